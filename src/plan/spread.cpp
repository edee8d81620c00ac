// SPDX-License-Identifier: Apache-2.0
#include "plan/spread.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

namespace stowage::planning {
namespace {

constexpr std::array<std::uint64_t, 5> kRings{2, 1, 3, 4, 8};  // times the largest that moves
constexpr std::array<double, 9> kOnCpu{0, 1, 0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875};
constexpr std::size_t kLarge = 4;         // sizes above which a unit must stay, none included
constexpr std::size_t kImproved = 3;      // placements that are improved
constexpr int kRounds = 2;                // through the knobs
constexpr std::size_t kManyUnits = 2000;  // units: from one beginning only

int level_of(double value) {  // values within a fifth of each other count as equal
  return value > 0 ? static_cast<int>(std::lround(std::log2(value) * 4)) : -100000;
}

/// Takes of one level: all, or so many bytes of every stretch of the order as there is room.
void take_evenly(std::span<const Candidate> units, std::span<const std::size_t> level,
                 std::uint64_t& room, std::vector<std::size_t>& taken) {
  std::uint64_t all = 0;
  for (const std::size_t i : level) all += units[i].bytes;
  if (all == 0) return;
  const double part = std::min(1.0, static_cast<double>(room) / static_cast<double>(all));
  double owed = 0;
  std::vector<std::size_t> left;
  for (const std::size_t i : level) {
    const auto bytes = static_cast<double>(units[i].bytes);
    owed += part * bytes;
    if (units[i].bytes > room || (part < 1 && owed < bytes / 2)) {
      left.push_back(i);
      continue;
    }
    taken.push_back(i);
    room -= units[i].bytes;
    owed -= bytes;
  }
  std::ranges::stable_sort(left, std::greater{}, [&](std::size_t i) { return units[i].bytes; });
  for (const std::size_t i : left) {  // what is left of the room
    if (units[i].bytes > room) continue;
    taken.push_back(i);
    room -= units[i].bytes;
  }
}

}  // namespace

std::vector<std::size_t> spread_evenly(std::span<const Candidate> units,
                                       std::span<const std::size_t> among,
                                       std::span<const double> value, std::uint64_t room) {
  std::map<int, std::vector<std::size_t>, std::greater<>> levels;
  for (const std::size_t i : among) levels[level_of(value[i])].push_back(i);
  std::vector<std::size_t> taken;
  for (const auto& [level, members] : levels) take_evenly(units, members, room, taken);
  return taken;
}

Spread::Spread(std::span<const Candidate> units, const Limits& limits)
    : units_(units), limits_(limits) {
  std::set<std::uint64_t, std::greater<>> sizes;
  for (const Candidate& unit : units)
    if (unit.bytes > 0) sizes.insert(unit.bytes);
  for (const std::uint64_t size : sizes)
    if (sizes_.size() < kLarge) sizes_.push_back(size);
  if (sizes_.empty()) sizes_.push_back(0);
}

// Units above the chosen size stay if they fit, so that the ring can be smaller.
void Spread::fill_accelerators(const Setting& setting, std::vector<Assignment>& assignments) const {
  const std::uint64_t large = sizes_[setting[accelerator_large] % sizes_.size()];
  std::vector<double> value(units_.size());
  for (std::size_t a = 0; a < kMostAccelerators; ++a) {
    if (limits_.accelerators[a] == 0) continue;
    std::vector<std::size_t> among;
    std::uint64_t all = 0, room = limits_.accelerators[a];
    for (std::size_t i = 0; i < units_.size(); ++i) {
      const Candidate& unit = units_[i];
      if (unit.bytes == 0 || unit.accelerator != static_cast<std::int32_t>(a)) continue;
      if (unit.bytes > large && unit.bytes <= room) {
        assignments[i] = Assignment::resident;
        room -= unit.bytes;
        continue;
      }
      const double slow = unit.on_cpu - unit.on_accelerator;
      const bool may = may_work(unit, limits_.works_on_cpu, Assignment::ram_cpu);
      const double saved = may && slow < unit.copy ? slow : unit.copy;
      value[i] = saved / static_cast<double>(unit.bytes);
      all += unit.bytes;
      among.push_back(i);
    }
    if (all > room) room -= std::min(room, kRings[setting[accelerator_ring]] * large);
    for (const std::size_t i : spread_evenly(units_, among, value, room))
      assignments[i] = Assignment::resident;
  }
}

// So many bytes of what would cross the link are multiplied where they rest: first those that the
// CPU multiplies fastest for what they take to fetch.
void Spread::send_to_cpu(double part, std::vector<Assignment>& assignments) const {
  std::vector<std::size_t> among;
  std::vector<double> value(units_.size());
  double all = 0;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].bytes == 0 || units_[i].is_slice || assignments[i] != Assignment::ram_accelerator)
      continue;
    among.push_back(i);
    value[i] = units_[i].copy / std::max(units_[i].on_cpu, 1e-12);
    all += static_cast<double>(units_[i].bytes);
  }
  for (const std::size_t i :
       spread_evenly(units_, among, value, static_cast<std::uint64_t>(part * all)))
    assignments[i] = Assignment::ram_cpu;
}

