// SPDX-License-Identifier: Apache-2.0
// The product of two widened tiles, with sums held in registers.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

/// kRows rows of a with kVectors vectors of columns of b.
template <int kRows, int kVectors>
void tile_block(const TileTask& task, std::int64_t row, std::int64_t column) {
  const float* a = task.a + row * task.a_stride;
  const float* b = task.b + column;
  F sums[kRows][kVectors] = {};
  for (std::int64_t p = 0; p < task.depth; ++p, b += task.b_stride) {
    F columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = Lanes::load_f32(b + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const F x = splat(a[r * task.a_stride + p]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(x, columns[v], sums[r][v]);
    }
  }
  float* c = task.c + row * task.c_stride + column;
  for (int r = 0; r < kRows; ++r, c += task.c_stride) {
    for (int v = 0; v < kVectors; ++v) {
      F result = sums[r][v];
      if (task.add) result += Lanes::load_f32(c + v * kWidth);
      Lanes::store_f32(c + v * kWidth, result);
    }
  }
}

/// All rows, as many at a time as registers allow, then half as many.
template <int kRows, int kVectors>
void tile_rows(const TileTask& task, std::int64_t row, std::int64_t column) {
  for (; row + kRows <= task.rows; row += kRows) tile_block<kRows, kVectors>(task, row, column);
  if constexpr (kRows > 1) tile_rows<kRows / 2, kVectors>(task, row, column);
}

void tile(const TileTask& task) noexcept {
  constexpr std::int64_t kColumns = kTileVectors * kWidth;
  std::int64_t column = 0;
  for (; column + kColumns <= task.columns; column += kColumns)
    tile_rows<kTileRows, kTileVectors>(task, 0, column);
  if constexpr (kColumns > kLinearPad) {
    for (; column < task.columns; column += kLinearPad)
      tile_rows<2 * kTileRows, kLinearPad / kWidth>(task, 0, column);
  }
}

}  // namespace
}  // namespace stowage
