// SPDX-License-Identifier: Apache-2.0
// What AVX2 with F16C and FMA does its own way: eight lanes, and readers of codes.
#pragma once
#include <immintrin.h>

namespace stowage {
namespace {
constexpr int kWidth = 8;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/lanes-inl.h"

namespace stowage {
namespace {

struct Lanes : PortableLanes {
  static F gather(const float* from, I index) { return _mm256_i32gather_ps(from, to(index), 4); }
  static I load_i8(const void* p) { return from(_mm256_cvtepi8_epi32(eight_bytes(p))); }
  // One byte to a qword: the nibble that comes first to the low dword, the other to the high one.
  template <Packing kPacking>
  static I load_nibbles(const void* p) {
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_as<std::int32_t>(p)));
    if constexpr (kPacking == Packing::low_first)
      return from(_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28)));
    return from(_mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(bytes, 32)));
  }
  // Sign-extended and shifted, an e4m3 code is the fp16 number of its value times 2^-8:
  //   s eeee mmm  ->  s s0eeee mmm0000000  less the second s
  static F load_e4m3(const void* p) {
    const __m128i words = _mm_cvtepi8_epi16(eight_bytes(p)), low7 = _mm_set1_epi16(0x7F);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(words, low7), low7);
    const __m128i halves =
        _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<short>(0xBFFF)));
    return _mm256_cvtph_ps(_mm_blendv_epi8(halves, _mm_set1_epi16(0x7E00), nan)) * 256.0f;
  }
  static F load_e5m2(const void* p) {  // the high byte of an fp16 number
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight_bytes(p)), 8));
  }
  static F load_bf16(const void* p) {
    return as_float(from(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(p)), 16)));
  }
  static F load_f16(const void* p) { return _mm256_cvtph_ps(load_as<__m128i>(p)); }
  static F load_f64(const void* p) {
    const auto* x = static_cast<const double*>(p);
    return _mm256_set_m128(_mm256_cvtpd_ps(load_as<__m256d>(x + 4)),
                           _mm256_cvtpd_ps(load_as<__m256d>(x)));
  }

  static void store_u8(void* p, I x) {
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(words(x & 0xFF), words(x & 0xFF)));
  }
  static void store_u16(void* p, I x) { store_as(p, words(x)); }
  static F add_scaled(F x, float power, F y) { return _mm256_fmadd_ps(x, splat(power), y); }
  template <int kLow, int kHigh>
  static I add_halves(I x) {
    return from(_mm256_madd_epi16(to(x), _mm256_set1_epi32(1 << kLow | 1 << (16 + kHigh))));
  }
  static void store_low_bytes(void* p, I a, I b) {  // packing works inside 16 bytes
    store_as(p, _mm256_permute4x64_epi64(_mm256_packus_epi16(to(a), to(b)), 0xD8));
  }
  template <Packing kPacking>
  static void store_nibbles(void* p, I x) {
    const __m256i pairs =
        kPacking == Packing::low_first
            ? _mm256_or_si256(to(x), _mm256_srli_epi64(to(x), 28))
            : _mm256_or_si256(_mm256_slli_epi32(to(x), 4), _mm256_srli_epi64(to(x), 32));
    const __m256i first = _mm256_shuffle_epi8(
        pairs, _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                -1, -1, 0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i bytes =
        _mm_or_si128(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1));
    store_as(p, _mm_cvtsi128_si32(bytes));
  }
  template <Packing kPacking>
  static void store_nibbles4(void* p, const I (&x)[4]) {
    const __m256i words[2] = {_mm256_packs_epi32(to(x[0]), to(x[1])),
                              _mm256_packs_epi32(to(x[2]), to(x[3]))};
    const __m256i codes = _mm256_packs_epi16(words[0], words[1]);
    const short places = kPacking == Packing::low_first ? 0x1001 : 0x0110;  // 16 and 1 of a pair
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(places));
    const __m256i bytes = _mm256_packus_epi16(pairs, pairs);  // in each half two of each vector
    store_as(p,
             _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  }
  static void store_f64(void* p, F x) {
    store_as(p, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    store_as(static_cast<double*>(p) + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  static void store_bf16(void* p, F x) { store_u16(p, bf16_bits(x)); }
  static void store_f16(void* p, F x) {
    const __m128i nan = words(from(_mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))));
    const __m128i halves = _mm256_cvtps_ph(x, kNearest);
    store_as(p, _mm_blendv_epi8(halves, _mm_set1_epi16(0x7E00), nan));
  }

  static constexpr int kNibbleStep = 32;
  struct WordTable {  // their bytes; of each half of the nibbles those in a half
    __m256i low, high;
  };
  static WordTable word_table(const I (&entries)[2]) {
    const __m256i bytes = split_bytes(entries);
    return in_order(_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xDD));
  }
  static constexpr bool kHasTwoTables = true;
  using TwoTables = WordTable;
  static TwoTables two_tables(const I (&first)[2], const I (&second)[2]) {
    const __m256i a = _mm256_permute4x64_epi64(split_bytes(first), 0xD8);
    const __m256i b = _mm256_permute4x64_epi64(split_bytes(second), 0xD8);
    return in_order(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  template <Packing kPacking>
  static void store_looked_up(void* p, const WordTable& table, const std::uint8_t* nibbles) {
    const __m256i pairs = _mm256_cvtepu8_epi16(load_as<__m128i>(nibbles));
    const __m256i both =
        kPacking == Packing::low_first
            ? _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4))
            : _mm256_or_si256(_mm256_srli_epi16(pairs, 4), _mm256_slli_epi16(pairs, 8));
    const __m256i index = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(table.low, index);
    const __m256i high = _mm256_shuffle_epi8(table.high, index);
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    store_as(p, _mm256_permute2x128_si256(a, b, 0x20));
    store_as(static_cast<char*>(p) + 32, _mm256_permute2x128_si256(a, b, 0x31));
  }
  static void store_bf16_pair(void* p, F a, F b) {  // packing works inside 16 bytes
    const __m256i mixed =
        _mm256_packus_epi32(to(round_shift(as_int(a), 16)), to(round_shift(as_int(b), 16)));
    store_as(p, _mm256_permute4x64_epi64(mixed, 0xD8));
  }
  static void store_normal_pair(void* p, F a, F b) { store_bf16_pair(p, a, b); }

  static constexpr bool kHasFloat8 = true;
  // The code  s e.. m..  has the bits: table entry of m.. + e.. in its place, and the sign.
  template <int kMantissa>
  static bool store_float8(void* p, const WordTable& table, const std::uint8_t* codes) {
    constexpr char kLow = (1 << kMantissa) - 1, kHigh = 0x7F - kLow;
    constexpr char kLargest = kMantissa == 3 ? 0x7E : 0x7B;
    // Unpacking works inside 16 bytes; these qwords are arranged so that the results are in order.
    const __m256i code = _mm256_permute4x64_epi64(load_as<__m256i>(codes), 0xD8);
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi8(0x7F));
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi8(size, _mm256_set1_epi8(kLargest))) != 0)
      return false;
    const __m256i subnormal = _mm256_cmpgt_epi8(_mm256_set1_epi8(kLow + 1), size);
    const __m256i index = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi8(kLow)),
                                          _mm256_and_si256(subnormal, _mm256_set1_epi8(kLow + 1)));
    const __m256i low = _mm256_shuffle_epi8(table.low, index);
    const __m256i high = _mm256_shuffle_epi8(table.high, index), zero = _mm256_setzero_si256();
    const auto value = [&](__m256i entry, __m256i word) {  // word: the code times 2^8
      const __m256i exponent = _mm256_and_si256(word, _mm256_set1_epi16(kHigh << 8));
      const __m256i moved = _mm256_srli_epi16(exponent, 1 + kMantissa);
      return _mm256_xor_si256(_mm256_add_epi16(entry, moved),
                              _mm256_and_si256(word, _mm256_set1_epi16(-0x8000)));
    };
    store_as(p, value(_mm256_unpacklo_epi8(low, high), _mm256_unpacklo_epi8(zero, code)));
    store_as(static_cast<char*>(p) + 32,
             value(_mm256_unpackhi_epi8(low, high), _mm256_unpackhi_epi8(zero, code)));
    return true;
  }

  static constexpr bool kHasNumbers = true;
  /// What load_numbers() gives are values over this.
  template <int kMantissa>
  static constexpr float kUnit = kMantissa == 3 ? 256.0f : 1.0f;
  /// Whether 32 codes with so many bits of mantissa are finite numbers; without any: integers.
  template <int kMantissa>
  static bool are_numbers(const std::uint8_t* codes) {
    if constexpr (kMantissa < 0) return true;
    const __m256i size = _mm256_and_si256(load_as<__m256i>(codes), _mm256_set1_epi8(0x7F));
    const __m256i above = _mm256_cmpgt_epi8(size, _mm256_set1_epi8(kMantissa == 3 ? 0x7E : 0x7B));
    return _mm256_testz_si256(above, above) != 0;
  }
  template <int kMantissa>
  static void load_numbers(const std::uint8_t* codes, F& a, F& b) {
    if constexpr (kMantissa < 0) {
      a = __builtin_convertvector(load_i8(codes), F);
      b = __builtin_convertvector(load_i8(codes + kWidth), F);
      return;
    }
    __m256i halves;  // numbers of fp16, as in load_e4m3() and load_e5m2()
    if constexpr (kMantissa == 3) {
      halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(codes)), 7);
      halves = _mm256_and_si256(halves, _mm256_set1_epi16(static_cast<short>(0xBFFF)));
    } else {
      halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_as<__m128i>(codes)), 8);
    }
    a = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    b = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  static void store_high_halves(void* p, F a, F b) {
    const __m256i mixed = _mm256_packus_epi32(_mm256_srli_epi32(to(as_int(a)), 16),
                                              _mm256_srli_epi32(to(as_int(b)), 16));
    store_as(p, _mm256_permute4x64_epi64(mixed, 0xD8));
  }

  struct Table16 {
    __m256i low, high;
  };
  static Table16 load_table(const void* sixteen) {
    return {load_as<__m256i>(sixteen),
            load_as<__m256i>(static_cast<const std::int32_t*>(sixteen) + 8)};
  }
  // Binary search. What is found so far is negative, as true is; look-ups see its low three bits.
  struct Ranks {
    __m256 middle, quarters[2];
    __m256 inside[2];  // of each quarter the one in its middle, and of each eighth; backwards
    explicit Ranks(const float* ascending)
        : middle(splat(ascending[7])), quarters{splat(ascending[3]), splat(ascending[11])} {
      float of_quarter[8] = {}, of_eighth[8];
      for (int i = 0; i < 4; ++i) of_quarter[-i & 7] = ascending[4 * i + 1];
      for (int i = 0; i < 8; ++i) of_eighth[-i & 7] = ascending[2 * i];
      inside[0] = load_as<__m256>(of_quarter);
      inside[1] = load_as<__m256>(of_eighth);
    }
    I of(F v) const {
      I found[1];
      of(&v, found);
      return found[0];
    }
    /// Each step is done to all of them in turn: in a step after the other, one waits for itself.
    template <int kCount>
    void of(const F* v, I (&found)[kCount]) const {
      I half[kCount];
      for (int j = 0; j < kCount; ++j) half[j] = above(v[j], middle);
      for (int j = 0; j < kCount; ++j)
        found[j] = half[j] * 2 +
                   above(v[j], _mm256_blendv_ps(quarters[0], quarters[1], as_float(half[j])));
      for (const __m256 thresholds : inside)
        for (int j = 0; j < kCount; ++j)
          found[j] = found[j] * 2 + above(v[j], _mm256_permutevar8x32_ps(thresholds, to(found[j])));
      for (I& each : found) each = -each;
    }

   private:
    static I above(F v, __m256 threshold) {
      return from(_mm256_castps_si256(_mm256_cmp_ps(v, threshold, _CMP_NLE_UQ)));
    }
  };
  struct SpreadRanks : Ranks {
    using Ranks::Ranks;
    I of_spread(F v) const { return of(v); }
  };

  static std::uint32_t largest(I magnitudes) {
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(to(magnitudes)),
                                       _mm256_extracti128_si256(to(magnitudes), 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return static_cast<std::uint32_t>(
        _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
  }
  static I look_up(const Table16& table, I index) {
    const __m256 low = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(table.low, to(index)));
    const __m256 high = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(table.high, to(index)));
    const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(to(index), 28));
    return from(_mm256_castps_si256(_mm256_blendv_ps(low, high, bit3)));
  }

  static constexpr int kTileRows = 6, kTileVectors = 2;  // 12 sums in 16 registers
  static F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  /// sums[j] = all lanes of x[j].
  static void sum4(const F (&x)[4], float (&sums)[4]) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }

 private:
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  static __m256i to(I x) { return reinterpret_cast<__m256i>(x); }
  static I from(__m256i x) { return reinterpret_cast<I>(x); }
  static __m128i eight_bytes(const void* p) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(p));
  }
  // Qwords: low bytes of entries 0 to 3 and 8 to 11, high ones; low bytes of the others, high ones.
  static __m256i split_bytes(const I (&entries)[2]) {
    const __m256i words = _mm256_packus_epi32(to(entries[0]), to(entries[1]));
    return _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0xFF)),
                               _mm256_srli_epi16(words, 8));
  }
  static WordTable in_order(__m256i low, __m256i high) {
    return {_mm256_shuffle_epi32(low, 0xD8), _mm256_shuffle_epi32(high, 0xD8)};
  }
  /// The low halves of the lanes.
  static __m128i words(I x) {
    const __m256i low = _mm256_and_si256(to(x), _mm256_set1_epi32(0xFFFF));
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  }
};

