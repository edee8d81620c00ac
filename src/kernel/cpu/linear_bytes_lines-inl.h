// SPDX-License-Identifier: Apache-2.0
// The same products of one row of x, whose scales are read as they lie, sixteen at a time. Expanded
// before, they would be stored and loaded again, no codes be on their way meanwhile, and streams
// end where the room for them does.
#pragma once
#include "kernel/cpu/linear_bytes_dense-inl.h"
#include "kernel/cpu/scales_avx512-inl.h"

namespace stowage {
namespace {

/// Lines of scales of one row. How they lie: groups of so many columns, where number g is, and what
/// those of `some` lanes are from there on.
struct Exponents {  // of two, a byte each: 0 is 2^-127; 255 becomes infinite, and so do sums
  static constexpr int kGroup = 32;
  explicit Exponents(const BytesDotTask& /*task*/) {}
  static const std::uint8_t* at(const std::uint8_t* kept, std::int64_t g) { return kept + g; }
  [[gnu::always_inline]] F read(const std::uint8_t* from, __mmask16 some) const {
    const __m512i exponents = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, from));
    const __m512i least = _mm512_set1_epi32(1 << 22);
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(exponents, 23), least));
  }
};
struct Float8UnderOne {  // e4m3; of those that are negative or none, NaN
  static constexpr int kGroup = 16;
  F outer;  // times what the bits lack
  explicit Float8UnderOne(const BytesDotTask& task) : outer(splat(task.outer * 0x1p120f)) {}
  static const std::uint8_t* at(const std::uint8_t* kept, std::int64_t g) { return kept + g; }
  [[gnu::always_inline]] F read(const std::uint8_t* from, __mmask16 some) const {
    const __m128i bytes = _mm_maskz_loadu_epi8(some, from);
    const __mmask16 numbers = _mm_cmple_epu8_mask(bytes, _mm_set1_epi8(0x7E));
    const __m512i none = _mm512_set1_epi32(static_cast<int>(kQuietNan));
    const __m512i bits = _mm512_mask_slli_epi32(none, numbers, _mm512_cvtepu8_epi32(bytes), 20);
    return _mm512_castsi512_ps(bits) * outer;
  }
};
template <int kOfGroup>
struct Halves {  // f16
  static constexpr int kGroup = kOfGroup;
  explicit Halves(const BytesDotTask& /*task*/) {}
  static const std::uint8_t* at(const std::uint8_t* kept, std::int64_t g) { return kept + 2 * g; }
  [[gnu::always_inline]] F read(const std::uint8_t* from, __mmask16 some) const {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, from));
  }
};
struct RecordsOfQ6K {
  using Super = superblocks::Q6K;
  static constexpr int kGroup = Super::kInner;
  static_assert(Super::kSteps == kScalesOfLine);
  explicit RecordsOfQ6K(const BytesDotTask& /*task*/) {}
  static const std::uint8_t* at(const std::uint8_t* kept, std::int64_t g) {
    return kept + g / Super::kSteps * Super::kRecord;
  }
  [[gnu::always_inline]] F read(const std::uint8_t* from, __mmask16 /*all*/) const {
    std::uint16_t number;
    __builtin_memcpy(&number, from + Super::kSteps, sizeof number);
    return all_lanes(number) * __builtin_convertvector(Lanes::load_i8(from), F);
  }
};

template <class How, std::int64_t kColumns, Zero kZero>
struct ScalesInLines {
  static constexpr int kGroups = static_cast<int>(kColumns) / How::kGroup;
  static constexpr std::int64_t kOfLine = kScalesOfLine;
  How how;
  F line[kStreams], zeros[kStreams];
  I places;  // of the scales of a block
  explicit ScalesInLines(const BytesDotTask& task) : how(task) {}

  /// The next line of each row, `left` groups before its end; those `soon` further are asked for.
  template <int kRows>
  [[gnu::always_inline]] void begin_line(PlaceInRows<kRows>& at, std::int64_t left,
                                         std::int64_t soon) {
    const auto some = static_cast<__mmask16>(left < kOfLine ? (1 << left) - 1 : 0xFFFF);
    for (int r = 0; r < kRows; ++r) {
      line[r] = how.read(How::at(at.task.kept, at.groups[r]), some);
      if constexpr (kZero == Zero::code) {
        const __m128i codes = _mm_maskz_loadu_epi8(some, at.task.run.zeros + at.groups[r]);
        zeros[r] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
      }
      if (soon != 0) __builtin_prefetch(How::at(at.task.kept, at.groups[r] + soon), 0, 2);
      at.groups[r] += kOfLine;
    }
    places = reinterpret_cast<I>(places_of_groups<kGroups>());
  }
  template <bool kWhole, int kRows>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& /*at*/, int r, F exact,
                                  const RestOfX& x, F& sum) const {
    const auto of = reinterpret_cast<__m512i>(places);
    const F scale = _mm512_permutexvar_ps(of, line[r]);
    if constexpr (kZero == Zero::code)
      exact = less_product(_mm512_permutexvar_ps(of, zeros[r]), x.sums, exact);
    sum = Lanes::multiply_add(exact * x.powers, scale, sum);
  }
  [[gnu::always_inline]] void end_block() { places += splat(kGroups); }
};

/// Records of q4_k. Offsets are multiplied by sums of x, a record at a time.
struct ScalesOfQ4K {
  using Super = superblocks::Q4K;
  static constexpr int kGroups = static_cast<int>(kPairsBlock / Super::kInner);
  static constexpr std::int64_t kOfLine = Super::kSteps;
  F scales[2], taken[2] = {};  // of two rows each
  I places[2];
  const float* sums;  // of x, of each group

