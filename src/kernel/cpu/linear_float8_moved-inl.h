// SPDX-License-Identifier: Apache-2.0
// Products of fp8 weights and a few rows of x in fp32, in vectors of AVX2, which looks up no bytes:
// the bits of a code move to where fp32 has them, and stand for 2^-120 times its value (2^-112 of
// e5m2), a subnormal one too:
//
//   e4m3, upper half of a word   s eeee mmm 00000000
//   >> 4, with bits 14 to 11 off s 0000eeee mmm0000       the upper half of a number of fp32
//
// x is multiplied by 2^90, so that no product is subnormal, and sums by what is left. A load has 32
// columns; words come of its halves of 16 bytes, and lanes of fp32 of every other word. x is
// arranged so, 32 by 32: even columns of the lower eights of each 16, odd ones, then those of the
// upper eights.
//
// One row of x takes four rows of weight at a time, a quarter of all of them apart: so many streams
// of codes come quicker than one (docs/benchmarks.md).
#pragma once
#include <type_traits>

#include "kernel/cpu/linear_bytes-inl.h"

namespace stowage {
namespace {

constexpr float kUp = 0x1p90f;  // in x
constexpr std::int64_t kMovedColumns = 32;

template <Codes kCodes>
constexpr float kBackUp = kCodes == Codes::f8_e4m3 ? 0x1p30f : 0x1p22f;  // what sums lack

/// Whether products with any code, and x times 2^90, are normal numbers: 2^-87 <= |x| < 2^37, or 0.
inline bool stay_normal(F x) {
  constexpr int kLeast = 127 - 87, kMost = 127 + 37;
  const I number = magnitude(x);
  const I outside = (number < (kLeast << 23)) | (number >= (kMost << 23));
  const auto wrong = reinterpret_cast<__m256i>(outside & (number != 0));
  return _mm256_testz_si256(wrong, wrong) != 0;
}

template <Dtype kIn>
F load_value(const char* from) {
  if constexpr (kIn == Dtype::f32) return Lanes::load_f32(from);
  if constexpr (kIn == Dtype::bf16) return Lanes::load_bf16(from);
  return Lanes::load_f16(from);
}

template <Dtype kIn>
bool arrange_moved(const void* x, std::int64_t n, std::uint8_t* out) noexcept {
  const auto* from = static_cast<const char*>(x);
  auto* to = reinterpret_cast<float*>(out);
  bool all = true;
  for (std::int64_t k = 0; k < n; k += kMovedColumns, to += kMovedColumns) {
    F eights[4];
    for (int i = 0; i < 4; ++i) {
      eights[i] = load_value<kIn>(from + (k + i * kWidth) * bytes_of(kIn));
      all &= stay_normal(eights[i]);
      eights[i] *= splat(kUp);
    }
    for (int i = 0; i < 2; ++i) {  // lower eights, upper ones
      const F first = _mm256_permute2f128_ps(eights[i], eights[i + 2], 0x20);
      const F last = _mm256_permute2f128_ps(eights[i], eights[i + 2], 0x31);
      store_as(to + 2 * i * kWidth, F(_mm256_shuffle_ps(first, last, 0x88)));
      store_as(to + (2 * i + 1) * kWidth, F(_mm256_shuffle_ps(first, last, 0xDD)));
    }
  }
  return all;
}

template <Codes kCodes>
[[gnu::always_inline]] inline __m256i moved(__m256i words) {
  constexpr int kDown = kCodes == Codes::f8_e4m3 ? 4 : 3;
  constexpr int kOff = ((1 << kDown) - 1) << (15 - kDown);  // copies of the sign
  return _mm256_and_si256(_mm256_srai_epi16(words, kDown),
                          _mm256_set1_epi16(static_cast<short>(~kOff)));
}

/// What a block of weight rows has seen: the largest magnitude of codes.
using Largest = __m256i;
template <Codes kCodes>
bool are_numbers(Largest largest) {
  const __m256i least = _mm256_set1_epi8(kCodes == Codes::f8_e4m3 ? 0x7F : 0x7C);
  const __m256i met = _mm256_cmpeq_epi8(_mm256_max_epu8(largest, least), largest);
  return _mm256_testz_si256(met, met) != 0;
}

/// Powers of two by their exponents, 0 for 2^-127; 255 becomes no number.
inline float power_of(std::uint8_t exponent) {
  const std::int32_t number = std::int32_t{exponent} << 23, least = 1 << 22;
  return __builtin_bit_cast(float, number < least ? least : number);
}
template <int kGroups>
F spread(const std::uint8_t* exponents) {
  if constexpr (kGroups == 1) return splat(power_of(*exponents));
  const float powers[]{power_of(exponents[0]), power_of(exponents[1])};
  return spread<2>(powers);
}

/// A row of weight on its way. All inlined, so that sums stay in registers. Scale: fp32, or a byte
/// that is an exponent.
template <Codes kCodes, int kM, class Scale>
struct MovedRow {
  static constexpr int kChains = 2;
  const std::uint8_t* codes;
  const Scale* scales;  // of the groups still to come
  F totals[kM] = {}, group[kM][kChains] = {};

