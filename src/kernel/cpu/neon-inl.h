// SPDX-License-Identifier: Apache-2.0
// What NEON (AArch64) does its own way: four lanes, and readers of codes.
#pragma once
#include <arm_neon.h>

namespace stowage {
namespace {
constexpr int kWidth = 4;
}  // namespace
}  // namespace stowage
#include "kernel/cpu/lanes-inl.h"

namespace stowage {
namespace {

/// The nibbles of bytes, in the order of the packing.
template <Packing kPacking>
uint8x16_t nibbles_in_order(uint8x8_t bytes) {
  const uint8x8_t low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
  const bool low_first = kPacking == Packing::low_first;
  const uint8x8x2_t both = vzip_u8(low_first ? low : high, low_first ? high : low);
  return vcombine_u8(both.val[0], both.val[1]);
}

struct Lanes : PortableLanes {
  static I load_i8(const void* p) { return from(vmovl_s16(vget_low_s16(vmovl_s8(four(p))))); }
  template <Packing kPacking>
  static I load_nibbles(const void* p) {
    constexpr int a = shift_of<kPacking>(0), b = shift_of<kPacking>(1);
    const int32x4_t down = {-a, -b, -8 - a, -8 - b};
    return from(vreinterpretq_s32_u32(vshlq_u32(vdupq_n_u32(load_as<std::uint16_t>(p)), down)));
  }
  // Sign-extended and shifted, an e4m3 code is the fp16 number of its value times 2^-8:
  //   s eeee mmm  ->  s s0eeee mmm0000000  less the second s
  static F load_e4m3(const void* p) {
    const int8x8_t codes = four(p);
    const uint16x8_t halves = vreinterpretq_u16_s16(
        vandq_s16(vshll_n_s8(codes, 7), vdupq_n_s16(static_cast<short>(0xBFFF))));
    const int16x8_t sizes = vmovl_s8(vand_s8(codes, vdup_n_s8(0x7F)));
    const uint16x8_t nan = vceqq_s16(sizes, vdupq_n_s16(0x7F));
    return to_f32(vget_low_u16(vbslq_u16(nan, vdupq_n_u16(0x7E00), halves))) * 256.0f;
  }
  static F load_e5m2(const void* p) {  // the high byte of an fp16 number
    return to_f32(vget_low_u16(vshll_n_u8(vreinterpret_u8_s8(four(p)), 8)));
  }
  static F load_bf16(const void* p) {
    return as_float(from(vreinterpretq_s32_u32(vshll_n_u16(load_as<uint16x4_t>(p), 16))));
  }
  static F load_f16(const void* p) { return to_f32(load_as<uint16x4_t>(p)); }
  static F load_f64(const void* p) {
    const auto* x = static_cast<const double*>(p);
    return from(
        vcvt_high_f32_f64(vcvt_f32_f64(load_as<float64x2_t>(x)), load_as<float64x2_t>(x + 2)));
  }
  static F load_f64_odd(const void* p) {
    const auto* x = static_cast<const double*>(p);
    return from(
        vcvtx_high_f32_f64(vcvtx_f32_f64(load_as<float64x2_t>(x)), load_as<float64x2_t>(x + 2)));
  }

