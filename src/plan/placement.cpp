// SPDX-License-Identifier: Apache-2.0
#include "plan/placement.h"

#include <algorithm>
#include <utility>

namespace stowage::planning {
namespace {

constexpr double kLinkWeight = 1e-3;  // of a link's seconds beside those of the pass

}  // namespace

std::vector<Step> steps_of(std::span<const Candidate> units,
                           std::span<const Assignment> assignments) {
  std::vector<Step> steps(units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Candidate& unit = units[i];
    const Assignment assignment = assignments[i];
    Step& step = steps[i];
    step.bytes = unit.bytes;
    step.compute = works_on_cpu(assignment) ? unit.on_cpu : unit.on_accelerator;
    if (unit.bytes == 0) continue;
    if (rests_on_disk(assignment)) step.read = unit.read;
    if (!works_on_cpu(assignment)) step.accelerator = unit.accelerator;
    if (!works_on_cpu(assignment) && assignment != Assignment::resident) step.copy = unit.copy;
  }
  return steps;
}

std::optional<Rings> rings_of(std::span<const Candidate> units, const Limits& limits,
                              std::span<const Assignment> assignments) {
  Rings held{}, most{}, moved{};  // bytes of residents, the largest that moves, all that move
  std::uint64_t through = 0;      // RAM, once
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::uint64_t bytes = units[i].bytes;
    const Assignment assignment = assignments[i];
    if (rests_in_ram(assignment)) held.ram += bytes;
    if (rests_on_disk(assignment)) {
      most.ram = std::max(most.ram, bytes);
      moved.ram += bytes;
    }
    if (works_on_cpu(assignment) || bytes == 0) continue;
    const auto a = static_cast<std::size_t>(units[i].accelerator);
    if (assignment == Assignment::resident) {
      held.accelerators[a] += bytes;
      if (units[i].is_slice) through = std::max(through, bytes);
    } else {
      most.accelerators[a] = std::max(most.accelerators[a], bytes);
      moved.accelerators[a] += bytes;
    }
  }
  most.ram = std::max(most.ram, through);
  moved.ram = std::max(moved.ram, through);
  if (held.ram + most.ram > limits.ram) return std::nullopt;
  Rings rings{.ram = std::min(limits.ram - held.ram, moved.ram)};
  for (std::size_t a = 0; a < rings.accelerators.size(); ++a) {
    if (held.accelerators[a] + most.accelerators[a] > limits.accelerators[a]) return std::nullopt;
    rings.accelerators[a] =
        std::min(limits.accelerators[a] - held.accelerators[a], moved.accelerators[a]);
  }
  return rings;
}

std::optional<Placement> weigh(std::span<const Candidate> units, const Limits& limits,
                               std::vector<Assignment> assignments) {
  const auto rings = rings_of(units, limits, assignments);
  if (!rings) return std::nullopt;
  const std::vector<Step> steps = steps_of(units, assignments);
  Placement placed{.assignments = std::move(assignments), .rings = *rings};
  placed.seconds = Pass().seconds(steps, *rings);
  double links = 0;
  for (const Step& step : steps) links += step.read + step.copy;
  placed.cost = placed.seconds + kLinkWeight * links;
  return placed;
}

}  // namespace stowage::planning
