// SPDX-License-Identifier: Apache-2.0
// Core: which units have room, and which goes when there is none.
#include <algorithm>

#include "engine/core.h"

namespace stowage::engine {
namespace {
constexpr std::uint64_t kPatience =
    16;  // acquires that a unit may be overdue, and 1/4 of all units
}  // namespace

std::uint64_t Core::held() const noexcept { return arena_ ? arena_->taken() : mapped_bytes_; }

bool Core::take_room(WeightId id) noexcept {
  const std::uint64_t bytes = unit(id).bytes;
  State& s = state(id);
  if (arena_ && bytes > 0 && s.run < 0) {
    const auto run = arena_->take(bytes);
    if (!run) return false;
    s.run = *run;
  } else if (!arena_) {
    if (mapped_bytes_ + bytes > budget_) return false;
    mapped_bytes_ += bytes;
  }
  report_.peak = std::max(report_.peak, held());
  return true;
}

void Core::evict(WeightId id) noexcept {
  State& s = state(id);
  if (s.stage == Stage::present) --present_;
  s.stage = Stage::absent;
  if (s.wanted > clock_) ++epoch_;
  if (!arena_) {
    link_->drop(unit(id));
    mapped_bytes_ -= unit(id).bytes;
  } else if (s.run >= 0 && !fits_) {
    link_->leave(id);
    arena_->give(s.run);
    s.run = -1;
  }
}

// A unit whose time has passed: what was expected of it was wrong, and it would stay for ever.
std::optional<WeightId> Core::overdue() {
  const std::uint64_t patience = kPatience + units_.size() / 4;
  return clock_ < patience ? std::nullopt : candidates_.take_overdue(clock_ - patience);
}

// Of the few units that are needed last, and later than `next_use`: one whose going leaves a hole
// of `bytes`, else the first. What a window expects stays unless somebody waits.
std::optional<WeightId> Core::needed_last(std::uint64_t bytes, std::uint64_t next_use) {
  return candidates_.take_last(
      next_use,
      [&](WeightId id) {
        return !arena_ || (state(id).run >= 0 && arena_->hole(state(id).run) >= bytes);
      },
      [&](WeightId id) { return next_use == kNow || state(id).wanted <= clock_; });
}

bool Core::make_room(std::uint64_t bytes, std::uint64_t next_use) {
  std::optional<WeightId> chosen = overdue();
  if (!chosen) chosen = needed_last(bytes, next_use);
  if (!chosen) return false;
  evict(*chosen);
  ++report_.evicted;
  return true;
}

std::uint64_t Core::expected_use(const State& s) const noexcept {
  if (s.predicted > s.used) return s.predicted;
  const std::uint64_t interval = s.intervals[1] != 0 ? s.intervals[1] : s.intervals[0];
  return s.used + (interval != 0 ? interval : states_.size());
}

void Core::become_present(WeightId id) {
  State& s = state(id);
  s.stage = Stage::present;
  ++present_;
  add_candidate(id);
}

// Nothing goes where all fits: leases of what stays are not counted.
void Core::add_candidate(WeightId id) {
  const State& s = state(id);
  if (!fits_ && s.leases == 0) candidates_.add(id, expected_use(s));
}

// Starts to read an absent unit if there is room, or room can be made of what is needed later.
bool Core::begin(WeightId id, std::uint64_t next_use) {
  while (!take_room(id))
    if (!make_room(unit(id).bytes, next_use)) return false;
  State& s = state(id);
  s.claimed = s.done = 0;
  s.pieces = static_cast<std::uint32_t>(unit(id).pieces.size());
  s.came = 0;
  s.cut = false;
  s.error = nullptr;
  if (s.pieces == 0) {
    become_present(id);
    return true;
  }
  s.stage = Stage::reading;
  if (next_use == kNow) {
    queue_.insert(queue_.begin(), id);
    if (s.pieces > 1 || !reads_for_itself()) work_.notify_one();
  } else {
    queue_.push_back(id);  // read_ahead() wakes the readers
  }
  return true;
}

}  // namespace stowage::engine