  explicit ScalesOfQ4K(const BytesDotTask& task) : sums(task.sums) {}
  template <int kRows>
  [[gnu::always_inline]] void begin_line(PlaceInRows<kRows>& at, std::int64_t /*left*/,
                                         std::int64_t soon) {
    const auto record = [&](int r, std::int64_t more) {
      return at.task.kept + (at.groups[r] + more) / kOfLine * Super::kRecord;
    };
    __m512i records = _mm512_castsi128_si512(load_as<__m128i>(record(0, 0)));
    if constexpr (kRows == kStreams) {
      records = _mm512_inserti32x4(records, load_as<__m128i>(record(1, 0)), 1);
      records = _mm512_inserti32x4(records, load_as<__m128i>(record(2, 0)), 2);
      records = _mm512_inserti32x4(records, load_as<__m128i>(record(3, 0)), 3);
    }
    const FourOfQ4K made(records);
    const F of_x =
        _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(sums))));
    for (int i = 0; i < 2; ++i) {
      scales[i] = made.scales[i];
      taken[i] = Lanes::multiply_add(made.offsets[i], of_x, taken[i]);
      places[i] = reinterpret_cast<I>(places_of_groups<kGroups>()) + splat(8 * i);
    }
    sums += kOfLine;
    for (int r = 0; r < kRows; ++r) {
      if (soon != 0) __builtin_prefetch(record(r, soon), 0, 2);
      at.groups[r] += kOfLine;
    }
  }
  template <bool kWhole, int kRows>
  [[gnu::always_inline]] void add(const PlaceInRows<kRows>& /*at*/, int r, F exact,
                                  const RestOfX& x, F& sum) const {
    const F scale = _mm512_permutexvar_ps(reinterpret_cast<__m512i>(places[r % 2]), scales[r / 2]);
    sum = Lanes::multiply_add(exact * x.powers, scale, sum);
  }
  [[gnu::always_inline]] void end_block() {
    for (I& of : places) of += splat(kGroups);
  }
  template <int kRows>
  [[gnu::always_inline]] void end(F (&of_rows)[kRows][1]) const {
    for (int r = 0; r < kRows; ++r) {  // to the same lanes: a row's sum is the same in any stream
      const __m256 half = r % 2 == 0 ? _mm512_castps512_ps256(taken[r / 2])
                                     : _mm512_extractf32x8_ps(taken[r / 2], 1);
      of_rows[r][0] -= F(_mm512_zextps256_ps512(half));
    }
  }
};

/// Sums of x over each 32 columns.
inline void sum_groups(const BytesDotTask& task, float* sums) {
  for (std::int64_t k = 0; k < task.columns; k += kPairsBlock, sums += 4) {
    const auto& x = reinterpret_cast<const BlockOfX*>(task.x)[k / kPairsBlock];
    const RestOfX rest(x, 0);
    const F each = rest.sums * rest.powers;
    F quarters[4];
    float totals[4];
    for (int i = 0; i < 4; ++i)
      quarters[i] = _mm512_maskz_mov_ps(static_cast<__mmask16>(15 << 4 * i), each);
    Lanes::sum4(quarters, totals);
    for (int i = 0; i < 4; ++i) sums[i] = totals[i];
  }
}
inline void q4_k_dot(const BytesDotTask& task) noexcept {
  alignas(64) float sums[kMostLinesColumns / superblocks::Q4K::kInner];
  sum_groups(task, sums);
  BytesDotTask with_sums = task;
  with_sums.sums = sums;
  add_rows_of_one<BytesWay<Codes::uint4, ScalesOfQ4K>, kStreams>(with_sums);
}

template <class Way>
void lines_dot(const BytesDotTask& task) noexcept {
  add_rows_of_one<Way, kStreams>(task);
}
template <Codes kCodes, class How, Zero kZero = Zero::none>
using PairsInLines = BytesWay<kCodes, ScalesInLines<How, kPairsBlock, kZero>>;
template <class Reader, class How>
using WholeInLines = WholeWay<Reader, ScalesInLines<How, kWholeBlock, Zero::none>>;

inline void q6_k_dot(const BytesDotTask& given) noexcept {
  BytesDotTask task = given;
  task.bits = bits_of(Codes::int6);
  lines_dot<WholeInLines<DenseReaderOf<Codes::int6>, RecordsOfQ6K>>(task);
}

/// Adds these to a table of the other products in integers.
constexpr BytesKernels with_lines(BytesKernels kernels) {
  kernels.lines = {.mxfp4 = &lines_dot<PairsInLines<Codes::f4_e2m1, Exponents>>,
                   .nvfp4 = &lines_dot<PairsInLines<Codes::f4_e2m1, Float8UnderOne>>,
                   .mxint8 = &lines_dot<WholeInLines<ByteReader, Exponents>>,
                   .q4_0 = &lines_dot<PairsInLines<Codes::int4, Halves<32>>>,
                   .q4_k = &q4_k_dot,
                   .q6_k = &q6_k_dot,
                   .q8_0 = &lines_dot<WholeInLines<ByteReader, Halves<32>>>,
                   .awq = &lines_dot<PairsInLines<Codes::int4, Halves<128>, Zero::code>>};
  return kernels;
}

}  // namespace
}  // namespace stowage
