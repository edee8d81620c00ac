// SPDX-License-Identifier: Apache-2.0
// The product of two widened tiles, with sums held in registers.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

// A sum is made of partial sums over so many terms, each in two chains, of even and of odd terms:
// the rounding error grows with the length of chains, not with that of the sum.
constexpr std::int64_t kPartial = 64;

/// c = or += the products of kRows rows of a and kVectors vectors of columns of b, over `depth`
/// terms.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void tile_partial(const TileTask& task, const float* a,
                                                const float* b, std::int64_t depth, float* c,
                                                bool add) {
  F sums[2][kRows][kVectors] = {};
  const auto add_term = [&](std::int64_t p, int chain) {
    F columns[kVectors];
    for (int v = 0; v < kVectors; ++v)
      columns[v] = Lanes::load_f32(b + p * task.b_stride + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const F x = splat(a[r * task.a_stride + p]);
      for (int v = 0; v < kVectors; ++v)
        sums[chain][r][v] = multiply_add(x, columns[v], sums[chain][r][v]);
    }
  };
  std::int64_t p = 0;
  for (; p + 2 <= depth; p += 2) add_term(p, 0), add_term(p + 1, 1);
  if (p < depth) add_term(p, 0);
  for (int r = 0; r < kRows; ++r, c += task.c_stride) {
    for (int v = 0; v < kVectors; ++v) {
      F result = sums[0][r][v] + sums[1][r][v];
      if (add) result += Lanes::load_f32(c + v * kWidth);
      Lanes::store_f32(c + v * kWidth, result);
    }
  }
}

template <int kRows, int kVectors>
void tile_block(const TileTask& task, std::int64_t row, std::int64_t column) {
  const float *a = task.a + row * task.a_stride, *b = task.b + column;
  float* c = task.c + row * task.c_stride + column;
  std::int64_t p = 0;
  do {  // once even where there are no terms
    const std::int64_t depth = task.depth - p < kPartial ? task.depth - p : kPartial;
    tile_partial<kRows, kVectors>(task, a + p, b + p * task.b_stride, depth, c, task.add || p != 0);
    p += kPartial;
  } while (p < task.depth);
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
      tile_rows<kTileRows, kLinearPad / kWidth>(task, 0, column);
  }
}

}  // namespace
}  // namespace stowage
