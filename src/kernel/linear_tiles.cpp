// SPDX-License-Identifier: Apache-2.0
// Many rows of x, and the gradient for the input. What multiplies the weight is widened once, for
// some rows of it, and shared by all threads; each of them widens its own stretch of weight, kDepth
// terms at a time, and multiplies it with all of those rows while it is in a near cache.
//
//   linear    y^T[n, m] = sum_k w[n, k] x^T[k, m]: x lies turned, in panels of a few rows of it
//   gradient  gx[m, k] = sum_n g[m, n] w[n, k]
//
// An element is the sum, in order, of partial sums of a fixed length (cpu/linear-inl.h), of which
// kDepth is a multiple: how tiles are cut and who computes them changes nothing.
#include "kernel/linear_weight.h"
#include "kernel/parts.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

// Of linear: terms of a tile, for which a panel of x is in the L1 cache, and the most rows of x
// that are shared. Of the gradient likewise, with columns of w of a part, and rows of g of a tile.
constexpr std::int64_t kDepth = 256, kMostShared = 512, kTileRows = 48;
constexpr std::int64_t kGradientDepth = 128, kPartColumns = 384, kMostSharedGradient = 192;
constexpr std::int64_t kTurned = 16;   // rows or columns that are turned at a time
constexpr std::int64_t kBetween = 16;  // floats between rows: no power of two, which would put
                                       // them all into the same few sets of a cache

// --- linear --------------------------------------------------------------------------------------

/// Some rows of x, turned: for each kDepth terms, panels of [terms, panel] floats.
class TurnedRows {
 public:
  TurnedRows(const LinearCall& call, Rows rows)
      : call_(call),
        rows_(rows),
        depth_(call.weight->columns()),
        panel_(call.kernels->panel),
        scratch_(static_cast<std::size_t>(padded(rows.count) * depth_) * sizeof(float)) {
    const std::int64_t groups = ceil_div(rows.count, kTurned), steps = ceil_div(depth_, kDepth);
    for_each_part(call, groups * steps, rows.count * depth_ * kMoves,
                  [&](std::int64_t i) { turn(i % groups * kTurned, i / groups * kDepth); });
  }

  /// Calls body(first, columns, panel) for the panels of n terms from d on.
  template <class Body>
  void for_each_panel(std::int64_t d, std::int64_t n, Body&& body) const {
    const std::int64_t all = padded(rows_.count);
    for (std::int64_t first = 0; first < all; first += panel_)
      body(first, std::min(panel_, all - first), at(first, d, n));
  }

 private:
  float* at(std::int64_t first, std::int64_t d, std::int64_t n) const noexcept {
    return scratch_.floats() + d * padded(rows_.count) + first * n;
  }
  // Rows that are not there are zeros.
  void turn(std::int64_t first, std::int64_t d) const noexcept {
    alignas(64) float wide[kTurned * kDepth];
    const std::int64_t n = std::min(kDepth, depth_ - d);
    const std::int64_t count = std::min(kTurned, rows_.count - first);
    for (std::int64_t i = 0; i < count; ++i)
      call_.widen_x((rows_.begin + first + i) * depth_ + d, n, wide + i * n);
    std::fill(wide + count * n, wide + kTurned * n, 0.0f);
    const std::int64_t panel = first / panel_ * panel_;
    const std::int64_t stride = std::min(panel_, padded(rows_.count) - panel);
    float* const out = at(panel, d, n) + (first - panel);
    call_.kernels->transpose({wide, n, kTurned, n, out, stride});
  }

  const LinearCall& call_;
  const Rows rows_;
  const std::int64_t depth_, panel_;
  const Scratch scratch_;
};

class Linear {
 public:
  explicit Linear(const LinearCall& call)
      : call_(call),
        widened_(call.kernels->part_columns),
        parts_(parts_of(call.weight->rows(), call.kernels->part_rows, call.executor->threads())) {}

  void run() const {
    for_each_rows(call_, call_.weight->columns(), kMostShared, [&](Rows rows) {
      const TurnedRows x(call_, rows);
      const std::int64_t products = rows.count * call_.weight->rows() * call_.weight->columns();
      for_each_part(call_, parts_.number(), products, [&](std::int64_t i) { part(i, rows, x); });
    });
  }

