// SPDX-License-Identifier: Apache-2.0
#include "cli/pack_report.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/losses.h"
#include "cli/text.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Totals {
  std::size_t packed = 0;
  std::uint64_t before = 0, after = 0, packed_before = 0, packed_after = 0;
  Losses losses;
};

Totals sum(const std::vector<Outcome>& outcomes) {
  Totals sums;
  for (const Outcome& outcome : outcomes) {
    sums.before += outcome.packing.item.bytes;
    sums.after += outcome.bytes;
    if (!outcome.packing.packed()) continue;
    ++sums.packed;
    sums.packed_before += outcome.packing.item.bytes;
    sums.packed_after += outcome.bytes;
    sums.losses.add(outcome.packing.item.name, outcome.packing.storage, outcome.loss);
  }
  return sums;
}

Json row(const Outcome& outcome) {
  const PackTask& packing = outcome.packing;
  const auto sizes = packing.item.shape.sizes();
  Json json{{"name", packing.item.name},
            {"shape", std::vector<std::int64_t>(sizes.begin(), sizes.end())},
            {"bytes_before", packing.item.bytes},
            {"bytes", outcome.bytes}};
  if (!packing.packed()) {
    json["reason"] = packing.reason;
    return json;
  }
  json["storage"] = to_string(packing.storage);
  json["compute"] = packing.compute ? Json(value_dtype_name(*packing.compute)) : Json(nullptr);
  json.update(errors_json(outcome.loss));
  return json;
}

// "61 not named weight, 1 a head": most frequent first.
std::string reasons(const std::vector<Outcome>& outcomes) {
  std::map<std::string, int> counts;
  for (const Outcome& outcome : outcomes)
    if (!outcome.packing.packed()) ++counts[outcome.packing.reason];
  std::vector<std::pair<std::string, int>> rows(counts.begin(), counts.end());
  std::ranges::stable_sort(rows, std::greater<>{}, &std::pair<std::string, int>::second);
  std::string text;
  for (const auto& [reason, count] : rows)
    text += formatted("  {:>5}  {}\n", count, printable(reason));
  return text;
}

}  // namespace

std::string report_text(const PackOptions& options, const std::vector<Outcome>& outcomes,
                        const std::vector<std::string>& left_out) {
  const Totals sums = sum(outcomes);
  std::string text =
      formatted("{}: {} of {} tensors packed, {} -> {}; all tensors {} -> {}\n",
                printable(options.out), sums.packed, outcomes.size(), size_text(sums.packed_before),
                size_text(sums.packed_after), size_text(sums.before), size_text(sums.after));
  const Loss& loss = sums.losses.sum;
  if (const auto& worst = sums.losses.worst) {
    text += formatted("error: max {:.3g}, rms {:.3g}, relative {:.3g}\n", loss.max_error,
                      loss.rms(), loss.relative());
    text += formatted("worst: {} ({}), relative {:.3g}, max {:.3g}\n", printable(worst->name),
                      to_string(worst->storage), worst->loss.relative(), worst->loss.max_error);
  }
  if (sums.losses.worst_block) text += worst_block_text(sums.losses) + "\n";
  if (loss.saturated != 0)
    text += formatted("saturated: {} elements lie beyond their format's largest value\n",
                      loss.saturated);
  if (loss.nonfinite != 0)
    text += formatted("not finite: {} elements, left out of the errors\n", loss.nonfinite);
  if (!left_out.empty())
    text += formatted("left out: {} numbers for activations, which {} does not name: {}{}\n",
                      left_out.size(), options.dialect, printable(left_out.front()),
                      left_out.size() == 1 ? "" : ", ...");
  const std::string plain = reasons(outcomes);
  return plain.empty() ? text : text + "not packed:\n" + plain;
}

std::string report_json(const PackOptions& options, const std::vector<Outcome>& outcomes,
                        const std::vector<std::string>& left_out) {
  const Totals sums = sum(outcomes);
  Json weights = Json::array(), plain = Json::array();
  for (const Outcome& outcome : outcomes)
    (outcome.packing.packed() ? weights : plain).push_back(row(outcome));
  Json total{{"bytes_before", sums.before}, {"bytes", sums.after}};
  total.update(errors_json(sums.losses));
  Json json{{"in", options.in},
            {"out", options.out},
            {"weights", weights},
            {"not_packed", plain},
            {"total", total}};
  if (!options.dialect.empty()) json["left_out"] = left_out;
  return json_text(json);
}

}  // namespace stowage::cli
