// SPDX-License-Identifier: Apache-2.0
// Dense codes as digits, by AVX512-VBMI: eight codes, which begin with a byte, go to a register's
// 64 bits, and each of its bytes takes eight bits from where its code begins. Codes of any number
// of bits go by the same instructions.
#pragma once
#include "kernel/cpu/linear_bytes_whole-inl.h"

namespace stowage {
namespace {

struct DenseReader {
  const int bits;
  __m512i places, shifts, all;
  explicit DenseReader(const BytesDotTask& task) : bits(task.bits), all(spread_byte(mask())) {
    alignas(64) std::uint8_t from[64], by[64];
    for (int i = 0; i < 64; ++i) {
      from[i] = static_cast<std::uint8_t>(i / 8 * bits + i % 8);
      by[i] = static_cast<std::uint8_t>(i % 8 * bits);
    }
    places = _mm512_load_si512(from);
    shifts = _mm512_load_si512(by);
  }
  int more() const { return 1 << (bits - 1); }
  [[gnu::always_inline]] Bytes read(const std::uint8_t* codes) const {
    const auto of_64_bits = static_cast<__mmask8>(mask());
    const __m512i eights =
        _mm512_permutexvar_epi8(places, _mm512_maskz_loadu_epi64(of_64_bits, codes));
    return _mm512_multishift_epi64_epi8(shifts, eights) & all;
  }

 private:
  int mask() const { return (1 << bits) - 1; }
};
template <Codes kCodes>
using DenseReaderOf = DenseReader;

}  // namespace
}  // namespace stowage
