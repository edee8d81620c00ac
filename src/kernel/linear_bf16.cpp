// SPDX-License-Identifier: Apache-2.0
// The bf16 path: 4-bit weights and x in bf16, where an instruction set multiplies pairs of bf16
// numbers and adds them in fp32. Any number of rows of x: as many at a time as the L2 cache holds.
#include "kernel/linear_paths.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kStackX = 8192;            // bf16 numbers; larger x comes from the pool
constexpr std::int64_t kMostX = 1 << 18;          // so many at a time stay in the L2 cache
constexpr std::int64_t kMostRows = 60, kFew = 6;  // of x; no fewer than kernels take at a time
constexpr std::int64_t kBatch = 64;  // rows of weight whose results are rounded together

// Products below which waking a thread costs more than it brings.
constexpr std::int64_t kParallelProducts = 1 << 19;

// Numbers between rows of x: no power of two, which would put all rows into the same few sets of a
// cache.
std::int64_t stride_of(const LinearCall& call) noexcept {
  return ceil_div(call.weight->columns(), kBf16Pad) * kBf16Pad + (call.m == 1 ? 0 : 32);
}

void batch(const LinearCall& call, const LinearWeight::Bf16Vectors& x, std::int64_t first,
           std::int64_t row, std::int64_t count) noexcept {
  alignas(64) float sums[kMostRows * kBatch];
  std::fill_n(sums, x.m * kBatch, 0.0f);
  call.weight->dot_bf16(row, count, x, sums, kBatch);
  call.finish(sums, kBatch, first, x.m, row, count, call.weight->rows());
}

/// Rows [first, first + m) of x, arranged in memory.
void some_rows(const LinearCall& call, std::int64_t first, std::int64_t m,
               std::uint16_t* arranged) {
  const std::int64_t n = call.weight->rows(), k = call.weight->columns(), stride = stride_of(call);
  for (std::int64_t j = 0; j < m; ++j)
    call.kernels->bf16.arrange(call.x_at((first + j) * k), k, arranged + j * stride);
  const LinearWeight::Bf16Vectors x{arranged, stride, m};
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    const ExactFloats exact;
    for (; begin < end; begin += kBatch)
      batch(call, x, first, begin, std::min(kBatch, end - begin));
  };
  const std::int64_t threads = call.executor->threads();
  if (threads == 1 || n * k * std::max<std::int64_t>(1, m / 4) < kParallelProducts)
    return rows(0, n);
  // Several parts for each thread, since threads start and run unevenly.
  const std::int64_t part = ceil_div(ceil_div(n, threads * 4), kBatch) * kBatch;
  call.executor->for_each(ceil_div(n, part),
                          [&](std::int64_t i) { rows(i * part, std::min(n, (i + 1) * part)); });
}

}  // namespace

bool fits_bf16(const LinearCall& call) noexcept {
  return call.dtype == Dtype::bf16 && call.weight->has_dot_bf16();
}

void linear_bf16(const LinearCall& call) {
  const std::int64_t stride = stride_of(call);
  const std::int64_t most = std::clamp(kMostX / stride, kFew, kMostRows);
  const std::int64_t some = ceil_div(call.m, ceil_div(call.m, most));  // parts alike
  const auto each = [&](std::uint16_t* x) {
    for (std::int64_t j = 0; j < call.m; j += some)
      some_rows(call, j, std::min(some, call.m - j), x);
  };
  if (some * stride <= kStackX) {
    alignas(64) std::uint16_t x[kStackX];
    return each(x);
  }
  const Scratch scratch(static_cast<std::size_t>(some * stride) * sizeof(std::uint16_t));
  each(static_cast<std::uint16_t*>(scratch.memory()));
}

}  // namespace stowage
