// SPDX-License-Identifier: Apache-2.0
// Units whose place is chosen, made at random, and the best placement of all by trying every one.
#pragma once
#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "plan/placement.h"

namespace stowage::test {

struct Draw {
  int units = 12;
  int accelerators = 0;
  bool with_disk = true;
};

struct Drawn {
  std::vector<planning::Candidate> units;
  planning::Limits limits;
};

/// Sizes over two orders of magnitude, links and work of like speed, limits that hold a part.
inline Drawn draw(const Draw& what, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto between = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  Drawn made;
  const double disk = between(0.5, 4), link = between(2, 20), cpu = between(0.5, 20);
  const bool alike = random() % 2 == 0;  // layers of one size
  std::uint64_t all = 0, most = 0;
  for (int i = 0; i < what.units; ++i) {
    planning::Candidate unit;
    unit.bytes = static_cast<std::uint64_t>(alike ? 50 : between(1, 100));
    if (random() % 8 == 0) unit.bytes *= 3;
    const auto bytes = static_cast<double>(unit.bytes);
    const double uses = random() % 6 == 0 ? 0.1 : 1;
    unit.read = uses * bytes / disk;
    unit.on_cpu = uses * bytes / cpu * between(0.7, 1.4);
    if (what.accelerators > 0) {
      unit.accelerator = i * what.accelerators / what.units;
      unit.copy = uses * bytes / link;
      unit.on_accelerator = unit.on_cpu / between(2, 50);
    }
    all += unit.bytes;
    most = std::max(most, unit.bytes);
    made.units.push_back(unit);
  }
  const auto part = [&](double low, double high) {
    return std::max(most,
                    static_cast<std::uint64_t>(static_cast<double>(all) * between(low, high)));
  };
  made.limits.ram = what.with_disk ? part(0.2, 0.9) : 2 * all;
  for (int a = 0; a < what.accelerators; ++a)
    made.limits.accelerators[static_cast<std::size_t>(a)] =
        part(0.2, 0.9) / static_cast<std::uint64_t>(what.accelerators) + most;
  made.limits.works_on_cpu = what.accelerators == 0 || random() % 2 == 0;
  return made;
}

/// The least seconds of all placements.
inline double exhaustive(const Drawn& drawn, bool with_disk) {
  const auto& [units, limits] = drawn;
  std::vector<planning::Assignment> allowed;
  for (const planning::Assignment assignment : planning::kAssignments) {
    if (units[0].accelerator < 0 && !planning::works_on_cpu(assignment)) continue;
    if (units[0].accelerator >= 0 && planning::works_on_cpu(assignment) && !limits.works_on_cpu)
      continue;
    if (!with_disk && planning::rests_on_disk(assignment)) continue;
    allowed.push_back(assignment);
  }
  std::vector<std::size_t> digits(units.size(), 0);
  std::vector<planning::Assignment> assignments(units.size(), allowed[0]);
  double best = std::numeric_limits<double>::infinity();
  for (;;) {
    if (const auto rings = planning::rings_of(units, limits, assignments))
      best =
          std::min(best, planning::Pass().seconds(planning::steps_of(units, assignments), *rings));
    std::size_t i = 0;
    for (; i < digits.size(); ++i) {
      digits[i] = (digits[i] + 1) % allowed.size();
      assignments[i] = allowed[digits[i]];
      if (digits[i] != 0) break;
    }
    if (i == digits.size()) return best;
  }
}

}  // namespace stowage::test
