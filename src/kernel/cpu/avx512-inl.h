// SPDX-License-Identifier: Apache-2.0
// What AVX-512 (F, BW, VL and DQ) does its own way: sixteen lanes, and readers of codes.
#pragma once
#include <immintrin.h>

#include <array>

namespace stowage {
namespace {
constexpr int kWidth = 16;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/lanes-inl.h"

namespace stowage {
namespace {

struct Lanes : PortableLanes {
  static F gather(const float* from, I index) { return _mm512_i32gather_ps(to(index), from, 4); }
  static I load_i8(const void* p) { return from(_mm512_cvtepi8_epi32(load_as<__m128i>(p))); }
  // One byte to a qword: the nibble that comes first to the low dword, the other to the high one.
  template <Packing kPacking>
  static I load_nibbles(const void* p) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    if constexpr (kPacking == Packing::low_first)
      return from(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)));
    return from(_mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32)));
  }
  // Sign-extended and shifted, an e4m3 code is the fp16 number of its value times 2^-8:
  //   s eeee mmm  ->  s s0eeee mmm0000000  less the second s
  static F load_e4m3(const void* p) {
    const __m256i words = _mm256_cvtepi8_epi16(load_as<__m128i>(p));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)),
                                                  _mm256_set1_epi16(0x7F));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7),
                                            _mm256_set1_epi16(static_cast<short>(0xBFFF)));
    const __m256i all = _mm256_mask_blend_epi16(nan, halves, _mm256_set1_epi16(0x7E00));
    return _mm512_cvtph_ps(all) * 256.0f;
  }
  static F load_e5m2(const void* p) {  // the high byte of an fp16 number
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_as<__m128i>(p)), 8));
  }
  static F load_bf16(const void* p) {
    return as_float(from(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16)));
  }
  static F load_f16(const void* p) { return _mm512_cvtph_ps(load_as<__m256i>(p)); }
  static F load_f64(const void* p) {
    return joined(_mm512_cvtpd_ps(half(p, 0)), _mm512_cvtpd_ps(half(p, 1)));
  }
  static F load_f64_odd(const void* p) { return joined(odd(half(p, 0)), odd(half(p, 1))); }

  static void store_u8(void* p, I x) { store_as(p, _mm512_cvtepi32_epi8(to(x))); }
  static void store_u16(void* p, I x) { store_as(p, _mm512_cvtepi32_epi16(to(x))); }
  template <std::int32_t kMask>
  static I select(I a, I b) {  // 0xCA: the second bit where the first is set, else the third
    return from(_mm512_ternarylogic_epi32(_mm512_set1_epi32(kMask), to(a), to(b), 0xCA));
  }
  static F add_scaled(F x, float power, F y) { return _mm512_fmadd_ps(x, splat(power), y); }
  template <int kLow, int kHigh>
  static I add_halves(I x) {
    return from(_mm512_madd_epi16(to(x), _mm512_set1_epi32(1 << kLow | 1 << (16 + kHigh))));
  }
  static void store_low_bytes(void* p, I a, I b) {  // packing works inside 16 bytes
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    store_as(p, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(to(a), to(b))));
  }
  template <Packing kPacking>
  static void store_nibbles(void* p, I x) {
    const __m512i pairs =
        kPacking == Packing::low_first
            ? _mm512_or_si512(to(x), _mm512_srli_epi64(to(x), 28))
            : _mm512_or_si512(_mm512_slli_epi32(to(x), 4), _mm512_srli_epi64(to(x), 32));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
  }
  template <Packing kPacking>
  static void store_nibbles4(void* p, const I (&x)[4]) {
    for (int j = 0; j < 4; ++j)
      store_nibbles<kPacking>(static_cast<std::uint8_t*>(p) + j * kWidth / 2, x[j]);
  }
  static void store_f64(void* p, F x) {
    store_as(p, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    store_as(static_cast<double*>(p) + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
  }
  static void store_bf16(void* p, F x) { store_u16(p, bf16_bits(x)); }
  static void store_f16(void* p, F x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m256i halves = _mm512_cvtps_ph(x, kNearest);
    store_as(p, _mm256_mask_blend_epi16(nan, halves, _mm256_set1_epi16(0x7E00)));
  }

  template <class Value>
  static consteval std::array<std::uint8_t, 64> each_byte(Value value) {
    std::array<std::uint8_t, 64> bytes{};
    for (int i = 0; i < 64; ++i)
      bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(value(i));
    return bytes;
  }
  static constexpr int kNibbleStep = 32;
  using WordTable = __m512i;  // twice the sixteen, so that the fifth bit of an index is free
  static WordTable word_table(const I (&words)[1]) {
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(to(words[0])));
  }
  /// A nibble in the low bits of each word, and others above it.
#if defined(__AVX512VBMI__)
  template <Packing kPacking>
  static __m512i word_nibbles(const std::uint8_t* nibbles) {
    // Two bytes to each lane of 64 bits, of which a word takes eight bits from where its own begin.
    alignas(64) static constexpr auto kPlaces = each_byte([](int i) { return i / 8 * 2 + i % 2; });
    alignas(64) static constexpr auto kShifts = each_byte([](int i) {
      const int word = i % 8 / 2;
      return 4 * (kPacking == Packing::low_first ? word : word ^ 1);
    });
    const __m512i pairs = _mm512_permutexvar_epi8(
        load_as<__m512i>(kPlaces.data()), _mm512_castsi128_si512(load_as<__m128i>(nibbles)));
    return _mm512_multishift_epi64_epi8(load_as<__m512i>(kShifts.data()), pairs);
  }
#else
  template <Packing kPacking>
  static __m512i word_nibbles(const std::uint8_t* nibbles) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_as<__m128i>(nibbles));
    if constexpr (kPacking == Packing::low_first)
      return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
  }
