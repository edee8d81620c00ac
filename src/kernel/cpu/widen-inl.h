// SPDX-License-Identifier: Apache-2.0
// The steps of dequantizing, once for each instruction set: a Widen turns kStep codes that share a
// scale into values. Wherever few results are possible, it is the results that are scaled and
// rounded, once for a group, and the codes only choose among them.
#pragma once
#include <cstdint>

#include "kernel/cpu/formats-inl.h"
#include "kernel/dequantize.h"
#include "kernel/tables.h"

namespace stowage {
namespace {

inline F quiet(F x) {
  return is_nan(magnitude(x)) ? as_float(splat(static_cast<std::int32_t>(kQuietNan))) : x;
}

/// The bits of bf16 or f16 in the low half of each lane.
template <Dtype kOut>
I half_bits(F x) {
  return kOut == Dtype::bf16 ? bf16_bits(x) : f16_bits(x);
}
/// The same of numbers, infinite ones among them.
template <Dtype kOut>
I half_bits_of_numbers(F x) {
  return kOut == Dtype::bf16 ? round_shift(as_int(x), 16) : f16_bits(x);
}

/// x, rounded to nearest even as kOut has it.
template <Dtype kOut>
F round_as(F x) {
  if constexpr (kOut == Dtype::bf16) return as_float(bf16_bits(x) << 16);
  if constexpr (kOut == Dtype::f16) return f16_value(f16_bits(x));
  return x;
}

/// The same of a dtype that is known later; fp32 as it is.
inline F round_as(F x, Dtype to) {
  if (to == Dtype::bf16) return round_as<Dtype::bf16>(x);
  return to == Dtype::f16 ? round_as<Dtype::f16>(x) : x;
}

template <Dtype kOut>
void store(void* to, F x) {
  if constexpr (kOut == Dtype::bf16) {
    Lanes::store_bf16(to, x);
  } else if constexpr (kOut == Dtype::f16) {
    Lanes::store_f16(to, x);
  } else if constexpr (kOut == Dtype::f32) {
    Lanes::store_f32(to, quiet(x));
  } else {
    Lanes::store_f64(to, quiet(x));
  }
}

/// The same of what is no NaN but the quiet one.
template <Dtype kOut>
void store_quiet(void* to, F x) {
  if constexpr (kOut == Dtype::f32)
    Lanes::store_f32(to, x);
  else
    Lanes::store_f64(to, x);
}

template <Codes kCodes>
F decode(const void* codes) {
  if constexpr (kCodes == Codes::f32) return Lanes::load_f32(codes);
  if constexpr (kCodes == Codes::bf16) return Lanes::load_bf16(codes);
  if constexpr (kCodes == Codes::f16) return Lanes::load_f16(codes);
  if constexpr (kCodes == Codes::f8_e4m3) return Lanes::load_e4m3(codes);
  if constexpr (kCodes == Codes::f8_e5m2) return Lanes::load_e5m2(codes);
  if constexpr (kCodes == Codes::int8) return __builtin_convertvector(Lanes::load_i8(codes), F);
  static_assert(bits_of(kCodes) > 8 || kCodes == Codes::f8_e4m3 || kCodes == Codes::f8_e5m2 ||
                    kCodes == Codes::int8,
                "a format of 8 bits must be decoded here");
}

/// What does not change from group to group: the sixteen values of a 4-bit format; for fp8, values
/// of every mantissa, normal and then subnormal, and the exponent bits that bf16 has for them.
template <Codes kCodes>
struct CodeValues {
  explicit CodeValues(const void* /*given*/) {}
};
template <Codes kCodes>
requires(is_four_bit(kCodes)) struct CodeValues<kCodes> {
  F all[16 / kWidth];
  explicit CodeValues(const void* given) {
    const float* values =
        given != nullptr ? static_cast<const float*>(given) : four_bit_tables(kCodes).values;
    for (int i = 0; i < 16 / kWidth; ++i) all[i] = Lanes::load_f32(values + i * kWidth);
  }
  CodeValues times(float scale) const {
    CodeValues made = *this;
    for (F& some : made.all) some *= splat(scale);
    return made;
  }
  CodeValues less(float zero) const {
    CodeValues made = *this;
    for (F& some : made.all) some -= splat(zero);
    return made;
  }
  CodeValues rounded(Dtype to) const {
    CodeValues made = *this;
    for (F& some : made.all) some = round_as(some, to);
    return made;
  }
};

template <Codes kCodes>
requires(is_float8(kCodes)) struct CodeValues<kCodes> {
  F all[16 / kWidth];
  I exponents[16 / kWidth];
  explicit CodeValues(const void* /*given*/) {
    constexpr int kMantissas = 1 << mantissa_of(kCodes);
    constexpr int kOne = 128 - least_exponent(kCodes);  // the exponent field of 1.0
    std::uint8_t codes[16];
    std::int32_t bits[16];
    for (int i = 0; i < 16; ++i) {
      const bool normal = i < kMantissas;
      codes[i] = static_cast<std::uint8_t>(i % kMantissas + (normal ? kOne * kMantissas : 0));
      bits[i] = normal ? kOne << 7 : 0;
    }
    for (int i = 0; i < 16 / kWidth; ++i) {
      all[i] = decode<kCodes>(codes + i * kWidth);
      exponents[i] = load_as<I>(bits + i * kWidth);
    }
  }
};

/// Codes of 8 bits and more: decode, multiply, round.
template <Codes kCodes, Dtype kOut>
struct Widen {
  static constexpr int kStep = kWidth;
  Widen(const CodeValues<kCodes>&, float scale) : scale_(splat(scale)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    const F value = decode<kCodes>(codes);
    if constexpr (bits_of(kCodes) > 8)
      store<kOut>(out, value);  // plain casts have no scale
    else
      store<kOut>(out, value * scale_);
  }

