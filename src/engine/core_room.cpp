// SPDX-License-Identifier: Apache-2.0
// Core: which units have room, and which goes when there is none.
#include <algorithm>
#include <cmath>

#include "base/formatted.h"
#include "engine/core.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {
constexpr std::uint64_t kPatience =
    16;  // acquires that a unit may be overdue, and 1/4 of all units
constexpr std::uint64_t kAfterAll = std::uint64_t{1} << 62;  // any acquire
constexpr double kSteps = 16;                                // of a rank, as integers tell it
}  // namespace

std::uint64_t Core::held() const noexcept {
  const std::uint64_t scratch = scratch_arena_ ? scratch_arena_->taken() : 0;
  return scratch + (arena_ ? arena_->taken() : mapped_bytes_);
}

// Who gets none waits for those who have it: they are being read, and give it back.
bool Core::take_scratch(WeightId id) noexcept {
  State& s = state(id);
  if (unit(id).scratch == 0 || s.scratch >= 0) return true;
  const auto run = scratch_arena_->take(unit(id).scratch);
  if (run) s.scratch = *run;
  return run.has_value();
}

void Core::give_scratch(WeightId id) noexcept {
  State& s = state(id);
  if (s.scratch >= 0) scratch_arena_->give(s.scratch);
  s.scratch = -1;
}

bool Core::take_room(WeightId id) noexcept {
  const std::uint64_t bytes = unit(id).bytes;
  State& s = state(id);
  if (s.roomed) return true;
  if (!arena_) {
    if (mapped_bytes_ + bytes > budget_) return false;
    mapped_bytes_ += bytes;
  } else if (bytes > 0) {
    const auto run = arena_->take(bytes);
    if (!run) return false;
    s.run = *run;
  }
  s.roomed = true;
  if (is_slice(id) && !s.kept) slice_bytes_ += bytes;
  report_.peak = std::max(report_.peak, held());
  return true;
}

void Core::evict(WeightId id) noexcept {
  State& s = state(id);
  if (s.stage == Stage::present) --present_;
  s.stage = Stage::absent;
  if (s.wanted > clock_) ++epoch_;
  if (s.unused) ++report_.unused, ++s.uses.unused;
  s.unused = false;
  give_scratch(id);
  if (!arena_) link_->drop(id, unit(id));
  if (s.kept) return;
  if (is_slice(id) && s.roomed) slice_bytes_ -= unit(id).bytes;
  s.roomed = false;
  if (!arena_) {
    mapped_bytes_ -= unit(id).bytes;
  } else if (s.run >= 0) {
    arena_->give(s.run);
    s.run = -1;
  }
}

// Room is taken at once and first, so that it lies together, and what is left is one piece.
void Core::keep(std::span<const WeightId> ids) {
  for (const WeightId id : ids) check_id(id);
  if (forked()) return;
  const std::scoped_lock lock(mutex_);
  if (clock_ != 0) {
    throw Error(Code::invalid_argument,
                formatted("{}: what is kept must be said before the first use, got it after {}",
                          file_.paths().front(), clock_));
  }
  if (std::ranges::all_of(states_, &State::kept)) return;
  std::vector<bool> chosen(units_.size());
  for (const WeightId id : ids) {
    chosen[static_cast<std::size_t>(id)] = unit(id).comes;
    const auto [first, count, rows] = unit(id).slices;
    for (WeightId slice = first; slice < first + count; ++slice)
      chosen[static_cast<std::size_t>(slice)] = unit(slice).comes;
  }
  std::uint64_t kept = 0, largest = 0;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (chosen[i] || states_[i].kept)
      kept += units_[i].bytes;
    else if (units_[i].comes)
      largest = std::max(largest, units_[i].bytes);
  }
  if (kept + largest > budget_) {
    throw Error(Code::invalid_argument,
                formatted("{}: the budget must hold what is kept, {} bytes, and the largest of the "
                          "rest, {}, together {}, got {}",
                          file_.paths().front(), kept, largest, kept + largest, budget_));
  }
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (!chosen[i] || states_[i].kept) continue;
    states_[i].kept = true;
    take_room(static_cast<WeightId>(i));  // nobody has any yet
  }
  ring_ = budget_ - kept;
  // Who chose what stays has the rest stream through all of it, but for the room of slices.
  ahead_ = ring_;
  if (slices_ != 0) bound_look_ahead();
}

// Of the budget's part that what comes and goes shares.
std::uint64_t Core::in_ring(WeightId id) const noexcept {
  return ring_ < budget_ && state(id).kept ? 0 : unit(id).bytes;
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
  if (is_slice(*chosen)) reuse_->set_room(slice_bytes_);
  evict(*chosen);
  ++report_.evicted;
  return true;
}

// All that is used in every pass is used before slices are: of these, those are kept that were used
// often and lately.
std::uint64_t Core::expected_use(WeightId id) const noexcept {
  const State& s = state(id);
  if (s.predicted > s.used) return s.predicted;
  if (is_slice(id))
    return kAfterAll - static_cast<std::uint64_t>(kSteps * reuse_->rank(slice_index(id)));
  if (s.again != 0) return s.used + s.again;
  const std::uint64_t interval = s.intervals[1] != 0 ? s.intervals[1] : s.intervals[0];
  return s.used + (interval != 0 ? interval : states_.size());
}

void Core::become_present(WeightId id) {
  State& s = state(id);
  s.stage = Stage::present;
  ++present_;
  add_candidate(id);
}

// What is kept never goes: leases of it are not counted.
void Core::add_candidate(WeightId id) {
  const State& s = state(id);
  if (!s.kept && s.leases == 0) candidates_.add(id, expected_use(id));
}

std::size_t Core::slice_index(WeightId id) const noexcept {
  return static_cast<std::size_t>(id) - named_units(units_);
}

// All slices that may go: what was used often is told by another measure now.
void Core::rank_anew() {
  for (auto id = static_cast<WeightId>(named_units(units_));
       id < static_cast<WeightId>(units_.size()); ++id)
    if (state(id).stage == Stage::present) add_candidate(id);
}

// Starts to read an absent unit if there is room, or room can be made of what is needed later.
bool Core::begin(WeightId id, std::uint64_t next_use) {
  if (!take_scratch(id)) return false;
  while (!take_room(id)) {
    if (make_room(unit(id).bytes, next_use)) continue;
    give_scratch(id);
    return false;
  }
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
    // Who looks ahead wakes the readers. Slices are read before what is used after them.
    const auto later = [&](WeightId other) { return state(other).predicted > next_use; };
    queue_.insert(is_slice(id) ? std::ranges::find_if(queue_, later) : queue_.end(), id);
  }
  return true;
}

}  // namespace stowage::engine
