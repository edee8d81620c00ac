// SPDX-License-Identifier: Apache-2.0
// The vocabulary that the kernels are written in: kWidth lanes of fp32 and int32, in the compiler's
// vector types, so that it runs on any CPU. An instruction set defines kWidth, includes this file
// and derives its `Lanes`, replacing what it can do better; results are the same bits everywhere,
// but for what only products use. Every lane holds one element. Memory needs no alignment.
#pragma once
#include <cstdint>

#include "stowage/descriptor.h"

namespace stowage {
namespace {

/// Where in its byte code i lies, from the lowest bit.
template <Packing kPacking>
constexpr int shift_of(int i) {
  static_assert(kPacking != Packing::whole);
  return (kPacking == Packing::high_first) == (i % 2 == 0) ? 4 : 0;
}

typedef float F __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t I __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t U __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t H __attribute__((vector_size(4 * kWidth)));  // two to a lane, low half first

constexpr std::uint32_t kSign = 0x80000000, kInfinity = 0x7F800000, kQuietNan = 0x7FC00000;

inline F as_float(I bits) { return reinterpret_cast<F>(bits); }
inline I as_int(F x) { return reinterpret_cast<I>(x); }
inline I splat(std::int32_t x) { return x - I{}; }
inline F splat(float x) { return x - F{}; }
inline I shift_right(I x, int count) {
  return reinterpret_cast<I>(reinterpret_cast<U>(x) >> count);
}
inline I magnitude(F x) { return as_int(x) & 0x7FFFFFFF; }
inline I sign(F x) { return as_int(x) & static_cast<std::int32_t>(kSign); }
inline I min(I a, I b) { return a < b ? a : b; }
inline I max(I a, I b) { return a > b ? a : b; }
inline I as_pairs(H halves) { return reinterpret_cast<I>(halves); }
inline H as_halves(I pairs) { return reinterpret_cast<H>(pairs); }
inline H max(H a, H b) { return a > b ? a : b; }
inline I is_nan(I magnitude) { return magnitude > static_cast<std::int32_t>(kInfinity); }

/// Drops `count` low bits of non-negative numbers, rounding to nearest, ties to even.
inline I round_shift(I x, int count) {
  const U bits = reinterpret_cast<U>(x), half = (1u << (count - 1)) - 1 + U{};
  return reinterpret_cast<I>((bits + half + (bits >> count & 1u)) >> count);
}

template <class T>
T load_as(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void store_as(void* to, T value) {
  __builtin_memcpy(to, &value, sizeof(T));
}

/// fp32 to the bits of fp16 or bf16 in the low half of each lane: nearest even, overflow to
/// infinity, every NaN the positive quiet one.
inline I bf16_bits(F x) {
  const I rounded = round_shift(as_int(x), 16);
  return is_nan(magnitude(x)) ? splat(0x7FC0) : rounded;
}
//   fp32  s eeeeeeee mmmmmmmmmm ....13 bits....    bias 127
//   fp16  s    eeeee mmmmmmmmmm                    bias 15: 112 less
inline I f16_bits(F x) {
  const I a = magnitude(x);
  const I normal = round_shift(a, 13) - (112 << 10);
  // Below 2^-14 the grid is 2^-24, which is that of fp32 numbers next to 0.5.
  const I subnormal = as_int(as_float(a) + 0.5f) - as_int(splat(0.5f));
  I bits = a < (113 << 23) ? subnormal : normal;
  bits = a >= (143 << 23) ? splat(0x7C00) : bits;  // 2^16 and above, infinity too
  bits = is_nan(a) ? splat(0x7E00) : bits | shift_right(sign(x), 16);
  return bits;
}
inline F f16_value(I bits) {
  const I a = bits & 0x7FFF, normal = (a << 13) + (112 << 23);
  const F subnormal = __builtin_convertvector(a, F) * 0x1p-24f;
  I value = a < 0x400 ? as_int(subnormal) : normal;
  value = a >= 0x7C00 ? normal + (112 << 23) : value;  // infinity and NaN
  return as_float(value | ((bits & 0x8000) << 16));
}

//   e4m3  s eeee mmm   bias 7; 0x7F is NaN, no infinity
//   e5m2  s eeeee mm   bias 15; 0x7C is infinity, above it NaN
template <int kMantissa>
F float8_value(I code) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15, kShift = 23 - kMantissa;
  const I a = code & 0x7F, normal = (a << kShift) + ((127 - kBias) << 23);
  const F subnormal = __builtin_convertvector(a, F) * (kMantissa == 3 ? 0x1p-9f : 0x1p-16f);
  const I sign = (code & 0x80) << 24, value = a < (1 << kMantissa) ? as_int(subnormal) : normal;
  if constexpr (kMantissa == 3)  // of either sign, the one quiet NaN: steps rely on it
    return as_float(a == 0x7F ? splat(static_cast<std::int32_t>(kQuietNan)) : value | sign);
  // The exponent of infinity and NaN is all ones here too.
  return as_float((a >= 0x7C ? normal + ((127 - kBias) << 23) : value) | sign);
}

struct PortableLanes {
  static I load_i8(const void* p) { return widen<std::int8_t>(p); }
  /// kWidth nibbles of kWidth / 2 bytes, in the order of the packing. Upper bits are anything.
  template <Packing kPacking>
  static I load_nibbles(const void* p) {
    I nibbles;
    for (int i = 0; i < kWidth; ++i)
      nibbles[i] = static_cast<const std::uint8_t*>(p)[i / 2] >> shift_of<kPacking>(i);
    return nibbles;
  }
  static F load_e4m3(const void* p) { return float8_value<3>(widen<std::uint8_t>(p)); }
  static F load_e5m2(const void* p) { return float8_value<2>(widen<std::uint8_t>(p)); }
  static F load_f32(const void* p) { return load_as<F>(p); }
  /// from[index], for each lane.
  static F gather(const float* from, I index) {
    F x;
    for (int i = 0; i < kWidth; ++i) x[i] = from[index[i]];
    return x;
  }
  static F load_bf16(const void* p) { return as_float(widen<std::uint16_t>(p) << 16); }
  static F load_f16(const void* p) { return f16_value(widen<std::uint16_t>(p)); }
  /// Rounded to nearest even.
  static F load_f64(const void* p) {
    F x;
    for (int i = 0; i < kWidth; ++i)
      x[i] = static_cast<float>(load_as<double>(static_cast<const double*>(p) + i));
    return x;
  }
  /// Rounded to odd: cut, and the last bit set where anything was cut off. Rounding that once more,
  /// to at least two bits less, gives what rounding the double once would have given. Finite
  /// doubles stay finite.
  static F load_f64_odd(const void* p) {
    I x;
    for (int i = 0; i < kWidth; ++i) {
      const double wide = load_as<double>(static_cast<const double*>(p) + i);
      x[i] = __builtin_bit_cast(std::int32_t, round_to_odd(wide));
    }
    return as_float(x);
  }