#endif
  template <Packing kPacking>
  static void store_looked_up(void* p, WordTable table, const std::uint8_t* nibbles) {
    store_as(p, _mm512_permutexvar_epi16(word_nibbles<kPacking>(nibbles), table));
  }

  static constexpr bool kHasTwoTables = true;
  struct TwoTables {  // one behind the other
    __m512i both;
  };
#if defined(__AVX512BF16__)
  static TwoTables normal_two_tables(const F (&first)[1], const F (&second)[1]) {
    return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second[0], first[0]))};
  }
#endif
  static TwoTables two_tables(const I (&first)[1], const I (&second)[1]) {
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(to(first[0])));
    return {_mm512_inserti64x4(low, _mm512_cvtepi32_epi16(to(second[0])), 1)};
  }
  template <Packing kPacking>
  static void store_looked_up(void* p, TwoTables tables, const std::uint8_t* nibbles) {
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    // 0xEA: what the first and the second have, or the third.
    const __m512i index = _mm512_ternarylogic_epi32(word_nibbles<kPacking>(nibbles),
                                                    _mm512_set1_epi16(15), second, 0xEA);
    store_as(p, _mm512_permutexvar_epi16(index, tables.both));
  }

  static void store_bf16_pair(void* p, F a, F b) {  // packing works inside 16 bytes
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i mixed =
        _mm512_packus_epi32(to(round_shift(as_int(a), 16)), to(round_shift(as_int(b), 16)));
    store_as(p, _mm512_permutexvar_epi64(order, mixed));
  }

  /// The same of zeros and of normal numbers whose results are normal.
#if defined(__AVX512BF16__)
  static constexpr bool kRoundsQuickly = true;
  // Tables of the same.
  static WordTable normal_word_table(const F (&values)[1]) {
    return _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values[0])));
  }
  static void store_normal_pair(void* p, F a, F b) { store_as(p, _mm512_cvtne2ps_pbh(b, a)); }
#else
  static void store_normal_pair(void* p, F a, F b) { store_bf16_pair(p, a, b); }
