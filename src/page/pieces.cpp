// SPDX-License-Identifier: Apache-2.0
#include "page/pieces.h"

#include <algorithm>
#include <cmath>

#include "base/formatted.h"
#include "base/table.h"

namespace stowage::page {
namespace {

// Of the picture of memory, in its own units.
constexpr double kLeft = 76, kTop = 10, kAcross = 820, kHigh = 230, kBelow = 44;

constexpr std::string_view kStyle = R"(
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#5b6570;
--line:#d9dde2;--c0:#2f6db3;--c1:#d07a24;--c2:#34936a;--c3:#9457a8;--c4:#b8474f;--c5:#5f8f1f;
--c6:#2590a0;--c7:#8a7a5c;--limit:#b3261e}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--card:#1c2024;--ink:#e7eaee;
--soft:#a2acb7;--line:#343b43;--c0:#6ea8e8;--c1:#eca057;--c2:#63c39a;--c3:#c48fd6;--c4:#ea8088;
--c5:#a3cf63;--c6:#66c7d4;--c7:#c4b393;--limit:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:980px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:16px;margin:0 0 10px}
p{margin:4px 0;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;
margin-top:16px}
.facts{display:flex;flex-wrap:wrap;gap:10px 34px}.facts div{min-width:120px}
.facts b{display:block;font-size:20px;font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--line)}.limit{stroke:var(--limit);stroke-dasharray:6 4}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);
white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.bar{display:grid;grid-template-columns:120px 1fr 110px;gap:10px;align-items:center;margin:6px 0}
.bar span:last-child{text-align:right;font-variant-numeric:tabular-nums}
.track{display:flex;height:18px}.track i{display:block;height:100%}
.track i:first-child{border-radius:4px 0 0 4px}.track i:last-child{border-radius:0 4px 4px 0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
)";

/// The smallest of 1, 2, 5 times a power of two's unit that is not below an eighth of `most`.
double grid_step(double most) {
  double step = 1024;
  while (most / step > 5) step *= 2;
  return step;
}

struct Scale {
  double most;
  std::size_t units;
  double x(std::size_t unit) const {
    const auto last = static_cast<double>(std::max<std::size_t>(units - 1, 1));
    return kLeft + kAcross * static_cast<double>(unit) / last;
  }
  double y(double bytes) const { return kTop + kHigh * (1 - bytes / most); }
};

std::string line(const Scale& scale, double bytes, const char* kind, const std::string& label) {
  const double y = scale.y(bytes);
  return formatted(
      "<line class=\"{}\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>"
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
      kind, kLeft, kLeft + kAcross, y, y, kLeft - 6, y + 4, escaped(label));
}

template <class Value>
std::string steps(const Plan& plan, const Scale& scale, std::size_t index, Value value) {
  std::string path;
  for (const PlanMoment& m : plan.over_the_pass) {
    const double x = scale.x(static_cast<std::size_t>(m.unit));
    const double y = scale.y(static_cast<double>(value(m)));
    path += path.empty() ? formatted("M{:.1f} {:.1f}", x, y) : formatted("H{:.1f}V{:.1f}", x, y);
  }
  const std::string area =
      path + formatted("V{:.1f}H{:.1f}Z", scale.y(0),
                       scale.x(static_cast<std::size_t>(plan.over_the_pass.front().unit)));
  const std::string ink = colour(index);
  return formatted("<path d=\"{}\" fill=\"{}\" opacity=\".16\"/>", area, ink) +
         formatted("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, ink);
}

// Where each limit is: accelerators are shown together, and so is their limit.
double accelerators_limit(const Plan& plan) {
  double sum = 0;
  for (const auto& [name, bytes] : plan.accelerators) sum += static_cast<double>(bytes);
  return sum;
}

}  // namespace

std::string colour(std::size_t i) { return formatted("var(--c{})", i % kColours); }

std::string legend(const std::vector<std::string>& names) {
  std::string text = "<div class=\"legend\">";
  for (std::size_t i = 0; i < names.size(); ++i)
    text +=
        formatted("<span><i style=\"background:{}\"></i>{}</span>", colour(i), escaped(names[i]));
  return text + "</div>\n";
}

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char c : printable(text)) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '>')
      safe += "&gt;";
    else if (c == '&')
      safe += "&amp;";
    else if (c == '"')
      safe += "&quot;";
    else
      safe += c;
  }
  return safe;
}