  static void store_u8(void* p, I x) {
    const uint16x4_t words = vmovn_u32(bits(x));
    store_as(p, vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0));
  }
  static void store_u16(void* p, I x) { store_as(p, vmovn_u32(bits(x))); }
  static F add_scaled(F x, float power, F y) { return multiply_add(x, splat(power), y); }
  static void store_low_bytes(void* p, I a, I b) { store_as(p, vuzp1q_u8(bytes(a), bytes(b))); }
  template <Packing kPacking>
  static void store_nibbles(void* p, I x) {
    constexpr int a = shift_of<kPacking>(0), b = shift_of<kPacking>(1);
    const int32x4_t up = {a, b, 8 + a, 8 + b};
    const uint32x4_t placed = vshlq_u32(vandq_u32(bits(x), vdupq_n_u32(15)), up);
    store_as(p, static_cast<std::uint16_t>(vaddvq_u32(placed)));
  }
  template <Packing kPacking>
  static void store_nibbles4(void* p, const I (&x)[4]) {
    const uint16x8_t first = vuzp1q_u16(words(x[0]), words(x[1]));
    const uint16x8_t second = vuzp1q_u16(words(x[2]), words(x[3]));
    const uint16x8_t pairs =  // the first of two in the low byte
        vreinterpretq_u16_u8(vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second)));
    if constexpr (kPacking == Packing::low_first)
      store_as(p, vorr_u8(vmovn_u16(pairs), vshrn_n_u16(pairs, 4)));
    else
      store_as(p, vorr_u8(vshl_n_u8(vmovn_u16(pairs), 4), vshrn_n_u16(pairs, 8)));
  }
  static void store_f64(void* p, F x) {
    store_as(p, vcvt_f64_f32(vget_low_f32(to(x))));
    store_as(static_cast<double*>(p) + 2, vcvt_high_f64_f32(to(x)));
  }
  static void store_bf16(void* p, F x) { store_u16(p, bf16_bits(x)); }
  static void store_f16(void* p, F x) {
    const uint16x4_t halves = vreinterpret_u16_f16(vcvt_f16_f32(to(x)));
    const uint16x4_t number = vmovn_u32(vceqq_f32(to(x), to(x)));
    store_as(p, vbsl_u16(number, halves, vdup_n_u16(0x7E00)));
  }
  static void store_bf16_pair(void* p, F a, F b) { store_high_halves(p, near(a), near(b)); }
  static void store_normal_pair(void* p, F a, F b) { store_bf16_pair(p, a, b); }

  static constexpr int kNibbleStep = 32;
  struct WordTable {  // their bytes, for each half of the nibbles
    uint8x16_t low[2], high[2];
  };
  static WordTable word_table(const I (&entries)[4]) { return two_tables(entries, entries); }
  static constexpr bool kHasTwoTables = true;
  using TwoTables = WordTable;
  static TwoTables two_tables(const I (&first)[4], const I (&second)[4]) {
    return {{low_bytes(first), low_bytes(second)}, {high_bytes(first), high_bytes(second)}};
  }
  template <Packing kPacking>
  static void store_looked_up(void* p, const WordTable& table, const std::uint8_t* nibbles) {
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t places = nibbles_in_order<kPacking>(vld1_u8(nibbles + 8 * half));
      const uint8x16_t low = vqtbl1q_u8(table.low[half], places);
      const uint8x16_t high = vqtbl1q_u8(table.high[half], places);
      char* out = static_cast<char*>(p) + 32 * half;
      store_as(out, vzip1q_u8(low, high));
      store_as(out + 16, vzip2q_u8(low, high));
    }
  }

  static constexpr bool kHasFloat8 = true;
  // The code  s e.. m..  has the bits: table entry of m.. + e.. in its place, and the sign.
  template <int kMantissa>
  static bool store_float8(void* p, const WordTable& table, const std::uint8_t* codes) {
    constexpr int kLow = (1 << kMantissa) - 1, kHigh = 0x7F - kLow;
    if (!are_numbers<kMantissa>(codes)) return false;
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t code = vld1q_u8(codes + 16 * half);
      const uint8x16_t size = vandq_u8(code, vdupq_n_u8(0x7F));
      const uint8x16_t subnormal = vcgtq_u8(vdupq_n_u8(kLow + 1), size);
      const uint8x16_t places =
          vorrq_u8(vandq_u8(code, vdupq_n_u8(kLow)), vandq_u8(subnormal, vdupq_n_u8(kLow + 1)));
      const uint8x16_t low = vqtbl1q_u8(table.low[0], places);
      const uint8x16_t high = vqtbl1q_u8(table.high[0], places);
      const uint8x16_t exponent = vandq_u8(code, vdupq_n_u8(kHigh));
      const uint8x16_t sign = vandq_u8(code, vdupq_n_u8(0x80));
      const auto value = [](uint8x16_t entry, uint8x8_t above, uint8x8_t negative) {
        const uint16x8_t sum =
            vaddq_u16(vreinterpretq_u16_u8(entry), vshll_n_u8(above, 7 - kMantissa));
        return veorq_u16(sum, vshll_n_u8(negative, 8));
      };
      char* out = static_cast<char*>(p) + 32 * half;
      store_as(out, value(vzip1q_u8(low, high), vget_low_u8(exponent), vget_low_u8(sign)));
      store_as(out + 16, value(vzip2q_u8(low, high), vget_high_u8(exponent), vget_high_u8(sign)));
    }
    return true;
  }

  static constexpr bool kHasNumbers = true;
  /// What load_numbers() gives are values over this.
  template <int kMantissa>
  static constexpr float kUnit = kMantissa == 3 ? 256.0f : 1.0f;
  /// Whether 32 codes with so many bits of mantissa are finite numbers; without any: integers.
  template <int kMantissa>
  static bool are_numbers(const std::uint8_t* codes) {
    if constexpr (kMantissa < 0) return true;
    const uint8x16_t size = vdupq_n_u8(0x7F);
    const uint8x16_t most =
        vmaxq_u8(vandq_u8(vld1q_u8(codes), size), vandq_u8(vld1q_u8(codes + 16), size));
    return vmaxvq_u8(most) <= (kMantissa == 3 ? 0x7E : 0x7B);
  }
  template <int kMantissa>
  static void load_numbers(const std::uint8_t* codes, F& a, F& b) {
    if constexpr (kMantissa < 0) {
      const int16x8_t numbers = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes)));
      a = from(vcvtq_f32_s32(vmovl_s16(vget_low_s16(numbers))));
      b = from(vcvtq_f32_s32(vmovl_high_s16(numbers)));
      return;
    }
    const uint16x8_t halves = fp16_of<kMantissa>(vld1_u8(codes));
    a = to_f32(vget_low_u16(halves));
    b = to_f32(vget_high_u16(halves));
  }
  static void store_high_halves(void* p, F a, F b) {
    store_as(p, vuzp2q_u16(words(as_int(a)), words(as_int(b))));
  }
  /// Codes of fp8 as numbers of fp16, as in load_e4m3() and load_e5m2(), and none is NaN.
  template <int kMantissa>
  static uint16x8_t fp16_of(uint8x8_t codes) {
    if constexpr (kMantissa == 2) return vshll_n_u8(codes, 8);
    return vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vreinterpret_s8_u8(codes), 7)),
                     vdupq_n_u16(0xBFFF));
  }
  static F to_f32(uint16x4_t halves) { return from(vcvt_f32_f16(vreinterpret_f16_u16(halves))); }

  // Binary search. What is found so far is a rank among half, a quarter, ... of the thresholds.
  struct Ranks {
    F middle, quarters[2];
    uint8x16_t of_quarter;     // of each quarter the one in its middle,
    uint8x16x2_t of_eighth{};  // and of each eighth
    explicit Ranks(const float* ascending)
        : middle(splat(ascending[7])), quarters{splat(ascending[3]), splat(ascending[11])} {
      float inside[12];
      for (int i = 0; i < 4; ++i) inside[i] = ascending[4 * i + 1];
      for (int i = 0; i < 8; ++i) inside[4 + i] = ascending[2 * i];
      of_quarter = load_as<uint8x16_t>(inside);
      for (int i = 0; i < 2; ++i) of_eighth.val[i] = load_as<uint8x16_t>(inside + 4 + 4 * i);
    }
    I of(F v) const {
      const I half = not_above(v, middle);
      const F quarter = from(vbslq_f32(bits(half), to(quarters[0]), to(quarters[1])));
      I found = next(half + 1, not_above(v, quarter));
      found = next(found, not_above(v, floats(vqtbl1q_u8(of_quarter, places(found)))));
      return next(found, not_above(v, floats(vqtbl2q_u8(of_eighth, places(found)))));
    }

   private:
    static I not_above(F v, F threshold) {  // -1 where it is not; NaN is above all
      return from(vreinterpretq_s32_u32(vcleq_f32(to(v), to(threshold))));
    }
    static I next(I found, I not_above) { return found + found + 1 + not_above; }
    static F floats(uint8x16_t bytes) { return from(vreinterpretq_f32_u8(bytes)); }
  };
  struct SpreadRanks : Ranks {
    using Ranks::Ranks;
    I of_spread(F v) const { return of(v); }
  };

  static std::uint32_t largest(I magnitudes) { return vmaxvq_u32(bits(magnitudes)); }

  using Table16 = uint8x16x4_t;
  static Table16 load_table(const void* sixteen) { return load_as<Table16>(sixteen); }
  static I look_up(const Table16& table, I index) {
    return from(vreinterpretq_s32_u8(vqtbl4q_u8(table, places(index & 15))));
  }

  static constexpr int kTileRows = 6, kTileVectors = 4;  // 24 sums in 32 registers
  static F multiply_add(F a, F b, F c) { return from(vfmaq_f32(to(c), to(a), to(b))); }
  /// sums[j] = all lanes of x[j].
  static void sum4(const F (&x)[4], float (&sums)[4]) {
    store_as(sums, vpaddq_f32(vpaddq_f32(to(x[0]), to(x[1])), vpaddq_f32(to(x[2]), to(x[3]))));
  }

  static F from(float32x4_t x) { return reinterpret_cast<F>(x); }
  static I from(int32x4_t x) { return reinterpret_cast<I>(x); }
  static float32x4_t to(F x) { return reinterpret_cast<float32x4_t>(x); }
  static int32x4_t to(I x) { return reinterpret_cast<int32x4_t>(x); }
  static uint32x4_t bits(I x) { return reinterpret_cast<uint32x4_t>(x); }
  static uint16x8_t words(I x) { return reinterpret_cast<uint16x8_t>(x); }
  static uint8x16_t bytes(I x) { return reinterpret_cast<uint8x16_t>(x); }
  static int8x8_t four(const void* p) {
    return vreinterpret_s8_u32(vdup_n_u32(load_as<std::uint32_t>(p)));
  }

 private:
  /// Where in a table of 32 bits the bytes of these entries are.
  static uint8x16_t places(I entries) { return bytes(entries * 0x04040404 + 0x03020100); }
  /// Rounded to bf16, in the upper halves.
  static F near(F x) {
    const U whole = reinterpret_cast<U>(x);
    return reinterpret_cast<F>(whole + 0x7FFFu + (whole >> 16 & 1u));
  }
  static uint8x16_t low_bytes(const I (&entries)[4]) {
    return vuzp1q_u8(vuzp1q_u8(bytes(entries[0]), bytes(entries[1])),
                     vuzp1q_u8(bytes(entries[2]), bytes(entries[3])));
  }
  static uint8x16_t high_bytes(const I (&entries)[4]) {
    return vuzp1q_u8(vuzp2q_u8(bytes(entries[0]), bytes(entries[1])),
                     vuzp2q_u8(bytes(entries[2]), bytes(entries[3])));
  }
};

