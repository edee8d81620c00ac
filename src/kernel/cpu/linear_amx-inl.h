// SPDX-License-Identifier: Apache-2.0
// Products of matrices of bf16 in tiles (AMX): 16 rows of 64 bytes each. TDPBF16PS adds to a tile
// of 16 x 16 sums in fp32 the products of 16 x 32 numbers and 32 x 16 ones, which lie in pairs; an
// element has its pairs' products in order, whatever tiles it is in.
//
// Of eight tiles four are sums: two of rows by two of columns, so that each tile that is loaded
// serves two products; or four of rows, where there is one of columns.
#pragma once
#include "kernel/cpu/linear_matrices-inl.h"

namespace stowage {
namespace {

constexpr std::int64_t kSumsLine = kTile * sizeof(float);  // bytes
constexpr std::int64_t kPairsLine = kMatrixDepth * sizeof(std::uint16_t);

/// What LDTILECFG reads: Intel SDM volume 1, table 18-1.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  constexpr TileShapes() {
    for (int i = 0; i < 8; ++i) {
      row_bytes[i] = kPairsLine;
      rows[i] = kTile;
    }
  }
};
static_assert(sizeof(TileShapes) == sizeof(MatrixState));
constexpr TileShapes kShapes;

// By hand: the intrinsics of GCC 12 say that they read 8 bytes of the 64.
void begin_matrices(MatrixState* before) noexcept {
  __asm__ volatile("sttilecfg %0" : "=m"(*before));
  __asm__ volatile("ldtilecfg %0" ::"m"(kShapes));
}
void end_matrices(const MatrixState* before) noexcept {
  if (before->bytes[0] == 0)
    __asm__ volatile("tilerelease");
  else
    __asm__ volatile("ldtilecfg %0" ::"m"(*before));
}

/// Where a product of tiles reads: rows a, columns b and those beside them.
struct Tiles {
  const std::uint16_t *a, *below, *b, *right;
};
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void load_tiles(const Tiles& at, std::int64_t a_line) {
  _tile_loadd(4, at.a, a_line);
  _tile_loadd(6, at.b, kPairsLine);
  if constexpr (kColumns > 1) _tile_loadd(7, at.right, kPairsLine);
  if constexpr (kRows > 1) _tile_loadd(5, at.below, a_line);
}

/// Sums of kRows x kColumns tiles of all columns, from rows a. What the next product begins with is
/// loaded before sums are stored: loads behind stores wait for them.
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void add_tiles(const MatrixTask& task, const std::uint16_t* a,
                                             float* c, std::int64_t column, std::int64_t end,
                                             const char*& next, std::int64_t each) {
  const std::int64_t a_line = task.a_stride * 2, c_line = task.c_stride * 4;
  const auto begin = [&](std::int64_t j) __attribute__((always_inline)) {
    const std::uint16_t* b = task.b + j / kTile * task.b_stride;
    return Tiles{a, a + kTile * task.a_stride, b, b + task.b_stride};
  };
  Tiles at = begin(column);
  load_tiles<kRows, kColumns>(at, a_line);
  for (; column < end; column += kColumns * kTile) {
    float *const sums = c + column, *const lower = sums + kTile * task.c_stride;
    if (task.add) {
      _tile_loadd(0, sums, c_line);
      if constexpr (kColumns > 1) _tile_loadd(1, sums + kTile, c_line);
      if constexpr (kRows > 1) _tile_loadd(2, lower, c_line);
      if constexpr (kRows > 1 && kColumns > 1) _tile_loadd(3, lower + kTile, c_line);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (std::int64_t left = task.depth;;) {
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kColumns > 1) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kRows > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kRows > 1 && kColumns > 1) _tile_dpbf16ps(3, 5, 7);
      for (std::int64_t i = 0; i < each; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      left -= kMatrixDepth;
      if (left == 0) break;
      at = {at.a + kMatrixDepth, at.below + kMatrixDepth, at.b + kMatrixDepth * kTile,
            at.right + kMatrixDepth * kTile};
      load_tiles<kRows, kColumns>(at, a_line);
    }
    if (column + kColumns * kTile < end) {
      at = begin(column + kColumns * kTile);
      load_tiles<kRows, kColumns>(at, a_line);
    }
    _tile_stored(0, sums, c_line);
    if constexpr (kColumns > 1) _tile_stored(1, sums + kTile, c_line);
    if constexpr (kRows > 1) _tile_stored(2, lower, c_line);
    if constexpr (kRows > 1 && kColumns > 1) _tile_stored(3, lower + kTile, c_line);
  }
}

/// Four tiles of rows by one of columns.
[[gnu::always_inline]] inline void add_tall(const MatrixTask& task, const std::uint16_t* a,
                                            const std::uint16_t* b, float* c) {
  const std::int64_t a_line = task.a_stride * 2, c_line = task.c_stride * 4;
  const std::int64_t a_tile = kTile * task.a_stride, c_tile = kTile * task.c_stride;
  if (task.add) {
    _tile_loadd(0, c, c_line);
    _tile_loadd(1, c + c_tile, c_line);
    _tile_loadd(2, c + 2 * c_tile, c_line);
    _tile_loadd(3, c + 3 * c_tile, c_line);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < task.depth; k += kMatrixDepth) {
    _tile_loadd(6, b + k * kTile, kPairsLine);
    _tile_loadd(4, a + k, a_line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + a_tile + k, a_line);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, a + 2 * a_tile + k, a_line);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, a + 3 * a_tile + k, a_line);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, c, c_line);
  _tile_stored(1, c + c_tile, c_line);
  _tile_stored(2, c + 2 * c_tile, c_line);
  _tile_stored(3, c + 3 * c_tile, c_line);
}

void multiply_matrices(const MatrixTask& task) noexcept {
  __asm__ volatile("" ::: "memory");  // which the intrinsics read, and do not say so
  const std::int64_t steps =
      task.rows / kTile * (task.columns / kTile) * (task.depth / kMatrixDepth);
  const std::int64_t lines = task.next_bytes / 64;
  const std::int64_t each = (4 * lines + steps - 1) / steps;  // a step is up to four products
  const std::int64_t twos = task.columns / (2 * kTile) * (2 * kTile);
  const auto* next = static_cast<const char*>(task.next);
  std::int64_t row = 0;
  if (task.columns == kTile)
    for (; row + 4 * kTile <= task.rows; row += 4 * kTile)
      add_tall(task, task.a + row * task.a_stride, task.b, task.c + row * task.c_stride);
  for (; row < task.rows; row += 2 * kTile) {
    const std::uint16_t* a = task.a + row * task.a_stride;
    float* c = task.c + row * task.c_stride;
    if (row + kTile < task.rows) {
      if (twos != 0) add_tiles<2, 2>(task, a, c, 0, twos, next, each);
      if (twos != task.columns) add_tiles<2, 1>(task, a, c, twos, task.columns, next, each);
    } else {
      if (twos != 0) add_tiles<1, 2>(task, a, c, 0, twos, next, each);
      if (twos != task.columns) add_tiles<1, 1>(task, a, c, twos, task.columns, next, each);
    }
  }
}

}  // namespace
}  // namespace stowage
