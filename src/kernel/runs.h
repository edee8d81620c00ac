// SPDX-License-Identifier: Apache-2.0
// Turns elements of a weight into Runs, which are all that kernels know of a storage.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernel/dequantize.h"
#include "stowage/weight.h"

namespace stowage {

/// How many nested scales are expanded at a time: four rows of 32,000 columns, in 8 KiB.
inline constexpr std::int64_t kExpandedScales = 2048;

/// A view of a weight, which must outlive it.
class Runs {
 public:
  explicit Runs(const Weight& weight);

  /// Calls body(run) for runs that cover elements [begin, end) in order. A run and its scales live
  /// as long as the call.
  template <class Body>
  void cover(std::int64_t begin, std::int64_t end, Body&& body) const {
    Expanded room;
    while (begin < end) {
      const Run run = next(begin, end, room);
      body(run);
      begin += run.n;
    }
  }

 private:
  struct Nested {
    const std::uint8_t* absmax = nullptr;
    const float *table = nullptr, *map = nullptr, *offset = nullptr;
  };
  /// The parts of nf4:torchao, in the dtype of `type`.
  struct Torchao {
    const std::int8_t* scalers = nullptr;
    const void *factors = nullptr, *mean = nullptr, *table = nullptr;
    std::int64_t scaler_block = 1;
    ScaleType type = ScaleType::f32;
  };
  union Expanded {
    float scales[kExpandedScales];
    double values[16];
  };
  Run next(std::int64_t begin, std::int64_t end, Expanded& room) const noexcept;
  Run next_nested(std::int64_t begin, std::int64_t end, float* scales) const noexcept;
  Run next_torchao(std::int64_t begin, std::int64_t end, float* scales) const noexcept;
  Run next_doubles(std::int64_t begin, std::int64_t end, double* values) const noexcept;

  const std::uint8_t* codes_ = nullptr;
  const float* scales_ = nullptr;
  std::int64_t group_ = 1;
  std::int64_t row_ = 0;  // elements of a row where groups restart at each row; else 0
  Nested nested_;
  Torchao torchao_;
  float table_[16];  // of nf4:torchao, but for f64
};

}  // namespace stowage
