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

/// Whether codes up to this magnitude are numbers.
template <Codes kCodes>
bool are_numbers(__m256i largest) {
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

/// kRows rows of weight on their way with kM rows of x; each step is done to all rows in turn. All
/// inlined, so that sums stay in registers. Scale: fp32, or a byte that is an exponent.
template <Codes kCodes, class Scale, int kRows, int kM>
struct MovedRows {
  const BytesDotTask& task;
  const std::uint8_t* codes[kRows];
  const Scale* scales[kRows];  // of the groups still to come
  const std::int64_t ahead;
  F totals[kRows][kM] = {}, group[kRows][kM] = {};
  __m256i largest = _mm256_setzero_si256();  // magnitude of codes

  MovedRows(const BytesDotTask& of, std::int64_t row, const Streams& streams)
      : task(of),
        ahead(kRows == kStreams ? bytes_ahead<false>(row, streams.apart, of.row_stride, of.columns)
                                : of.ahead) {
    static constexpr float kOne = 1.0f;
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t begin = (row + r * streams.apart) * task.row_stride;
      codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + task.run.first + begin;
      const std::int64_t first = task.run.first + (task.one_line ? 0 : begin) - streams.lag_of(r);
      if constexpr (std::is_same_v<Scale, std::uint8_t>)
        scales[r] = task.exponents + first / task.run.group;
      else
        scales[r] = task.run.scales == nullptr ? &kOne : task.run.scales + first / task.run.group;
    }
  }
  /// Sums of 32 columns from k on.
  [[gnu::always_inline]] void add_to(F (&sums)[kRows][kM], std::int64_t k) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int upper = 0; upper < 2; ++upper) {
      __m256i words[kRows];
      for (int r = 0; r < kRows; ++r) {
        const __m256i bytes = load_as<__m256i>(codes[r] + k);
        if (upper == 0)
          largest = _mm256_max_epu8(largest, _mm256_and_si256(bytes, _mm256_set1_epi8(0x7F)));
        words[r] = moved<kCodes>(upper == 0 ? _mm256_unpacklo_epi8(zero, bytes)
                                            : _mm256_unpackhi_epi8(zero, bytes));
      }
      for (int j = 0; j < kM; ++j) {
        const auto* x =
            reinterpret_cast<const float*>(task.x + j * task.x_stride) + k + 2 * upper * kWidth;
        for (int r = 0; r < kRows; ++r)
          sums[r][j] = Lanes::multiply_add(_mm256_castsi256_ps(_mm256_slli_epi32(words[r], 16)),
                                           Lanes::load_f32(x), sums[r][j]);
        for (int r = 0; r < kRows; ++r)
          sums[r][j] = Lanes::multiply_add(_mm256_castsi256_ps(_mm256_and_si256(words[r], odd)),
                                           Lanes::load_f32(x + kWidth), sums[r][j]);
      }
    }
  }
  [[gnu::always_inline]] void ask(std::int64_t k) const {
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(codes[r] + k + ahead, 0, 2);
  }
  /// The sum of a group, or of kGroups of them, goes to the totals with its scale.
  template <int kGroups>
  [[gnu::always_inline]] void end(F (&sums)[kRows][kM]) {
    for (int r = 0; r < kRows; ++r) {
      const F scale = spread<kGroups>(scales[r]);
      for (int j = 0; j < kM; ++j)
        totals[r][j] =
            Lanes::multiply_add(sums[r][j] * splat(kBackUp<kCodes>), scale, totals[r][j]);
      scales[r] += kGroups;
    }
  }
  /// kBytesBlock columns from k on, of one group; and the end of it.
  [[gnu::always_inline]] void add(std::int64_t k) {
    ask(k);
    add_to(group, k);
    add_to(group, k + kMovedColumns);
  }
  [[gnu::always_inline]] void end_group() {
    end<1>(group);
    for (auto& of_row : group)
      for (F& sum : of_row) sum = F{};
  }
  /// The same of groups of which kGroups are in 32 columns.
  template <int kGroups>
  [[gnu::always_inline]] void add_short(std::int64_t k) {
    ask(k);
    for (int half = 0; half < 2; ++half, k += kMovedColumns) {
      F sums[kRows][kM] = {};
      add_to(sums, k);
      end<kGroups>(sums);
    }
  }
};

inline bool has_groups(const BytesDotTask& task) {
  return task.run.scales != nullptr || task.exponents != nullptr;
}

/// Row `row` of kRows streams, whose groups end at the same columns. kGroups: of 32 columns; 0:
/// groups are whole blocks.
template <Codes kCodes, class Scale, int kGroups, int kRows, int kM>
[[gnu::always_inline]] inline void moved_together(const BytesDotTask& task, std::int64_t row,
                                                  const Streams& streams) {
  MovedRows<kCodes, Scale, kRows, kM> rows(task, row, streams);
  const std::int64_t begin = task.run.first + row * task.row_stride;
  for (std::int64_t k = 0; k < task.columns;) {
    if constexpr (kGroups != 0) {
      rows.template add_short<kGroups>(k);
      k += kBytesBlock;
    } else {
      const std::int64_t left = task.columns - k;
      const std::int64_t in_group =
          has_groups(task) ? task.run.group - (begin + k) % task.run.group : left;
      for (const std::int64_t stop = k + (in_group < left ? in_group : left); k < stop;
           k += kBytesBlock)
        rows.add(k);
      rows.end_group();
    }
  }
  const float factor = are_numbers<kCodes>(rows.largest) ? 1.0f : __builtin_nanf("");
  for (int j = 0; j < kM; ++j) {
    F sums[4] = {};
    for (int r = 0; r < kRows; ++r) sums[r] = rows.totals[r][j];
    float totals[4];
    Lanes::sum4(sums, totals);
    for (int r = 0; r < kRows; ++r)
      task.y[j * task.y_stride + row + r * streams.apart] += totals[r] * factor;
  }
}

template <Codes kCodes, class Scale, int kGroups>
void moved_rows(const BytesDotTask& task) {
  const bool together = !has_groups(task) || task.one_line ||
                        task.row_stride % task.run.group == 0 ||
                        task.run.group % task.row_stride == 0;
  for_each_part<2>(task, [&]<int kM>(const BytesDotTask& part) {
    constexpr int kRows = kM == 1 ? kStreams : 2;
    const std::int64_t apart = together ? part.rows / kRows : 0;
    const Streams streams =
        kM == 1 && part.streams.apart != 0 ? part.streams : Streams{0, apart, apart};
    for (std::int64_t i = streams.begin; i < streams.end; ++i)
      moved_together<kCodes, Scale, kGroups, kRows, kM>(part, i, streams);
    for (std::int64_t i = streams.apart * kRows; i < part.rows; ++i)
      moved_together<kCodes, Scale, kGroups, 1, kM>(part, i, {});
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
  kernels.arrange[kForFloat8][1] = &arrange_moved<Dtype::f32>;
  kernels.arrange[kForFloat8][2] = &arrange_moved<Dtype::bf16>;
  kernels.arrange[kForFloat8][3] = &arrange_moved<Dtype::f16>;
  kernels.set(Codes::f8_e4m3, &moved_dot<Codes::f8_e4m3>, kForFloat8);
  kernels.set(Codes::f8_e5m2, &moved_dot<Codes::f8_e5m2>, kForFloat8);
  return kernels;
}

}  // namespace
}  // namespace stowage
