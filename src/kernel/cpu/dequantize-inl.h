// SPDX-License-Identifier: Apache-2.0
// Dequantizing, once for each instruction set: runs are cut into groups and groups into steps;
// ragged ends are the same for all formats.
#pragma once
#include <cstdint>

#include "kernel/cpu/dense-inl.h"
#include "kernel/cpu/widen_table-inl.h"
#include "kernel/dequantize.h"

namespace stowage {
namespace {

/// Fewer than kStep elements, or 4-bit ones that begin in the middle of a byte: through a copy, so
/// that nothing outside the run is read or written.
template <Codes kCodes, Dtype kOut, class Step>
[[gnu::noinline]] void ragged(const Step& step, const std::uint8_t* codes, std::int64_t first,
                              std::int64_t n, char* out) {
  std::uint8_t padded[Step::kStep * bits_of(kCodes) / 8 + 1] = {};
  char values[Step::kStep * bytes_of(kOut)];
  const std::int64_t begin = first * bits_of(kCodes) / 8,
                     end = ((first + n) * bits_of(kCodes) + 7) / 8;
  __builtin_memcpy(padded, codes + begin, static_cast<std::size_t>(end - begin));
  step(padded, values);
  const bool odd = is_four_bit(kCodes) && first % 2 != 0;
  __builtin_memcpy(out, values + (odd ? bytes_of(kOut) : 0),
                   static_cast<std::size_t>(n) * bytes_of(kOut));
}

/// n elements of one group. Inlined, since a group may be two steps.
template <Codes kCodes, Dtype kOut, class Step>
[[gnu::always_inline]] inline void sweep(const Step& step, const std::uint8_t* codes,
                                         std::int64_t first, std::int64_t n, char* out) {
  if (is_four_bit(kCodes) && first % 2 != 0) {
    ragged<kCodes, kOut>(step, codes, first, 1, out);
    ++first, --n, out += bytes_of(kOut);
  }
  const std::uint8_t* from = codes + first * bits_of(kCodes) / 8;
  const std::int64_t whole = n - n % Step::kStep;
  for (std::int64_t i = 0; i < whole; i += Step::kStep)
    step(from + i * bits_of(kCodes) / 8, out + i * bytes_of(kOut));
  if (whole < n)
    ragged<kCodes, kOut>(step, codes, first + whole, n - whole, out + whole * bytes_of(kOut));
}

template <Codes kCodes, Dtype kOut>
[[gnu::always_inline]] inline void group(const CodeValues<kCodes>& values, float scale,
                                         const std::uint8_t* codes, std::int64_t first,
                                         std::int64_t n, char* out) {
  if constexpr (Lanes::kHasByteTable && bits_of(kCodes) == 8 && bytes_of(kOut) == 2) {
    using ByTable = WidenByTable<kCodes, kOut>;
    if (n >= ByTable::kWorthwhile && __builtin_isfinite(scale))
      return sweep<kCodes, kOut>(ByTable(values, scale), codes, first, n, out);
  }
  if constexpr (Lanes::kHasFloat8 && is_float8(kCodes) && kOut == Dtype::bf16) {
    using Float8 = WidenFloat8<kCodes>;
    if (Float8::fits(scale))
      return sweep<kCodes, kOut>(Float8(values, scale), codes, first, n, out);
  }
  if constexpr (is_four_bit(kCodes))
    sweep<kCodes, kOut>(Widen<kCodes, kOut>(Products<kCodes, Zero::none>(values, scale)), codes,
                        first, n, out);
  else
    sweep<kCodes, kOut>(Widen<kCodes, kOut>(values, scale), codes, first, n, out);
}

/// Calls body(group, first, n) for the elements of a run, by their groups.
template <class Body>
[[gnu::always_inline]] inline void for_each_group(const Run& run, const Body& body) {
  std::int64_t g = run.first / run.group;
  for (std::int64_t done = 0; done < run.n; ++g) {
    const std::int64_t first = run.first + done;
    const std::int64_t left = run.n - done, in_group = (g + 1) * run.group - first;
    const std::int64_t n = left < in_group ? left : in_group;
    body(g, first, n);
    done += n;
  }
}

/// Codes of 8 bits to bf16 by their groups. Short ones whose results are all numbers go through
/// fp32 in a loop that nothing interrupts, so that its constants stay in registers; those of half a
/// step by two.
template <Codes kCodes>
void dequantize_bytes(const CodeValues<kCodes>& values, const Run& run, char* out) {
  using Short = WidenNumbers<kCodes>;
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  const bool is_short = run.group % Short::kStep == 0 && run.group < Short::kWorthwhile;
  const bool is_half = 2 * run.group == Short::kStep;
  std::int64_t g = run.first / run.group, at = run.first;
  const std::int64_t end = run.first + run.n;
  if constexpr (Lanes::kRoundsQuickly && is_integer(kCodes))
    if (at == g * run.group && (is_half || run.group % Short::kStep == 0)) {
      const std::int64_t groups = (end - at) / run.group & (is_half ? -2 : -1);
      if (are_common(run.scales + g, groups)) {
        Short::widen_common(codes + at, run.scales + g, groups, run.group, out);
        g += groups, at += groups * run.group, out += 2 * groups * run.group;
      }
    }
  while (at < end) {
    if (is_half && at == g * run.group) {
      for (; at + Short::kStep <= end; at += Short::kStep, g += 2, out += 2 * Short::kStep)
        if (!Short::widen_halves(codes + at, run.scales + g, out)) break;
      if (at == end) return;
    }
    if (is_short && at == g * run.group) {
      for (; at + run.group <= end; at += run.group, ++g, out += 2 * run.group)
        if (!Short::widen(codes + at, run.scales[g], run.group, out)) break;
      if (at == end) return;
    }
    const std::int64_t next = (g + 1) * run.group, n = (next < end ? next : end) - at;
    group<kCodes, Dtype::bf16>(values, run.scales[g], codes, at, n, out);
    ++g, at += n, out += 2 * n;
  }
}

/// The same of fp8 in short groups whose scales are, most of them, powers of two.
template <Codes kCodes>
void dequantize_under_powers(const CodeValues<kCodes>& values, const Run& run, char* out) {
  using Powers = WidenByPowers<kCodes>;
  const Powers step;
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  const std::int64_t groups = 2 * run.group == Powers::kStep ? 2 : 1;
  const std::int64_t together = groups * run.group, end = run.first + run.n;
  std::int64_t g = run.first / run.group, at = run.first;
  const auto widen = [&] {  // some groups
    if (at != g * run.group || end - at < together) return false;
    const float first = run.scales[g], last = run.scales[g + groups - 1];
    for (std::int64_t i = 0; i < together; i += Powers::kStep)
      if (!step(codes + at + i, first, last, out + 2 * i)) return false;
    return true;
  };
  for (std::int64_t n; at < end; at += n, out += 2 * n) {
    if (widen()) {
      n = together, g += groups;
      continue;
    }
    const std::int64_t next = ++g * run.group;
    n = (next < end ? next : end) - at;
    dequantize_bytes<kCodes>(values, run.part(at - run.first, n), out);
  }
}
/// Whether a run is of such groups.
template <Codes kCodes>
bool is_under_powers(const Run& run) {
  using Powers = WidenByPowers<kCodes>;
  const bool fits = 2 * run.group == Powers::kStep || run.group % Powers::kStep == 0;
  return fits && run.group < WidenNumbers<kCodes>::kWorthwhile &&
         Powers::is_power(run.scales[run.first / run.group]);
}

/// Codes of 4 bits by their groups, of which two may make one step.
template <Codes kCodes, Dtype kOut, Zero kZero>
void dequantize_nibbles(const CodeValues<kCodes>& values, const Run& run, char* out) {
  constexpr bool kTwos = Lanes::kHasTwoTables && bytes_of(kOut) == 2;
  constexpr std::int64_t kStep = bytes_of(kOut) == 2 ? Lanes::kNibbleStep : kWidth;
  using Group = Products<kCodes, kZero>;
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  std::int64_t g = run.first / run.group, at = run.first;
  const std::int64_t end = run.first + run.n;
  const auto one = [&] {
    const std::int64_t next = (g + 1) * run.group, n = (next < end ? next : end) - at;
    sweep<kCodes, kOut>(Widen<kCodes, kOut>(Group(values, run, g)), codes, at, n, out);
    ++g, at += n, out += n * bytes_of(kOut);
  };
  if (at != g * run.group && at < end) one();
  if constexpr (Lanes::kRoundsQuickly && kOut == Dtype::bf16 && kZero != Zero::rounded)
    if (run.group % kStep == 0 || 2 * run.group == kStep) {
      const std::int64_t groups = (end - at) / run.group & (run.group < kStep ? -2 : -1);
      const WidenCommon<kCodes, kZero> common(values, run, g);
      if (common.fits(groups)) {
        common.widen(codes + at / 2, groups, run.group, out);
        g += groups, at += groups * run.group, out += 2 * groups * run.group;
      }
    }
  if constexpr (kTwos)
    if (2 * run.group == kStep)
      for (; at + kStep <= end; at += kStep, g += 2, out += kStep * bytes_of(kOut))
        WidenTwo<kCodes, kOut>(Group(values, run, g), Group(values, run, g + 1))(codes + at / 2,
                                                                                 out);
  if (run.group % kStep == 0)  // nothing ragged: constants stay in registers
    for (; at + run.group <= end; at += run.group, ++g) {
      const Widen<kCodes, kOut> step(Group(values, run, g));
      for (std::int64_t i = 0; i < run.group; i += kStep, out += kStep * bytes_of(kOut))
        step(codes + (at + i) / 2, out);
    }
  while (at < end) one();
}

/// n elements of an array, from place `skipped` on.
template <class T>
struct Placed {
  T of[kWidth] = {};
  Placed(const T* from, std::int64_t skipped, std::int64_t n) {
    __builtin_memcpy(of + skipped, from, static_cast<std::size_t>(n) * sizeof(T));
  }
};

/// Elements that each have an element of `beside` too, which begin with that of element 0 of the
/// codes. What is no whole step, or begins in the middle of a byte, goes through copies, as in
/// ragged().
template <Codes kCodes, Dtype kOut, class Step, class... Beside>
void sweep_beside(const Step& step, const Run& run, char* out, const Beside*... beside) {
  constexpr std::int64_t kBits = bits_of(kCodes);
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  const std::int64_t end = run.first + run.n;
  const auto copied = [&](std::int64_t at, std::int64_t n) {
    const std::int64_t odd = is_four_bit(kCodes) ? at % 2 : 0;
    std::uint8_t some[kWidth * kBits / 8] = {};
    char made[kWidth * bytes_of(kOut)];
    const std::int64_t begin = (at - odd) * kBits / 8, stop = ((at + n) * kBits + 7) / 8;
    __builtin_memcpy(some, codes + begin, static_cast<std::size_t>(stop - begin));
    step(some, made, Placed<Beside>(beside + at, odd, n).of...);
    __builtin_memcpy(out + (at - run.first) * bytes_of(kOut), made + odd * bytes_of(kOut),
                     static_cast<std::size_t>(n * bytes_of(kOut)));
  };
  std::int64_t at = run.first;
  if (is_four_bit(kCodes) && at % 2 != 0 && at < end) copied(at++, 1);
  for (; at + kWidth <= end; at += kWidth)
    step(codes + at * kBits / 8, out + (at - run.first) * bytes_of(kOut), beside + at...);
  if (at < end) copied(at, end - at);
}

/// Elements of groups that are named.
template <Codes kCodes, Dtype kOut>
void dequantize_named(const CodeValues<kCodes>& values, const Run& run, char* out) {
  const WidenNamed<kCodes, kOut> step(values, run.scales, *run.named);
  sweep_beside<kCodes, kOut>(step, run, out, run.named->groups);
}

/// Elements that have scales and zeros of their own.
template <Codes kCodes, Dtype kOut>
void dequantize_each(const CodeValues<kCodes>& values, const Run& run, char* out) {
  const auto in_type = [&]<Dtype kType>() {
    const WidenEach<kCodes, kOut, kType> step(values);
    sweep_beside<kCodes, kOut>(step, run, out, run.scales, run.offsets);
  };
  if (run.rounds == Dtype::bf16) return in_type.template operator()<Dtype::bf16>();
  if (run.rounds == Dtype::f16) return in_type.template operator()<Dtype::f16>();
  in_type.template operator()<Dtype::f32>();
}

template <Codes kCodes, Dtype kOut>
void dequantize(const Run& run, void* to) noexcept {
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  auto* out = static_cast<char*>(to);
  if constexpr (is_own_type(kCodes, kOut)) {
    __builtin_memcpy(out, codes + run.first * bytes_of(kOut),
                     static_cast<std::size_t>(run.n) * bytes_of(kOut));
    return;
  }
  const CodeValues<kCodes> values(run.values);
  if (run.scales == nullptr) return group<kCodes, kOut>(values, 1.0f, codes, run.first, run.n, out);
  if constexpr (may_be_named(kCodes))
    if (run.named != nullptr) return dequantize_named<kCodes, kOut>(values, run, out);
  if constexpr (is_four_bit(kCodes)) {
    if constexpr (may_have_zeros(kCodes))
      if (run.zeros != nullptr)
        return dequantize_nibbles<kCodes, kOut, Zero::code>(values, run, out);
    if constexpr (may_be_rounded(kCodes))
      if (run.rounds != Dtype::unknown) {
        if (run.group == 1) return dequantize_each<kCodes, kOut>(values, run, out);
        return dequantize_nibbles<kCodes, kOut, Zero::rounded>(values, run, out);
      }
    if constexpr (may_have_offsets(kCodes))
      if (run.offsets != nullptr)
        return dequantize_nibbles<kCodes, kOut, Zero::offset>(values, run, out);
    return dequantize_nibbles<kCodes, kOut, Zero::none>(values, run, out);
  } else {
    if constexpr (may_have_zeros(kCodes))
      if (run.zeros != nullptr)
        return for_each_group(run, [&](std::int64_t g, std::int64_t first, std::int64_t n) {
          const WidenFrom<kCodes, kOut> step(values, run.scales[g], run.zeros[g]);
          sweep<kCodes, kOut>(step, codes, first, n, out + (first - run.first) * bytes_of(kOut));
        });
    if constexpr (may_have_factor(kCodes))
      if (run.factor != 1.0f)
        return for_each_group(run, [&](std::int64_t g, std::int64_t first, std::int64_t n) {
          const WidenTwice<kCodes, kOut> step(values, run.scales[g], run.factor);
          sweep<kCodes, kOut>(step, codes, first, n, out + (first - run.first) * bytes_of(kOut));
        });
    if constexpr (Lanes::kHasByteTable && is_float8(kCodes) && kOut == Dtype::bf16)
      if (is_under_powers<kCodes>(run)) return dequantize_under_powers<kCodes>(values, run, out);
    if constexpr (Lanes::kHasNumbers && bits_of(kCodes) == 8 && kOut == Dtype::bf16)
      return dequantize_bytes<kCodes>(values, run, out);
    for_each_group(run, [&](std::int64_t g, std::int64_t first, std::int64_t n) {
      group<kCodes, kOut>(values, run.scales[g], codes, first, n,
                          out + (first - run.first) * bytes_of(kOut));
    });
  }
}

void unpack(const std::uint8_t* codes, int bits, std::int64_t n, std::int8_t* out) noexcept {
  with_bits(bits, [&]<int kBits>() { unpack_all<kBits>(codes, n, out); });
}

template <Codes kCodes>
constexpr void fill(DequantizeKernels& kernels) {
  auto& row = kernels.to[static_cast<int>(kCodes)];
  row[0] = &dequantize<kCodes, Dtype::f64>;
  row[1] = &dequantize<kCodes, Dtype::f32>;
  row[2] = &dequantize<kCodes, Dtype::bf16>;
  row[3] = &dequantize<kCodes, Dtype::f16>;
}
constexpr DequantizeKernels dequantize_kernels() {
  DequantizeKernels kernels{};
  for_all_codes([&]<Codes kCodes>() { fill<kCodes>(kernels); });
  kernels.unpack = &unpack;
  return kernels;
}

}  // namespace
}  // namespace stowage
