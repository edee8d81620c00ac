// SPDX-License-Identifier: Apache-2.0
// Which weight is used after which, learnt from use. What came before the current weight tells a
// forward pass from a backward one, and the signature one kind of input from another.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "stowage/engine.h"

namespace stowage::engine {

inline constexpr WeightId kNone = -1;

/// Where a thread stands: the two weights that it used last.
struct Place {
  std::uint64_t signature = 0;
  WeightId previous = kNone, current = kNone;
};

class Order {
 public:
  explicit Order(std::size_t weights) : after_(weights) {}
  /// After `place` came `next`.
  void learn(const Place& place, WeightId next) noexcept;
  /// What is expected after `place`: as it went there last with this signature and this weight
  /// before, else the nearest to that; kNone where nothing is known.
  WeightId next(const Place& place) const noexcept;

 private:
  static constexpr std::size_t kWays = 8;  // kept for each weight; the oldest gives way
  struct Step {
    std::uint64_t signature = 0, age = 0;  // age 0: empty
    WeightId previous = kNone, next = kNone;
  };
  std::vector<std::array<Step, kWays>> after_;
  std::uint64_t clock_ = 0;
};

}  // namespace stowage::engine