/// Through fp16, which has e4m3's numbers with 8 added to the exponent; NaN would become 480.
template <>
struct CodeReader<Codes::f8_e4m3> {
  static constexpr bool kScalesSum = true;
  explicit CodeReader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    const uint8x8_t four = vreinterpret_u8_s8(Lanes::four(codes));
    note(vcombine_u8(four, four));
    return Lanes::to_f32(vget_low_u16(Lanes::fp16_of<3>(four)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    const uint8x16_t all = vld1q_u8(codes);
    note(all);
    read8(vget_low_u8(all), w[0], w[1]);
    read8(vget_high_u8(all), w[2], w[3]);
  }
  F value(F sum) const { return sum * 256.0f; }
  bool met_nan() const { return vmaxvq_u8(largest_) == 0x7F; }

 private:
  static void read8(uint8x8_t codes, F& a, F& b) {
    const uint16x8_t halves = Lanes::fp16_of<3>(codes);
    a = Lanes::to_f32(vget_low_u16(halves));
    b = Lanes::to_f32(vget_high_u16(halves));
  }
  void note(uint8x16_t codes) { largest_ = vmaxq_u8(largest_, vandq_u8(codes, vdupq_n_u8(0x7F))); }
  uint8x16_t largest_ = vdupq_n_u8(0);
};

/// Of two formats whose numbers load_numbers() reads as they are.
template <Codes kCodes, int kMantissa>
struct NumberReader {
  static constexpr bool kScalesSum = true;
  explicit NumberReader(const float*) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) {
    if constexpr (kCodes == Codes::int8) return __builtin_convertvector(Lanes::load_i8(codes), F);
    return Lanes::load_e5m2(codes);
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    Lanes::load_numbers<kMantissa>(codes, w[0], w[1]);
    Lanes::load_numbers<kMantissa>(codes + 2 * kWidth, w[2], w[3]);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }
};
template <>
struct CodeReader<Codes::f8_e5m2> : NumberReader<Codes::f8_e5m2, 2> {
  using NumberReader::NumberReader;
};
template <>
struct CodeReader<Codes::int8> : NumberReader<Codes::int8, -1> {
  using NumberReader::NumberReader;
};

