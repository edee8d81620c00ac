// SPDX-License-Identifier: Apache-2.0
// A resting matrix as the linear family reads it: any stretch of a row in fp32, and dot products
// with resting rows, whatever the storage.
#pragma once
#include <cstdint>

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
  bool arranged() const noexcept { return four_bit_; }  // dot() wants x arranged
  /// y[i] = w[row + i] . x for i < count. x has zeros up to the padded length.
  void dot(std::int64_t row, std::int64_t count, const float* x, float* y) const noexcept;

 private:
  std::int64_t most_dot_rows(const Storage& storage) const noexcept;

  Runs runs_;
  std::int64_t rows_, columns_;
  DequantizeKernel to_f32_;
  DotKernel dot_;
  const float* values_;  // of a 4-bit format
  bool four_bit_;
  std::int64_t dot_rows_;  // as many rows at a time are one Run; 0: dot() cannot
};

}  // namespace stowage