#endif

  static constexpr bool kHasFloat8 = true;
  // The code  s e.. m..  has the bits: table entry of m.. + e.. in its place, and the sign.
  template <int kMantissa>
  static bool store_float8(void* p, WordTable table, const std::uint8_t* codes) {
    constexpr short kLow = (1 << kMantissa) - 1, kHigh = 0x7F - kLow;
    constexpr short kLargest = kMantissa == 3 ? 0x7E : 0x7B;
    const __m512i code = _mm512_cvtepu8_epi16(load_as<__m256i>(codes));
    const __m512i exponent = _mm512_and_si512(code, _mm512_set1_epi16(kHigh));
    const __m512i mantissa = _mm512_and_si512(code, _mm512_set1_epi16(kLow));
    const __m512i size = _mm512_or_si512(exponent, mantissa);
    if (_mm512_cmpgt_epi16_mask(size, _mm512_set1_epi16(kLargest)) != 0) return false;
    const __mmask32 subnormal = _mm512_testn_epi16_mask(exponent, exponent);
    const __m512i index =
        _mm512_mask_add_epi16(mantissa, subnormal, mantissa, _mm512_set1_epi16(kLow + 1));
    const __m512i value = _mm512_add_epi16(_mm512_permutexvar_epi16(index, table),
                                           _mm512_slli_epi16(exponent, 7 - kMantissa));
    const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(-0x8000));
    store_as(p, _mm512_xor_si512(value, signs));
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
    return _mm256_cmpgt_epi8_mask(size, _mm256_set1_epi8(kMantissa == 3 ? 0x7E : 0x7B)) == 0;
  }
  template <int kMantissa>
  static void load_numbers(const std::uint8_t* codes, F& a, F& b) {
    if constexpr (kMantissa < 0) {
      a = __builtin_convertvector(load_i8(codes), F);
      b = __builtin_convertvector(load_i8(codes + kWidth), F);
      return;
    }
    __m512i halves;  // numbers of fp16, as in load_e4m3() and load_e5m2()
    if constexpr (kMantissa == 3) {
      halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_as<__m256i>(codes)), 7);
      halves = _mm512_and_si512(halves, _mm512_set1_epi16(static_cast<short>(0xBFFF)));
    } else {
      halves = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load_as<__m256i>(codes)), 8);
    }
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
  static void store_high_halves(void* p, F a, F b) {
    store_as(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(to(as_int(a)), 16)));
    store_as(static_cast<char*>(p) + 32,
             _mm512_cvtepi32_epi16(_mm512_srli_epi32(to(as_int(b)), 16)));
  }

#if defined(__AVX512VBMI__)
  static constexpr bool kHasByteTable = true;
  /// 128 entries of 16 bits, as two tables of bytes, and of integers the bytes of -128.
  struct ByteTable {
    __m512i low[2], high[2], least[2];
  };
  template <int kMantissa>
  static ByteTable load_byte_table(const std::uint16_t* entries) {
    // The even bytes of two registers: byte i of the result is byte 2 i of the 128.
    alignas(64) std::uint8_t even_bytes[64];
    for (int i = 0; i < 64; ++i) even_bytes[i] = static_cast<std::uint8_t>(2 * i);
    const auto even = load_as<__m512i>(even_bytes);
    ByteTable table;
    for (int i = 0; i < 2; ++i) {
      const auto a = load_as<__m512i>(entries + 64 * i),
                 b = load_as<__m512i>(entries + 64 * i + 32);
      table.low[i] = _mm512_permutex2var_epi8(a, even, b);
      table.high[i] = _mm512_permutex2var_epi8(a, _mm512_or_si512(even, _mm512_set1_epi8(1)), b);
      if constexpr (kMantissa < 0)
        table.least[i] = _mm512_set1_epi8(static_cast<char>(entries[128] >> 8 * i));
    }
    return table;
  }
  /// Results of 64 codes: the entry of the magnitude, and the sign. False, and nothing is written,
  /// if that is not so for one of them: negative ones of fp8 that are infinite or no number.
  template <int kMantissa>
  static bool store_looked_up(void* p, const ByteTable& table, const std::uint8_t* codes) {
    const __m512i code = in_turn(codes);
    if constexpr (kMantissa >= 0)
      if (_mm512_cmpgt_epu8_mask(code, _mm512_set1_epi8(kMantissa == 3 ? -2 : -5)) != 0)
          [[unlikely]]
        return false;
    const Words<kMantissa> words(table, code);
    for (int i = 0; i < 2; ++i) store_as(static_cast<char*>(p) + 64 * i, words.of[i]);
    return true;
  }
  /// The same of fp8, where `moved` is added to entries that are not 0, for each half of the codes;
  /// false if one is infinite or no number.
  template <int kMantissa>
  static bool store_moved(void* p, const ByteTable& table, const std::uint8_t* codes,
                          const std::int16_t (&moved)[2]) {
    const __m512i code = in_turn(codes), size = _mm512_and_si512(code, _mm512_set1_epi8(0x7F));
    if (_mm512_cmpgt_epi8_mask(size, _mm512_set1_epi8(kMantissa == 3 ? 0x7E : 0x7B)) != 0)
        [[unlikely]]
      return false;
    const Words<kMantissa> words(table, code);
    for (int i = 0; i < 2; ++i) {
      const __m512i word = words.of[i], by = _mm512_set1_epi16(moved[i]);
      const __mmask32 some = _mm512_test_epi16_mask(word, _mm512_set1_epi16(0x7FFF));
      store_as(static_cast<char*>(p) + 64 * i, _mm512_mask_add_epi16(word, some, word, by));
    }
    return true;
  }
