// SPDX-License-Identifier: Apache-2.0
// What products take a weight for: one matrix [O, K], which multiplies all rows of x, or a matrix
// [O, K] for each group of them. Which of both is a constant of a program.
#pragma once
#include "kernel/cuda/grid.cuh"

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

}  // namespace stowage::cuda
