// SPDX-License-Identifier: Apache-2.0
// linear, its gradient and linear_fixed: checks, and the choice of a way. The smallest way and the
// fixed one are here too.
//
// linear_fixed computes in one fixed order of fp32 operations, none of them fused. It is compiled
// once, for the baseline, and reads weights through dequantize, whose bytes are the same on every
// instruction set; so are these. The order, for each element of y:
//
//   p[j] = 0;  for k = 0, 1, ..., K - 1:  p[k mod 16] = fl(p[k mod 16] + fl(x[k] * w[k]))
//   for s = 8, 4, 2, 1:  for j < s:  p[j] = fl(p[j] + p[j + s])
//   y = fl(p[0] + bias), or p[0] without one
#include <array>
#include <string>

#include "kernel/check_read.h"
#include "kernel/drivers.h"
#include "kernel/linear_weight.h"
#include "stowage/crossover.h"

namespace stowage {
namespace {

void check(const char* where, const void* x, std::int64_t depth, std::int64_t m, Dtype dtype,
           const void* y) {
  const std::string prefix(where);
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16)
    throw Error(Code::invalid_argument,
                prefix + ": dtype must be f32, bf16 or f16, got " + std::string(disk_name(dtype)));
  if (m < 0)
    throw Error(Code::invalid_argument,
                prefix + ": rows of x must not be negative, got " + std::to_string(m));
  if ((x == nullptr && depth != 0) || y == nullptr)
    throw Error(Code::invalid_argument, prefix + ": x and y must not be null");
}

constexpr std::int64_t kTinyFloats = 4096;  // of each buffer of linear_tiny

bool fits_tiny(const LinearCall& call) noexcept {
  const std::int64_t n = padded(call.weight->rows()), k = call.weight->columns();
  if (n > kTinyFloats || k > kTinyFloats || call.m > kTinyFloats) return false;
  if (call.m == 1 && call.weight->has_dot()) return false;  // quicker by dot products
  return n * k <= kTinyFloats && call.m * k <= kTinyFloats && call.m * n <= kTinyFloats;
}

// Weight and x are widened whole, on the stack, and multiplied as one tile.
void linear_tiny(const LinearCall& call) noexcept {
  const ExactFloats exact;
  const std::int64_t n = call.weight->rows(), k = call.weight->columns(), stride = padded(n);
  alignas(64) float x[kTinyFloats], w[kTinyFloats], columns[kTinyFloats];
  call.widen_x(0, call.m * k, x);
  call.weight->widen(0, 0, n * k, w);
  if (n != stride) std::fill_n(columns, k * stride, 0.0f);
  call.kernels->transpose({w, k, n, k, columns, stride});
  float* sums = w;  // which is not needed any more
  call.kernels->tile({x, k, call.m, columns, stride, stride, k, sums, stride, false});
  call.finish(sums, stride, 0, call.m, 0, n, n);
}

constexpr std::int64_t kFixedSums = 16;
constexpr std::int64_t kFixedColumns =
    2048;                                // of a row, widened at a time; a multiple of kFixedSums
constexpr std::int64_t kFixedRows = 16;  // multiplied with a row while it is in cache
using Sums = std::array<float, kFixedSums>;

void add_products(const float* x, const float* w, std::int64_t n, Sums& sums) noexcept {
  std::int64_t k = 0;
  for (; k + kFixedSums <= n; k += kFixedSums)
    for (std::int64_t j = 0; j < kFixedSums; ++j)
      sums[static_cast<std::size_t>(j)] += x[k + j] * w[k + j];
  for (std::int64_t j = 0; k < n; ++j, ++k) sums[static_cast<std::size_t>(j)] += x[k] * w[k];
}

float total(Sums sums) noexcept {
  for (std::size_t s = kFixedSums / 2; s > 0; s /= 2)
    for (std::size_t j = 0; j < s; ++j) sums[j] += sums[j + s];
  return sums[0];
}

/// y[i, row] for rows i of x in [begin, end), at most kFixedRows.
void fixed_dots(const LinearWeight& weight, const float* x, std::int64_t begin, std::int64_t end,
                std::int64_t row, const float* bias, float* y) noexcept {
  std::array<float, kFixedColumns> w;
  std::array<Sums, kFixedRows> sums{};
  const std::int64_t columns = weight.columns();
  for (std::int64_t k = 0; k < columns; k += kFixedColumns) {
    const std::int64_t n = std::min(kFixedColumns, columns - k);
    weight.widen(row, k, n, w.data());
    for (std::int64_t i = begin; i < end; ++i)
      add_products(x + i * columns + k, w.data(), n, sums[static_cast<std::size_t>(i - begin)]);
  }
  for (std::int64_t i = begin; i < end; ++i) {
    const float sum = total(sums[static_cast<std::size_t>(i - begin)]);
    y[i * weight.rows() + row] = bias == nullptr ? sum : sum + bias[row];
  }
}

bool goes_by_matrices(const Weight& weight) {
  return kernels().linear.matrices.multiply != nullptr &&
         LinearWeight(kernels(), weight, "linear").fits_pairs();
}

}  // namespace

