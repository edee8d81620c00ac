// SPDX-License-Identifier: Apache-2.0
// Rows of x in bf16, and the gradient, where an instruction set multiplies matrices of such numbers
// (cpu/linear_amx-inl.h).
//
//   linear    y^T[n, m] = sum_k w[n, k] x^T[k, m]: x lies in pairs of k
//   gradient  gx[m, k] = sum_n g[m, n] w[n, k]: w lies in pairs of n
//
// x or g is put in order once, for some rows of it, and shared by all threads. Each of them widens
// its own stretch of weight to bf16, so much at a time as stays in a near cache with what it is
// multiplied with. An element is summed in the order of k, or n: how work is cut and who does it
// change nothing.
#include <algorithm>
#include <atomic>

#include "kernel/linear_weight.h"
#include "kernel/parts.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kMostByTiles = 8;  // rows of g, for which tiles of fp32 are as quick
constexpr std::int64_t kMostShared = 512, kFewestShared = 64;  // rows of x or g
constexpr std::int64_t kSharedNumbers = std::int64_t{4} << 20;
constexpr std::int64_t kBetween = 32;  // numbers between rows: no power of two, as in
                                       // linear_tiles.cpp

/// Rows of weight that a thread takes at a time, and the fewest where threads are many; columns of
/// it that are widened at a time, and those of them that are multiplied at a time.
struct Cut {
  std::int64_t rows, fewest, widened, depth;
};
// As long as x stays in the L2 cache, sums stay in tiles for a whole row; beyond, many rows of
// weight use a stretch of x while it is there.
Cut cut_of_linear(std::int64_t m, std::int64_t k) noexcept {
  constexpr std::int64_t kCached = std::int64_t{1} << 19;  // numbers
  return m * k <= kCached ? Cut{64, 16, 4096, 4096} : Cut{256, 64, 512, 256};
}
/// Columns of weight that a thread takes at a time, and rows of it.
struct GradientCut {
  std::int64_t columns, depth;
};
GradientCut cut_of_gradient(std::int64_t m) noexcept {
  return m <= 64 ? GradientCut{2048, 128} : GradientCut{1024, 256};
}

std::int64_t whole_depth(std::int64_t n) noexcept {
  return ceil_div(n, kMatrixDepth) * kMatrixDepth;
}

/// Rows of x or g of which each widened stretch of weight is multiplied with all.
std::int64_t most_shared(std::int64_t depth) noexcept {
  const std::int64_t fit = kSharedNumbers / std::max<std::int64_t>(depth, 1) / kTurned * kTurned;
  return std::clamp(fit, kFewestShared, kMostShared);
}

/// Parts of the weight, and, where these are fewer than threads, of the rows that share it: each
/// widens what it needs.
struct Grid {
  Parts lines, rows;

  Grid(const Parts& of_weight, std::int64_t m, std::int64_t threads)
      : lines(of_weight), rows{m, padded(m)} {
    if (lines.number() >= threads || lines.number() == 0) return;
    rows.each = std::max(padded(ceil_div(m, threads / lines.number())), kFewestShared);
  }
  std::int64_t number() const noexcept { return lines.number() * rows.number(); }
  /// Those of part i, of the rows that are shared.
  Rows rows_of(std::int64_t i) const noexcept {
    const std::int64_t begin = i / lines.number() * rows.each;
    return {begin, std::min(rows.each, rows.count - begin)};
  }
  std::int64_t line_of(std::int64_t i) const noexcept { return i % lines.number() * lines.each; }
};

/// MatrixKernels on a thread, for a scope.
class Multiplier {
 public:
  explicit Multiplier(const MatrixKernels& kernels) noexcept : kernels_(kernels) {
    kernels_.begin(&before_);
  }
  ~Multiplier() { kernels_.end(&before_); }
  Multiplier(const Multiplier&) = delete;
  Multiplier& operator=(const Multiplier&) = delete;
  void operator()(const MatrixTask& task) const noexcept { kernels_.multiply(task); }

 private:
  const MatrixKernels& kernels_;
  MatrixState before_;
};

/// Numbers of bf16, or sums, for a scope.
class Numbers {
 public:
  explicit Numbers(std::int64_t n)
      : scratch_(static_cast<std::size_t>(n) * sizeof(std::uint16_t)) {}
  std::uint16_t* at(std::int64_t i) const noexcept {
    return static_cast<std::uint16_t*>(scratch_.memory()) + i;
  }

