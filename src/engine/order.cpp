// SPDX-License-Identifier: Apache-2.0
#include "engine/order.h"

#include <tuple>

namespace stowage::engine {

void Order::learn(const Place& place, WeightId next) noexcept {
  if (place.current == kNone) return;
  auto& steps = after_[static_cast<std::size_t>(place.current)];
  Step* slot = &steps.front();
  for (Step& step : steps) {
    if (step.age != 0 && step.signature == place.signature && step.previous == place.previous) {
      slot = &step;
      break;
    }
    if (step.age < slot->age) slot = &step;
  }
  *slot = {place.signature, ++clock_, place.previous, next};
}

WeightId Order::next(const Place& place) const noexcept {
  if (place.current == kNone) return kNone;
  std::tuple<bool, bool, std::uint64_t> best{};
  WeightId found = kNone;
  for (const Step& step : after_[static_cast<std::size_t>(place.current)]) {
    if (step.age == 0) continue;
    const std::tuple fit(step.signature == place.signature, step.previous == place.previous,
                         step.age);
    if (found == kNone || fit > best) {
      best = fit;
      found = step.next;
    }
  }
  return found;
}

}  // namespace stowage::engine