void linear_with(const Kernels& kernels, const void* x, std::int64_t m, Dtype dtype,
                 const Weight& weight, const void* bias, void* y, Executor& executor) {
  const LinearWeight rows(kernels, weight, "linear");
  if (m == 0 || rows.rows() == 0) return;
  check("linear", x, rows.columns(), m, dtype, y);
  const LinearCall call{&kernels.linear, &rows, x, m, dtype, bias, y, &executor};
  if (fits_tiny(call)) return linear_tiny(call);
  if (fits_bytes(call) && linear_bytes(call)) return;
  if (fits_matrices(call) && linear_matrices(call)) return;
  if (fits_bf16(call) && linear_bf16(call)) return;
  if (fits_float8(call) && linear_float8(call)) return;
  if (fits_eights(call) && linear_eights(call)) return;
  if (fits_pairs(call) && linear_pairs(call)) return;
  if (fits_rows(call) && linear_rows(call)) return;
  linear_tiles(call);
}

void linear_grad_input_with(const Kernels& kernels, const void* g, std::int64_t m, Dtype dtype,
                            const Weight& weight, void* gx, Executor& executor) {
  const LinearWeight rows(kernels, weight, "linear_grad_input");
  if (m == 0 || rows.columns() == 0) return;
  check("linear_grad_input", g, rows.rows(), m, dtype, gx);
  const LinearCall call{&kernels.linear, &rows, g, m, dtype, nullptr, gx, &executor};
  fits_grad_matrices(call) ? linear_grad_matrices(call) : linear_grad_tiles(call);
}

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
      for (std::int64_t i = 0; i < m; i += kFixedRows)
        fixed_dots(rows, x, i, std::min(m, i + kFixedRows), row, bias, y);
  });
}

inline namespace v0 {

void linear(const void* x, std::int64_t m, Dtype dtype, const Weight& weight, const void* bias,
            void* y, Executor* executor) {
  linear_with(kernels(), x, m, dtype, weight, bias, y, or_default(executor));
  check_read(weight);
}

std::int64_t most_rows_in_bf16(const Weight& weight) {
  return goes_by_matrices(weight) ? stowage::crossover().own_matrices : 0;
}
std::int64_t most_gradient_rows_in_bf16(const Weight& weight) {
  return goes_by_matrices(weight) ? stowage::crossover().own_gradient : 0;
}

void linear_grad_input(const void* g, std::int64_t m, Dtype dtype, const Weight& weight, void* gx,
                       Executor* executor) {
  linear_grad_input_with(kernels(), g, m, dtype, weight, gx, or_default(executor));
  check_read(weight);
}

void linear_fixed(const float* x, std::int64_t m, const Weight& weight, const float* bias, float* y,
                  Executor* executor) {
  linear_fixed_with(kernels(), x, m, weight, bias, y, or_default(executor));
  check_read(weight);
}

}  // namespace v0
}  // namespace stowage