/// Sixteen at a time: each byte of their values has a table of its own.
template <Packing kPacking>
requires(kPacking != Packing::whole) struct NibbleReader<kPacking> {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values) {
    for (int i = 0; i < 4; ++i) values_[i] = Lanes::load_f32(values + i * kWidth);
    set_scale(1.0f);
  }
  void set_scale(float scale) {
    set_table([=](F x) { return x * splat(scale); });
  }
  template <class Make>
  void set_table(Make make) {
    uint8x16_t of[4];
    for (int i = 0; i < 4; ++i) of[i] = Lanes::bytes(as_int(make(values_[i])));
    const uint8x16_t even[2] = {vuzp1q_u8(of[0], of[1]), vuzp1q_u8(of[2], of[3])};
    const uint8x16_t odd[2] = {vuzp2q_u8(of[0], of[1]), vuzp2q_u8(of[2], of[3])};
    table_[0] = vuzp1q_u8(even[0], even[1]);
    table_[1] = vuzp1q_u8(odd[0], odd[1]);
    table_[2] = vuzp2q_u8(even[0], even[1]);
    table_[3] = vuzp2q_u8(odd[0], odd[1]);
  }
  F read(const std::uint8_t* codes) {
    F w[4];
    read8(vreinterpret_u8_u16(vdup_n_u16(load_as<std::uint16_t>(codes))), w);
    return w[0];
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) { read8(vld1_u8(codes), w); }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }

 private:
  [[gnu::always_inline]] void read8(uint8x8_t codes, F (&w)[4]) const {
    const uint8x16_t places = nibbles_in_order<kPacking>(codes);
    uint8x16_t bytes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = vqtbl1q_u8(table_[i], places);
    for (int i = 0; i < 2; ++i) {
      const uint16x8_t low = vreinterpretq_u16_u8(i == 0 ? vzip1q_u8(bytes[0], bytes[1])
                                                         : vzip2q_u8(bytes[0], bytes[1]));
      const uint16x8_t high = vreinterpretq_u16_u8(i == 0 ? vzip1q_u8(bytes[2], bytes[3])
                                                          : vzip2q_u8(bytes[2], bytes[3]));
      w[2 * i] = reinterpret_cast<F>(vzip1q_u16(low, high));
      w[2 * i + 1] = reinterpret_cast<F>(vzip2q_u16(low, high));
    }
  }
  F values_[4];
  uint8x16_t table_[4];
};

}  // namespace
}  // namespace stowage