 private:
  F scale_;
};
template <Codes kCodes>
requires(bits_of(kCodes) == 8) struct Widen<kCodes, Dtype::bf16> {
  static constexpr int kStep = 2 * kWidth;
  Widen(const CodeValues<kCodes>&, float scale)
      : scale_(splat(scale)), has_nan_(!is_integer(kCodes) || !__builtin_isfinite(scale)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    F a = decode<kCodes>(codes) * scale_, b = decode<kCodes>(codes + kWidth) * scale_;
    if (has_nan_) a = quiet(a), b = quiet(b);
    Lanes::store_bf16_pair(out, a, b);
  }

 private:
  F scale_;
  bool has_nan_;
};

/// To fp32: of e4m3, whose one NaN is read as the quiet one, and of integers by a finite scale
/// nothing has to be made quiet.
template <Codes kCodes>
requires(bits_of(kCodes) == 8) struct Widen<kCodes, Dtype::f32> {
  static constexpr int kStep = kWidth;
  Widen(const CodeValues<kCodes>&, float scale)
      : scale_(splat(scale)),
        is_quiet_((is_integer(kCodes) || kCodes == Codes::f8_e4m3) && __builtin_isfinite(scale)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    const F value = decode<kCodes>(codes) * scale_;
    Lanes::store_f32(out, is_quiet_ ? value : quiet(value));
  }

 private:
  F scale_;
  bool is_quiet_;
};

/// Codes of 8 bits that stand for their distance from `zero`.
template <Codes kCodes, Dtype kOut>
struct WidenFrom {
  static constexpr int kStep = kWidth;
  WidenFrom(const CodeValues<kCodes>&, float scale, float zero)
      : scale_(splat(scale)), zero_(splat(zero)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    store<kOut>(out, (decode<kCodes>(codes) - zero_) * scale_);
  }

 private:
  F scale_, zero_;
};

/// What the codes of 4 bits of one group stand for, not rounded yet.
template <Codes kCodes, Zero kZero>
struct Products {
  CodeValues<kCodes> of;
  bool numbers;  // none is NaN
  [[gnu::always_inline]] Products(const CodeValues<kCodes>& values, const Run& run, std::int64_t g)
      : Products(values, run.scales[g], run, g) {}
  [[gnu::always_inline]] Products(const CodeValues<kCodes>& values, float scale)
      : of(values.times(scale)), numbers(__builtin_isfinite(scale)) {
    static_assert(kZero == Zero::none);
  }

