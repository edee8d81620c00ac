// SPDX-License-Identifier: Apache-2.0
// The rows path: few rows of x, so that reading and decoding the weight costs most. Codes are
// multiplied as they are decoded, where a kernel reads them; else a few rows of weight at a time
// are widened into the L1 cache.
#include "kernel/linear_paths.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kMostRows = 16;    // of x
constexpr std::int64_t kStackX = 8192;    // floats; larger widened x comes from the pool
constexpr std::int64_t kMostX = 1 << 18;  // and larger than this (1 MiB) goes to the tiles path
constexpr std::int64_t kBatch = 64;       // rows of weight whose results are rounded together
constexpr std::int64_t kCachedX = 8192;   // floats of x that stay in the L1 cache
constexpr std::int64_t kWidened = 4096;   // floats of widened weight, likewise
constexpr std::int64_t kColumns = 1024;   // of these, in one row

// Products below which waking a thread costs more than it brings.
constexpr std::int64_t kParallelProducts = 1 << 18;

/// How x is cut along its columns. Each stretch of `step` columns of all rows lies together, so
/// that the four rows that kernels take at a time fit the L1 cache, whatever the size of a row.
struct Stretches {
  std::int64_t m, columns, step;

  Stretches(std::int64_t m_, std::int64_t k) noexcept
      : m(m_),
        columns(k),
        step(m == 1 ? padded(k)
                    : std::min(padded(k), kCachedX / std::min<std::int64_t>(m, 4) / kLinearPad *
                                              kLinearPad)) {}
  std::int64_t floats() const noexcept {
    return step == 0 ? 0 : m * step * ceil_div(columns, step);
  }
};

/// A call with x widened: [stretch, m, step], zeros after the last column.
class RowsCall {
 public:
  RowsCall(const LinearCall& call, const Stretches& stretches, float* x) noexcept
      : call_(call), weight_(*call.weight), k_(stretches.columns), step_(stretches.step), x_(x) {
    const ExactFloats exact;
    std::fill_n(x, stretches.floats(), 0.0f);
    for (std::int64_t c = 0; c < k_; c += step_)
      for (std::int64_t j = 0; j < call.m; ++j)
        call.widen_x(j * k_ + c, std::min(step_, k_ - c), x + c * call.m + j * step_);
    if (weight_.has_dot() && weight_.arranged()) call.kernels->arrange(x, stretches.floats());
  }

  void run() const {
    const std::int64_t n = weight_.rows(), threads = call_.executor->threads();
    const std::int64_t products = n * k_ * std::max<std::int64_t>(1, call_.m / 4);
    if (threads == 1 || products < kParallelProducts) return rows(0, n);
    // Several parts for each thread, since threads start and run unevenly.
    const std::int64_t part = ceil_div(ceil_div(n, threads * 4), kBatch) * kBatch;
    call_.executor->for_each(ceil_div(n, part),
                             [&](std::int64_t i) { rows(i * part, std::min(n, (i + 1) * part)); });
  }

 private:
  void rows(std::int64_t begin, std::int64_t end) const noexcept {
    const ExactFloats exact;
    for (; begin < end; begin += kBatch) batch(begin, std::min(kBatch, end - begin));
  }

  void batch(std::int64_t row, std::int64_t count) const noexcept {
    alignas(64) float sums[kMostRows * kBatch];
    std::fill_n(sums, call_.m * kBatch, 0.0f);
    for (std::int64_t c = 0; c < k_; c += step_) {
      const LinearWeight::Vectors vectors{x_ + c * call_.m, step_, call_.m, sums, kBatch};
      const std::int64_t n = std::min(step_, k_ - c);
      if (weight_.has_dot())
        weight_.dot(row, count, c, n, vectors);
      else
        add_widened(row, count, c, n, vectors);
    }
    call_.finish(sums, kBatch, 0, call_.m, row, count, weight_.rows());
  }

  void add_widened(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                   const LinearWeight::Vectors& to) const noexcept {
    const std::int64_t width = std::min(padded(n), kColumns), step = kWidened / width;
    alignas(64) float w[kWidened];
    for (std::int64_t i = 0; i < count; i += step) {
      const std::int64_t some = std::min(step, count - i);
      for (std::int64_t c = 0; c < n; c += kColumns) {
        const std::int64_t now = std::min(kColumns, n - c), now16 = padded(now);
        weight_.widen_rows(row + i, some, k + c, now, w, now16);
        call_.kernels->dots(
            {w, now16, some, to.x + c, to.x_stride, to.m, now16, to.y + i, to.y_stride});
      }
    }
  }

  const LinearCall& call_;
  const LinearWeight& weight_;
  std::int64_t k_, step_;
  const float* x_;
};

}  // namespace

bool fits_rows(const LinearCall& call) noexcept {
  return call.m <= kMostRows && padded(call.weight->columns()) <= kMostX / call.m;
}

void linear_rows(const LinearCall& call) {
  const Stretches stretches(call.m, call.weight->columns());
  if (stretches.floats() <= kStackX) {
    alignas(64) float x[kStackX];
    return RowsCall(call, stretches, x).run();
  }
  const Scratch scratch(static_cast<std::size_t>(stretches.floats()) * sizeof(float));
  RowsCall(call, stretches, scratch.floats()).run();
}

}  // namespace stowage