std::string bars(const std::vector<Bar>& rows) {
  double most = 0;
  std::vector<std::string> names;
  for (const Bar& row : rows) {
    double sum = 0;
    for (const auto& [name, bytes] : row.parts) {
      sum += bytes;
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
    most = std::max(most, sum);
  }
  std::string text;
  for (const Bar& row : rows) {
    text +=
        formatted("<div class=\"bar\"><span>{}</span><span class=\"track\">", escaped(row.name));
    for (const auto& [name, bytes] : row.parts) {
      const auto at = std::ranges::find(names, name) - names.begin();
      text += formatted("<i style=\"width:{:.2f}%;background:{}\" title=\"{}\"></i>",
                        most > 0 ? 100 * bytes / most : 0.0, colour(static_cast<std::size_t>(at)),
                        escaped(name));
    }
    text += formatted("</span><span>{}</span></div>\n", escaped(row.value));
  }
  return text + legend(names);
}

std::string memory_over_the_pass(const Plan& plan) {
  if (plan.over_the_pass.empty()) return "";
  const bool has_accelerators = !plan.accelerators.empty();
  double most = 1;
  for (const PlanMoment& m : plan.over_the_pass)
    most = std::max({most, static_cast<double>(m.ram), static_cast<double>(m.accelerators)});
  const auto ram_limit = static_cast<double>(plan.ram);
  const double limit = has_accelerators ? accelerators_limit(plan) : ram_limit;
  if (limit < 2 * most) most = std::max(most, limit);
  const Scale scale{most * 1.05, plan.units.size()};
  std::string svg = formatted(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"Bytes in use over the "
      "pass\">\n",
      kLeft + kAcross + 14, kTop + kHigh + kBelow);
  const double step = grid_step(scale.most);
  for (double at = 0; at <= scale.most; at += step)
    svg += line(scale, at, "grid", size_text(static_cast<std::uint64_t>(at)));
  svg += steps(plan, scale, 0, [](const PlanMoment& m) { return m.ram; });
  if (has_accelerators)
    svg += steps(plan, scale, 1, [](const PlanMoment& m) { return m.accelerators; });
  if (limit <= scale.most) svg += line(scale, limit, "limit", "");
  svg += formatted("<text x=\"{:.0f}\" y=\"{:.0f}\">{}</text>", kLeft, kTop + kHigh + 22,
                   escaped(plan.units.front().name));
  svg += formatted("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\">{}</text></svg>\n",
                   kLeft + kAcross, kTop + kHigh + 22, escaped(plan.units.back().name));
  std::vector<std::string> names{"RAM"};
  if (has_accelerators) names.push_back("accelerators");
  return svg + legend(names) +
         (limit <= scale.most ? formatted("<p>The broken line is the limit of {}.</p>\n",
                                          has_accelerators ? "the accelerators" : "RAM")
                              : "");
}

std::string bars(const BytesBy& bytes) {
  std::vector<Bar> rows;
  for (const auto& [name, parts] : bytes) {
    Bar row{name, "", {}};
    std::uint64_t sum = 0;
    for (const auto& [of, count] : parts) {
      row.parts.emplace_back(of, static_cast<double>(count));
      sum += count;
    }
    row.value = size_text(sum);
    rows.push_back(std::move(row));
  }
  return bars(rows);
}

std::string fact(std::string_view name, std::string_view value) {
  return formatted("<div>{}<b>{}</b></div>\n", escaped(name), escaped(value));
}

std::string facts(const std::string& inside) {
  return "<section class=\"facts\">\n" + inside + "</section>\n";
}

std::string predicted_facts(const Plan& plan) {
  std::string text = fact("a pass", time_text(plan.seconds));
  for (const auto& [tier, bytes] : plan.peak) text += fact("peak of " + tier, size_text(bytes));
  for (const auto& [link, bytes] : plan.moved) text += fact(link, size_text(bytes));
  if (const auto hits = hits_of(plan))
    text += fact("experts in memory when used", formatted("{:.0f} %", 100 * *hits));
  return text;
}

PageTable::PageTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

void PageTable::add(const std::vector<std::string>& cells) {
  rows_ += "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i)
    rows_ += (columns_[i].number ? "<td class=\"n\">" : "<td>") + escaped(cells[i]) + "</td>";
  rows_ += "</tr>\n";
  ++added_;
}

std::string PageTable::text(std::size_t count) const {
  std::string text = "<div class=\"scroll\"><table><tr>";
  for (const Column& column : columns_)
    text += (column.number ? "<th class=\"n\">" : "<th>") + escaped(column.name) + "</th>";
  text += "</tr>\n" + rows_ + "</table></div>\n";
  if (added_ < count) text += formatted("<p>and {} more, in the JSON</p>\n", count - added_);
  return text;
}

std::string section(std::string_view heading, std::string_view inside) {
  return formatted("<section><h2>{}</h2>\n{}</section>\n", escaped(heading), inside);
}

std::string measured_section(const Plan& plan, const PlanMeasured& measured) {
  PageTable rows({{""}, {"predicted", true}, {"measured", true}, {"off by", true}});
  std::size_t count = 0;
  const auto add = [&](const std::string& name, double predicted, double was,
                       const std::string& predicted_text, const std::string& text) {
    const double off = predicted > 0 ? 100 * (was / predicted - 1) : 0;
    rows.add({name, predicted_text, text,
              predicted > 0 ? formatted("{}{:.1f} %", off >= 0 ? "+" : "", off) : "-"});
    ++count;
  };
  const auto add_all = [&](const std::string& prefix, const BytesByName& predicted,
                           const BytesByName& all) {
    for (const auto& [name, bytes] : all) {
      const auto at = predicted.find(name);
      const std::uint64_t planned = at == predicted.end() ? 0 : at->second;
      add(prefix + name, static_cast<double>(planned), static_cast<double>(bytes),
          size_text(planned), size_text(bytes));
    }
  };
  if (measured.seconds > 0)
    add("a pass", plan.seconds, measured.seconds, time_text(plan.seconds),
        time_text(measured.seconds));
  add_all("peak of ", plan.peak, measured.peak);
  add_all("", plan.moved, measured.moved);
  if (count == 0) return "";
  const std::string said = measured.seconds > 0 ? compare(plan, measured) : "";
  return section("Predicted beside measured", rows.text(count) + "<p>" + escaped(said) + "</p>\n");
}

std::string document(std::string_view title, std::string_view lead, std::string_view sections) {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>" +
         escaped(title) + "</title>\n<style>" + std::string(kStyle) +
         "</style></head>\n<body><main>\n<h1>" + escaped(title) + "</h1>\n" + std::string(lead) +
         std::string(sections) + "</main></body></html>\n";
}

}  // namespace stowage::page
