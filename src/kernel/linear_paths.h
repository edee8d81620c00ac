// SPDX-License-Identifier: Apache-2.0
// The ways in which linear() computes. Which one runs depends on storage and sizes alone, and each
// sums an element in an order of its own, so that threads never change a byte:
//
//   tiny    everything fits a few stack buffers: no allocation, no thread
//   bf16    4-bit weights and x in bf16, where an instruction set multiplies pairs of them
//   rows    up to 16 rows of x: weights are read once, a row at a time, by dot products
//   tiles   more rows of x, and the gradient: tiles of weight are widened into scratch
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "kernel/chunks.h"
#include "kernel/linear_weight.h"

namespace stowage {

/// What all paths need to know of a call. x and y are row-major, [m, ...], of `dtype`.
struct LinearCall {
  const LinearKernels* kernels;
  const LinearWeight* weight;
  const void* x;
  std::int64_t m;
  Dtype dtype;
  const void* bias;  // null: none
  void* y;
  Executor* executor;

  std::int64_t bytes() const noexcept { return bits(dtype) / 8; }
  const void* x_at(std::int64_t element) const noexcept {
    return static_cast<const char*>(x) + element * bytes();
  }
  const void* bias_at(std::int64_t element) const noexcept {
    return bias == nullptr ? nullptr : static_cast<const char*>(bias) + element * bytes();
  }
  void widen_x(std::int64_t element, std::int64_t n, float* out) const noexcept {
    kernels->widen[value_index(dtype)](x_at(element), n, out);
  }
  /// y[row + i, column + j] = round(sums[i, j] + bias[column + j]); y has `columns` columns.
  void finish(const float* sums, std::int64_t stride, std::int64_t row, std::int64_t rows,
              std::int64_t column, std::int64_t n, std::int64_t columns) const noexcept {
    void* out = static_cast<char*>(y) + (row * columns + column) * bytes();
    kernels->narrow[value_index(dtype)]({sums, stride, rows, n, bias_at(column), out, columns});
  }
};

constexpr std::int64_t padded(std::int64_t n) {
  return (n + kLinearPad - 1) / kLinearPad * kLinearPad;
}

bool fits_tiny(const LinearCall& call) noexcept;
void linear_tiny(const LinearCall& call) noexcept;
bool fits_bf16(const LinearCall& call) noexcept;
void linear_bf16(const LinearCall& call);
bool fits_rows(const LinearCall& call) noexcept;
void linear_rows(const LinearCall& call);

void linear_tiles(const LinearCall& call);
/// y[m, columns] = x[m, rows] W.
void linear_grad_tiles(const LinearCall& call);

}  // namespace stowage
