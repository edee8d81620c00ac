// SPDX-License-Identifier: Apache-2.0
// Dot products: resting rows with one vector (decode and multiply in registers), and widened rows
// with a few vectors.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

// Codes are asked for this far ahead; without it one core waits for memory half of the time.
constexpr std::int64_t kPrefetchBytes = 2048;
constexpr std::int64_t kCommonBlock = 64;  // of most 4-bit weights

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

/// sums += n codes times n values of x. Inlined so that sums stay in registers.
template <Codes kCodes>
[[gnu::always_inline]] inline void add_products(Reader<kCodes>& reader, const std::uint8_t* codes,
                                                const float* x, std::int64_t n, F (&sums)[4]) {
  constexpr std::int64_t kStep = 4 * kWidth;
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    const std::uint8_t* from = codes + bytes_for<kCodes>(i);
    for (std::int64_t b = 0; b < bytes_for<kCodes>(kStep); b += 64)
      __builtin_prefetch(from + kPrefetchBytes + b);
    F w[4];
    reader.read4(from, w);
    for (int v = 0; v < 4; ++v)
      sums[v] = multiply_add(w[v], Lanes::load_f32(x + i + v * kWidth), sums[v]);
  }
  for (; i + kWidth <= n; i += kWidth)
    sums[0] =
        multiply_add(reader.read(codes + bytes_for<kCodes>(i)), Lanes::load_f32(x + i), sums[0]);
  if (i < n)
    sums[0] = multiply_add(read_tail<kCodes>(reader, codes + bytes_for<kCodes>(i), n - i),
                           Lanes::load_f32(x + i), sums[0]);
}

/// The same for elements that share a scale.
template <Codes kCodes>
[[gnu::always_inline]] inline void add_group(Reader<kCodes>& reader, const std::uint8_t* codes,
                                             const float* x, std::int64_t n, float scale,
                                             F (&sums)[4]) {
  if constexpr (Reader<kCodes>::kScalesSum) {
    F group[4] = {};
    add_products(reader, codes, x, n, group);
    for (int v = 0; v < 4; ++v)
      sums[v] = multiply_add(reader.value(group[v]), splat(scale), sums[v]);
  } else {
    reader.set_scale(scale);
    add_products(reader, codes, x, n, sums);
  }
}

template <Codes kCodes>
float dot_row(const DotTask& task, std::int64_t first) {
  const auto* codes = static_cast<const std::uint8_t*>(task.run.codes) + bytes_for<kCodes>(first);
  const float one = 1.0f;
  const float* scale = &one;
  std::int64_t left = task.columns;
  if (task.run.scales != nullptr) {
    scale = task.run.scales + first / task.run.group;
    left = task.run.group - first % task.run.group;
  }
  Reader<kCodes> reader(task.values);
  F sums[4] = {};
  for (std::int64_t k = 0; k < task.columns; ++scale) {
    // The common block, with its length known to the compiler.
    for (; left == kCommonBlock && k + kCommonBlock <= task.columns; k += kCommonBlock, ++scale) {
      add_group(reader, codes + bytes_for<kCodes>(k), task.x + k, kCommonBlock, *scale, sums);
      left = task.run.group;
    }
    if (k == task.columns) break;
    const std::int64_t n = left < task.columns - k ? left : task.columns - k;
    add_group(reader, codes + bytes_for<kCodes>(k), task.x + k, n, *scale, sums);
    k += n;
    left = task.run.group;
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <Codes kCodes>
void dot(const DotTask& task) noexcept {
  float* y = task.y;
  for (std::int64_t done = 0; done < task.run.n; done += task.columns)
    *y++ = dot_row<kCodes>(task, task.run.first + done);
}

/// kRows rows of w with kVectors rows of x.
template <int kRows, int kVectors>
void dots_block(const DotsTask& task, std::int64_t row, std::int64_t vector) {
  const float* w = task.w + row * task.w_stride;
  const float* x = task.x + vector * task.x_stride;
  F sums[kRows][kVectors] = {};
  for (std::int64_t k = 0; k < task.columns; k += kWidth) {
    F values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = Lanes::load_f32(x + v * task.x_stride + k);
    for (int r = 0; r < kRows; ++r) {
      const F weights = Lanes::load_f32(w + r * task.w_stride + k);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(weights, values[v], sums[r][v]);
    }
  }
  for (int v = 0; v < kVectors; ++v)
    for (int r = 0; r < kRows; ++r)
      task.y[(vector + v) * task.y_stride + row + r] += sum(sums[r][v]);
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