 private:
  void part(std::int64_t i, Rows rows, const TurnedRows& x) const {
    const LinearWeight& weight = *call_.weight;
    const std::int64_t row = i * parts_.each, depth = weight.columns();
    const std::int64_t count = std::min(parts_.each, weight.rows() - row);
    const std::int64_t stride = padded(rows.count) + kBetween;      // of sums
    const std::int64_t wide = parts_.each * (widened_ + kBetween);  // of w, and what is turned last
    const Scratch scratch(static_cast<std::size_t>(wide + parts_.each * stride) * sizeof(float));
    float *const w = scratch.floats(), *const sums = w + wide;
    std::int64_t begin = 0;
    do {  // once even where the sum is empty: y is then the bias
      const std::int64_t length = std::min(widened_, depth - begin), line = length + kBetween;
      weight.widen_rows(row, count, begin, length, w, line);
      for (std::int64_t d = 0; d == 0 || d < length; d += kDepth) {
        const std::int64_t n = std::min(kDepth, length - d);
        x.for_each_panel(begin + d, n, [&](std::int64_t first, std::int64_t columns, float* panel) {
          call_.kernels->tile({w + d, line, count, panel, columns, columns, n, sums + first, stride,
                               begin + d != 0});
        });
      }
      begin += length;
    } while (begin < depth);
    const std::int64_t line = parts_.each;
    for (std::int64_t j = 0; j < rows.count; j += kTurned) {
      const std::int64_t some = std::min(kTurned, rows.count - j);
      call_.kernels->transpose({sums + j, stride, count, kTurned, w, line});
      call_.finish(w, line, rows.begin + j, some, row, count, weight.rows());
    }
  }

  const LinearCall& call_;
  const std::int64_t widened_;
  const Parts parts_;
};

// --- the gradient --------------------------------------------------------------------------------

class Gradient {
 public:
  explicit Gradient(const LinearCall& call)
      : call_(call),
        parts_(parts_of(call.weight->columns(), kPartColumns, call.executor->threads())) {}

  void run() const {
    const std::int64_t depth = call_.weight->rows();
    for_each_rows(call_, depth, kMostSharedGradient, [&](Rows rows) {
      const std::int64_t stride = depth + kBetween;
      const Scratch wide(static_cast<std::size_t>(rows.count * stride) * sizeof(float));
      float* const g = wide.floats();
      for_each_part(call_, rows.count, rows.count * depth * kMoves, [&](std::int64_t i) {
        call_.widen_x((rows.begin + i) * depth, depth, g + i * stride);
      });
      const std::int64_t products = rows.count * depth * call_.weight->columns();
      for_each_part(call_, parts_.number(), products, [&](std::int64_t i) { part(i, rows, g); });
    });
  }

 private:
  void part(std::int64_t i, Rows rows, const float* g) const {
    const LinearWeight& weight = *call_.weight;
    const std::int64_t column = i * parts_.each, depth = weight.rows();
    const std::int64_t count = std::min(parts_.each, weight.columns() - column);
    const std::int64_t line = parts_.each + kBetween;
    const Scratch scratch(static_cast<std::size_t>((kGradientDepth + rows.count) * line) *
                          sizeof(float));
    float *const w = scratch.floats(), *const sums = w + kGradientDepth * line;
    std::int64_t d = 0;
    do {
      const std::int64_t n = std::min(kGradientDepth, depth - d);
      for (std::int64_t p = 0; p < n; ++p) {
        weight.widen(d + p, column, count, w + p * line);
        std::fill(w + p * line + count, w + p * line + padded(count), 0.0f);
      }
      for (std::int64_t j = 0; j < rows.count; j += kTileRows)
        call_.kernels->tile({g + j * (depth + kBetween) + d, depth + kBetween,
                             std::min(kTileRows, rows.count - j), w, line, padded(count), n,
                             sums + j * line, line, d != 0});
      d += n;
    } while (d < depth);
    call_.finish(sums, line, rows.begin, rows.count, column, count, weight.columns());
  }

  const LinearCall& call_;
  const Parts parts_;
};

}  // namespace

void linear_tiles(const LinearCall& call) { Linear(call).run(); }

void linear_grad_tiles(const LinearCall& call) { Gradient(call).run(); }

}  // namespace stowage