  static void store_u8(void* p, I x) { narrow<std::uint8_t>(p, x); }
  static void store_u16(void* p, I x) { narrow<std::uint16_t>(p, x); }
  /// x times a power of two, plus much larger y: rounded once.
  static F add_scaled(F x, float power, F y) { return x * splat(power) + y; }
  /// Bits of a where those of the mask are set, else of b.
  template <std::int32_t kMask>
  static I select(I a, I b) {
    return (a & kMask) | (b & ~kMask);
  }
  /// The low half of each lane, shifted left by kLow, plus the high half, shifted by kHigh, as far
  /// as the low half of the lane holds it. Both are below 2^15.
  template <int kLow, int kHigh>
  static I add_halves(I x) {
    return (x << kLow) + (shift_right(x, 16) << kHigh);
  }
  /// The low bytes of the halves of a, then of b, all of which are below 256: 4 kWidth bytes.
  static void store_low_bytes(void* p, I a, I b) {
    const H halves[2] = {as_halves(a), as_halves(b)};
    for (int i = 0; i < 4 * kWidth; ++i)
      static_cast<std::uint8_t*>(p)[i] =
          static_cast<std::uint8_t>(halves[i / (2 * kWidth)][i % (2 * kWidth)]);
  }
  /// The low four bits of each lane, packed as load_nibbles reads them.
  template <Packing kPacking>
  static void store_nibbles(void* p, I x) {
    for (int i = 0; i < kWidth; i += 2)
      static_cast<std::uint8_t*>(p)[i / 2] = static_cast<std::uint8_t>(
          x[i] << shift_of<kPacking>(0) | x[i + 1] << shift_of<kPacking>(1));
  }
  /// The same of four vectors, whose lanes are below 16.
  template <Packing kPacking>
  static void store_nibbles4(void* p, const I (&x)[4]) {
    for (int j = 0; j < 4; ++j)
      store_nibbles<kPacking>(static_cast<std::uint8_t*>(p) + j * kWidth / 2, x[j]);
  }
  static void store_f32(void* p, F x) { store_as(p, x); }
  static void store_f64(void* p, F x) {
    for (int i = 0; i < kWidth; ++i) store_as(static_cast<double*>(p) + i, double{x[i]});
  }
  /// As bf16_bits() and f16_bits().
  static void store_bf16(void* p, F x) { narrow<std::uint16_t>(p, bf16_bits(x)); }
  static void store_f16(void* p, F x) { narrow<std::uint16_t>(p, f16_bits(x)); }

  /// Numbers and quiet NaNs, 2 kWidth of them.
  static void store_bf16_pair(void* p, F a, F b) {
    narrow<std::uint16_t>(p, round_shift(as_int(a), 16));
    narrow<std::uint16_t>(static_cast<std::uint16_t*>(p) + kWidth, round_shift(as_int(b), 16));
  }

