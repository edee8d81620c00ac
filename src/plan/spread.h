// SPDX-License-Identifier: Apache-2.0
// Placements by rule: what saves most seconds for its bytes stays, evenly through the order of use,
// so that what moves always has work to hide behind. What a rule cannot know (how large the rings
// should be, how much the CPU takes off the links) is tried.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "plan/placement.h"

namespace stowage::planning {

class Spread {
 public:
  Spread(std::span<const Candidate> units, const Limits& limits);

  /// A few placements that differ in kind, the best first; never none.
  std::vector<Placement> best();

 private:
  // What is tried, each an index into a list of values.
  enum Knob : std::size_t { accelerator_ring, accelerator_large, on_cpu, ram_ring, ram_large };
  using Setting = std::array<std::size_t, 5>;

  std::vector<Assignment> assignments_for(const Setting& setting) const;
  void fill_accelerators(const Setting& setting, std::vector<Assignment>& assignments) const;
  void send_to_cpu(double part, std::vector<Assignment>& assignments) const;
  void fill_ram(const Setting& setting, std::vector<Assignment>& assignments) const;
  const Placement* weigh(const Setting& setting);

  std::span<const Candidate> units_;
  const Limits& limits_;
  std::vector<std::uint64_t> sizes_;  // the largest, each once, falling
  std::map<Setting, std::optional<Placement>> tried_;
};

/// Which of `among` (in order of use) stay within `room` bytes: those of the highest `value` (saved
/// seconds per byte) first, those of about equal value evenly.
std::vector<std::size_t> spread_evenly(std::span<const Candidate> units,
                                       std::span<const std::size_t> among,
                                       std::span<const double> value, std::uint64_t room);

}  // namespace stowage::planning
