// SPDX-License-Identifier: Apache-2.0
#include "stowage/plan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include "plan/experts.h"
#include "plan/maker.h"
#include "plan/units.h"

namespace stowage {
namespace planning {
namespace {

std::string described(const PlanUnit& unit) {
  return unit.storage + " " + to_string(unit.shape) + " of " + std::to_string(unit.rest) + " bytes";
}

// The first difference, in words; empty if there is none.
std::string difference(const Plan& plan, const std::vector<PlanUnit>& units) {
  std::unordered_map<std::string_view, const PlanUnit*> there;
  for (const PlanUnit& unit : units) there.emplace(unit.name, &unit);
  for (const PlanUnit& planned : plan.units) {
    const auto at = there.find(planned.name);
    if (at == there.end()) return "'" + planned.name + "' of the plan is not there";
    if (described(planned) != described(*at->second))
      return "'" + planned.name + "' is " + described(*at->second) + ", in the plan " +
             described(planned);
    there.erase(at);
  }
  if (there.empty()) return "";
  std::string_view first = there.begin()->first;
  for (const auto& [name, unit] : there) first = std::min(first, name);
  return "'" + std::string(first) + "' is not in the plan";
}

// By so much less of the time a plan of many more units is better.
constexpr double kWorthSplitting = 0.98;

// Without accelerators the matrices of all stacks are units of their own. With one, a stack may
// work on the CPU as a whole, or its matrices rest in places of their own and work on the
// accelerator: of plans with all stacks whole, with none, and with those that would work on the
// CPU, the quickest.
Plan best_of_forms(std::string_view model, const std::vector<PlanUnit>& units,
                   const PlanOptions& options, const Links& links) {
  std::set<std::string, std::less<>> stacks, on_cpu;
  std::optional<Plan> best;
  std::optional<Error> refused;
  const auto try_with = [&](const std::set<std::string, std::less<>>& whole) {
    std::vector<PlanUnit> some = units;
    split_stacks(some, whole);
    if (best && some.size() == best->units.size()) return;  // the same again
    for (PlanUnit& unit : some) complete(unit);
    try {
      Plan plan = PlanMaker(model, std::move(some), options, links).make();
      if (!best || plan.seconds < kWorthSplitting * best->seconds) best = std::move(plan);
    } catch (const Error& error) {
      refused = error;
    }
  };
  for (const PlanUnit& unit : units)
    if (unit.stack) stacks.insert(unit.name);
  if (!options.accelerators.empty() && !stacks.empty()) try_with(stacks);
  if (best)
    for (const PlanUnit& unit : best->units)
      if (unit.work == "cpu" && stacks.contains(unit.name)) on_cpu.insert(unit.name);
  if (!on_cpu.empty() && on_cpu != stacks) try_with(on_cpu);
  try_with({});
  if (!best) throw Error(*refused);
  return std::move(*best);
}

}  // namespace
}  // namespace planning

inline namespace v0 {

Plan make_plan(std::string_view model, std::vector<PlanUnit> units, const PlanOptions& options,
               const Links& links) {
  if (options.storage) planning::convert(units, *options.storage);
  return planning::best_of_forms(model, units, options, links);
}

Plan make_plan(const File& file, const PlanOptions& options, const Links& links) {
  PlanOptions known = options;
  if (known.config.empty()) known.config = planning::config_of(file);
  return make_plan(file.paths().front(), plan_units(file), known, links);
}

void check_plan(const Plan& plan, std::string_view model, const std::vector<PlanUnit>& units) {
  std::set<std::string, std::less<>> whole;
  for (const PlanUnit& unit : plan.units) whole.insert(unit.name);
  const auto as_planned = [&](std::vector<PlanUnit> all) {
    planning::split_stacks(all, whole);
    return all;
  };
  const std::vector<PlanUnit> there = as_planned(units);
  if (planning::fingerprint_of(there) == plan.fingerprint) return;
  if (!plan.storage.empty()) {
    std::vector<PlanUnit> converted = units;
    planning::convert(converted, parse_storage(plan.storage));
    if (planning::fingerprint_of(as_planned(std::move(converted))) == plan.fingerprint)
      throw Error(Code::invalid_argument, "plan: was made for the weights of " +
                                              std::string(model) + " as " + plan.storage +
                                              ": pack or stow them so first");
  }
  const std::string found = planning::difference(plan, there);
  throw Error(Code::invalid_argument,
              "plan: must be made for the weights of " + std::string(model) + ", was made for " +
                  plan.model + ": " +
                  (found.empty() ? "its fingerprint is not that of its own units" : found));
}

void check_plan(const Plan& plan, const File& file) {
  check_plan(plan, file.paths().front(), plan_units(file));
}

}  // namespace v0
}  // namespace stowage
