// SPDX-License-Identifier: Apache-2.0
// A first placement by seconds saved per byte (spread.h), then changes of a few units at a time for
// as long as they pay; of few units also changes that do not pay at once (annealing).
#include "plan/search.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "plan/spread.h"

namespace stowage::planning {
namespace {

constexpr std::size_t kFew = 16;  // units of which all pairs are tried
// Simulated units, where there are more. Sanitized builds look for errors, not for good plans.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kSteps = 100'000;
#else
constexpr std::size_t kSteps = 4'000'000;
#endif
constexpr std::size_t kAnnealed = 600;  // changes from each start, where there are few
constexpr int kStarts = 12;
constexpr double kHeat = 0.3;  // of the cost: what annealing accepts at first

bool may(const Candidate& unit, const Limits& limits, Assignment assignment) {
  if (unit.bytes == 0) return assignment == unit.fixed;
  return may_work(unit, limits.works_on_cpu, assignment);
}

/// A placement that is changed for as long as it gets better.
class Improvement {
 public:
  Improvement(std::span<const Candidate> units, const Limits& limits, Placement start)
      : units_(units), limits_(limits), best_(std::move(start)) {
    for (std::size_t i = 0; i < units.size(); ++i)
      if (units[i].bytes > 0) free_.push_back(i);
  }

  /// `anneals`: from several starts, where there are few units.
  Placement run(bool anneals) && {
    if (free_.empty()) return std::move(best_);
    if (free_.size() > kFew) {
      try_some();
      return std::move(best_);
    }
    descend();
    for (int start = 0; anneals && start < kStarts; ++start)
      if (auto other = start == 0 ? std::optional(best_) : greedy()) anneal(std::move(*other));
    descend();
    return std::move(best_);
  }

 private:
  bool keep(std::vector<Assignment> assignments) {
    auto placed = weigh(units_, limits_, std::move(assignments));
    if (!placed || placed->cost >= best_.cost * (1 - 1e-9)) return false;
    best_ = std::move(*placed);
    return true;
  }

  bool try_one(std::size_t i) {
    bool better = false;
    for (const Assignment assignment : kAssignments) {
      if (assignment == best_.assignments[i] || !may(units_[i], limits_, assignment)) continue;
      std::vector<Assignment> changed = best_.assignments;
      changed[i] = assignment;
      better |= keep(std::move(changed));
    }
    return better;
  }

  bool try_two(std::size_t i, std::size_t j) {
    bool better = false;
    for (const Assignment a : kAssignments)
      for (const Assignment b : kAssignments) {
        if (!may(units_[i], limits_, a) || !may(units_[j], limits_, b)) continue;
        if (a == best_.assignments[i] || b == best_.assignments[j]) continue;
        std::vector<Assignment> changed = best_.assignments;
        changed[i] = a;
        changed[j] = b;
        better |= keep(std::move(changed));
      }
    return better;
  }

  bool all_may(const std::vector<Assignment>& assignments) const {
    return std::ranges::all_of(
        free_, [&](std::size_t i) { return may(units_[i], limits_, assignments[i]); });
  }

  void descend() {
    while (try_all()) {
    }
  }

  // Larger units for smaller ones takes several changes, of which the first ones do not pay.
  void anneal(Placement now) {
    if (now.cost < best_.cost) best_ = now;
    for (std::size_t move = 0; move < kAnnealed; ++move) {
      const double left = 1 - static_cast<double>(move) / static_cast<double>(kAnnealed);
      std::vector<Assignment> changed = now.assignments;
      if (random_() % 2 == 0) std::swap(changed[any()], changed[any()]);
      for (std::size_t times = random_() % 4; times > 0; --times) {
        const std::size_t i = any();
        const Assignment assignment = kAssignments[random_() % std::size(kAssignments)];
        if (may(units_[i], limits_, assignment)) changed[i] = assignment;
      }
      if (!all_may(changed)) continue;
      auto placed = weigh(units_, limits_, std::move(changed));
      if (!placed) continue;
      const double worse = (placed->cost - now.cost) / now.cost;
      const double chance = static_cast<double>(random_() % 4096) / 4096;
      if (worse > 0 && chance >= std::exp(-worse / (kHeat * left))) continue;
      now = std::move(*placed);
      if (now.cost < best_.cost) best_ = now;
    }
  }

  // One unit after the other, in any order, to the first place that has room: others come from the
  // disk meanwhile.
  std::optional<Placement> greedy() {
    std::vector<Assignment> assignments = best_.assignments;
    for (const std::size_t i : free_)
      assignments[i] = may(units_[i], limits_, Assignment::disk_cpu) ? Assignment::disk_cpu
                                                                     : Assignment::disk_accelerator;
    std::ranges::shuffle(free_, random_);
    for (const std::size_t i : free_) {
      const Assignment before = assignments[i];
      const bool cpu = units_[i].on_cpu < units_[i].copy + units_[i].on_accelerator;
      for (const Assignment assignment :
           {Assignment::resident, cpu ? Assignment::ram_cpu : Assignment::ram_accelerator,
            Assignment::ram_cpu, Assignment::ram_accelerator,
            cpu ? Assignment::disk_cpu : Assignment::disk_accelerator, before}) {
        assignments[i] = assignment;
        if (may(units_[i], limits_, assignment) && rings_of(units_, limits_, assignments)) break;
      }
    }
    return weigh(units_, limits_, std::move(assignments));
  }

  std::size_t any() { return free_[random_() % free_.size()]; }

  bool try_all() {
    bool better = false;
    for (const std::size_t i : free_) better |= try_one(i);
    for (std::size_t i = 0; i < free_.size(); ++i)
      for (std::size_t j = i + 1; j < free_.size(); ++j) better |= try_two(free_[i], free_[j]);
    return better;
  }

  // Pairs that have different places: two of the same change nothing by being swapped.
  void try_some() {
    for (std::size_t done = 0; done < kSteps; done += Pass::kPasses * units_.size()) {
      const std::size_t i = any(), j = any();
      std::vector<Assignment> changed = best_.assignments;
      if (changed[i] == changed[j]) {
        changed[i] = kAssignments[random_() % std::size(kAssignments)];
      } else {
        std::swap(changed[i], changed[j]);
      }
      if (may(units_[i], limits_, changed[i]) && may(units_[j], limits_, changed[j]))
        keep(std::move(changed));
    }
  }

  std::span<const Candidate> units_;
  const Limits& limits_;
  Placement best_;
  std::vector<std::size_t> free_;  // units that have a assignment
  std::mt19937_64 random_{1};
};

}  // namespace

Placement place(std::span<const Candidate> units, const Limits& limits) {
  Spread spread(units, limits);
  std::optional<Placement> best;
  for (Placement& start : spread.best()) {
    Placement improved = Improvement(units, limits, std::move(start)).run(!best);
    if (!best || improved.cost < best->cost) best = std::move(improved);
  }
  return std::move(*best);
}

}  // namespace stowage::planning
