// SPDX-License-Identifier: Apache-2.0
// The linear family, once for each instruction set: the product of two widened tiles, with sums
// held in registers; values to fp32 and back; and the table of all.
#pragma once
#include "kernel/cpu/linear_dot-inl.h"

namespace stowage {
namespace {

// A sum is made of partial sums over so many terms: the rounding error grows with the length of
// chains, not with that of the sum.
constexpr std::int64_t kPartial = 128;

/// c = or += the products of kRows rows of a and kVectors vectors of columns of b, over `depth`
/// terms.
template <int kRows, int kVectors>
[[gnu::always_inline]] inline void tile_partial(const TileTask& task, const float* a,
                                                const float* b, std::int64_t depth, float* c,
                                                bool add) {
  F sums[kRows][kVectors] = {};
  for (std::int64_t p = 0; p < depth; ++p, b += task.b_stride) {
    F columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = Lanes::load_f32(b + v * kWidth);
    for (int r = 0; r < kRows; ++r) {
      const F x = splat(a[r * task.a_stride + p]);
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = Lanes::multiply_add(x, columns[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r, c += task.c_stride) {
    for (int v = 0; v < kVectors; ++v) {
      F result = sums[r][v];
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

/// `some` rows, of at most kRows.
template <int kRows, int kVectors>
void tile_some(std::int64_t some, const TileTask& task, std::int64_t row, std::int64_t column) {
  if constexpr (kRows > 1)
    if (some < kRows) return tile_some<kRows - 1, kVectors>(some, task, row, column);
  tile_block<kRows, kVectors>(task, row, column);
}

/// All rows, in blocks as alike as can be: small ones wait for their own sums.
template <int kVectors>
void tile_rows(const TileTask& task, std::int64_t column) {
  std::int64_t left = (task.rows + Lanes::kTileRows - 1) / Lanes::kTileRows;
  for (std::int64_t row = 0; row < task.rows; --left) {
    const std::int64_t some = (task.rows - row + left - 1) / left;
    tile_some<Lanes::kTileRows, kVectors>(some, task, row, column);
    row += some;
  }
}

constexpr std::int64_t kPanel = Lanes::kTileVectors * kWidth;

void tile(const TileTask& task) noexcept {
  std::int64_t column = 0;
  for (; column + kPanel <= task.columns; column += kPanel)
    tile_rows<Lanes::kTileVectors>(task, column);
  if constexpr (kPanel > kLinearPad) {
    for (; column < task.columns; column += kLinearPad)
      tile_rows<kLinearPad / kWidth>(task, column);
  }
}

template <Dtype kIn>
F load_value(const void* x) {
  if constexpr (kIn == Dtype::bf16) return Lanes::load_bf16(x);
  if constexpr (kIn == Dtype::f16) return Lanes::load_f16(x);
  if constexpr (kIn == Dtype::f32) return Lanes::load_f32(x);
}

template <Dtype kIn>
void widen(const void* x, std::int64_t n, float* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    Lanes::store_f32(out + i, load_value<kIn>(from + i * bytes_of(kIn)));
  if (i == n) return;
  char padded[kWidth * bytes_of(kIn)] = {};
  __builtin_memcpy(padded, from + i * bytes_of(kIn),
                   static_cast<std::size_t>((n - i) * bytes_of(kIn)));
  const F values = load_value<kIn>(padded);
  __builtin_memcpy(out + i, &values, static_cast<std::size_t>(n - i) * sizeof(float));
}

template <Dtype kOut>
void narrow_vector(const float* y, const char* bias, char* out) {
  F value = Lanes::load_f32(y);
  if (bias != nullptr) value += load_value<kOut>(bias);
  store<kOut>(out, value);
}

/// Fewer than a vector: through copies, so that nothing outside the row is read or written.
template <Dtype kOut>
void narrow_tail(const float* y, const char* bias, std::int64_t n, char* out) {
  const auto bytes = static_cast<std::size_t>(n * bytes_of(kOut));
  float values[kWidth] = {};
  char biases[kWidth * bytes_of(kOut)] = {}, rounded[kWidth * bytes_of(kOut)];
  __builtin_memcpy(values, y, static_cast<std::size_t>(n) * sizeof(float));
  if (bias != nullptr) __builtin_memcpy(biases, bias, bytes);
  narrow_vector<kOut>(values, bias == nullptr ? nullptr : biases, rounded);
  __builtin_memcpy(out, rounded, bytes);
}

template <Dtype kOut>
void narrow(const NarrowTask& task) noexcept {
  const auto* bias = static_cast<const char*>(task.bias);
  const auto bias_at = [&](std::int64_t j) {
    return bias == nullptr ? nullptr : bias + j * bytes_of(kOut);
  };
  for (std::int64_t i = 0; i < task.rows; ++i) {
    const float* y = task.y + i * task.y_stride;
    char* out = static_cast<char*>(task.out) + i * task.out_stride * bytes_of(kOut);
    std::int64_t j = 0;
    for (; j + kWidth <= task.columns; j += kWidth)
      narrow_vector<kOut>(y + j, bias_at(j), out + j * bytes_of(kOut));
    if (j < task.columns)
      narrow_tail<kOut>(y + j, bias_at(j), task.columns - j, out + j * bytes_of(kOut));
  }
}

typedef float F4 __attribute__((vector_size(16)));

/// Four rows of four columns.
inline void transpose_block(const float* in, std::int64_t in_stride, float* out,
                            std::int64_t out_stride) {
  const F4 a = load_as<F4>(in), b = load_as<F4>(in + in_stride);
  const F4 c = load_as<F4>(in + 2 * in_stride), d = load_as<F4>(in + 3 * in_stride);
  const F4 ac01 = __builtin_shufflevector(a, c, 0, 4, 1, 5);  // a0 c0 a1 c1
  const F4 ac23 = __builtin_shufflevector(a, c, 2, 6, 3, 7);
  const F4 bd01 = __builtin_shufflevector(b, d, 0, 4, 1, 5);
  const F4 bd23 = __builtin_shufflevector(b, d, 2, 6, 3, 7);
  store_as(out, __builtin_shufflevector(ac01, bd01, 0, 4, 1, 5));  // a0 b0 c0 d0
  store_as(out + out_stride, __builtin_shufflevector(ac01, bd01, 2, 6, 3, 7));
  store_as(out + 2 * out_stride, __builtin_shufflevector(ac23, bd23, 0, 4, 1, 5));
  store_as(out + 3 * out_stride, __builtin_shufflevector(ac23, bd23, 2, 6, 3, 7));
}

void transpose(const TransposeTask& task) noexcept {
  const std::int64_t rows = task.rows - task.rows % 4, columns = task.columns - task.columns % 4;
  for (std::int64_t r = 0; r < rows; r += 4)
    for (std::int64_t c = 0; c < columns; c += 4)
      transpose_block(task.in + r * task.in_stride + c, task.in_stride,
                      task.out + c * task.out_stride + r, task.out_stride);
  for (std::int64_t r = 0; r < task.rows; ++r)
    for (std::int64_t c = r < rows ? columns : 0; c < task.columns; ++c)
      task.out[c * task.out_stride + r] = task.in[r * task.in_stride + c];
}

constexpr LinearKernels linear_kernels() {
  LinearKernels kernels{{nullptr, &widen<Dtype::f32>, &widen<Dtype::bf16>, &widen<Dtype::f16>},
                        {nullptr, &narrow<Dtype::f32>, &narrow<Dtype::bf16>, &narrow<Dtype::f16>},
                        &Lanes::arrange,
                        {},
                        {},
                        &dots,
                        kWidth == 16  ? kMostRows
                        : kWidth == 8 ? 12
                                      : 16,
                        &tile,
                        kPanel,
                        kWidth == 16 ? 192 : 48,
                        kWidth == 16 ? 512 : 1024,
                        &transpose,
                        {},
                        {},
                        {}};
  for_all_codes([&]<Codes kCodes>() { kernels.dot[static_cast<int>(kCodes)] = &dot<kCodes>; });
  kernels.dot_rounded[2] = &dot<Codes::nf4, Dtype::bf16>;
  kernels.dot_rounded[3] = &dot<Codes::nf4, Dtype::f16>;
  return kernels;
}

}  // namespace
}  // namespace stowage