/// Through fp16, which has e4m3's numbers with 8 added to the exponent; NaN would become 480.
//   e4m3                s eeee mmm
//   sign-extended, << 7 s s eeee mmm 0000000
//   fp16, x 2^-8        s 0 eeee mmm 0000000
template <>
struct CodeReader<Codes::f8_e4m3> {
  static constexpr bool kScalesSum = true;
  explicit CodeReader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    note(_mm256_zextsi128_si256(bytes));
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(~0x4000)));
  }
  // Bytes become the upper halves of words, in each 16 by themselves.
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    const __m256i bytes = load_as<__m256i>(codes), zero = _mm256_setzero_si256();
    note(bytes);
    const __m256i low = halves(_mm256_unpacklo_epi8(zero, bytes));
    const __m256i high = halves(_mm256_unpackhi_epi8(zero, bytes));
    w[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
    w[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
    w[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
    w[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
  }
  F value(F sum) const { return sum * 256.0f; }
  bool met_nan() const {
    const __m256i nan = _mm256_cmpeq_epi8(largest_, _mm256_set1_epi8(0x7F));
    return _mm256_testz_si256(nan, nan) == 0;
  }

 private:
  void note(__m256i bytes) {
    largest_ = _mm256_max_epu8(largest_, _mm256_and_si256(bytes, _mm256_set1_epi8(0x7F)));
  }
  static __m256i halves(__m256i words) {
    return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(~0x4000));
  }
  __m256i largest_ = _mm256_setzero_si256();
};

/// e5m2 is the upper half of an fp16 number.
template <>
struct CodeReader<Codes::f8_e5m2> {
  static constexpr bool kScalesSum = true;
  explicit CodeReader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }
};

