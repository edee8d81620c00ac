// SPDX-License-Identifier: Apache-2.0
// Scales to fp32, once for each instruction set. Runs of short groups have one for every few codes.
#pragma once
#include "format/superblocks.h"
#include "kernel/cpu/widen-inl.h"
#include "kernel/scales.h"

namespace stowage {
namespace {

/// out[i] = read(code i) for n codes of kBytes; the last ones through copies, so that nothing
/// outside the part is read.
template <int kBytes, class Read>
[[gnu::always_inline]] inline void expand(const void* part, std::int64_t first, std::int64_t n,
                                          float* out, Read read) {
  const auto* codes = static_cast<const std::uint8_t*>(part) + first * kBytes;
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) Lanes::store_f32(out + i, read(codes + i * kBytes));
  if (i == n) return;
  std::uint8_t some[kWidth * kBytes] = {};
  __builtin_memcpy(some, codes + i * kBytes, static_cast<std::size_t>((n - i) * kBytes));
  const F made = read(some);
  __builtin_memcpy(out + i, &made, static_cast<std::size_t>(n - i) * sizeof(float));
}

/// Powers of two, by their exponents: 0 is a subnormal number, 255 is NaN.
void expand_e8m0(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  expand<1>(kept.parts[0], first, n, out, [](const std::uint8_t* codes) {
    const I exponents = Lanes::load_i8(codes) & 0xFF, bits = exponents << 23;
    const I finite = exponents == 255 ? splat(static_cast<std::int32_t>(kQuietNan)) : bits;
    return as_float(exponents == 0 ? splat(0x400000) : finite);
  });
}

void expand_bf16(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  expand<2>(kept.parts[0], first, n, out,
            [](const std::uint8_t* codes) { return Lanes::load_bf16(codes); });
}

void expand_f16(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  expand<2>(kept.parts[0], first, n, out,
            [](const std::uint8_t* codes) { return Lanes::load_f16(codes); });
}

/// bitsandbytes: codes, numbers over them, the map of the codes, the offset.
void expand_mapped(const KeptScales& kept, std::int64_t first, std::int64_t n,
                   float* out) noexcept {
  const auto* map = static_cast<const float*>(kept.parts[2]);
  const F offset = splat(*static_cast<const float*>(kept.parts[3]));
  for (std::int64_t b = first, end = first + n; b < end;) {
    const std::int64_t which = b / kNestedBlock, next = (which + 1) * kNestedBlock;
    const std::int64_t stop = next < end ? next : end;
    const F outer = splat(static_cast<const float*>(kept.parts[1])[which]);
    expand<1>(kept.parts[0], b, stop - b, out + (b - first), [&](const std::uint8_t* codes) {
      const F product = Lanes::gather(map, Lanes::load_i8(codes) & 0xFF) * outer;
      return product + offset;
    });
    b = stop;
  }
}

template <ScaleCode kCode>
F under_one(F scale, F outer) {
  if constexpr (kCode == ScaleCode::quotient) return scale / outer;
  if constexpr (kCode == ScaleCode::product_bf16)  // of at most 12 bits: rounded once
    return round_as<Dtype::bf16>(scale * outer);
  return scale * outer;
}
/// Of n e4m3 numbers those that are made 32 at a time: none of them is NaN. How many it made.
template <ScaleCode kCode, class SomeLanes>
std::int64_t expand_numbers(const std::uint8_t* codes, std::int64_t n, F outer, float* out) {
  constexpr int kStep = 32;
  std::int64_t i = 0;
  for (; i + kStep <= n && SomeLanes::template are_numbers<3>(codes + i); i += kStep)
    for (int at = 0; at < kStep; at += 2 * kWidth) {
      F scales[2];
      SomeLanes::template load_numbers<3>(codes + i + at, scales[0], scales[1]);
      for (int half = 0; half < 2; ++half)
        Lanes::store_f32(out + i + at + half * kWidth,
                         under_one<kCode>(scales[half] * SomeLanes::template kUnit<3>, outer));
    }
  return i;
}
/// e4m3 numbers, and those that stand over so many of them each (format/under_one.h).
template <ScaleCode kCode>
void expand_under_one(const KeptScales& kept, std::int64_t first, std::int64_t n,
                      float* out) noexcept {
  for (std::int64_t b = first, end = first + n; b < end;) {
    const std::int64_t which = b / kept.outer, next = (which + 1) * kept.outer;
    const std::int64_t stop = next < end ? next : end;
    const F given = splat(static_cast<const float*>(kept.parts[1])[which]);
    const F outer = kCode == ScaleCode::product_bf16 ? round_as<Dtype::bf16>(given) : given;
    if constexpr (Lanes::kHasNumbers)
      b += expand_numbers<kCode, Lanes>(static_cast<const std::uint8_t*>(kept.parts[0]) + b,
                                        stop - b, outer, out + (b - first));
    expand<1>(kept.parts[0], b, stop - b, out + (b - first), [&](const std::uint8_t* codes) {
      return under_one<kCode>(Lanes::load_e4m3(codes), outer);
    });
    b = stop;
  }
}

/// An f16 number in all lanes. Made in a register: a load of what was just stored in pieces waits.
inline F all_lanes(std::uint16_t half) {
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kWidth)));
  const Halves halves = half - Halves{};
  return Lanes::load_f16(&halves);
}