 private:
  [[gnu::always_inline]] Products(const CodeValues<kCodes>& values, float scale, const Run& run,
                                  std::int64_t g)
      : of(values), numbers(__builtin_isfinite(scale)) {
    if constexpr (kZero == Zero::code) of = values.less(run.zeros[g]).times(scale);
    if constexpr (kZero == Zero::none) of = values.times(scale);
    if constexpr (kZero == Zero::offset) {
      of = values.times(scale).less(run.offsets[g]);
      numbers = numbers && __builtin_isfinite(run.offsets[g]);
    }
    if constexpr (kZero == Zero::rounded) {
      const Dtype to = run.rounds;
      of = values.less(run.offsets[g]).rounded(to).times(scale).rounded(to);
      numbers = numbers && __builtin_isfinite(run.offsets[g]);
    }
  }
};

/// These rounded to 16 bits, in the low halves of lanes.
template <Dtype kOut>
struct Rounded {
  I of[16 / kWidth];
  template <Codes kCodes, Zero kZero>
  [[gnu::always_inline]] explicit Rounded(const Products<kCodes, kZero>& products) {
    constexpr int kHalf = kZero == Zero::none && has_sign(kCodes) ? 8 / kWidth : 0;  // vectors
    for (int i = 0; i < 16 / kWidth; ++i) {
      if (!products.numbers)
        of[i] = half_bits<kOut>(products.of.all[i]);
      else if (kHalf != 0 && i >= kHalf)
        of[i] = of[i - kHalf] ^ 0x8000;
      else
        of[i] = half_bits_of_numbers<kOut>(products.of.all[i]);
    }
  }
};

/// Codes of 8 bits whose products with the scale are multiplied by `factor`.
template <Codes kCodes, Dtype kOut>
struct WidenTwice {
  static constexpr int kStep = kWidth;
  WidenTwice(const CodeValues<kCodes>&, float scale, float factor)
      : scale_(splat(scale)), factor_(splat(factor)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    store<kOut>(out, decode<kCodes>(codes) * scale_ * factor_);
  }

 private:
  F scale_, factor_;
};

/// Codes of 4 bits: multiply and round the sixteen values, then look up.
template <Codes kCodes, Dtype kOut>
requires(is_four_bit(kCodes) && bytes_of(kOut) > 2) struct Widen<kCodes, kOut> {
  static constexpr int kStep = kWidth;
  template <Zero kZero>
  explicit Widen(Products<kCodes, kZero> products) : table_(table_of(products)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    const I nibbles = Lanes::load_nibbles<packing_of(kCodes)>(codes);
    store_quiet<kOut>(out, as_float(Lanes::look_up(table_, nibbles)));
  }

 private:
  template <Zero kZero>
  static Lanes::Table16 table_of(Products<kCodes, kZero>& products) {
    if (!products.numbers)
      for (F& some : products.of.all) some = quiet(some);
    return Lanes::load_table(products.of.all);
  }
  Lanes::Table16 table_;
};
template <Codes kCodes, Dtype kOut>
requires(is_four_bit(kCodes) && bytes_of(kOut) == 2) struct Widen<kCodes, kOut> {
  static constexpr int kStep = Lanes::kNibbleStep;
  template <Zero kZero>
  explicit Widen(const Products<kCodes, kZero>& products)
      : table_(Lanes::word_table(Rounded<kOut>(products).of)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    Lanes::store_looked_up<packing_of(kCodes)>(out, table_, codes);
  }

 private:
  Lanes::WordTable table_;
};
/// Two groups of half a step each.
template <Codes kCodes, Dtype kOut, class L = Lanes>
struct WidenTwo {
  static constexpr int kStep = L::kNibbleStep;
  template <Zero kZero>
  WidenTwo(const Products<kCodes, kZero>& a, const Products<kCodes, kZero>& b)
      : tables_(L::two_tables(Rounded<kOut>(a).of, Rounded<kOut>(b).of)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    L::template store_looked_up<packing_of(kCodes)>(out, tables_, codes);
  }

