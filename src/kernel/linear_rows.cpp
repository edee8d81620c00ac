// SPDX-License-Identifier: Apache-2.0
// Few rows of x: the tiny path and the rows path.
#include <array>
#include <optional>

#include "kernel/linear_paths.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kTinyFloats = 4096;  // of each buffer of the tiny path
constexpr std::int64_t kStackX = 8192;      // larger widened x comes from the pool
constexpr std::int64_t kMostX = 1 << 18;    // and larger than this (1 MiB) goes to the tiles path
constexpr std::int64_t kBatch = 64;         // rows of weight whose results are rounded together
constexpr std::int64_t kWidened = 4096;     // floats of widened weight that stay in the L1 cache
constexpr std::int64_t kColumns = 1024;     // of a row, widened at a time

// Products below which waking a thread costs more than it brings.
constexpr std::int64_t kParallelProducts = 1 << 18;

}  // namespace

bool fits_tiny(const LinearCall& call) noexcept {
  const std::int64_t n = padded(call.weight->rows()), k = call.weight->columns();
  if (n > kTinyFloats || k > kTinyFloats || call.m > kTinyFloats) return false;
  if (call.m == 1 && call.weight->has_dot()) return false;  // quicker by dot products
  return n * k <= kTinyFloats && call.m * k <= kTinyFloats && call.m * n <= kTinyFloats;
}

void linear_tiny(const LinearCall& call) noexcept {
  const ExactFloats exact;
  const std::int64_t n = call.weight->rows(), k = call.weight->columns(), n16 = padded(n);
  alignas(64) float x[kTinyFloats], w[kTinyFloats], columns[kTinyFloats];
  call.widen_x(0, call.m * k, x);
  call.weight->widen(0, 0, n * k, w);
  if (n != n16) std::fill_n(columns, k * n16, 0.0f);
  call.kernels->transpose({w, k, n, k, columns, n16});
  float* sums = w;  // which is not needed any more
  call.kernels->tile({x, k, call.m, columns, n16, n16, k, sums, n16, false});
  call.finish(sums, n16, 0, call.m, 0, n, n);
}

bool fits_rows(const LinearCall& call) noexcept {
  return call.m <= kMostVectors && padded(call.weight->columns()) <= kMostX / call.m;
}

namespace {

/// A call on the rows path: x widened, rows padded with zeros.
struct RowsCall {
  const LinearCall& call;
  const float* x;
  std::int64_t stride;

  // sums[j, i] = x[j] . w[row + i], at stride kBatch.
  void dots(std::int64_t row, std::int64_t count, float* sums) const noexcept {
    const std::int64_t k = call.weight->columns();
    const std::int64_t step =
        stride > kColumns ? kLinearRows
                          : std::max(kWidened / std::max(stride, kLinearPad) / 4 * 4, kLinearRows);
    alignas(64) float w[kWidened];
    for (std::int64_t i = 0; i < count; i += step) {
      const std::int64_t rows = std::min(step, count - i);
      for (std::int64_t c = 0; c < k; c += kColumns) {
        const std::int64_t n = std::min(kColumns, k - c);
        call.weight->widen_rows(row + i, rows, c, n, w, padded(n));
        call.kernels->dots(
            {w, padded(n), rows, x + c, stride, call.m, padded(n), sums + i, kBatch});
      }
    }
  }

  void batch(std::int64_t row, std::int64_t count) const noexcept {
    alignas(64) float sums[kMostVectors * kBatch];
    if (call.m == 1 && call.weight->has_dot()) {
      call.weight->dot(row, count, x, sums);
    } else {
      std::fill_n(sums, call.m * kBatch, 0.0f);
      dots(row, count, sums);
    }
    call.finish(sums, kBatch, 0, call.m, row, count, call.weight->rows());
  }

  void rows(std::int64_t begin, std::int64_t end) const noexcept {
    const ExactFloats exact;
    for (; begin < end; begin += kBatch) batch(begin, std::min(kBatch, end - begin));
  }

  static constexpr std::int64_t kLinearRows = 4;  // at least so many rows are widened at a time
};

void widen_x(const LinearCall& call, float* x, std::int64_t stride) noexcept {
  const std::int64_t k = call.weight->columns();
  for (std::int64_t j = 0; j < call.m; ++j) {
    call.widen_x(j * k, k, x + j * stride);
    std::fill(x + j * stride + k, x + (j + 1) * stride, 0.0f);
  }
  if (call.m == 1 && call.weight->has_dot() && call.weight->arranged())
    call.kernels->arrange(x, stride);
}

void run(const RowsCall& rows) {
  const LinearCall& call = rows.call;
  const std::int64_t n = call.weight->rows(), threads = call.executor->threads();
  const std::int64_t products = n * rows.stride * std::max<std::int64_t>(1, call.m / 4);
  if (threads == 1 || products < kParallelProducts) return rows.rows(0, n);
  // Several parts for each thread, since threads start and run unevenly.
  const std::int64_t part = ceil_div(ceil_div(n, threads * 4), kBatch) * kBatch;
  call.executor->for_each(
      ceil_div(n, part), [&](std::int64_t i) { rows.rows(i * part, std::min(n, (i + 1) * part)); });
}

}  // namespace

void linear_rows(const LinearCall& call) {
  const std::int64_t stride = padded(call.weight->columns()), floats = call.m * stride;
  if (floats <= kStackX) {
    alignas(64) float x[kStackX];
    widen_x(call, x, stride);
    return run({call, x, stride});
  }
  const Scratch scratch(static_cast<std::size_t>(floats) * sizeof(float));
  widen_x(call, scratch.floats(), stride);
  run({call, scratch.floats(), stride});
}

}  // namespace stowage