/// All numbers of a superblock of ggml: those of scales, and those of offsets if it has them.
template <class Super>
[[gnu::always_inline]] inline void expand_record(const std::uint8_t* record, float* scales,
                                                 float* offsets) noexcept {
  constexpr std::int64_t kSteps = Super::kSteps, kCounts = Super::kOffsets ? 2 * kSteps : kSteps;
  static_assert(kCounts % kWidth == 0);
  const auto said = Super::counted(record);
  const F of_scales = all_lanes(said.scale), of_offsets = all_lanes(said.offset);
  for (std::int64_t i = 0; i < kCounts; i += kWidth) {
    I first_kind;  // whether a lane is of scales
    for (int k = 0; k < kWidth; ++k) first_kind[k] = i + k < kSteps ? -1 : 0;
    const F made = (first_kind ? of_scales : of_offsets) *
                   __builtin_convertvector(Lanes::load_i8(said.counts + i), F);
    constexpr std::int64_t kOfOne = kSteps < kWidth ? kSteps : kWidth;
    for (std::int64_t k = 0; k < kWidth; k += kOfOne) {
      float* const to = i + k < kSteps ? scales + i + k : offsets + (i + k - kSteps);
      __builtin_memcpy(to, reinterpret_cast<const char*>(&made) + k * 4, kOfOne * sizeof(float));
    }
  }
}

/// Superblocks of ggml: sub-blocks, several to a record.
template <class Super>
void expand_super(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  constexpr std::int64_t kSteps = Super::kSteps;
  const auto* record =
      static_cast<const std::uint8_t*>(kept.parts[0]) + first / kSteps * Super::kRecord;
  for (std::int64_t at = -(first % kSteps); at < n; at += kSteps, record += Super::kRecord) {
    if (at >= 0 && at + kSteps <= n) {
      expand_record<Super>(record, out + at, out + kExpandedScales + at);
      continue;
    }
    float scales[kSteps], offsets[kSteps];
    expand_record<Super>(record, scales, offsets);
    const std::int64_t begin = at < 0 ? -at : 0, end = kSteps < n - at ? kSteps : n - at;
    const auto bytes = static_cast<std::size_t>(end - begin) * sizeof(float);
    __builtin_memcpy(out + at + begin, scales + begin, bytes);
    if constexpr (Super::kOffsets)
      __builtin_memcpy(out + kExpandedScales + at + begin, offsets + begin, bytes);
  }
}

/// Numbers, and those of their type that stand for 0.
template <Dtype kType, bool kAdded>
void expand_zeros(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  const auto load = [](const std::uint8_t* codes) {
    if constexpr (kType == Dtype::bf16) return Lanes::load_bf16(codes);
    if constexpr (kType == Dtype::f16) return Lanes::load_f16(codes);
    if constexpr (kType == Dtype::f32) return Lanes::load_f32(codes);
  };
  expand<bytes_of(kType)>(kept.parts[0], first, n, out, load);
  expand<bytes_of(kType)>(kept.parts[1], first, n, out + kExpandedScales,
                          [&](const std::uint8_t* codes) {
                            const F zero = load(codes);
                            return kAdded ? -zero : zero;
                          });
}
template <bool kAdded>
constexpr ScaleKernels::OfType expand_zeros_of_types() {
  return {&expand_zeros<Dtype::f32, kAdded>, &expand_zeros<Dtype::bf16, kAdded>,
          &expand_zeros<Dtype::f16, kAdded>};
}

constexpr ScaleKernels scale_kernels() {
  return {&expand_e8m0,
          &expand_bf16,
          &expand_f16,
          &expand_mapped,
          &expand_under_one<ScaleCode::product>,
          &expand_under_one<ScaleCode::product_bf16>,
          &expand_under_one<ScaleCode::quotient>,
          &expand_super<superblocks::Q4K>,
          &expand_super<superblocks::Q6K>,
          expand_zeros_of_types<true>(),
          expand_zeros_of_types<false>()};
}

}  // namespace
}  // namespace stowage
