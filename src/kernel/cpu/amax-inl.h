// SPDX-License-Identifier: Apache-2.0
// How quantizing walks its input, by steps, by quads of bf16 and by groups, and the first of its
// two walks: the largest magnitudes.
#pragma once
#include <cstdint>

#include "kernel/cpu/formats-inl.h"
#include "kernel/quantize.h"

namespace stowage {
namespace {

template <Dtype kIn, bool kOdd = false>
F load(const void* from) {
  if constexpr (kIn == Dtype::f64) return kOdd ? Lanes::load_f64_odd(from) : Lanes::load_f64(from);
  if constexpr (kIn == Dtype::f32) return Lanes::load_f32(from);
  if constexpr (kIn == Dtype::bf16) return Lanes::load_bf16(from);
  if constexpr (kIn == Dtype::f16) return Lanes::load_f16(from);
}

/// How far ahead inputs are asked for: loops that compute this much between loads leave the
/// hardware's own prefetcher behind. Nothing is read past the end.
constexpr int kAhead = 2048;

/// Calls body(input, elements, i) for kWidth elements at a time; the last, short, time the input is
/// a copy padded with zeros.
template <Dtype kIn, class Body>
void for_each_step(const void* x, std::int64_t n, Body&& body, std::int64_t ahead = kAhead) {
  const auto* from = static_cast<const char*>(x);
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    __builtin_prefetch(from + i * bytes_of(kIn) + ahead);
    body(from + i * bytes_of(kIn), kWidth, i);
  }
  if (i == n) return;
  char padded[kWidth * bytes_of(kIn)] = {};
  __builtin_memcpy(padded, from + i * bytes_of(kIn),
                   static_cast<std::size_t>(n - i) * bytes_of(kIn));
  body(padded, static_cast<int>(n - i), i);
}

/// bf16 in quads of vectors: each I of a pair holds two elements a lane, the first in the low half.
/// Calls body(pairs, i) for 4 kWidth elements at a time, and returns where it ended: before n. Asks
/// for nothing where `ahead` is 0.
template <int kLocality, class Body>
std::int64_t for_each_quad(const void* x, std::int64_t n, std::int64_t ahead, Body&& body) {
  constexpr std::int64_t kQuad = 4 * kWidth;
  const auto* from = static_cast<const char*>(x);
  std::int64_t i = 0;
  for (; i + kQuad <= n; i += kQuad) {
    for (int line = 0; ahead != 0 && line < (kQuad * 2 + 63) / 64; ++line)
      __builtin_prefetch(from + 2 * i + 64 * line + ahead, 0, kLocality);
    body({load_as<I>(from + 2 * i), load_as<I>(from + 2 * i + 4 * kWidth)}, i);
  }
  return i;
}
constexpr std::int32_t kUpper = static_cast<std::int32_t>(0xFFFF0000);
inline F lower(I pair) { return as_float(pair << 16); }
inline F upper(I pair) { return as_float(pair & kUpper); }
inline H magnitudes(I pair) { return as_halves(pair & 0x7FFF7FFF); }
/// The larger of each pair, as fp32 numbers.
inline I larger(H bf16) {
  const I pairs = as_pairs(bf16);
  return max(pairs << 16, pairs & kUpper);
}

/// What is asked for while largest magnitudes are looked for.
enum class Asks : std::uint8_t { values, codes, nothing };
/// Encoding would wait for the lines of its codes; with shorter vectors it takes long enough.
constexpr bool kWaitsForCodes = kWidth >= 16;

template <Dtype kIn, Asks kAsks>
std::uint32_t amax(const void* x, std::int64_t n, const void* codes) noexcept {
  std::int64_t done = 0;
  I most{};
  if constexpr (kIn == Dtype::bf16) {
    H halves{};
    constexpr std::int64_t kFar = kAsks == Asks::values ? kAhead : 0;
    done = for_each_quad<2>(x, n, kFar, [&](const I(&pairs)[2], std::int64_t i) {
      if constexpr (kAsks == Asks::codes)
        for (int line = 0; line < (4 * kWidth + 63) / 64; ++line)
          __builtin_prefetch(static_cast<const char*>(codes) + i + 64 * line, 1);
      halves = max(halves, max(magnitudes(pairs[0]), magnitudes(pairs[1])));
    });
    most = larger(halves);
  }
  for_each_step<kIn>(
      static_cast<const char*>(x) + done * bytes_of(kIn), n - done,
      [&](const char* from, int, std::int64_t) { most = max(most, magnitude(load<kIn>(from))); });
  return Lanes::largest(most);
}
template <Dtype kIn>
std::uint32_t amax(const void* x, std::int64_t n) noexcept {
  return amax<kIn, Asks::values>(x, n, nullptr);
}

/// n values in groups of `group`, the last of which may be short.
struct Grouped {
  const void* x;
  std::int64_t n;
  std::int64_t group;
  std::int64_t ahead = kAhead;
};
/// For each group: begin(), step<elements>(input, elements that count, i) for all of it, end().
/// kSteps descend to kWidth. Groups of whole steps of one size have a loop of their own, whose
/// constants stay in registers; as above, short input is a copy padded with zeros.
template <Dtype kIn, int kLocality, int... kSteps, class Begin, class Step, class End>
void for_each_group(const Grouped& all, Begin&& begin, Step&& step, End&& end) {
  const auto* const x = static_cast<const char*>(all.x);
  const auto take = [&]<int kStep>(std::int64_t i) {
    const char* from = x + i * bytes_of(kIn);
    for (int line = 0; line < (kStep * bytes_of(kIn) + 63) / 64; ++line)
      __builtin_prefetch(from + 64 * line + all.ahead, 0, kLocality);
    step.template operator()<kStep>(from, kStep, i);
  };
  std::int64_t i = 0;
  const auto take_whole = [&]<int kStep>() {
    if (all.group % kStep != 0) return false;
    for (; i + all.group <= all.n; i += all.group) {
      begin();
      for (std::int64_t k = i; k < i + all.group; k += kStep) take.template operator()<kStep>(k);
      end();
    }
    return true;
  };
  (void)(take_whole.template operator()<kSteps>() || ...);
  while (i < all.n) {
    const std::int64_t stop = i + all.group < all.n ? i + all.group : all.n;
    begin();
    const auto take_some = [&]<int kStep>() {
      for (; i + kStep <= stop; i += kStep) take.template operator()<kStep>(i);
    };
    (take_some.template operator()<kSteps>(), ...);
    if (i < stop) {
      char padded[kWidth * bytes_of(kIn)] = {};
      __builtin_memcpy(padded, x + i * bytes_of(kIn),
                       static_cast<std::size_t>(stop - i) * bytes_of(kIn));
      step.template operator()<kWidth>(padded, static_cast<int>(stop - i), i);
    }
    end();
    i = stop;
  }
}

/// How far ahead encoding asks: bytes that were just read for their scales are near; what comes
/// after them is not.
inline std::int64_t ahead_of(std::int64_t bytes) {
  constexpr std::int64_t kNear = 16384;
  return kAhead < bytes && bytes <= kNear ? bytes : kAhead;
}

/// Groups of so many values pay for a call of their own.
constexpr std::int64_t kLong = 128;

template <Dtype kIn, Asks kAsks>
void amaxes_long(const ManyValues& all, std::uint32_t* out) {
  for (std::int64_t i = 0; i < all.n; i += all.group) {
    const auto* codes = static_cast<const char*>(all.codes);
    if constexpr (kAsks == Asks::codes) codes += i;
    *out++ = amax<kIn, kAsks>(static_cast<const char*>(all.x) + i * bytes_of(kIn),
                              all.n - i < all.group ? all.n - i : all.group, codes);
  }
}

template <Dtype kIn>
void amaxes(const ManyValues& all, std::uint32_t* out) noexcept {
  if (all.group >= kLong) {
    const std::int64_t bytes = all.n * bytes_of(kIn);
    if (!all.asked || ahead_of(bytes) != bytes) return amaxes_long<kIn, Asks::values>(all, out);
    if constexpr (kWaitsForCodes)
      if (all.codes != nullptr) return amaxes_long<kIn, Asks::codes>(all, out);
    return amaxes_long<kIn, Asks::nothing>(all, out);
  }
  I most{};
  H halves{};  // of bf16
  const auto begin = [&] { most = I{}, halves = H{}; };
  const auto step = [&]<int kStep>(const char* from, int, std::int64_t) {
    if constexpr (kStep == kWidth)
      most = max(most, magnitude(load<kIn>(from)));
    else
      for (int i = 0; i < kStep; i += 2 * kWidth)
        halves = max(halves, magnitudes(load_as<I>(from + 2 * i)));
  };
  if constexpr (kIn == Dtype::bf16)
    for_each_group<kIn, 2, 4 * kWidth, 2 * kWidth, kWidth>(
        {all.x, all.n, all.group}, begin, step,
        [&] { *out++ = Lanes::largest(max(most, larger(halves))); });
  else
    for_each_group<kIn, 3, kWidth>({all.x, all.n, all.group}, begin, step,
                                   [&] { *out++ = Lanes::largest(most); });
}

/// As unsigned integers order magnitudes, integers with a sign order numbers on one side of 0.
template <Dtype kIn>
void reach(const void* x, std::int64_t n, std::int64_t group, Extremes* out) noexcept {
  I below{}, above{};
  for_each_group<kIn, 3, kWidth>(
      {x, n, group}, [&] { below = above = I{}; },
      [&]<int>(const char* from, int, std::int64_t) {
        const I bits = as_int(load<kIn>(from));
        above = max(above, bits);
        below = max(below, bits ^ static_cast<std::int32_t>(kSign));
      },
      [&] {
        *out++ = {Lanes::largest(below), Lanes::largest(above)};
      });
}

/// The same of each value and of what is there.
template <Dtype kIn>
void reach_each(const void* x, std::int64_t n, std::uint32_t* below,
                std::uint32_t* above) noexcept {
  for_each_step<kIn>(x, n, [&](const char* from, int count, std::int64_t i) {
    const I up = as_int(load<kIn>(from)), down = up ^ static_cast<std::int32_t>(kSign);
    if (count == kWidth) {
      store_as(above + i, max(load_as<I>(above + i), up));
      store_as(below + i, max(load_as<I>(below + i), down));
      return;
    }
    std::int32_t ups[kWidth], downs[kWidth];
    store_as(ups, max(up, I{}));
    store_as(downs, max(down, I{}));
    for (int k = 0; k < count; ++k) {
      const auto a = static_cast<std::uint32_t>(ups[k]), b = static_cast<std::uint32_t>(downs[k]);
      above[i + k] = above[i + k] > a ? above[i + k] : a;
      below[i + k] = below[i + k] > b ? below[i + k] : b;
    }
  });
}

}  // namespace
}  // namespace stowage
