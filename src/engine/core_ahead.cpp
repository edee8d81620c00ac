// SPDX-License-Identifier: Apache-2.0
// Core: what is read before somebody asks for it. What comes as a whole is expected in the order
// that was learnt; slices are, when somebody says that they are used next.
#include <algorithm>
#include <functional>

#include "base/formatted.h"
#include "engine/core.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {
constexpr std::uint64_t kByteStride = 4 << 20;  // by which a window of many bytes goes on
constexpr std::uint64_t kSometime = std::uint64_t{1} << 61;
}  // namespace

// Reading further ahead than hides a read would put out what could have stayed: in a circle that
// does not fit, all would be read in every pass. Slices, which no window has, need room too.
void Core::bound_look_ahead() noexcept {
  std::uint64_t largest = 0;
  for (const Unit& unit : units_)
    if (unit.comes && unit.whole < 0) largest = std::max(largest, unit.bytes);
  const std::uint64_t least = slices_ == 0 ? 4 * largest : largest;
  ahead_ = bytes_of(units_) <= ring_ ? ring_ : std::min(ring_, std::max(ring_ / 4, least));
}

// Begins to read what is expected after the thread's turn, for as many bytes as the window has. A
// thread that does what was expected goes on where it stood, a stride at a time, so that neighbours
// in the file are wanted together and read as one.
void Core::prefetch(Session& session) {
  if (workers_.empty() || stopping_ || waiting_ > 0 || present_ == coming_) return;
  Window& window = session.window;
  if (window.epoch == epoch_ && window.first() == session.turn.current &&
      window.end().signature == session.turn.signature) {
    window.pop();
  } else {
    while (window.size() > 0) state(window.pop()).wanted = 0;
    window.restart(session.turn);
    window.epoch = epoch_;
  }
  const std::uint64_t taken = window.bytes() + in_ring(session.turn.current);
  const std::uint64_t room = ahead_ - std::min(ahead_, taken);
  if (window.size() == 0 || (window.size() + Window::kStride <= Window::kMost &&
                             room >= std::min(kByteStride, ahead_ / 4)))
    extend(window, room);
}

// So many uses of what is no slice are among about so many acquires.
std::uint64_t Core::acquires_of(std::size_t uses) const noexcept {
  const std::size_t others = coming_ - slices_;
  return slices_ == 0 || pass_ <= others ? uses : uses * pass_ / others;
}

void Core::extend(Window& window, std::uint64_t room) {
  for (std::size_t step = 0; step < Window::kStride; ++step) {
    const WeightId next = order_.next(window.end());
    if (next == kNone) return;
    State& s = state(next);
    const bool counted = s.wanted > clock_;  // it is in the window already
    const std::uint64_t bytes = counted ? 0 : in_ring(next);
    if (bytes > room) return;
    const std::uint64_t time = clock_ + acquires_of(window.size() + 1);
    if (s.stage == Stage::absent) {
      if (!begin_ahead(next, time)) return;
      s.predicted = time;
    }
    room -= bytes;
    s.wanted = time;
    window.push(next, bytes);
  }
}

bool Core::want(std::span<const WeightId> ids, bool after) {
  for (const WeightId id : ids) check_id(id);
  if (forked() || workers_.empty()) return false;
  const std::shared_ptr<Session> own = session();
  const std::scoped_lock lock(mutex_);
  Wants& wants = own->wants;
  const std::size_t used = std::min(wants.used, wants.begun);
  wants.ids.erase(wants.ids.begin(), wants.ids.begin() + static_cast<std::ptrdiff_t>(used));
  wants.begun -= used;
  wants.used = 0;
  if (!after) {
    // What it wanted before and has not used comes after what it wants now.
    for (std::size_t i = 0; i < wants.begun; ++i)
      put_off(wants.ids[i], clock_ + 1 + ids.size() + i);
    wants.ids.clear();
    wants.begun = 0;
    wants.since = clock_;
  }
  const bool comes = std::ranges::any_of(
      ids, [&](WeightId id) { return unit(id).comes && state(id).stage != Stage::present; });
  wants.ids.insert(wants.ids.end(), ids.begin(), ids.end());
  std::erase_if(wants.ids, [&](WeightId id) { return !unit(id).comes; });
  begin_wants(*own);
  // What was wanted before may be among what is wanted now, and is read in the new order.
  std::ranges::stable_sort(queue_, {}, [&](WeightId id) {
    return state(id).leases > 0 ? 0 : state(id).predicted;  // somebody waits for it
  });
  return comes;
}

