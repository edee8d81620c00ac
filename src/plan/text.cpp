// SPDX-License-Identifier: Apache-2.0
// A plan for people: what it predicts, bytes by tier, and why each weight is where it is.
#include <algorithm>

#include "base/formatted.h"
#include "base/table.h"
#include "stowage/plan.h"

namespace stowage {
namespace {

constexpr std::size_t kMostRows = 400;

std::string by_name(const BytesByName& bytes) {
  std::string text;
  for (const auto& [name, count] : bytes)
    text += (text.empty() ? "" : ", ") + name + " " + size_text(count);
  return text;
}

std::string limits_of(const Plan& plan) {
  std::string text = "ram " + size_text(plan.ram);
  for (const auto& [name, bytes] : plan.accelerators) text += ", " + name + " " + size_text(bytes);
  return text;
}

std::string heading(const Plan& plan) {
  std::uint64_t bytes = 0;
  for (const PlanUnit& unit : plan.units) bytes += unit.bytes;
  std::string text = formatted(
      "{}: {} weights, {}{}\nlimits     {}\npredicted  {} for a pass of {} row{}\npeak       {}\n"
      "moved      {} in a pass\n",
      printable(plan.model), plan.units.size(), size_text(bytes),
      plan.storage.empty() ? "" : " as " + plan.storage, limits_of(plan), time_text(plan.seconds),
      plan.rows, plan.rows == 1 ? "" : "s", by_name(plan.peak), by_name(plan.moved));
  if (const auto hits = hits_of(plan))
    text += formatted("experts    {:.0f} % of their uses find them in memory\n", 100 * *hits);
  for (const auto& [name, limit] : plan.accelerators) {
    const auto rates = plan.links.accelerators.find(name);
    if (rates != plan.links.accelerators.end() && rates->second.assumed)
      text += formatted("note       what {} computes a second is assumed, not measured\n", name);
  }
  return text;
}

std::string tiers(const Plan& plan) {
  BytesByName bytes, counts;
  for (const PlanUnit& unit : plan.units) {
    bytes[unit.tier] += unit.bytes;
    ++counts[unit.tier];
  }
  Table table({"tier", "weights", "bytes", "ring", "tile"}, 1);
  for (const auto& [tier, count] : bytes) {
    const auto ring = plan.ring.find(tier), tile = plan.tiles.find(tier);
    table.add({tier, std::to_string(counts[tier]), size_text(count),
               ring == plan.ring.end() ? "-" : size_text(ring->second),
               tile == plan.tiles.end() ? "-" : size_text(tile->second)});
  }
  return table.text();
}

// A line for each module of experts: a thousand lines of them would say less.
std::string experts_table(const Plan& plan) {
  const std::vector<PlanExperts> layers = experts_of(plan);
  if (layers.empty()) return "";
  Table table({"experts", "of a layer", "in memory", "used in a pass", "of it there", "bytes"}, 1);
  for (const PlanExperts& layer : layers) {
    std::uint64_t bytes = 0;
    std::size_t there = 0;
    double uses = 0, hits = 0;
    for (const PlanExpert& expert : layer.experts) {
      const bool in_memory = expert.tier != "disk";
      bytes += expert.bytes;
      there += in_memory ? 1 : 0;
      uses += expert.uses;
      hits += in_memory ? expert.uses : 0;
    }
    table.add({printable(layer.name), std::to_string(layer.experts.size()), std::to_string(there),
               formatted("{:.1f}", uses), formatted("{:.0f} %", uses > 0 ? 100 * hits / uses : 0),
               size_text(bytes)});
  }
  return table.text() + "\n";
}

}  // namespace

inline namespace v0 {

std::string to_text(const Plan& plan) {
  Table table({"weight", "storage", "tier", "work", "why", "bytes", "seconds"}, 5);
  std::vector<const PlanUnit*> units;
  for (const PlanUnit& unit : plan.units)
    if (unit.stays || !is_of_expert(unit.name)) units.push_back(&unit);
  const std::size_t shown = std::min(units.size(), kMostRows);
  for (std::size_t i = 0; i < shown; ++i) {
    const PlanUnit& unit = *units[i];
    table.add({printable(unit.name), unit.storage, unit.tier, unit.work, unit.why,
               size_text(unit.bytes), time_text(unit.seconds)});
  }
  std::string text = heading(plan) + "\n" + tiers(plan) + "\n" + experts_table(plan) + table.text();
  if (shown < units.size())
    text += formatted("... and {} more, in its JSON\n", units.size() - shown);
  return text;
}

}  // namespace v0
}  // namespace stowage