 private:
  const Scratch scratch_;
};
class Sums {
 public:
  explicit Sums(std::int64_t n) : scratch_(static_cast<std::size_t>(n) * sizeof(float)) {}
  float* at(std::int64_t i) const noexcept { return scratch_.floats() + i; }

 private:
  const Scratch scratch_;
};

/// Columns [k, k + n) of row i of x, and zeros up to `length`.
void copy_row(const LinearCall& call, std::int64_t i, std::int64_t columns, std::int64_t k,
              std::int64_t n, std::uint16_t* out, std::int64_t length) noexcept {
  const auto* from = static_cast<const std::uint16_t*>(call.x_at(i * columns + k));
  std::fill(std::copy_n(from, n, out), out + length, std::uint16_t{0});
}

// --- linear --------------------------------------------------------------------------------------

/// Some rows of x, in pairs: for each stretch of columns that is multiplied at a time, [blocks of
/// rows, columns / 2, kMatrixTile, 2], zeros beyond both ends.
class PairedRows {
 public:
  PairedRows(const LinearCall& call, Rows rows, std::int64_t step)
      : call_(call),
        rows_(rows),
        step_(step),
        columns_(call.weight->columns()),
        depth_(whole_depth(columns_)),
        numbers_(padded(rows.count) * depth_) {
    const std::int64_t blocks = ceil_div(rows.count, kMatrixTile), steps = ceil_div(depth_, kStep);
    for_each_part(call, blocks * steps, rows.count * depth_ * kMoves,
                  [&](std::int64_t i) { turn(i / steps * kMatrixTile, i % steps * kStep); });
  }
  /// From column k on, which begins a stretch, and from a row that begins a block; and numbers from
  /// one block to the next.
  const std::uint16_t* at(std::int64_t row, std::int64_t k) const noexcept { return place(row, k); }
  std::int64_t stride(std::int64_t k) const noexcept {
    return std::min(step_, depth_ - k) * kMatrixTile;
  }

 private:
  static constexpr std::int64_t kStep = 256;  // of columns, of which stretches are multiples

  std::uint16_t* place(std::int64_t row, std::int64_t k) const noexcept {
    const std::int64_t begin = k / step_ * step_;
    return numbers_.at(begin * padded(rows_.count) + row / kMatrixTile * stride(begin) +
                       (k - begin) * kMatrixTile);
  }
  void turn(std::int64_t first, std::int64_t k) const noexcept {
    alignas(64) std::uint16_t rows[kMatrixTile * kStep];
    const std::int64_t count = std::min(kMatrixTile, rows_.count - first);
    const std::int64_t n = std::min(kStep, depth_ - k), some = std::min(n, columns_ - k);
    for (std::int64_t i = 0; i < count; ++i)
      copy_row(call_, rows_.begin + first + i, columns_, k, some, rows + i * n, n);
    std::fill(rows + count * n, rows + kMatrixTile * n, std::uint16_t{0});
    call_.kernels->transpose({reinterpret_cast<const float*>(rows), n / 2, kMatrixTile, n / 2,
                              reinterpret_cast<float*>(place(first, k)), kMatrixTile});
  }

  const LinearCall& call_;
  const Rows rows_;
  const std::int64_t step_, columns_, depth_;
  const Numbers numbers_;
};

class LinearByMatrices {
 public:
  explicit LinearByMatrices(const LinearCall& call)
      : call_(call),
        weight_(*call.weight),
        most_(most_shared(weight_.columns())),
        cut_(cut_of_linear(std::min(call.m, most_), weight_.columns())),
        parts_(parts_of(weight_.rows(), cut_.rows, call.executor->threads(), cut_.fewest, 1)) {}

  /// Whether all sums are finite that a scale multiplies.
  bool run() const {
    std::atomic<bool> held = true;
    for_each_rows(call_, 0, most_, [&](Rows rows) {
      const PairedRows x(call_, rows, cut_.depth);
      const Grid grid(parts_, rows.count, call_.executor->threads());
      const std::int64_t products = rows.count * weight_.rows() * weight_.columns();
      for_each_part(call_, grid.number(), products / kQuicker, [&](std::int64_t i) {
        const Rows some = grid.rows_of(i);
        if (!part(grid.line_of(i), some, rows.begin + some.begin, x)) held = false;
      });
    });
    return held;
  }

