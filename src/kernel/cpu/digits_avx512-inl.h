// SPDX-License-Identifier: Apache-2.0
// Dense codes as digits, by AVX512-VBMI: eight codes, which begin with a byte, go to a register's
// 64 bits, and each of its bytes takes eight bits from where its code begins.
#pragma once
#include "kernel/cpu/linear_bytes_whole-inl.h"

namespace stowage {
namespace {

template <Codes kCodes>
requires(is_dense(kCodes)) struct DigitReader<kCodes> {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int kMore = 1 << (kBits - 1);
  __m512i places, shifts;
  DigitReader() {
    alignas(64) std::uint8_t bytes[64], bits[64];
    for (int i = 0; i < 64; ++i) {
      bytes[i] = static_cast<std::uint8_t>(i / 8 * kBits + i % 8);
      bits[i] = static_cast<std::uint8_t>(i % 8 * kBits);
    }
    places = _mm512_load_si512(bytes);
    shifts = _mm512_load_si512(bits);
  }
  [[gnu::always_inline]] Bytes read(const std::uint8_t* codes) const {
    constexpr __mmask8 kRead = (1 << kBits) - 1;  // of 64 bits each
    const __m512i eights = _mm512_permutexvar_epi8(places, _mm512_maskz_loadu_epi64(kRead, codes));
    return _mm512_multishift_epi64_epi8(shifts, eights) & spread_byte((1 << kBits) - 1);
  }
};

}  // namespace
}  // namespace stowage
