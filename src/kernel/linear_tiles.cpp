// SPDX-License-Identifier: Apache-2.0
// Many rows of x, and the gradient for the input: y[m, n] = sum_d x[m, d] b[d, n], where b is a
// tile of weight, widened into scratch, as it is (gradient) or transposed (linear).
//
// An element is the sum, in order, of partial sums of a fixed length (cpu/linear-inl.h), of which
// kDepth is a multiple: how tiles are cut and who computes them changes nothing.
#include "kernel/linear_weight.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kDepth = 256;
constexpr std::int64_t kMostRows = 256, kMostColumns = 128;    // of a tile of y
constexpr std::int64_t kScratchBytes = std::int64_t{5} << 19;  // asked for by all threads; the pool
                                                               // may give half as much again
constexpr std::int64_t kBetween = 16;  // floats between rows of b: no power of two, which
                                       // would put them all into the same few sets of a cache
constexpr std::int64_t kTransposedRows = 16;  // rows widened before they are turned
constexpr std::int64_t kParallelProducts = std::int64_t{1} << 20;

enum class Side { forward, gradient };

struct Tiles {
  LinearCall call;
  Side side;
  std::int64_t columns, depth;           // of y and of the sum
  std::int64_t tile_rows, tile_columns;  // of y

  std::int64_t b_stride() const noexcept { return tile_columns + kBetween; }
  std::int64_t floats() const noexcept {
    return tile_rows * kDepth + kDepth * b_stride() + tile_rows * tile_columns;
  }
  std::int64_t row_tiles() const noexcept { return ceil_div(call.m, tile_rows); }
  std::int64_t column_tiles() const noexcept { return ceil_div(columns, tile_columns); }

  // b[p, j] = w[column + j, d + p], with zeros up to the padded count of columns.
  void widen_transposed(std::int64_t d, std::int64_t n, std::int64_t column, std::int64_t count,
                        float* b) const noexcept {
    alignas(64) float w[kTransposedRows * kDepth];
    for (std::int64_t j = 0; j < padded(count); j += kTransposedRows) {
      const std::int64_t rows = std::min(kTransposedRows, count - j);
      call.weight->widen_rows(column + j, rows, d, n, w, n);
      std::fill(w + rows * n, w + kTransposedRows * n, 0.0f);
      call.kernels->transpose({w, n, kTransposedRows, n, b + j, b_stride()});
    }
  }

  void widen_weight(std::int64_t d, std::int64_t n, std::int64_t column, std::int64_t count,
                    float* b) const noexcept {
    if (side == Side::forward) return widen_transposed(d, n, column, count, b);
    for (std::int64_t p = 0; p < n; ++p, b += b_stride()) {
      call.weight->widen(d + p, column, count, b);
      std::fill(b + count, b + padded(count), 0.0f);
    }
  }

  void compute(std::int64_t row, std::int64_t column) const {
    const ExactFloats exact;
    const Scratch scratch(static_cast<std::size_t>(floats()) * sizeof(float));
    float* a = scratch.floats();
    float* b = a + tile_rows * kDepth;
    float* c = b + kDepth * b_stride();
    const std::int64_t rows = std::min(tile_rows, call.m - row);
    const std::int64_t count = std::min(tile_columns, columns - column);
    std::int64_t d = 0;
    do {  // once even where the sum is empty: y is then the bias
      const std::int64_t n = std::min(kDepth, depth - d);
      for (std::int64_t i = 0; i < rows; ++i)
        call.widen_x((row + i) * depth + d, n, a + i * kDepth);
      widen_weight(d, n, column, count, b);
      call.kernels->tile(
          {a, kDepth, rows, b, b_stride(), padded(count), n, c, tile_columns, d != 0});
      d += n;
    } while (d < depth);
    call.finish(c, tile_columns, row, rows, column, count, columns);
  }

  void run() const {
    const std::int64_t count = row_tiles() * column_tiles();
    const auto tile = [&](std::int64_t i) {
      compute(i % row_tiles() * tile_rows, i / row_tiles() * tile_columns);
    };
    const std::int64_t most = kScratchBytes / (floats() * static_cast<std::int64_t>(sizeof(float)));
    const std::int64_t workers = std::min<std::int64_t>(call.executor->threads(), most);
    if (workers == 1 || call.m * columns * depth < kParallelProducts) {
      for (std::int64_t i = 0; i < count; ++i) tile(i);
    } else if (workers == call.executor->threads()) {
      call.executor->for_each(count, tile);
    } else {  // more threads than scratch for them
      call.executor->for_each(workers, [&](std::int64_t worker) {
        for (std::int64_t i = worker; i < count; i += workers) tile(i);
      });
    }
  }
};

// Tiles shrink until every thread has its share of the scratch, and there is work for all.
Tiles plan(const LinearCall& call, Side side, std::int64_t columns, std::int64_t depth) {
  Tiles tiles{call,
              side,
              columns,
              depth,
              std::min(call.m, kMostRows),
              std::min(padded(columns), kMostColumns)};
  const std::int64_t threads = call.executor->threads();
  const std::int64_t share = kScratchBytes / static_cast<std::int64_t>(sizeof(float)) / threads;
  while (tiles.floats() > share && tiles.tile_rows > 16) {
    tiles.tile_rows = (tiles.tile_rows + 1) / 2;
    if (tiles.floats() > share && tiles.tile_columns > 16)
      tiles.tile_columns = padded(tiles.tile_columns / 2);
  }
  while (tiles.row_tiles() * tiles.column_tiles() < 2 * threads && tiles.tile_columns > 32)
    tiles.tile_columns = padded(tiles.tile_columns / 2);
  return tiles;
}

}  // namespace

void linear_tiles(const LinearCall& call) {
  plan(call, Side::forward, call.weight->rows(), call.weight->columns()).run();
}

void linear_grad_tiles(const LinearCall& call) {
  plan(call, Side::gradient, call.weight->columns(), call.weight->rows()).run();
}

}  // namespace stowage
