// SPDX-License-Identifier: Apache-2.0
// Eight numbers of x: two registers.
#pragma once
#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

struct Floats {
  float32x4_t of[2];
};
struct Numbers {
  int32x4_t of[2];
};

/// The low byte of each, the first four of them to `first`, the others to `last`.
inline void put_bytes(Numbers numbers, std::int8_t* first, std::int8_t* last) {
  const int16x8_t words =
      vuzp1q_s16(vreinterpretq_s16_s32(numbers.of[0]), vreinterpretq_s16_s32(numbers.of[1]));
  const uint32x2_t fours = vreinterpret_u32_s8(vmovn_s16(words));
  store_as(first, vget_lane_u32(fours, 0));
  store_as(last, vget_lane_u32(fours, 1));
}
inline std::int32_t total(Numbers numbers) {
  return vaddvq_s32(vaddq_s32(numbers.of[0], numbers.of[1]));
}

/// Eight numbers of kIn.
template <Dtype kIn>
Floats load_eight(const void* x) {
  const uint16x8_t eight = load_as<uint16x8_t>(x);
  if constexpr (kIn == Dtype::f16)
    return {{vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(eight))),
             vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(eight)))}};
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(eight), 16)),
           vreinterpretq_f32_u32(vshll_high_n_u16(eight, 16))}};
}
inline std::uint32_t largest_magnitude(Floats x) {
  const auto size = [](float32x4_t four) { return vreinterpretq_u32_f32(vabsq_f32(four)); };
  return vmaxvq_u32(vmaxq_u32(size(x.of[0]), size(x.of[1])));
}
/// x times a power of two, to the nearest integers.
inline Numbers integers_of(Floats x, float power) {
  return {
      {vcvtnq_s32_f32(vmulq_n_f32(x.of[0], power)), vcvtnq_s32_f32(vmulq_n_f32(x.of[1], power))}};
}
/// X = 256 high + low.
inline Numbers high_of(Numbers numbers) {
  return {{vrshrq_n_s32(numbers.of[0], 8), vrshrq_n_s32(numbers.of[1], 8)}};
}
inline Numbers low_of(Numbers numbers, Numbers high) {
  return {{vsubq_s32(numbers.of[0], vshlq_n_s32(high.of[0], 8)),
           vsubq_s32(numbers.of[1], vshlq_n_s32(high.of[1], 8))}};
}
/// Those at even places, then the others.
inline Numbers part(Numbers numbers) {
  return {{vuzp1q_s32(numbers.of[0], numbers.of[1]), vuzp2q_s32(numbers.of[0], numbers.of[1])}};
}

}  // namespace
}  // namespace stowage
