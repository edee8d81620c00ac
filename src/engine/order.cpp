// SPDX-License-Identifier: Apache-2.0
#include "engine/order.h"

#include <tuple>

namespace stowage::engine {

void Order::learn(const Place& place, WeightId next) noexcept {
  if (place.current == kNone) return;
  auto& steps = after_[static_cast<std::size_t>(place.current)];
  Step* slot = &steps.front();
  Step* own = nullptr;  // the oldest of this signature
  std::size_t count = 0;
  for (Step& step : steps) {
    if (step.age < slot->age) slot = &step;
    if (step.age == 0 || step.signature != place.signature) continue;
    if (step.past == place.past) {
      step.age = ++clock_;
      step.previous = place.previous;
      step.next = next;
      return;
    }
    if (own == nullptr || step.age < own->age) own = &step;
    ++count;
  }
  if (count >= kOfOne) slot = own;
  *slot = {place.signature, place.past, ++clock_, place.previous, next, 0};
}

WeightId Order::next(const Place& place) const noexcept {
  if (place.current == kNone) return kNone;
  std::tuple<bool, bool, bool, std::uint64_t> best{};
  WeightId found = kNone;
  for (const Step& step : after_[static_cast<std::size_t>(place.current)]) {
    if (step.age == 0) continue;
    const std::tuple fit(step.signature == place.signature, step.past == place.past,
                         step.previous == place.previous, step.age);
    if (found == kNone || fit > best) {
      best = fit;
      found = step.next;
    }
  }
  return found;
}

Order::Step* Order::find(const Place& place) noexcept {
  for (Step& step : after_[static_cast<std::size_t>(place.current)])
    if (step.age != 0 && step.signature == place.signature && step.past == place.past) return &step;
  return nullptr;
}

void Order::learn_interval(const Place& place, std::uint64_t interval) noexcept {
  if (Step* const step = find(place)) step->interval = interval;
}

std::uint64_t Order::interval(const Place& place) noexcept {
  const Step* const step = find(place);
  return step == nullptr ? 0 : step->interval;
}

}  // namespace stowage::engine
