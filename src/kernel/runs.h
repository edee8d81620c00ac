// SPDX-License-Identifier: Apache-2.0
// Turns elements of a weight into Runs, which are all that kernels know of a storage.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernel/dequantize.h"
#include "stowage/weight.h"

namespace stowage {

/// How many nested scales are expanded at a time.
inline constexpr std::int64_t kExpandedScales = 512;

/// A view of a weight, which must outlive it. Throws unsupported for a dialect without kernels.
class Runs {
 public:
  explicit Runs(const Weight& weight);

  /// Calls body(run) for runs that cover elements [begin, end) in order. A run and its scales live
  /// as long as the call.
  template <class Body>
  void cover(std::int64_t begin, std::int64_t end, Body&& body) const {
    float scales[kExpandedScales];
    while (begin < end) {
      const Run run = next(begin, end, scales);
      body(run);
      begin += run.n;
    }
  }

 private:
  struct Nested {
    const std::uint8_t* absmax = nullptr;
    const float *table = nullptr, *map = nullptr, *offset = nullptr;
  };
  Run next(std::int64_t begin, std::int64_t end, float* scales) const noexcept;
  Run next_nested(std::int64_t begin, std::int64_t end, float* scales) const noexcept;

  const std::uint8_t* codes_ = nullptr;
  const float* scales_ = nullptr;
  std::int64_t group_ = 1;
  std::int64_t row_ = 0;  // elements of a row where groups restart at each row; else 0
  Nested nested_;
};

}  // namespace stowage
