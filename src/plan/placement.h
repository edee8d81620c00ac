// SPDX-License-Identifier: Apache-2.0
// Which unit rests in which tier: what a pass then does, and whether the limits of memory hold it.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plan/pass.h"

namespace stowage::planning {

/// Where a unit rests, and where it works.
enum class Assignment : std::uint8_t {
  disk_cpu,
  ram_cpu,
  disk_accelerator,
  ram_accelerator,
  resident
};
inline constexpr Assignment kAssignments[] = {Assignment::disk_cpu, Assignment::ram_cpu,
                                              Assignment::disk_accelerator,
                                              Assignment::ram_accelerator, Assignment::resident};
constexpr bool works_on_cpu(Assignment c) {
  return c == Assignment::disk_cpu || c == Assignment::ram_cpu;
}
constexpr bool rests_on_disk(Assignment c) {
  return c == Assignment::disk_cpu || c == Assignment::disk_accelerator;
}
constexpr bool rests_in_ram(Assignment c) {
  return c == Assignment::ram_cpu || c == Assignment::ram_accelerator;
}

/// A unit as its place is chosen. Seconds are those of a pass, with its uses in them.
struct Candidate {
  std::uint64_t bytes = 0;    // 0: takes nothing of the limits, its assignment is `fixed`
  double read = 0, copy = 0;  // over the links
  double on_cpu = 0, on_accelerator = 0;
  std::int32_t accelerator = -1;  // that its part of the order belongs to; -1: there is none
  Assignment fixed = Assignment::ram_cpu;  // of a unit without bytes
  /// Of a stack whose others may rest elsewhere: it works where they do, on the accelerator if
  /// there is one, and comes there through RAM though it stays.
  bool is_slice = false;
};

/// Bytes that units and rings may take.
struct Limits {
  std::uint64_t ram = 0;
  std::array<std::uint64_t, kMostAccelerators> accelerators{};
  bool works_on_cpu = true;  // of units that have an accelerator
};

struct Placement {
  std::vector<Assignment> assignments;
  Rings rings{};
  double seconds = 0;
  double cost = 0;  // seconds, and a little for what the links carry: less of it is better
};

/// Whether a unit that takes bytes may have it, as far as its kind tells.
constexpr bool may_work(const Candidate& unit, bool on_cpu, Assignment assignment) {
  if (unit.accelerator < 0) return works_on_cpu(assignment);
  return (on_cpu && !unit.is_slice) || !works_on_cpu(assignment);
}

/// The steps of a pass in which units have these assignments.
std::vector<Step> steps_of(std::span<const Candidate> units,
                           std::span<const Assignment> assignments);

/// What is left of the limits is the rings'; none where it does not hold the largest that moves.
std::optional<Rings> rings_of(std::span<const Candidate> units, const Limits& limits,
                              std::span<const Assignment> assignments);

/// A placement of those assignments, or none where the limits do not hold it.
std::optional<Placement> weigh(std::span<const Candidate> units, const Limits& limits,
                               std::vector<Assignment> assignments);

}  // namespace stowage::planning
