// SPDX-License-Identifier: Apache-2.0
// What products take a weight for: one matrix [O, K], which multiplies all rows of x, or a matrix
// [O, K] for each group of them. Which of both is a constant of a program.
#pragma once
#include "kernel/cuda/grid.cuh"
#include "kernel/cuda/values.cuh"

namespace stowage::cuda {

inline Index matrices(const Weight& w) { return form.groups ? static_cast<Index>(w.rows) : 1; }
inline Line line_of(const Weight& w, Index matrix, Index line) {
  return form.groups ? Line{matrix, line * w.columns} : Line{line, 0};
}

/// The rows of x that a matrix multiplies. Ends that do not ascend, or are beyond x, lead nowhere
/// outside of it.
inline Rows rows_of(const std::int32_t* ends, Index matrix, Index x_rows) {
  if (!form.groups) return {0, form.many ? x_rows : form.x_rows};
  const auto within = [=](Index at) {
    const Index end = at < 0 ? 0 : ends[at];
    return end < 0 ? 0 : end < x_rows ? end : x_rows;
  };
  return {within(matrix - 1), within(matrix)};
}
/// Whether there is row i of those that are taken at a time.
inline bool has(Rows rows, int i) {
  return i < form.x_rows && (!form.many || rows.first + i < rows.end);
}

inline bool is_finite(float x) { return x * 0.0f == 0.0f; }
/// The product of a line of w and a row of x from values, one after the other: for sums that reach
/// beyond fp32 before their scale multiplies them.
inline float product_of_values(const Weight& w, Line line, const void* x, Index row) {
  float sum = 0.0f;
  for (Index k = 0; k < w.columns; ++k)
    sum = __fmaf_rn(value_in(x, row * w.columns + k),
                    value_at(w, line.row * w.row + line.begin + k), sum);
  return sum;
}

}  // namespace stowage::cuda