#endif

  using Table16 = __m512i;
  static Table16 load_table(const void* sixteen) { return load_as<__m512i>(sixteen); }
  struct Ranks {
    __m512 ascending;
    explicit Ranks(const float* thresholds) : ascending(load_as<__m512>(thresholds)) {}
    I of(F v) const {  // binary search
      __m512i rank = _mm512_setzero_si512();
      for (int step = 8; step > 0; step /= 2) {
        const __m512i next = _mm512_add_epi32(rank, _mm512_set1_epi32(step - 1));
        const __mmask16 above =
            _mm512_cmp_ps_mask(v, _mm512_permutexvar_ps(next, ascending), _CMP_NLE_UQ);
        rank = _mm512_mask_add_epi32(rank, above, rank, _mm512_set1_epi32(step));
      }
      return from(rank);
    }
  };
  // 32 bins of [-1, 1] with at most one threshold each, so that one comparison settles the rank.
  // Whatever the rounding, numbers in ascending order fall into bins in ascending order.
  struct SpreadRanks : Ranks {
    __m512 threshold[2];  // of each bin; 2 where there is none
    __m512i below[2];     // how many thresholds fall into lower bins
    explicit SpreadRanks(const float* thresholds) : Ranks(thresholds) {
      const I bins = bin(ascending);
      float of_bin[32];
      std::int32_t count[32] = {};
      for (float& limit : of_bin) limit = 2;
      for (int i = 0; i < 15; ++i) {
        of_bin[bins[i]] = thresholds[i];
        for (int b = bins[i] + 1; b < 32; ++b) ++count[b];
      }
      for (int i = 0; i < 2; ++i) {
        threshold[i] = load_as<__m512>(of_bin + 16 * i);
        below[i] = load_as<__m512i>(count + 16 * i);
      }
    }
    I of_spread(F v) const {
      const __m512i b = to(bin(v)), base = _mm512_permutex2var_epi32(below[0], b, below[1]);
      const __m512 limit = _mm512_permutex2var_ps(threshold[0], b, threshold[1]);
      const __mmask16 above = _mm512_cmp_ps_mask(v, limit, _CMP_NLE_UQ);
      return from(_mm512_mask_add_epi32(base, above, base, _mm512_set1_epi32(1)));
    }

   private:
    static I bin(F v) { return from(_mm512_cvttps_epi32(v * 15.5f + 15.5f)); }
  };

  static std::uint32_t largest(I magnitudes) {
    return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(to(magnitudes)));
  }
  static I look_up(Table16 table, I index) {
    return from(_mm512_permutexvar_epi32(to(index), table));
  }

  static constexpr int kTileRows = 12, kTileVectors = 2;  // 24 sums in 32 registers
  static F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  /// sums[j] = all lanes of x[j]: halves of each first, then as quarters of one register.
  static void sum4(const F (&x)[4], float (&sums)[4]) {
    __m256 half[4];
    for (int j = 0; j < 4; ++j)
      half[j] = _mm256_add_ps(_mm512_castps512_ps256(x[j]), _mm512_extractf32x8_ps(x[j], 1));
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
  }
  static void arrange(float* x, std::int64_t n) noexcept {
    const __m512i kOrder = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (std::int64_t i = 0; i < n; i += 16)
      _mm512_storeu_ps(x + i, _mm512_permutexvar_ps(kOrder, _mm512_loadu_ps(x + i)));
  }

 private:
