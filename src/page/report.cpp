// SPDX-License-Identifier: Apache-2.0
// A report for people, as text and as a page; both show the same figures.
#include <algorithm>

#include "base/formatted.h"
#include "base/table.h"
#include "page/page.h"
#include "page/pieces.h"

namespace stowage::page {
namespace {

constexpr std::size_t kMostLines = 400;  // of weights, on a terminal

struct Sum {
  std::size_t weights = 0;
  std::uint64_t bytes = 0, in_bf16 = 0;
  void add(const ReportWeight& weight) {
    ++weights;
    bytes += weight.bytes;
    in_bf16 += bytes_in_bf16(weight);
  }
};

std::string share_text(std::uint64_t bytes, std::uint64_t of) {
  return of == 0 ? "-" : formatted("{:.3f}", static_cast<double>(bytes) / static_cast<double>(of));
}

std::string error_text(const std::optional<double>& error) {
  return error ? formatted("{:.3g}", *error) : "-";
}

Sum sum_of(const Report& report) {
  Sum sum;
  for (const ReportWeight& weight : report.weights) sum.add(weight);
  return sum;
}

// What of a weight is known of any: columns that would be empty are left out.
struct Known {
  bool compute = false, tier = false, errors = false;
  explicit Known(const Report& report) {
    for (const ReportWeight& weight : report.weights) {
      compute |= !weight.compute.empty();
      tier |= !weight.tier.empty();
      errors |= weight.max_error || weight.relative_error;
    }
  }

  std::vector<PageTable::Column> columns() const {
    std::vector<PageTable::Column> all{{"weight"}, {"storage"}, {"kind"}};
    if (compute) all.push_back({"compute"});
    if (tier) all.push_back({"tier"});
    all.insert(all.end(), {{"shape"}, {"bytes", true}, {"in bf16", true}, {"share", true}});
    if (errors) all.insert(all.end(), {{"max error", true}, {"relative", true}});
    return all;
  }

