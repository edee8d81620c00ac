// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes in AVX-512 F, BW, VL and DQ.
#pragma once
#include <immintrin.h>

namespace stowage {
namespace {
constexpr int kWidth = 16;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/lanes-inl.h"

namespace stowage {
namespace {

struct Lanes : PortableLanes {
  static I load_u8(const void* p) { return from(_mm512_cvtepu8_epi32(load_as<__m128i>(p))); }
  static I load_i8(const void* p) { return from(_mm512_cvtepi8_epi32(load_as<__m128i>(p))); }
  // One byte to a qword: its high nibble to the low dword, its low nibble to the high one.
  static I load_nibbles(const void* p) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    return from(_mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32)));
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
  static void store_nibbles(void* p, I x) {
    const __m512i pairs = _mm512_or_si512(_mm512_slli_epi32(to(x), 4), _mm512_srli_epi64(to(x), 32));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
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

  using Table16 = __m512i;
  static Table16 load_table(const void* sixteen) { return load_as<__m512i>(sixteen); }
  static I look_up(Table16 table, I index) {
    return from(_mm512_permutexvar_epi32(to(index), table));
  }

 private:
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
    return _mm256_castsi256_ps(
        _mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
  }
};

}  // namespace
}  // namespace stowage