#if defined(__AVX512VBMI__)
  // Unpacking works inside 16 bytes; these qwords are arranged so that the results are in order.
  static __m512i in_turn(const std::uint8_t* codes) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm512_permutexvar_epi64(order, load_as<__m512i>(codes));
  }
  template <int kMantissa>
  struct Words {
    __m512i of[2];
    Words(const ByteTable& table, __m512i code) {
      const __m512i index = kMantissa < 0 ? _mm512_abs_epi8(code) : code;  // bit 6 picks of a pair
      __m512i low = _mm512_permutex2var_epi8(table.low[0], index, table.low[1]);
      const __m512i above = _mm512_permutex2var_epi8(table.high[0], index, table.high[1]);
      const __m512i sign = _mm512_set1_epi8(-128);
      // 0x78: the first, turned where both others are set.
      __m512i high = _mm512_ternarylogic_epi64(above, code, sign, 0x78);
      if constexpr (kMantissa < 0) {
        const __mmask64 least = _mm512_cmpeq_epi8_mask(code, sign);
        low = _mm512_mask_mov_epi8(low, least, table.least[0]);
        high = _mm512_mask_mov_epi8(high, least, table.least[1]);
      }
      of[0] = _mm512_unpacklo_epi8(low, high), of[1] = _mm512_unpackhi_epi8(low, high);
    }
  };
#endif
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  static __m512i to(I x) { return reinterpret_cast<__m512i>(x); }
  static I from(__m512i x) { return reinterpret_cast<I>(x); }
  static __m512d half(const void* p, int i) {
    return load_as<__m512d>(static_cast<const double*>(p) + 8 * i);
  }
  static F joined(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static __m256 odd(__m512d x) {
    const __m256 cut = _mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), x, _CMP_NEQ_OQ);
    const __m256i bits = _mm256_castps_si256(cut);
    return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
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
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    note(_mm512_zextsi128_si512(bytes));
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(~0x4000)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    note(_mm512_loadu_si512(codes));
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const __m256i*>(codes) + half;
      __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from)), 7);
      words = _mm512_and_si512(words, _mm512_set1_epi16(~0x4000));
      w[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
      w[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
    }
  }
  F value(F sum) const { return sum * 256.0f; }
  bool met_nan() const { return _mm512_cmpeq_epi8_mask(largest_, _mm512_set1_epi8(0x7F)) != 0; }

 private:
  void note(__m512i bytes) {
    largest_ = _mm512_max_epu8(largest_, _mm512_and_si512(bytes, _mm512_set1_epi8(0x7F)));
  }
  __m512i largest_ = _mm512_setzero_si512();
};

/// e5m2 is the upper half of an fp16 number.
template <>
struct CodeReader<Codes::f8_e5m2> {
  static constexpr bool kScalesSum = true;
  explicit CodeReader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }
};

/// Sixteen nibbles, those of two 32-bit words a and b in turn, so that one shift finds them all:
//   lane                0   1   2   3   4   5  ...  14  15
//   word                a   b   a   b   a   b       a   b
//   shift, high first   4   4   0   0  12  12      24  24
//   shift, low first    0   0   4   4   8   8      28  28     element  0 8 1 9 2 10 ... 7 15
//   (arrange)
// The table is one register, and vpermps reads the low four bits of a lane: no mask.
template <Packing kPacking>
requires(kPacking != Packing::whole) struct NibbleReader<kPacking> {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values) : values_(_mm512_loadu_ps(values)), table_(values_) {}
  void set_scale(float scale) {
    set_table([=](F x) { return x * splat(scale); });
  }
  template <class Make>
  void set_table(Make make) {
    table_ = make(values_);
  }
  F read(const std::uint8_t* codes) {
    const __m512i kShifts =
        kPacking == Packing::low_first
            ? _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28)
            : _mm512_setr_epi32(4, 4, 0, 0, 12, 12, 8, 8, 20, 20, 16, 16, 28, 28, 24, 24);
    const __m512i words = _mm512_set1_epi64(load_as<long long>(codes));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, kShifts), table_);
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }

 private:
  __m512 values_, table_;
};

}  // namespace
}  // namespace stowage
