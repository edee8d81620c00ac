// SPDX-License-Identifier: Apache-2.0
// Registers of 128 bits.
#pragma once
#include "kernel/cpu/dequantize-inl.h"

namespace stowage {
namespace {

using Bytes = int8x16_t;
inline Bytes spread_byte(int byte) { return vdupq_n_s8(static_cast<std::int8_t>(byte)); }
inline Bytes repeat(const std::int8_t* sixteen) { return vld1q_s8(sixteen); }
inline Bytes low_nibbles(Bytes x) { return vandq_s8(x, vdupq_n_s8(15)); }
inline Bytes high_nibbles(Bytes x) {
  return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4));
}
template <int kBits>
Bytes left_in_lanes(Bytes x) {
  return vreinterpretq_s8_s32(vshlq_n_s32(vreinterpretq_s32_s8(x), kBits));
}
inline Bytes look_up(Bytes table, Bytes places) {
  return vqtbl1q_s8(table, vreinterpretq_u8_s8(places));
}
inline Bytes add_lanes(Bytes a, Bytes b) {
  return vreinterpretq_s8_s32(vaddq_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}
inline F to_floats(Bytes lanes) { return Lanes::from(vcvtq_f32_s32(vreinterpretq_s32_s8(lanes))); }
inline F less_product(F a, F b, F c) {
  return Lanes::from(vfmsq_f32(Lanes::to(c), Lanes::to(a), Lanes::to(b)));
}
/// To each of the sums: four digits times four bytes.
inline Bytes add_fours(Bytes sums, Bytes digits, Bytes bytes) {
  return vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sums), digits, bytes));
}
/// What is added to signed codes so that they are digits.
constexpr int kMoreThanSigned = 0;
/// Whether codes of a byte in long groups are quicker so than in fp32, one conversion for each.
constexpr bool kWholeInLong = true;

/// A number of each group of a block, in the lanes of its columns.
template <int kGroups>
F spread(const float* numbers) {
  static_assert(kGroups <= 2);
  if constexpr (kGroups <= 1) return Lanes::from(vld1q_dup_f32(numbers));
  const float32x2_t both = vld1_f32(numbers);
  return Lanes::from(vcombine_f32(vdup_lane_f32(both, 0), vdup_lane_f32(both, 1)));
}
/// The same of integers.
template <int kGroups>
F spread(const std::int8_t* numbers) {
  float as_floats[2] = {};
  for (int i = 0; i < (kGroups < 2 ? 1 : kGroups); ++i)
    as_floats[i] = static_cast<float>(numbers[i]);
  return spread<kGroups>(as_floats);
}

}  // namespace
}  // namespace stowage