void Core::set_behind(std::span<const WeightId> order) noexcept {
  for (std::size_t i = 0; i < order.size(); ++i)
    behind_[static_cast<std::size_t>(order[i])] = i + 1 < order.size() ? order[i + 1] : -1;
}

bool Core::begin_ahead(WeightId id, std::uint64_t time) {
  if (!begin(id, time)) return false;
  State& s = state(id);
  ++report_.ahead, ++s.uses.ahead;
  s.unused = true;
  return true;
}

// It may go for what is used before that time.
void Core::put_off(WeightId id, std::uint64_t time) {
  State& s = state(id);
  s.wanted = 0;
  if (s.stage == Stage::absent || s.predicted <= s.used) return;
  s.predicted = time;
  if (s.stage == Stage::present && s.leases == 0 && !s.kept) candidates_.add(id, time);
}

// As many of them as there is room for, but what is used or expected before; after each use more.
void Core::begin_wants(Session& session) {
  auto& [ids, begun, used, since] = session.wants;
  if (begun == ids.size() || workers_.empty() || stopping_ || waiting_ > 0) return;
  for (; begun < ids.size(); ++begun) {
    const WeightId id = ids[begun];
    State& s = state(id);
    if (s.used > since) continue;  // it came before it was begun
    const std::uint64_t time = clock_ + 1 + (begun - std::min(used, begun));
    s.wanted = time;
    if (s.stage == Stage::absent) {
      if (!begin_ahead(id, time)) break;
    } else if (s.stage == Stage::present && s.leases == 0 && !s.kept) {
      candidates_.add(id, time);
    }
    s.predicted = time;
  }
  if (!queue_.empty()) work_.notify_one();  // who wakes the next
}

void Core::expect(std::span<const WeightId> order) {
  for (const WeightId id : order) check_id(id);
  if (forked()) return;
  std::vector<WeightId> coming(order.begin(), order.end());
  std::erase_if(coming, [&](WeightId id) { return !unit(id).comes || is_slice(id); });
  Turn turn{.signature = session()->turn.signature};
  const std::scoped_lock lock(mutex_);
  ++epoch_;
  for (std::size_t i = 0; i <= coming.size() && !coming.empty(); ++i) {
    const WeightId id = coming[i % coming.size()];  // the last leads to the first
    order_.learn(turn, id);
    turn = turn.then(id);
  }
}

// What has its room before all others, the weights that are used in every pass, keeps it.
void Core::foresee(std::span<const std::uint64_t> uses) {
  if (uses.size() != states_.size())
    throw Error(Code::invalid_argument,
                formatted("{}: uses must be of each of {} weights and slices, got {}",
                          file_.paths().front(), states_.size(), uses.size()));
  if (forked()) return;
  const std::scoped_lock lock(mutex_);
  if (clock_ != 0)
    throw Error(Code::invalid_argument,
                formatted("{}: uses must be said before the first, got them after {}",
                          file_.paths().front(), clock_));
  std::vector<WeightId> used;
  std::uint64_t others = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const auto id = static_cast<WeightId>(i);
    if (!unit(id).comes) continue;
    if (!is_slice(id)) {
      others += in_ring(id);
    } else if (uses[i] != 0) {
      used.push_back(id);
    }
  }
  const auto count = [&](WeightId id) { return uses[static_cast<std::size_t>(id)]; };
  std::ranges::stable_sort(used, std::greater<>{}, count);
  if (reuse_) reuse_->foresee(uses.subspan(named_units(units_)));
  std::uint64_t room = ring_ - std::min(ring_, others);
  foreseen_.clear();
  for (const WeightId id : used) {
    const State& s = state(id);
    if (s.stage != Stage::absent || in_ring(id) > room) continue;
    room -= in_ring(id);
    foreseen_.push_back(id);
  }
  std::ranges::reverse(foreseen_);
  begin_foreseen();
}

// As many as there is scratch for; more when that is given back, until somebody uses a weight.
void Core::begin_foreseen() {
  if (workers_.empty() || stopping_ || clock_ != 0) foreseen_.clear();
  while (!foreseen_.empty() && begin_ahead(foreseen_.back(), kSometime)) foreseen_.pop_back();
  if (!queue_.empty()) work_.notify_one();  // who wakes the next
}

}  // namespace stowage::engine
