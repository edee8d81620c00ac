// SPDX-License-Identifier: Apache-2.0
// Dot products: resting rows with one vector (decode and multiply in registers), and widened rows
// with a few vectors.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

constexpr std::int64_t kCommonBlock = 64;  // of most 4-bit weights

/// Sums of one row of weight with kM rows of x, in two chains each (four, if alone), since a
/// multiply-add waits for the one before it.
template <int kM>
struct Sums {
  static constexpr int kChains = kM == 1 ? 4 : 2;
  F of[kM][kChains] = {};

  void add(F w, int v, const float* x, std::int64_t x_stride) {
    for (int j = 0; j < kM; ++j)
      of[j][v % kChains] = multiply_add(w, Lanes::load_f32(x + j * x_stride), of[j][v % kChains]);
  }
  void add_to(float* y, std::int64_t y_stride) const {
    F joined[4] = {};
    for (int j = 0; j < kM; ++j) {
      joined[j] = of[j][0] + of[j][1];
      if constexpr (kChains == 4) joined[j] += of[j][2] + of[j][3];
    }
    float sums[4];
    sum4(joined, sums);
    for (int j = 0; j < kM; ++j) y[j * y_stride] += sums[j];
  }
};

template <Codes kCodes>
constexpr std::int64_t bytes_for(std::int64_t elements) {
  return elements * bits_of(kCodes) / 8;
}

/// The last elements of a row, fewer than a vector: through a copy, so that nothing beyond the row
/// is read. x has zeros there.
template <Codes kCodes>
F read_tail(Reader<kCodes>& reader, const std::uint8_t* codes, std::int64_t n) {
  std::uint8_t padded[bytes_for<kCodes>(kWidth)] = {};
  __builtin_memcpy(padded, codes, static_cast<std::size_t>(bytes_for<kCodes>(n)));
  return reader.read(padded);
}

/// sums += n codes times x. Inlined so that sums stay in registers.
template <Codes kCodes, int kM>
[[gnu::always_inline]] inline void add_products(Reader<kCodes>& reader, const DotTask& task,
                                                const std::uint8_t* codes, const float* x,
                                                std::int64_t n, Sums<kM>& sums) {
  constexpr std::int64_t kStep = 4 * kWidth;
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    const std::uint8_t* from = codes + bytes_for<kCodes>(i);
    for (std::int64_t b = 0; b < bytes_for<kCodes>(kStep); b += 64)
      __builtin_prefetch(from + task.ahead + b);
    F w[4];
    reader.read4(from, w);
    for (int v = 0; v < 4; ++v) sums.add(w[v], v, x + i + v * kWidth, task.x_stride);
  }
  for (; i + kWidth <= n; i += kWidth)
    sums.add(reader.read(codes + bytes_for<kCodes>(i)), 0, x + i, task.x_stride);
  if (i < n)
    sums.add(read_tail<kCodes>(reader, codes + bytes_for<kCodes>(i), n - i), 0, x + i,
             task.x_stride);
}

/// The same for elements that share a scale.
template <Codes kCodes, int kM>
[[gnu::always_inline]] inline void add_group(Reader<kCodes>& reader, const DotTask& task,
                                             const std::uint8_t* codes, const float* x,
                                             std::int64_t n, float scale, Sums<kM>& sums) {
  if constexpr (Reader<kCodes>::kScalesSum) {
    Sums<kM> group;
    add_products(reader, task, codes, x, n, group);
    for (int j = 0; j < kM; ++j)
      for (int c = 0; c < Sums<kM>::kChains; ++c)
        sums.of[j][c] = multiply_add(reader.value(group.of[j][c]), splat(scale), sums.of[j][c]);
  } else {
    reader.set_scale(scale);
    add_products(reader, task, codes, x, n, sums);
  }
}

