// SPDX-License-Identifier: Apache-2.0
#include "engine/order.h"

#include <tuple>

namespace stowage::engine {

void Order::learn(const Turn& turn, WeightId next) noexcept {
  if (turn.current == kNone) return;
  auto& seen_here = after_[static_cast<std::size_t>(turn.current)];
  Seen* slot = &seen_here.front();
  Seen* own = nullptr;  // the oldest of this signature
  std::size_t count = 0;
  for (Seen& seen : seen_here) {
    if (seen.age < slot->age) slot = &seen;
    if (seen.age == 0 || seen.signature != turn.signature) continue;
    if (seen.past == turn.past) {
      seen.age = ++clock_;
      seen.previous = turn.previous;
      seen.next = next;
      return;
    }
    if (own == nullptr || seen.age < own->age) own = &seen;
    ++count;
  }
  if (count >= kOfOne) slot = own;
  *slot = {turn.signature, turn.past, ++clock_, turn.previous, next, 0};
}

WeightId Order::next(const Turn& turn) const noexcept {
  if (turn.current == kNone) return kNone;
  std::tuple<bool, bool, bool, std::uint64_t> best{};
  WeightId found = kNone;
  for (const Seen& seen : after_[static_cast<std::size_t>(turn.current)]) {
    if (seen.age == 0) continue;
    const std::tuple fit(seen.signature == turn.signature, seen.past == turn.past,
                         seen.previous == turn.previous, seen.age);
    if (found == kNone || fit > best) {
      best = fit;
      found = seen.next;
    }
  }
  return found;
}

Order::Seen* Order::find(const Turn& turn) noexcept {
  for (Seen& seen : after_[static_cast<std::size_t>(turn.current)])
    if (seen.age != 0 && seen.signature == turn.signature && seen.past == turn.past) return &seen;
  return nullptr;
}

void Order::learn_interval(const Turn& turn, std::uint64_t interval) noexcept {
  if (Seen* const seen = find(turn)) seen->interval = interval;
}

std::uint64_t Order::interval(const Turn& turn) noexcept {
  const Seen* const seen = find(turn);
  return seen == nullptr ? 0 : seen->interval;
}

}  // namespace stowage::engine
