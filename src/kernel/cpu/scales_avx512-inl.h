// SPDX-License-Identifier: Apache-2.0
// Scales that AVX-512 expands many at a time: four records of q4_k, and, with VBMI, 64 codes of a
// map.
#pragma once
#include <immintrin.h>

#include "kernel/cpu/scales-inl.h"

namespace stowage {
namespace {

/// Scales and offsets of four records of q4_k, two records to a register.
struct FourOfQ4K {
  F scales[2], offsets[2];
  [[gnu::always_inline]] explicit FourOfQ4K(__m512i records) {
    const __m512i low = _mm512_set1_epi8(0x0F);
    // Of each four words of 32 bits the second is of scales, the third of offsets: six bits of the
    // first four counts, and above them two of the last four, whose low ones the fourth word has.
    const __m512i first = _mm512_and_si512(records, _mm512_set1_epi8(0x3F));
    const __m512i above = _mm512_and_si512(_mm512_srli_epi32(records, 2), _mm512_set1_epi8(0x30));
    const __m512i fourth = _mm512_shuffle_epi32(records, _MM_PERM_DDDD);
    const __m512i below = _mm512_and_si512(
        _mm512_srlv_epi32(fourth, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 4, 0))), low);
    const __m512i last = _mm512_or_si512(above, below);
    const __m512i order =
        _mm512_setr_epi32(1, 17, 5, 21, 9, 25, 13, 29, 2, 18, 6, 22, 10, 26, 14, 30);
    const __m512i counts = _mm512_permutex2var_epi32(first, order, last);
    // The first two words of 16 bits of each record, eight times each.
    alignas(64) std::uint16_t places[32];
    for (int i = 0; i < 32; ++i) places[i] = static_cast<std::uint16_t>(i / 8 * 8);
    const __m512i of_scales = _mm512_load_si512(places);
    const __m512i of_offsets = _mm512_add_epi16(of_scales, _mm512_set1_epi16(1));
    const __m512i scale = _mm512_permutexvar_epi16(of_scales, records);
    const __m512i offset = _mm512_permutexvar_epi16(of_offsets, records);
    scales[0] = counted(_mm512_castsi512_si128(counts), _mm512_castsi512_si256(scale));
    scales[1] = counted(_mm512_extracti32x4_epi32(counts, 1), _mm512_extracti64x4_epi64(scale, 1));
    offsets[0] = counted(_mm512_extracti32x4_epi32(counts, 2), _mm512_castsi512_si256(offset));
    offsets[1] =
        counted(_mm512_extracti32x4_epi32(counts, 3), _mm512_extracti64x4_epi64(offset, 1));
  }

 private:
  /// 16 bytes as numbers, times others of f16.
  [[gnu::always_inline]] static F counted(__m128i counts, __m256i numbers) {
    const __m512 made = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(counts));
    return _mm512_mul_ps(_mm512_cvtph_ps(numbers), made);
  }
};

inline void expand_q4_k(const KeptScales& kept, std::int64_t first, std::int64_t n,
                        float* out) noexcept {
  using superblocks::Q4K;
  constexpr std::int64_t kEach = 4 * Q4K::kSteps;
  const std::int64_t whole = first % Q4K::kSteps == 0 ? n / kEach * kEach : 0;
  const auto* records =
      static_cast<const std::uint8_t*>(kept.parts[0]) + first / Q4K::kSteps * Q4K::kRecord;
  for (std::int64_t i = 0; i < whole; i += kEach) {
    const FourOfQ4K made(_mm512_loadu_si512(records + i / Q4K::kSteps * Q4K::kRecord));
    for (int j = 0; j < 2; ++j) {
      Lanes::store_f32(out + i + 16 * j, made.scales[j]);
      Lanes::store_f32(out + kExpandedScales + i + 16 * j, made.offsets[j]);
    }
  }
  if (whole < n) expand_super<Q4K>(kept, first + whole, n - whole, out + whole);
}

constexpr ScaleKernels wide_scale_kernels() {
  ScaleKernels kernels = scale_kernels();
  kernels.q4_k = &expand_q4_k;
  return kernels;
}

#if defined(__AVX512VBMI__)
/// 256 numbers of fp32, as four tables of their bytes.
class ByteTables {
 public:
  explicit ByteTables(const float* numbers) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      __m512i sixteens[4];
      for (int i = 0; i < 4; ++i) sixteens[i] = _mm512_loadu_si512(numbers + 64 * quarter + 16 * i);
      for (int b = 0; b < 4; ++b) {
        alignas(64) std::uint8_t places[64];  // byte b of each of 32 numbers
        for (int i = 0; i < 64; ++i) places[i] = static_cast<std::uint8_t>(4 * (i % 32) + b);
        const __m512i of = _mm512_load_si512(places);
        const __m512i low = _mm512_permutex2var_epi8(sixteens[0], of, sixteens[1]);
        const __m512i high = _mm512_permutex2var_epi8(sixteens[2], of, sixteens[3]);
        tables_[b][quarter] = _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
      }
    }
  }
  /// numbers[i] = those of codes 16 i to 16 i + 15.
  void look_up(const std::uint8_t* codes, __m512 (&numbers)[4]) const {
    // Unpacking works inside 16 bytes: codes lie so that the results are in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i places = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
    const __mmask64 upper = _mm512_movepi8_mask(places);
    __m512i bytes[4];
    for (int b = 0; b < 4; ++b)
      bytes[b] = _mm512_mask_blend_epi8(
          upper, _mm512_permutex2var_epi8(tables_[b][0], places, tables_[b][1]),
          _mm512_permutex2var_epi8(tables_[b][2], places, tables_[b][3]));
    const __m512i low[2] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]),
                            _mm512_unpackhi_epi8(bytes[0], bytes[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(bytes[2], bytes[3]),
                             _mm512_unpackhi_epi8(bytes[2], bytes[3])};
    for (int half = 0; half < 2; ++half) {
      numbers[2 * half] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low[half], high[half]));
      numbers[2 * half + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low[half], high[half]));
    }
  }

 private:
  __m512i tables_[4][4];
};

/// expand_mapped(), whose numbers are looked up by bytes where there are enough of them.
inline void expand_mapped_by_bytes(const KeptScales& kept, std::int64_t first, std::int64_t n,
                                   float* out) noexcept {
  constexpr std::int64_t kStep = 64, kFewest = 256;  // that tables are worth making for
  static_assert(kNestedBlock % kStep == 0);
  const std::int64_t begin = first % kStep == 0 && n >= kFewest ? n / kStep * kStep : 0;
  if (begin != 0) {
    const ByteTables tables(static_cast<const float*>(kept.parts[2]));
    const __m512 offset = _mm512_set1_ps(*static_cast<const float*>(kept.parts[3]));
    const auto* codes = static_cast<const std::uint8_t*>(kept.parts[0]);
    const auto* outer = static_cast<const float*>(kept.parts[1]);
    for (std::int64_t i = 0; i < begin; i += kStep) {
      const __m512 scale = _mm512_set1_ps(outer[(first + i) / kNestedBlock]);
      __m512 numbers[4];
      tables.look_up(codes + first + i, numbers);
      for (int j = 0; j < 4; ++j)
        _mm512_storeu_ps(out + i + 16 * j, _mm512_add_ps(_mm512_mul_ps(numbers[j], scale), offset));
    }
  }
  if (begin < n) expand_mapped(kept, first + begin, n - begin, out + begin);
}
#endif

}  // namespace
}  // namespace stowage