 private:
  typename L::TwoTables tables_;
};

/// The values of codes before they are scaled.
template <Codes kCodes>
struct Unscaled {
  explicit Unscaled(const CodeValues<kCodes>&) {}
  F operator()(const std::uint8_t* codes) const { return decode<kCodes>(codes); }
};
template <Codes kCodes>
requires(is_four_bit(kCodes) && !is_integer(kCodes)) struct Unscaled<kCodes> {
  explicit Unscaled(const CodeValues<kCodes>& values) : table_(Lanes::load_table(values.all)) {}
  F operator()(const std::uint8_t* codes) const {
    return as_float(Lanes::look_up(table_, Lanes::load_nibbles<packing_of(kCodes)>(codes)));
  }

 private:
  Lanes::Table16 table_;
};
template <Codes kCodes>
requires(is_four_bit(kCodes) && is_integer(kCodes)) struct Unscaled<kCodes> {
  static_assert(first_integer(kCodes) == least_integer(kCodes));
  explicit Unscaled(const CodeValues<kCodes>&) {}
  F operator()(const std::uint8_t* codes) const {
    const I nibbles = Lanes::load_nibbles<packing_of(kCodes)>(codes) & 15;  // above them is noise
    return __builtin_convertvector(nibbles + first_integer(kCodes), F);
  }
};

/// Codes each of which has the scale and the zero of the group that is named for it.
template <Codes kCodes, Dtype kOut>
struct WidenNamed {
  WidenNamed(const CodeValues<kCodes>& values, const float* scales, const NamedGroups& named)
      : value_(values), scales_(scales), zeros_(named.zeros), last_(splat(named.last)) {}
  void operator()(const std::uint8_t* codes, void* out, const std::int32_t* groups) const {
    const I group = max(min(load_as<I>(groups), last_), I{});
    F value = value_(codes);
    if (zeros_ != nullptr) value -= Lanes::gather(zeros_, group);
    store<kOut>(out, value * Lanes::gather(scales_, group));
  }

 private:
  Unscaled<kCodes> value_;
  const float *scales_, *zeros_;
  I last_;
};

/// Codes each of which has a scale and a zero of its own, numbers of kType, to which their distance
/// from the zero is rounded, and the product.
template <Codes kCodes, Dtype kOut, Dtype kType>
struct WidenEach {
  explicit WidenEach(const CodeValues<kCodes>& values) : value_(values) {}
  void operator()(const std::uint8_t* codes, void* out, const float* scales,
                  const float* zeros) const {
    const F distance = round_as<kType>(value_(codes) - Lanes::load_f32(zeros));
    const F product = distance * Lanes::load_f32(scales);
    store<kOut>(out, kType == kOut ? product : round_as<kType>(product));  // which rounds itself
  }

 private:
  Unscaled<kCodes> value_;
};

/// fp8 to bf16 under a scale that keeps all results normal: rounding depends on the mantissa alone,
/// so a table by mantissa (normal ones, then subnormal ones) and a sum of exponents are enough.
template <Codes kCodes, class L = Lanes>
struct WidenFloat8 {
  static constexpr int kStep = 32, kMantissa = mantissa_of(kCodes);
  static bool fits(float scale) {
    const float size = __builtin_fabsf(scale);
    return size >= 0x1p-100f && size <= 0x1p100f;
  }
  WidenFloat8(const CodeValues<kCodes>& values, float scale) : plain_(values, scale) {
    I table[16 / kWidth];
    for (int i = 0; i < 16 / kWidth; ++i)
      table[i] =
          half_bits_of_numbers<Dtype::bf16>(values.all[i] * splat(scale)) - values.exponents[i];
    table_ = L::word_table(table);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    if (L::template store_float8<kMantissa>(out, table_, codes)) return;
    for (int i = 0; i < kStep; i += plain_.kStep)  // one is infinite or NaN
      plain_(codes + i, static_cast<std::uint16_t*>(out) + i);
  }

 private:
  Widen<kCodes, Dtype::bf16> plain_;
  typename L::WordTable table_;
};

}  // namespace
}  // namespace stowage