 private:
  static constexpr std::int64_t kQuicker = 8;  // than products of fp32

  /// Of rows of weight from `row` on and some of those that are shared, the first of which is
  /// `first` of y.
  bool part(std::int64_t row, Rows rows, std::int64_t first, const PairedRows& x) const {
    const std::int64_t depth = weight_.columns();
    const std::int64_t count = std::min(parts_.each, weight_.rows() - row), lines = padded(count);
    const std::int64_t w_line = std::min(cut_.widened, whole_depth(depth)) + kBetween;
    const std::int64_t columns = padded(rows.count), line = columns + kMatrixTile;
    const Numbers w(lines * w_line);
    const Sums sums(lines * line + lines);
    float* const scales = sums.at(lines * line);
    std::fill_n(scales, lines, 1.0f);
    {
      const Multiplier multiply(call_.kernels->matrices);
      for (std::int64_t k = 0; k < depth; k += cut_.widened) {
        const std::int64_t n = std::min(cut_.widened, depth - k), length = whole_depth(n);
        const std::int64_t ahead = k + n < depth ? n : depth - k;  // its next stretch, or row
        weight_.widen_matrix(row, count, k, n, w.at(0), w_line, length,
                             weight_.bytes_of_codes(ahead), scales);
        for (std::int64_t d = 0; d < length; d += cut_.depth) {
          const std::int64_t at = k + d, after = at + cut_.depth;
          const std::int64_t next = after < depth ? after : 0;  // the first, of the next part
          multiply({w.at(d), w_line, lines, x.at(rows.begin, at), x.stride(at), columns,
                    std::min(cut_.depth, length - d), sums.at(0), line, at != 0,
                    x.at(rows.begin, next),
                    next == at ? 0 : x.stride(next) * columns / kMatrixTile * 2});
        }
      }
    }
    if (depth == 0) std::fill_n(sums.at(0), lines * line, 0.0f);
    return finish(sums.at(0), line, scales, row, count, {first, rows.count});
  }

  bool finish(const float* sums, std::int64_t line, const float* scales, std::int64_t row,
              std::int64_t count, Rows rows) const {
    const std::int64_t turned_line = padded(count) + kMatrixTile;
    const Sums turned(kMatrixTile * turned_line);
    bool held = true;
    for (std::int64_t j = 0; j < rows.count; j += kMatrixTile) {
      const std::int64_t some = std::min(kMatrixTile, rows.count - j);
      held &= call_.kernels->matrices.turn(
          {sums + j, line, padded(count), scales, turned.at(0), turned_line});
      call_.finish(turned.at(0), turned_line, rows.begin + j, some, row, count, weight_.rows());
    }
    return held;
  }

  const LinearCall& call_;
  const LinearWeight& weight_;
  const std::int64_t most_;
  const Cut cut_;
  const Parts parts_;
};

// --- the gradient --------------------------------------------------------------------------------

/// Some rows of g: for each stretch of columns that is multiplied at a time, [rows, columns and
/// kBetween], zeros beyond both ends.
class StretchesOfRows {
 public:
  StretchesOfRows(const LinearCall& call, Rows rows, std::int64_t step)
      : step_(step),
        depth_(call.weight->rows()),
        lines_(padded(rows.count)),
        numbers_(lines_ * ceil_div(depth_, step) * (step + kBetween)) {
    for_each_part(call, lines_, rows.count * depth_ * kMoves, [&](std::int64_t i) {
      for (std::int64_t k = 0; k < depth_; k += step_) {
        const std::int64_t n = std::min(step_, depth_ - k);
        if (i < rows.count)
          copy_row(call, rows.begin + i, depth_, k, n, place(i, k), stride());
        else
          std::fill_n(place(i, k), stride(), std::uint16_t{0});
      }
    });
  }
  const std::uint16_t* at(std::int64_t row, std::int64_t k) const noexcept { return place(row, k); }
  std::int64_t stride() const noexcept { return step_ + kBetween; }

 private:
  std::uint16_t* place(std::int64_t row, std::int64_t k) const noexcept {
    return numbers_.at((k / step_ * lines_ + row) * stride());
  }

  const std::int64_t step_, depth_, lines_;
  const Numbers numbers_;
};

