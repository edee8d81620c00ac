// SPDX-License-Identifier: Apache-2.0
// How dot products read resting codes, in the portable form. An instruction set includes this file
// and specializes what it does better before it includes linear-inl.h.
#pragma once
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/lanes-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

/// Codes of 8 bits and more. Their scale multiplies the sum of a group: one product for many.
template <Codes kCodes>
struct Reader {
  static constexpr bool kScalesSum = true;
  explicit Reader(const float* /*values*/) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) { return decode<kCodes>(codes); }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = decode<kCodes>(codes + v * kWidth * bits_of(kCodes) / 8);
  }
  /// What a sum of read values stands for.
  F value(F sum) const { return sum; }
};

/// Codes of 4 bits. The scale multiplies the table: values are those of dequantize, bit for bit.
template <Codes kCodes>
requires(is_four_bit(kCodes)) struct Reader<kCodes> {
  static constexpr bool kScalesSum = false;
  explicit Reader(const float* values) : values_(values) { set_scale(1.0f); }
  void set_scale(float scale) {
    set_scale(scale, [](F x) { return x; });
  }
  template <class Round>
  void set_scale(float scale, Round round) {
    F scaled[16 / kWidth];
    for (int i = 0; i < 16 / kWidth; ++i)
      scaled[i] = round(Lanes::load_f32(values_ + i * kWidth) * splat(scale));
    table_ = Lanes::load_table(scaled);
  }
  F read(const std::uint8_t* codes) {
    return as_float(Lanes::look_up(table_, Lanes::load_nibbles(codes)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }

 private:
  const float* values_;
  Lanes::Table16 table_;
};

}  // namespace
}  // namespace stowage