/// One row of weight, from element `first`, with kM rows of x.
template <Codes kCodes, int kM>
void dot_row(const DotTask& task, std::int64_t first, const float* x, float* y) {
  const auto* codes = static_cast<const std::uint8_t*>(task.run.codes) + bytes_for<kCodes>(first);
  const float one = 1.0f;
  const float* scale = &one;
  std::int64_t left = task.columns;  // of the group
  if (task.run.scales != nullptr) {
    scale = task.run.scales + first / task.run.group;
    left = task.run.group - first % task.run.group;
  }
  Reader<kCodes> reader(task.values);
  Sums<kM> sums;
  for (std::int64_t k = 0; k < task.columns; ++scale) {
    // The common block, with its length known to the compiler.
    for (; left == kCommonBlock && k + kCommonBlock <= task.columns; k += kCommonBlock, ++scale) {
      add_group(reader, task, codes + bytes_for<kCodes>(k), x + k, kCommonBlock, *scale, sums);
      left = task.run.group;
    }
    if (k == task.columns) break;
    const std::int64_t n = left < task.columns - k ? left : task.columns - k;
    add_group(reader, task, codes + bytes_for<kCodes>(k), x + k, n, *scale, sums);
    k += n;
    left = task.run.group;
  }
  sums.add_to(y, task.y_stride);
}

template <Codes kCodes, int kM>
void dot_rows(const DotTask& task, std::int64_t j) {
  for (std::int64_t i = 0; i < task.rows; ++i)
    dot_row<kCodes, kM>(task, task.run.first + i * task.row_stride, task.x + j * task.x_stride,
                        task.y + j * task.y_stride + i);
}

/// Four rows of x at a time: they stay in the L1 cache, and codes are decoded again for the next
/// four, which costs less than keeping them would.
template <Codes kCodes>
void dot(const DotTask& task) noexcept {
  std::int64_t j = 0;
  for (; j + 4 <= task.m; j += 4) dot_rows<kCodes, 4>(task, j);
  if (j + 3 == task.m) dot_rows<kCodes, 3>(task, j);
  if (j + 2 == task.m) dot_rows<kCodes, 2>(task, j);
  if (j + 1 == task.m) dot_rows<kCodes, 1>(task, j);
}

/// kRows rows of w with kVectors rows of x. Each sum has chains as Sums does.
template <int kRows, int kVectors>
void dots_block(const DotsTask& task, std::int64_t row, std::int64_t vector) {
  constexpr int kChains = kVectors == 1 ? 4 : kVectors == 2 ? 2 : 1;
  const float* w = task.w + row * task.w_stride;
  const float* x = task.x + vector * task.x_stride;
  F sums[kChains][kRows][kVectors] = {};
  const auto add_products = [&](std::int64_t k, int chain) {
    F values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = Lanes::load_f32(x + v * task.x_stride + k);
    for (int r = 0; r < kRows; ++r) {
      const F weights = Lanes::load_f32(w + r * task.w_stride + k);
      for (int v = 0; v < kVectors; ++v)
        sums[chain][r][v] = multiply_add(weights, values[v], sums[chain][r][v]);
    }
  };
  std::int64_t k = 0;
  for (; k + kChains * kWidth <= task.columns; k += kChains * kWidth)
    for (int chain = 0; chain < kChains; ++chain) add_products(k + chain * kWidth, chain);
  for (; k < task.columns; k += kWidth) add_products(k, 0);
  for (int r = 0; r < kRows; ++r) {
    F of_row[4] = {};
    for (int v = 0; v < kVectors; ++v)
      for (int chain = 0; chain < kChains; ++chain) of_row[v] += sums[chain][r][v];
    float totals[4];
    sum4(of_row, totals);
    for (int v = 0; v < kVectors; ++v) task.y[(vector + v) * task.y_stride + row + r] += totals[v];
  }
}

template <int kVectors>
void dots_rows(const DotsTask& task, std::int64_t vector) {
  constexpr int kRows = kWidth == 16 ? 4 : 2;  // with 4 vectors: 16 sums, or 8
  std::int64_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) dots_block<kRows, kVectors>(task, row, vector);
  for (; row < task.rows; ++row) dots_block<1, kVectors>(task, row, vector);
}

void dots(const DotsTask& task) noexcept {
  std::int64_t vector = 0;
  for (; vector + 4 <= task.m; vector += 4) dots_rows<4>(task, vector);
  if (vector + 2 <= task.m) dots_rows<2>(task, vector), vector += 2;
  if (vector < task.m) dots_rows<1>(task, vector);
}

}  // namespace
}  // namespace stowage
