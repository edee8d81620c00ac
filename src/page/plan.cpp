// SPDX-License-Identifier: Apache-2.0
// A plan as one page: what it predicts, in pictures, and beside it what was measured.
#include <algorithm>

#include "base/formatted.h"
#include "base/table.h"
#include "page/page.h"
#include "page/pieces.h"

namespace stowage::page {
namespace {

std::string unit_table(const Plan& plan) {
  PageTable table(
      {{"weight"}, {"storage"}, {"tier"}, {"work"}, {"bytes", true}, {"seconds", true}, {"why"}});
  std::vector<const PlanUnit*> units;  // experts have a picture of their own
  for (const PlanUnit& unit : plan.units)
    if (unit.stays || !is_of_expert(unit.name)) units.push_back(&unit);
  const std::size_t shown = std::min(units.size(), kMostRows);
  for (std::size_t i = 0; i < shown; ++i) {
    const PlanUnit& unit = *units[i];
    table.add({unit.name, unit.storage, unit.tier, unit.work, size_text(unit.bytes),
               time_text(unit.seconds), unit.why});
  }
  return section("Weights in order of use", table.text(units.size()));
}

std::string experts_section(const Plan& plan) {
  const std::vector<PlanExperts> layers = experts_of(plan);
  if (layers.empty()) return "";
  return section("Experts by layer", heat_map(layers));
}

std::string limits_text(const Plan& plan) {
  std::string text = "limits: ram " + size_text(plan.ram);
  for (const auto& [name, bytes] : plan.accelerators) text += ", " + name + " " + size_text(bytes);
  return text + formatted("; {} row{} in a pass", plan.rows, plan.rows == 1 ? "" : "s");
}

}  // namespace

std::string html_of(const Plan& plan, const PlanMeasured& measured) {
  BytesBy by_tier, by_storage;
  for (const PlanUnit& unit : plan.units) {
    by_tier[unit.tier][unit.storage] += unit.bytes;
    by_storage[unit.storage][unit.tier] += unit.bytes;
  }
  const std::string lead = formatted("<p>{} weights{}; {}</p>\n<p>{}</p>\n", plan.units.size(),
                                     plan.storage.empty() ? "" : " as " + escaped(plan.storage),
                                     escaped(limits_text(plan)), escaped(plan.links.key));
  return document("Plan of " + plan.model, lead,
                  facts(predicted_facts(plan)) + measured_section(plan, measured) +
                      section("Memory over the pass", memory_over_the_pass(plan)) +
                      experts_section(plan) + section("Bytes by tier", bars(by_tier)) +
                      section("Bytes by storage", bars(by_storage)) + unit_table(plan));
}

}  // namespace stowage::page
