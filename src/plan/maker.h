// SPDX-License-Identifier: Apache-2.0
// How a plan comes to be: costs of units, what is left of the limits, a placement, and what the
// pass then takes.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "plan/placement.h"
#include "stowage/plan.h"

namespace stowage::planning {

class PlanMaker {
 public:
  PlanMaker(std::string_view model, std::vector<PlanUnit> units, const PlanOptions& options,
            const Links& links);
  Plan make() &&;

 private:
  void assign_accelerators();
  void weigh_units();
  Candidate candidate_of(const PlanUnit& unit, std::int32_t accelerator) const;
  void join_groups();
  void take_always();
  void subtract_needs();
  void describe(const Placement& placed);
  void describe(PlanUnit& unit, const Candidate& candidate, Assignment assignment) const;
  void predict(const Placement& placed);
  void watch(const std::vector<Step>& steps, const std::vector<Moments>& moments);
  const std::string& name(std::int32_t accelerator) const;

  const PlanOptions& options_;
  Plan plan_;
  std::vector<std::int32_t> accelerators_;  // of each unit; -1 without any
  std::vector<Candidate> weighed_;          // of each unit
  std::vector<std::size_t> groups_;         // for each unit the candidate that places it
  std::vector<Candidate> candidates_;       // of what gets one place
  Limits limits_{};
  BytesByName always_;  // small tensors, tiles and activations, by tier
};

}  // namespace stowage::planning
