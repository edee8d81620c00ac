// SPDX-License-Identifier: Apache-2.0
// Dense codes as digits, by NEON: sixteen codes begin with a byte; each lane of 16 bits takes the
// two bytes that its code lies in, and moves it down.
#pragma once
#include "kernel/cpu/linear_bytes_whole-inl.h"

namespace stowage {
namespace {

template <Codes kCodes>
struct DenseReaderOf {
  static constexpr int kBits = bits_of(kCodes);
  static constexpr int bits = kBits;
  static constexpr int more() { return 1 << (kBits - 1); }
  uint8x16_t places[2];
  int16x8_t down[2];
  explicit DenseReaderOf(const BytesDotTask& /*task*/) {
    std::uint8_t bytes[32];
    std::int16_t shifts[16];
    for (int i = 0; i < 16; ++i) {
      const int byte = i * kBits / 8;
      bytes[2 * i] = static_cast<std::uint8_t>(place_of(byte));
      bytes[2 * i + 1] = static_cast<std::uint8_t>(place_of(byte + 1));
      shifts[i] = static_cast<std::int16_t>(-(i * kBits % 8));
    }
    for (int half = 0; half < 2; ++half) {
      places[half] = vld1q_u8(bytes + 16 * half);
      down[half] = vld1q_s16(shifts + 8 * half);
    }
  }
  [[gnu::always_inline]] Bytes read(const std::uint8_t* codes) const {
    const uint8x16_t string = load(codes);
    uint8x16_t moved[2];
    for (int half = 0; half < 2; ++half)
      moved[half] = vreinterpretq_u8_u16(
          vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(string, places[half])), down[half]));
    return vreinterpretq_s8_u8(
        vandq_u8(vuzp1q_u8(moved[0], moved[1]), vdupq_n_u8((1 << kBits) - 1)));
  }

 private:
  static constexpr int kString = 2 * kBits, kPart = kString < 8 ? 4 : 8;  // bytes
  /// Where a byte of a string is when its first kPart bytes and its last ones are loaded; those
  /// behind it are nowhere.
  static constexpr int place_of(int byte) {
    if (byte < kPart) return byte;
    return byte < kString ? byte - (kString - kPart) + 8 : 255;
  }
  [[gnu::always_inline]] static uint8x16_t load(const std::uint8_t* codes) {
    using Part = std::conditional_t<kPart == 4, std::uint32_t, std::uint64_t>;
    return vcombine_u8(vcreate_u8(load_as<Part>(codes)),
                       vcreate_u8(load_as<Part>(codes + kString - kPart)));
  }
};

}  // namespace
}  // namespace stowage
