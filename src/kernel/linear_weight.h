// SPDX-License-Identifier: Apache-2.0
// A resting matrix as the linear family reads it: any stretch of a row in fp32, and dot products
// with resting rows, whatever the storage.
#pragma once
#include <cstdint>

#include "kernel/decode.h"
#include "kernel/kernels.h"
#include "kernel/runs.h"

namespace stowage {

/// A view of a weight, which must outlive it.
class LinearWeight {
 public:
  /// `where` begins the messages. Throws invalid_argument (not a matrix), unsupported (a dialect).
  LinearWeight(const Kernels& kernels, const Weight& weight, const char* where);

  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t columns() const noexcept { return columns_; }

  /// out[i] = w[row, k + i] in fp32, for i < n: the values of dequantize.
  void widen(std::int64_t row, std::int64_t k, std::int64_t n, float* out) const noexcept;
  /// `count` rows from `row`, columns [k, k + n) of each, at `stride` >= n: zeros fill the rest.
  void widen_rows(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n, float* out,
                  std::int64_t stride) const noexcept;

  /// Whether dot() can read this storage and shape.
  bool has_dot() const noexcept { return dot_rows_ != 0; }
  bool arranged() const noexcept { return bits_ == 4; }  // dot() wants x arranged
  /// y[j, i] += sum over columns [k, k + n) of w[row + i] x[j], for i < count and j < m. x begins
  /// with column k, a padded number, and has zeros from the last column up to the padded length.
  struct Vectors {
    const float* x;
    std::int64_t x_stride, m;
    float* y;
    std::int64_t y_stride;
  };
  void dot(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
           const Vectors& vectors) const noexcept;

  /// The same for x in bf16, whole rows of it, arranged.
  bool has_dot_bf16() const noexcept { return dot_bf16_rows_ != 0; }
  struct Bf16Vectors {
    const std::uint16_t* x;
    std::int64_t x_stride, m;
  };
  void dot_bf16(std::int64_t row, std::int64_t count, const Bf16Vectors& to, float* y,
                std::int64_t y_stride) const noexcept;

 private:
  std::int64_t most_dot_bf16_rows(const Storage& storage) const noexcept;
  std::int64_t most_dot_rows(const Storage& storage) const noexcept;

  Runs runs_;
  std::int64_t rows_, columns_;
  Decode to_f32_;
  DotKernel dot_;
  const float* values_;    // of a 4-bit format
  int bits_;               // of a code
  std::int64_t dot_rows_;  // as many rows at a time are one Run; 0: dot() cannot
  Bf16DotKernel dot_bf16_;
  std::int64_t dot_bf16_rows_;
};

}  // namespace stowage
