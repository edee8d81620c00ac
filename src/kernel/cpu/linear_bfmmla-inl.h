// SPDX-License-Identifier: Apache-2.0
// Products of matrices of bf16 by BFMMLA: four numbers of two rows times those of two columns. Sums
// of eight rows and eight columns are held in registers; a stretch of eight columns, put in order
// once, stays in the L1 cache for all rows.
#pragma once
#include "kernel/cpu/neon-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

constexpr std::int64_t kStretch = 256;  // of the depth
constexpr int kRowsAtOnce = 8, kColumnsAtOnce = 8, kFour = 4;

inline bfloat16x8_t as_bf16(uint32x4_t pairs) { return vreinterpretq_bf16_u32(pairs); }

/// Eight columns of b over a stretch: for each four of the depth, those of two columns to a vector.
struct Columns {
  uint32x4_t of[kStretch / kFour][kColumnsAtOnce / 2];

  Columns(const std::uint16_t* b, std::int64_t depth) {
    constexpr std::int64_t kLine = 2 * kMatrixTile;  // numbers of two rows
    for (std::int64_t p = 0; p < depth; p += kFour, b += 2 * kLine)
      for (int half = 0; half < 2; ++half) {  // pairs of four columns
        const auto first = load_as<uint32x4_t>(b + 8 * half);
        const auto second = load_as<uint32x4_t>(b + kLine + 8 * half);
        of[p / kFour][2 * half] = vzip1q_u32(first, second);
        of[p / kFour][2 * half + 1] = vzip2q_u32(first, second);
      }
  }
};

/// Eight rows of a times these.
[[gnu::always_inline]] inline void add_block(const MatrixTask& task, const std::uint16_t* a,
                                             const Columns& b, std::int64_t depth, float* c,
                                             bool add) {
  float32x4_t sums[kRowsAtOnce / 2][kColumnsAtOnce / 2];  // two rows by two columns
  for (int r = 0; r < kRowsAtOnce / 2; ++r)
    for (int v = 0; v < kColumnsAtOnce / 2; ++v) {
      const float* from = c + 2 * r * task.c_stride + 2 * v;
      sums[r][v] =
          add ? vcombine_f32(vld1_f32(from), vld1_f32(from + task.c_stride)) : vdupq_n_f32(0.0f);
    }
  for (std::int64_t p = 0; p < depth; p += 2 * kFour) {
    bfloat16x8_t rows[kRowsAtOnce / 2][2];
    for (int r = 0; r < kRowsAtOnce / 2; ++r) {
      const std::uint16_t* from = a + 2 * r * task.a_stride + p;
      const auto even = load_as<uint64x2_t>(from), odd = load_as<uint64x2_t>(from + task.a_stride);
      rows[r][0] = vreinterpretq_bf16_u64(vzip1q_u64(even, odd));
      rows[r][1] = vreinterpretq_bf16_u64(vzip2q_u64(even, odd));
    }
    for (int four = 0; four < 2; ++four)
      for (int v = 0; v < kColumnsAtOnce / 2; ++v) {
        const bfloat16x8_t columns = as_bf16(b.of[p / kFour + four][v]);
        for (int r = 0; r < kRowsAtOnce / 2; ++r)
          sums[r][v] = vbfmmlaq_f32(sums[r][v], rows[r][four], columns);
      }
  }
  for (int r = 0; r < kRowsAtOnce / 2; ++r)
    for (int v = 0; v < kColumnsAtOnce / 2; ++v) {
      float* to = c + 2 * r * task.c_stride + 2 * v;
      vst1_f32(to, vget_low_f32(sums[r][v]));
      vst1_f32(to + task.c_stride, vget_high_f32(sums[r][v]));
    }
}

void multiply_matrices(const MatrixTask& task) noexcept {
  static_assert(kMatrixDepth % (2 * kFour) == 0 && kStretch % kMatrixDepth == 0);
  const std::int64_t stretches = (task.depth + kStretch - 1) / kStretch;
  const std::int64_t steps = stretches * (task.columns / kColumnsAtOnce);
  const std::int64_t lines = (task.next_bytes / 64 + steps - 1) / steps;
  const auto* next = static_cast<const char*>(task.next);
  for (std::int64_t p = 0; p < task.depth; p += kStretch) {
    const std::int64_t depth = task.depth - p < kStretch ? task.depth - p : kStretch;
    for (std::int64_t column = 0; column < task.columns; column += kColumnsAtOnce) {
      for (std::int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      const std::int64_t inside = column % kMatrixTile;
      const Columns columns(
          task.b + column / kMatrixTile * task.b_stride + p * kMatrixTile + 2 * inside, depth);
      for (std::int64_t row = 0; row < task.rows; row += kRowsAtOnce)
        add_block(task, task.a + row * task.a_stride + p, columns, depth,
                  task.c + row * task.c_stride + column, task.add || p != 0);
    }
  }
}

void begin_matrices(MatrixState*) noexcept {}
void end_matrices(const MatrixState*) noexcept {}

void pair_rows(const std::uint16_t* even, const std::uint16_t* odd, std::int64_t n,
               std::uint16_t* out, std::int64_t stride) noexcept {
  for (std::int64_t i = 0; i < n; i += kMatrixTile, out += stride)
    for (int half = 0; half < 2; ++half) {
      const auto low = load_as<uint16x8_t>(even + i + 8 * half);
      const auto high = load_as<uint16x8_t>(odd + i + 8 * half);
      store_as(out + 16 * half, vzip1q_u16(low, high));
      store_as(out + 16 * half + 8, vzip2q_u16(low, high));
    }
}

bool turn_sums(const TurnTask& task) noexcept {
  I bad{};
  for (std::int64_t i = 0; i < task.rows; i += kWidth) {
    const F scale = Lanes::load_f32(task.scales + i);
    const I scaled = scale != 1.0f;
    for (std::int64_t j = 0; j < kMatrixTile; j += kWidth) {
      const float* c = task.c + i * task.c_stride + j;
      float32x4_t rows[kWidth];
      for (int r = 0; r < kWidth; ++r) rows[r] = vld1q_f32(c + r * task.c_stride);
      const float32x4_t even[] = {vtrn1q_f32(rows[0], rows[1]), vtrn1q_f32(rows[2], rows[3])};
      const float32x4_t odd[] = {vtrn2q_f32(rows[0], rows[1]), vtrn2q_f32(rows[2], rows[3])};
      const auto join = [](const float32x4_t(&both)[2], bool last) {
        const float64x2_t a = vreinterpretq_f64_f32(both[0]), b = vreinterpretq_f64_f32(both[1]);
        return reinterpret_cast<F>(last ? vtrn2q_f64(a, b) : vtrn1q_f64(a, b));
      };
      const F columns[] = {join(even, false), join(odd, false), join(even, true), join(odd, true)};
      for (int t = 0; t < kWidth; ++t) {
        const F sums = columns[t] * scale;
        bad |= scaled & (magnitude(sums) >= static_cast<std::int32_t>(kInfinity));
        Lanes::store_f32(task.out + (j + t) * task.out_stride + i, sums);
      }
    }
  }
  return Lanes::largest(bad) == 0;
}

}  // namespace
}  // namespace stowage