  std::vector<std::string> cells(const ReportWeight& weight) const {
    std::vector<std::string> all{printable(weight.name), weight.storage, kind_of(weight)};
    if (compute) all.push_back(weight.compute);
    if (tier) all.push_back(weight.tier);
    const std::uint64_t in_bf16 = bytes_in_bf16(weight);
    all.insert(all.end(), {to_string(weight.shape), size_text(weight.bytes), size_text(in_bf16),
                           share_text(weight.bytes, in_bf16)});
    if (errors)
      all.insert(all.end(), {error_text(weight.max_error), error_text(weight.relative_error)});
    return all;
  }
};

template <class Key>
std::string sums_by(const char* heading, const Report& report, Key key) {
  std::map<std::string, Sum> sums;
  for (const ReportWeight& weight : report.weights) sums[key(weight)].add(weight);
  Table table({heading, "weights", "bytes", "in bf16", "share"}, 1);
  for (const auto& [name, sum] : sums)
    table.add({printable(name), std::to_string(sum.weights), size_text(sum.bytes),
               size_text(sum.in_bf16), share_text(sum.bytes, sum.in_bf16)});
  return table.text() + "\n";
}

std::string storage_of(const ReportWeight& weight) { return weight.storage; }
std::string tier_of(const ReportWeight& weight) {
  return weight.tier.empty() ? "not known" : weight.tier;
}

// A plan's figures beside what was measured, or what was measured alone.
std::vector<std::string> pass_lines(const Plan* plan, const PlanMeasured& measured) {
  std::vector<std::string> lines;
  if (plan != nullptr) {
    lines.push_back("predicted for a pass: " + time_text(plan->seconds));
    for (const auto& [tier, bytes] : plan->peak)
      lines.push_back("predicted peak of " + tier + ": " + size_text(bytes));
    for (const auto& [link, bytes] : plan->moved)
      lines.push_back("predicted " + link + ": " + size_text(bytes));
  }
  if (measured.seconds > 0)
    lines.push_back(plan == nullptr ? "measured for a pass: " + time_text(measured.seconds)
                                    : compare(*plan, measured));
  for (const auto& [tier, bytes] : measured.peak)
    lines.push_back("measured peak of " + tier + ": " + size_text(bytes));
  for (const auto& [link, bytes] : measured.moved)
    lines.push_back("measured " + link + ": " + size_text(bytes));
  return lines;
}

std::string measured_facts(const PlanMeasured& measured) {
  std::string text;
  if (measured.seconds > 0) text += fact("a pass, measured", time_text(measured.seconds));
  for (const auto& [tier, bytes] : measured.peak)
    text += fact("peak of " + tier + ", measured", size_text(bytes));
  for (const auto& [link, bytes] : measured.moved)
    text += fact(link + ", measured", size_text(bytes));
  return text;
}

std::string weight_section(const Report& report, const Known& known) {
  PageTable table(known.columns());
  const std::size_t shown = std::min(report.weights.size(), kMostRows);
  for (std::size_t i = 0; i < shown; ++i) table.add(known.cells(report.weights[i]));
  return section("Weights", table.text(report.weights.size()));
}

std::string bar_sections(const Report& report, bool tiers) {
  BytesBy by_storage, by_kind, by_tier;
  for (const ReportWeight& weight : report.weights) {
    by_storage[weight.storage][kind_of(weight)] += weight.bytes;
    by_kind[kind_of(weight)][weight.storage] += weight.bytes;
    by_tier[tier_of(weight)][weight.storage] += weight.bytes;
  }
  return section("Bytes by storage", bars(by_storage)) + section("Bytes by kind", bars(by_kind)) +
         (tiers ? section("Bytes by tier", bars(by_tier)) : "");
}

}  // namespace

std::string text_of(const Report& report, const Plan* plan, const PlanMeasured& measured) {
  const Sum sum = sum_of(report);
  const Known known(report);
  std::string text = formatted("{}: {} weights, {}; {} in bf16, {} of it\n\n",
                               printable(report.model), sum.weights, size_text(sum.bytes),
                               size_text(sum.in_bf16), share_text(sum.bytes, sum.in_bf16));
  text += sums_by("storage", report, storage_of) + sums_by("kind", report, kind_of);
  if (known.tier) text += sums_by("tier", report, tier_of);
  std::vector<std::string> heading;
  std::size_t numbers = 0;
  for (const PageTable::Column& column : known.columns()) {
    if (!column.number) ++numbers;
    heading.push_back(column.name);
  }
  Table table(std::move(heading), numbers);
  const std::size_t shown = std::min(report.weights.size(), kMostLines);
  for (std::size_t i = 0; i < shown; ++i) table.add(known.cells(report.weights[i]));
  text += table.text();
  if (shown < report.weights.size())
    text += formatted("... and {} more, in its JSON\n", report.weights.size() - shown);
  std::vector<std::string> lines = report.notes;
  for (std::string& line : pass_lines(plan, measured)) lines.push_back(std::move(line));
  if (!lines.empty()) text += "\n";
  for (const std::string& line : lines) text += printable(line) + "\n";
  return text;
}

std::string html_of(const Report& report, const Plan* plan, const PlanMeasured& measured) {
  const Sum sum = sum_of(report);
  const Known known(report);
  std::string lead = formatted("<p>{} weights</p>\n", sum.weights);
  for (const std::string& note : report.notes) lead += "<p>" + escaped(note) + "</p>\n";
  std::string figures = fact("bytes", size_text(sum.bytes)) +
                        fact("in bf16", size_text(sum.in_bf16)) +
                        fact("share of bf16", share_text(sum.bytes, sum.in_bf16));
  figures += plan == nullptr ? measured_facts(measured) : predicted_facts(*plan);
  std::string sections = facts(figures);
  if (plan != nullptr)
    sections += measured_section(*plan, measured) +
                section("Memory over the pass", memory_over_the_pass(*plan));
  sections += bar_sections(report, known.tier) + weight_section(report, known);
  return document("Report of " + report.model, lead, sections);
}

}  // namespace stowage::page
