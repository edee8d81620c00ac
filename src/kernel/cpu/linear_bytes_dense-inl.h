// SPDX-License-Identifier: Apache-2.0
// The same products of densely packed codes, where AVX512-VBMI takes them apart: eight codes, which
// begin with a byte, go to a register's 64 bits, and each of its bytes takes eight bits from where
// its code begins. Digits are codes as they lie.
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

template <Codes kCodes>
void dense_dot(const BytesDotTask& task) noexcept {
  if (task.run.zeros != nullptr) return whole_groups<kCodes, Zero::code, 1, 1>(task);
  whole_groups<kCodes, Zero::none, 2, kTogetherInBytes>(task);
}

/// Of dense codes alone; x is arranged as for codes of a byte.
constexpr BytesKernels dense_kernels() {
  BytesKernels kernels{};
  for_every_codes([&]<Codes kCodes>() {
    if constexpr (is_dense(kCodes)) kernels.set(kCodes, &dense_dot<kCodes>, kForBytes);
  });
  return kernels;
}

}  // namespace
}  // namespace stowage
