// SPDX-License-Identifier: Apache-2.0
// linear in one fixed order of fp32 operations, none of them fused. It is compiled once, for the
// baseline, and reads weights through dequantize, whose bytes are the same on every instruction
// set; so are these. The order, for each element of y:
//
//   p[j] = 0;  for k = 0, 1, ..., K - 1:  p[k mod 16] = fl(p[k mod 16] + fl(x[k] * w[k]))
//   for s = 8, 4, 2, 1:  for j < s:  p[j] = fl(p[j] + p[j + s])
//   y = fl(p[0] + bias), or p[0] without one
#include <array>
#include <string>

#include "kernel/check_read.h"
#include "kernel/linear_drivers.h"
#include "kernel/linear_paths.h"

namespace stowage {
namespace {

constexpr std::int64_t kSums = 16;
constexpr std::int64_t kColumns = 2048;  // of a row, widened at a time; a multiple of kSums
constexpr std::int64_t kRowsOfX = 16;    // multiplied with a row while it is in cache
using Sums = std::array<float, kSums>;

void add_products(const float* x, const float* w, std::int64_t n, Sums& sums) noexcept {
  std::int64_t k = 0;
  for (; k + kSums <= n; k += kSums)
    for (std::int64_t j = 0; j < kSums; ++j)
      sums[static_cast<std::size_t>(j)] += x[k + j] * w[k + j];
  for (std::int64_t j = 0; k < n; ++j, ++k) sums[static_cast<std::size_t>(j)] += x[k] * w[k];
}

float total(Sums sums) noexcept {
  for (std::size_t s = kSums / 2; s > 0; s /= 2)
    for (std::size_t j = 0; j < s; ++j) sums[j] += sums[j + s];
  return sums[0];
}

/// y[i, row] for rows i of x in [begin, end), at most kRowsOfX.
void fixed_dots(const LinearWeight& weight, const float* x, std::int64_t begin, std::int64_t end,
                std::int64_t row, const float* bias, float* y) noexcept {
  std::array<float, kColumns> w;
  std::array<Sums, kRowsOfX> sums{};
  const std::int64_t columns = weight.columns();
  for (std::int64_t k = 0; k < columns; k += kColumns) {
    const std::int64_t n = std::min(kColumns, columns - k);
    weight.widen(row, k, n, w.data());
    for (std::int64_t i = begin; i < end; ++i)
      add_products(x + i * columns + k, w.data(), n, sums[static_cast<std::size_t>(i - begin)]);
  }
  for (std::int64_t i = begin; i < end; ++i) {
    const float sum = total(sums[static_cast<std::size_t>(i - begin)]);
    y[i * weight.rows() + row] = bias == nullptr ? sum : sum + bias[row];
  }
}

}  // namespace

void linear_fixed_with(const Kernels& kernels, const float* x, std::int64_t m, const Weight& weight,
                       const float* bias, float* y, Executor& executor) {
  const LinearWeight rows(kernels, weight, "linear_fixed");
  if (m < 0)
    throw Error(Code::invalid_argument,
                "linear_fixed: rows of x must not be negative, got " + std::to_string(m));
  const std::int64_t elements =
      std::max<std::int64_t>(1, rows.columns() * std::max<std::int64_t>(1, m));
  const std::int64_t chunk = ceil_div(kChunkElements, elements);
  for_each_chunk(executor, rows.rows(), chunk, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t i = 0; i < m; i += kRowsOfX)
        fixed_dots(rows, x, i, std::min(m, i + kRowsOfX), row, bias, y);
  });
}

inline namespace v0 {

void linear_fixed(const float* x, std::int64_t m, const Weight& weight, const float* bias, float* y,
                  Executor* executor) {
  linear_fixed_with(kernels(), x, m, weight, bias, y, or_default(executor));
  check_read(weight);
}

}  // namespace v0
}  // namespace stowage