  /// Sixteen entries of 16 bits, from the low halves of lanes; store_looked_up() writes those that
  /// kNibbleStep nibbles name, in the order of the packing.
  static constexpr int kNibbleStep = 8;
  struct WordTable {
    std::uint16_t entries[16];
  };
  static WordTable word_table(const I (&words)[16 / kWidth]) {
    WordTable table;
    for (int i = 0; i < 16; ++i)
      table.entries[i] = static_cast<std::uint16_t>(words[i / kWidth][i % kWidth]);
    return table;
  }
  template <Packing kPacking>
  static void store_looked_up(void* p, const WordTable& table, const std::uint8_t* nibbles) {
    auto* out = static_cast<char*>(p);
    for (int i = 0; i < kNibbleStep / 2; ++i, out += 4) {
      store_as(out, table.entries[nibbles[i] >> shift_of<kPacking>(0) & 15]);
      store_as(out + 2, table.entries[nibbles[i] >> shift_of<kPacking>(1) & 15]);
    }
  }
  /// Whether there are tables of two groups, each for half of the nibbles of a step
  /// (two_tables()).
  static constexpr bool kHasTwoTables = false;
  /// Whether there is store_float8(), 32 codes by a table of mantissas (WidenFloat8), and
  /// store_looked_up() of 64 codes by a table of 128 (WidenByTable).
  static constexpr bool kHasFloat8 = false, kHasByteTable = false;
  /// Whether there are load_numbers() and what else short groups of such codes need
  /// (WidenNumbers).
  static constexpr bool kHasNumbers = false;
  /// Whether an instruction rounds normal numbers to bf16, so that a table of results pays late.
  static constexpr bool kRoundsQuickly = false;

  /// How many of 15 ascending thresholds lie strictly below each lane; NaN is above all.
  struct Ranks {
    F thresholds[15];
    explicit Ranks(const float* ascending) {
      for (int i = 0; i < 15; ++i) thresholds[i] = splat(ascending[i]);
    }
    I of(F v) const {
      I rank = splat(15);
      for (const F& threshold : thresholds) rank += v <= threshold;  // true is -1
      return rank;
    }
  };
  /// The same where no two thresholds are closer than 1/15, for numbers in [-1, 1] or next to it.
  struct SpreadRanks : Ranks {
    using Ranks::Ranks;
    I of_spread(F v) const { return of(v); }
  };

  static std::uint32_t largest(I magnitudes) {
    std::int32_t most = 0;
    for (int i = 0; i < kWidth; ++i) most = magnitudes[i] > most ? magnitudes[i] : most;
    return static_cast<std::uint32_t>(most);
  }

  /// Sixteen entries of 32 bits, looked up by the low four bits of each lane.
  struct Table16 {
    std::int32_t entries[16];
  };
  static Table16 load_table(const void* sixteen) { return load_as<Table16>(sixteen); }
  static I look_up(const Table16& table, I index) {
    I found;
    for (int i = 0; i < kWidth; ++i) found[i] = table.entries[index[i] & 15];
    return found;
  }

  /// Rows and vectors of a tile that are summed at once: 8 sums in 16 registers.
  static constexpr int kTileRows = 2, kTileVectors = 4;
  /// a * b + c, rounded once or twice: products have a bound, not one definition.
  static F multiply_add(F a, F b, F c) { return a * b + c; }
  /// sums[j] = all lanes of x[j], of which there are four.
  static void sum4(const F (&x)[4], float (&sums)[4]) {
    for (int j = 0; j < 4; ++j) sums[j] = (x[j][0] + x[j][2]) + (x[j][1] + x[j][3]);
  }
  /// x in the order in which CodeReader reads 4-bit codes; n is a multiple of kLinearPad.
  static void arrange(float* /*x*/, std::int64_t /*n*/) noexcept {}

 private:
  template <class T>
  static I widen(const void* p) {
    I x{};
    for (int i = 0; i < kWidth; ++i) x[i] = load_as<T>(static_cast<const T*>(p) + i);
    return x;
  }
  template <class T>
  static void narrow(void* p, I x) {
    for (int i = 0; i < kWidth; ++i) store_as(static_cast<T*>(p) + i, static_cast<T>(x[i]));
  }
  static float round_to_odd(double wide) {
    float near = static_cast<float>(wide);
    if (static_cast<double>(near) == wide || wide != wide) return near;
    auto bits = __builtin_bit_cast(std::uint32_t, near);
    const bool away =
        wide < 0 ? static_cast<double>(near) < wide : static_cast<double>(near) > wide;
    if (away) --bits;  // the next one towards zero; infinity becomes the largest number
    return __builtin_bit_cast(float, bits | 1);
  }
};

/// How dot products read codes: linear_dot-inl.h has the portable forms, which an instruction set
/// may specialize beside its lanes.
template <Codes kCodes>
struct CodeReader;
template <Packing kPacking>
struct NibbleReader;

}  // namespace
}  // namespace stowage
