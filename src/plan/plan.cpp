// SPDX-License-Identifier: Apache-2.0
#include "stowage/plan.h"

#include <algorithm>
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

}  // namespace
}  // namespace planning

inline namespace v0 {

Plan make_plan(std::string_view model, std::vector<PlanUnit> units, const PlanOptions& options,
               const Links& links) {
  if (options.storage) planning::convert(units, *options.storage);
  if (options.accelerators.empty()) planning::split_stacks(units);
  for (PlanUnit& unit : units) planning::complete(unit);
  return planning::PlanMaker(model, std::move(units), options, links).make();
}

Plan make_plan(const File& file, const PlanOptions& options, const Links& links) {
  PlanOptions known = options;
  if (known.config.empty()) known.config = planning::config_of(file);
  return make_plan(file.paths().front(), plan_units(file), known, links);
}

void check_plan(const Plan& plan, std::string_view model, const std::vector<PlanUnit>& units) {
  // Without accelerators the matrices of stacks are units of their own.
  const auto as_planned = [&](std::vector<PlanUnit> all) {
    if (plan.accelerators.empty()) planning::split_stacks(all);
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