class GradientByMatrices {
 public:
  explicit GradientByMatrices(const LinearCall& call)
      : call_(call),
        weight_(*call.weight),
        most_(most_shared(weight_.rows())),
        cut_(cut_of_gradient(std::min(call.m, most_))),
        parts_(parts_of(weight_.columns(), cut_.columns, call.executor->threads(), kFewestColumns,
                        1)) {}

  void run() const {
    for_each_rows(call_, 0, most_, [&](Rows rows) {
      const StretchesOfRows g(call_, rows, cut_.depth);
      const Grid grid(parts_, rows.count, call_.executor->threads());
      const std::int64_t products = rows.count * weight_.rows() * weight_.columns();
      for_each_part(call_, grid.number(), products / kQuicker, [&](std::int64_t i) {
        const Rows some = grid.rows_of(i);
        part(grid.line_of(i), some, rows.begin + some.begin, g);
      });
    });
  }

 private:
  static constexpr std::int64_t kQuicker = 4;
  static constexpr std::int64_t kFewestColumns = 256;  // of which decoding is worth its calls

  /// As in LinearByMatrices, of columns of weight.
  void part(std::int64_t column, Rows rows, std::int64_t first, const StretchesOfRows& g) const {
    const std::int64_t depth = weight_.rows();
    const std::int64_t count = std::min(parts_.each, weight_.columns() - column);
    const std::int64_t columns = padded(count), lines = padded(rows.count);
    const std::int64_t line = columns + kMatrixTile;
    const Numbers w((cut_.depth + 2) * columns);
    const Sums sums(lines * line);
    {
      const Multiplier multiply(call_.kernels->matrices);
      for (std::int64_t d = 0; d < depth; d += cut_.depth) {
        const std::int64_t n = std::min(cut_.depth, depth - d), length = whole_depth(n);
        widen_in_pairs(d, n, column, count, w.at(0), w.at(cut_.depth * columns));
        const std::int64_t next = d + n < depth ? d + n : 0;
        multiply({g.at(rows.begin, d), g.stride(), lines, w.at(0), length * kMatrixTile, columns,
                  length, sums.at(0), line, d != 0, g.at(rows.begin, next),
                  next == d ? 0 : lines * g.stride() * 2});
      }
    }
    if (depth == 0) std::fill_n(sums.at(0), lines * line, 0.0f);
    call_.finish(sums.at(0), line, first, rows.count, column, count, weight_.columns());
  }

  /// Rows [row, row + n) of weight, a stretch of each, in pairs, and zeros beyond them. `two` has
  /// room for two.
  void widen_in_pairs(std::int64_t row, std::int64_t n, std::int64_t column, std::int64_t count,
                      std::uint16_t* out, std::uint16_t* two) const {
    const std::int64_t columns = padded(count), length = whole_depth(n);
    for (std::int64_t p = 0; p < length; p += 2) {
      for (std::int64_t r = 0; r < 2; ++r) {
        std::uint16_t* const to = two + r * columns;
        const std::int64_t there = p + r < n ? count : 0;
        if (there != 0) weight_.widen_bf16(row + p + r, column, count, to);
        std::fill(to + there, to + columns, std::uint16_t{0});
      }
      call_.kernels->matrices.pair(two, two + columns, columns, out + p * kMatrixTile,
                                   length * kMatrixTile);
    }
  }

  const LinearCall& call_;
  const LinearWeight& weight_;
  const std::int64_t most_;
  const GradientCut cut_;
  const Parts parts_;
};

bool has_matrices(const LinearCall& call) noexcept {
  return call.dtype == Dtype::bf16 && call.kernels->matrices.multiply != nullptr &&
         call.weight->fits_matrices();
}

}  // namespace

bool fits_matrices(const LinearCall& call) noexcept {
  return has_matrices(call) && call.m > call.kernels->matrices.most_by_vectors;
}
bool fits_grad_matrices(const LinearCall& call) noexcept {
  const std::int64_t by_others = call.kernels->matrices.most_by_vectors;
  return has_matrices(call) && call.m > std::min(by_others, kMostByTiles);
}

bool linear_matrices(const LinearCall& call) { return LinearByMatrices(call).run(); }

void linear_grad_matrices(const LinearCall& call) { GradientByMatrices(call).run(); }

}  // namespace stowage