/// Eight nibbles of a 32-bit word, one shift each, in order:
//   lane                0   1   2   3   4   5   6   7
//   shift, high first   4   0  12   8  20  16  28  24
//   shift, low first    0   4   8  12  16  20  24  28
// vpermps reads three bits of a lane, and the fourth, moved to the sign, picks the half of the
// table.
template <Packing kPacking>
requires(kPacking != Packing::whole) struct NibbleReader<kPacking> {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values)
      : values_{_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)} {
    set_scale(1.0f);
  }
  void set_scale(float scale) {
    set_table([=](F x) { return x * splat(scale); });
  }
  template <class Make>
  void set_table(Make make) {
    for (int i = 0; i < 2; ++i) table_[i] = make(values_[i]);
  }
  F read(const std::uint8_t* codes) {
    constexpr int a = shift_of<kPacking>(0), b = shift_of<kPacking>(1);
    const __m256i kDown = _mm256_setr_epi32(a, b, 8 + a, 8 + b, 16 + a, 16 + b, 24 + a, 24 + b);
    const __m256i kUp =
        _mm256_setr_epi32(28 - a, 28 - b, 20 - a, 20 - b, 12 - a, 12 - b, 4 - a, 4 - b);
    const __m256i word = _mm256_set1_epi32(load_as<int>(codes));
    const __m256i index = _mm256_srlv_epi32(word, kDown);
    const __m256 low = _mm256_permutevar8x32_ps(table_[0], index);
    const __m256 high = _mm256_permutevar8x32_ps(table_[1], index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_sllv_epi32(word, kUp)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }

 private:
  __m256 values_[2], table_[2];
};

}  // namespace
}  // namespace stowage