void Spread::fill_ram(const Setting& setting, std::vector<Assignment>& assignments) const {
  const std::uint64_t large = sizes_[setting[ram_large] % sizes_.size()];
  std::vector<std::size_t> among;
  std::vector<double> value(units_.size());
  std::uint64_t all = 0, room = limits_.ram;
  std::vector<bool> stays(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].bytes == 0 || !rests_in_ram(assignments[i])) continue;
    if (units_[i].bytes > large && units_[i].bytes <= room) {
      room -= units_[i].bytes;
      stays[i] = true;
      continue;
    }
    value[i] = units_[i].read / static_cast<double>(units_[i].bytes);
    all += units_[i].bytes;
    among.push_back(i);
  }
  if (all > room) room -= std::min(room, kRings[setting[ram_ring]] * large);
  for (const std::size_t i : spread_evenly(units_, among, value, room)) stays[i] = true;
  for (const std::size_t i : among)
    if (!stays[i])
      assignments[i] =
          works_on_cpu(assignments[i]) ? Assignment::disk_cpu : Assignment::disk_accelerator;
}

std::vector<Assignment> Spread::assignments_for(const Setting& setting) const {
  std::vector<Assignment> assignments(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const Candidate& unit = units_[i];
    assignments[i] = unit.accelerator < 0 ? Assignment::ram_cpu : Assignment::ram_accelerator;
    if (unit.bytes == 0) assignments[i] = unit.fixed;
  }
  fill_accelerators(setting, assignments);
  if (limits_.works_on_cpu) {
    for (std::size_t i = 0; i < units_.size(); ++i) {  // too large for any ring there
      const Candidate& unit = units_[i];
      if (assignments[i] == Assignment::ram_accelerator && unit.bytes > 0 && !unit.is_slice &&
          unit.bytes > limits_.accelerators[static_cast<std::size_t>(unit.accelerator)])
        assignments[i] = Assignment::ram_cpu;
    }
    send_to_cpu(kOnCpu[setting[on_cpu]], assignments);
  }
  fill_ram(setting, assignments);
  return assignments;
}

const Placement* Spread::weigh(const Setting& setting) {
  auto [at, is_new] = tried_.try_emplace(setting);
  if (is_new) at->second = planning::weigh(units_, limits_, assignments_for(setting));
  return at->second ? &*at->second : nullptr;
}

// One knob after the other, from several beginnings: the grid of all would be thousands of passes.
std::vector<Placement> Spread::best() {
  const bool chosen = std::ranges::any_of(units_, [](auto& u) { return u.accelerator >= 0; });
  const std::array<std::size_t, 5> counts{chosen ? kRings.size() : 1, chosen ? sizes_.size() : 1,
                                          chosen && limits_.works_on_cpu ? kOnCpu.size() : 1,
                                          kRings.size(), sizes_.size()};
  const std::size_t beginnings = units_.size() > kManyUnits ? 1 : sizes_.size();
  for (std::size_t large = 0; large < beginnings; ++large) {
    Setting now{0, large, 0, 0, large};
    for (int round = 0; round < kRounds; ++round)
      for (std::size_t knob = 0; knob < now.size(); ++knob) {
        Setting next = now;
        for (next[knob] = 0; next[knob] < counts[knob]; ++next[knob]) {
          const Placement* const better = weigh(next);
          const Placement* const best = weigh(now);
          if (better != nullptr && (best == nullptr || better->cost < best->cost)) now = next;
        }
      }
  }
  std::vector<Placement> found;
  for (auto& [setting, placed] : tried_)
    if (placed) found.push_back(std::move(*placed));
  if (found.empty()) {  // everything comes from the disk through rings as large as the limits
    std::vector<Assignment> assignments(units_.size());
    for (std::size_t i = 0; i < units_.size(); ++i) {
      const Candidate& unit = units_[i];
      const bool there =
          unit.accelerator >= 0 &&
          unit.bytes <=
              limits_.accelerators[static_cast<std::size_t>(std::max(unit.accelerator, 0))];
      assignments[i] = there ? Assignment::disk_accelerator : Assignment::disk_cpu;
      if (unit.bytes == 0) assignments[i] = unit.fixed;
    }
    found.push_back(*planning::weigh(units_, limits_, std::move(assignments)));
  }
  std::ranges::stable_sort(found, {}, &Placement::cost);
  const std::size_t kept = units_.size() > kManyUnits ? 1 : kImproved;
  if (found.size() > kept) found.resize(kept);
  return found;
}

}  // namespace stowage::planning