  MovedRow(const BytesDotTask& task, std::int64_t row)
      : codes(static_cast<const std::uint8_t*>(task.run.codes) + task.run.first +
              row * task.row_stride) {
    static constexpr float kOne = 1.0f;
    const std::int64_t first = task.run.first + (task.one_line ? 0 : row * task.row_stride);
    if constexpr (std::is_same_v<Scale, std::uint8_t>)
      scales = task.exponents + first / task.run.group;
    else
      scales = task.run.scales == nullptr ? &kOne : task.run.scales + first / task.run.group;
  }
  [[gnu::always_inline]] void widen(std::int64_t k, F (&w)[4], Largest& largest) const {
    const __m256i bytes = load_as<__m256i>(codes + k), zero = _mm256_setzero_si256();
    largest = _mm256_max_epu8(largest, _mm256_and_si256(bytes, _mm256_set1_epi8(0x7F)));
    const __m256i lower = moved<kCodes>(_mm256_unpacklo_epi8(zero, bytes));
    const __m256i upper = moved<kCodes>(_mm256_unpackhi_epi8(zero, bytes));
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(lower, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(lower, odd));
    w[2] = _mm256_castsi256_ps(_mm256_slli_epi32(upper, 16));
    w[3] = _mm256_castsi256_ps(_mm256_and_si256(upper, odd));
  }
  /// kBytesBlock columns from k on, of one group.
  [[gnu::always_inline]] void add(std::int64_t k, const float* x, std::int64_t x_stride,
                                  std::int64_t ahead, Largest& largest) {
    __builtin_prefetch(codes + k + ahead, 0, 2);
    for (int half = 0; half < 2; ++half, k += kMovedColumns) {
      F w[4];
      widen(k, w, largest);
      for (int j = 0; j < kM; ++j)
        for (int v = 0; v < 4; ++v)
          group[j][v % kChains] = Lanes::multiply_add(
              w[v], Lanes::load_f32(x + j * x_stride + k + v * kWidth), group[j][v % kChains]);
    }
  }
  [[gnu::always_inline]] void end_group() {
    const F scale = spread<1>(scales++);
    for (int j = 0; j < kM; ++j) {
      const F sum = (group[j][0] + group[j][1]) * splat(kBackUp<kCodes>);
      totals[j] = Lanes::multiply_add(sum, scale, totals[j]);
      for (F& chain : group[j]) chain = F{};
    }
  }
  /// The same of groups of which kGroups are in 32 columns.
  template <int kGroups>
  [[gnu::always_inline]] void add_short(std::int64_t k, const float* x, std::int64_t x_stride,
                                        std::int64_t ahead, Largest& largest) {
    __builtin_prefetch(codes + k + ahead, 0, 2);
    for (int half = 0; half < 2; ++half, k += kMovedColumns, scales += kGroups) {
      F w[4];
      widen(k, w, largest);
      const F scale = spread<kGroups>(scales);
      for (int j = 0; j < kM; ++j) {
        const float* from = x + j * x_stride + k;
        // The first product is added to 0, too: alone it makes all of this slower on Zen 3.
        F sum = {};
        for (int v = 0; v < 4; ++v)
          sum = Lanes::multiply_add(w[v], Lanes::load_f32(from + v * kWidth), sum);
        totals[j] = Lanes::multiply_add(sum * splat(kBackUp<kCodes>), scale, totals[j]);
      }
    }
  }
};

inline bool has_groups(const BytesDotTask& task) {
  return task.run.scales != nullptr || task.exponents != nullptr;
}

/// Rows of weight from `row` on, `apart` from one to the next, whose groups end at the same
/// columns, with kM rows of x. kGroups: of 32 columns; 0: groups are whole blocks.
template <Codes kCodes, int kGroups, int kM, class... Rows>
[[gnu::always_inline]] inline void moved_together(const BytesDotTask& task, std::int64_t row,
                                                  std::int64_t apart, Rows... rows) {
  constexpr int kRows = sizeof...(Rows);
  const auto* x = reinterpret_cast<const float*>(task.x);
  const std::int64_t x_stride = task.x_stride / std::int64_t{sizeof(float)};
  const std::int64_t ahead =
      kRows == kStreams ? ahead_in_streams(apart, task.row_stride) : task.ahead;
  const std::int64_t begin = task.run.first + row * task.row_stride;
  Largest largest = _mm256_setzero_si256();
  for (std::int64_t k = 0; k < task.columns;) {
    if constexpr (kGroups != 0) {
      (rows.template add_short<kGroups>(k, x, x_stride, ahead, largest), ...);
      k += kBytesBlock;
    } else {
      const std::int64_t left = task.columns - k;
      const std::int64_t in_group =
          has_groups(task) ? task.run.group - (begin + k) % task.run.group : left;
      for (const std::int64_t end = k + (in_group < left ? in_group : left); k < end;
           k += kBytesBlock)
        (rows.add(k, x, x_stride, ahead, largest), ...);
      (rows.end_group(), ...);
    }
  }
  const float factor = are_numbers<kCodes>(largest) ? 1.0f : __builtin_nanf("");
  for (int j = 0; j < kM; ++j) {
    F sums[4] = {rows.totals[j]...};
    float totals[4];
    Lanes::sum4(sums, totals);
    for (int r = 0; r < kRows; ++r)
      task.y[j * task.y_stride + row + r * apart] += totals[r] * factor;
  }
}

template <Codes kCodes, class Scale, int kGroups>
void moved_rows(const BytesDotTask& task) {
  const bool together = !has_groups(task) || task.one_line ||
                        task.row_stride % task.run.group == 0 ||
                        task.run.group % task.row_stride == 0;
  for_each_part<4>(task, [&]<int kM>(const BytesDotTask& part) {
    using Row = MovedRow<kCodes, kM, Scale>;
    std::int64_t i = 0;
    if constexpr (kM == 1) {
      const std::int64_t apart = together ? part.rows / kStreams : 0;
      for (; i < apart; ++i)
        moved_together<kCodes, kGroups, kM>(part, i, apart, Row(part, i), Row(part, i + apart),
                                            Row(part, i + 2 * apart), Row(part, i + 3 * apart));
      i *= kStreams;
    }
    if constexpr (kM == 2)
      for (; together && i + 2 <= part.rows; i += 2)
        moved_together<kCodes, kGroups, kM>(part, i, 1, Row(part, i), Row(part, i + 1));
    for (; i < part.rows; ++i) moved_together<kCodes, kGroups, kM>(part, i, 0, Row(part, i));
  });
}

template <Codes kCodes, class Scale>
void moved_groups(const BytesDotTask& task) {
  if (has_groups(task) && task.run.group == 16) return moved_rows<kCodes, Scale, 2>(task);
  if (has_groups(task) && task.run.group == 32) return moved_rows<kCodes, Scale, 1>(task);
  moved_rows<kCodes, Scale, 0>(task);
}

template <Codes kCodes>
void moved_dot(const BytesDotTask& task) noexcept {
  if (task.exponents != nullptr) return moved_groups<kCodes, std::uint8_t>(task);
  moved_groups<kCodes, float>(task);
}

/// Adds these to a table of products in integers.
constexpr BytesKernels with_moved_float8(BytesKernels kernels) {
  kernels.arrange[3][1] = &arrange_moved<Dtype::f32>;
  kernels.arrange[3][2] = &arrange_moved<Dtype::bf16>;
  kernels.arrange[3][3] = &arrange_moved<Dtype::f16>;
  kernels.set(Codes::f8_e4m3, &moved_dot<Codes::f8_e4m3>, 3);
  kernels.set(Codes::f8_e5m2, &moved_dot<Codes::f8_e5m2>, 3);
  return kernels;
}

}  // namespace
}  // namespace stowage
