// SPDX-License-Identifier: Apache-2.0
// Which weight is used after which, learnt from use. What came before the current weight tells a
// forward pass from a backward one and from one that is computed again for a backward, and the
// signature one kind of input from another.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "stowage/engine.h"

namespace stowage::engine {

inline constexpr WeightId kNone = -1;

/// Where a thread stands: the two weights that it used last, and a trace of those before.
struct Turn {
  std::uint64_t signature = 0;
  WeightId previous = kNone, current = kNone;
  std::uint64_t past = 0;  // of the last 32 weights or so; older ones are shifted out

  Turn then(WeightId next) const noexcept {
    const auto mixed = (static_cast<std::uint64_t>(next) + 1) * 0x9E3779B97F4A7C15u;
    return {signature, current, next, (past << 2) + (mixed ^ (mixed >> 32))};
  }
};

class Order {
 public:
  explicit Order(std::size_t weights) : after_(weights) {}
  /// After `turn` came `next`.
  void learn(const Turn& turn, WeightId next) noexcept;
  /// What is expected after `turn`: as it went there last with this signature and this past, else
  /// with this weight before, else the nearest to that; kNone where nothing is known.
  WeightId next(const Turn& turn) const noexcept;
  /// The weight that was current at `turn` was used again after so many uses.
  void learn_interval(const Turn& turn, std::uint64_t interval) noexcept;
  /// After how many uses that is expected, by this signature and this past; 0: not known.
  std::uint64_t interval(const Turn& turn) noexcept;

 private:
  static constexpr std::size_t kWays = 8;   // kept for each weight; the oldest gives way
  static constexpr std::size_t kOfOne = 4;  // of one signature: no more, so that others last
  struct Seen {
    std::uint64_t signature = 0, past = 0, age = 0;  // age 0: empty
    WeightId previous = kNone, next = kNone;
    std::uint64_t interval = 0;
  };
  Seen* find(const Turn& turn) noexcept;

  std::vector<std::array<Seen, kWays>> after_;
  std::uint64_t clock_ = 0;
};

}  // namespace stowage::engine
