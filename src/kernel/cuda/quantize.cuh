// SPDX-License-Identifier: Apache-2.0
// Kernels that make weights, in the order in which they run: how far the values of each group
// reach, the numbers over scales, the scales or records or blocks, and the codes. Elements are
// taken in the order in which their codes lie. Plain casts have one kernel.
#pragma once
#include "kernel/cuda/encode.cuh"
#include "kernel/cuda/grid.cuh"

namespace stowage::cuda {

inline bool has_zeros() { return form.zeros != Zeros::none; }
inline bool is_under_number() { return form.scales >= Scales::product; }

/// The element, in the order of the shape, whose code lies at a place.
inline Index source_of(const Weight& w, Index at) {
  if (!form.transposed) return at;
  const Index matrix = at / w.row, inside = at - matrix * w.row;
  const Index column = inside / w.lines, line = inside - column * w.lines;
  return matrix * w.row + line * w.columns + column;
}
/// A value in the type of the parts, as the plain cast makes it.
inline float cast_to_parts(float exact) {
  const float most = form.number == Number::bf16  ? 0x1.fep127f
                     : form.number == Number::f16 ? 65504.0f
                                                  : 0x1.fffffep127f;
  const std::uint32_t size = bits_of(exact) & 0x7FFFFFFFu;
  return size < kInfinity || form.values == Number::f64 ? rounded(clamped(exact, -most, most))
                                                        : exact;
}
/// n values whose codes lie from a place on; the others of together() are 0.
inline void take_values(const Weight& w, const void* values, Index at, int n,
                        float (&out)[kMostTogether]) {
  const bool casts = form.codec == Codec::torchao && form.values != form.number;
  if (!form.transposed && !casts) return values_in(values, at, n, together(), out);
  for (int k = 0; k < together(); ++k) {
    out[k] = 0.0f;
    if (k >= n) continue;
    out[k] = casts ? cast_to_parts(exact_in(values, at + k, form.number == Number::f32))
                   : value_in(values, source_of(w, at + k));
  }
}

/// Which of the numbers that values are made to codes with are those of a place, and how many
/// elements from there on have the same.
inline Place step_of_place(const Weight& w, Index at) {
  const Place place = place_in_groups(w, at);
  if (form.record == 0) return place;
  const Index inside = at % w.row % form.n, step = inside / form.inner;
  const Index left = (step + 1) * form.inner - inside;
  return {place.group * (form.n / form.inner) + step, left < place.left ? left : place.left};
}

// --- how far values reach ------------------------------------------------------------------------

struct Reach {
  std::uint32_t above = 0, below = 0;  // bits of magnitudes
  inline void take(float x) {
    const std::uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFFu;
    if (has_zeros() && size <= kInfinity && bits >> 31 != 0)
      below = larger(below, size);
    else
      above = larger(above, size);
  }
};
inline void count(const Working& work, Index step, const Reach& reach) {
  if (reach.above != 0) atomicMax(work.above + step, reach.above);
  if (has_zeros() && reach.below != 0) atomicMax(work.below + step, reach.below);
}
/// For all lanes of a warp at once, of which some may have nothing (a step below 0).
inline void count_for_all(const Working& work, Index step, Reach reach) {
  const Index one = __shfl_sync(kAllLanes, step, 0);
  if (!__all_sync(kAllLanes, step == one)) {
    if (step >= 0) count(work, step, reach);
  } else if (one >= 0) {
    reach.above = largest_of_warp(reach.above);
    if (has_zeros()) reach.below = largest_of_warp(reach.below);
    if (threadIdx.x % kWarp == 0) count(work, one, reach);
  }
}

STOWAGE_KERNEL stowage_reach(Weight w, const void* values, Working work) {
  const Index rounds = up(up(w.elements, together()), all_threads());  // the same for all lanes
  for (Index round = 0; round < rounds; ++round) {
    const Index first = (round * all_threads() + this_thread()) * together();
    const Index left = w.elements - first;
    const int n = left < together() ? left < 0 ? 0 : static_cast<int>(left) : together();
    float x[kMostTogether];
    if (n != 0) take_values(w, values, first, n, x);  // lanes without any go along
    for (int from = 0; from < together(); from += span()) {
      Index step = -1;
      Reach reach;
      if (from < n) {
        const Place place = step_of_place(w, first + from);
        if (form.whole || place.left >= span() || place.left >= n - from) {
          step = place.group;
          for (int k = from; k < from + span(); ++k)
            if (k < n) reach.take(x[k]);
        } else {
          for (int k = from; k < from + span(); ++k) {
            if (k >= n) continue;
            Reach own;
            own.take(x[k]);
            count(work, step_of_place(w, first + k).group, own);
          }
        }
      }
      count_for_all(work, step, reach);
    }
  }
}

// --- scales --------------------------------------------------------------------------------------

/// How far what scales stand under reaches.
STOWAGE_KERNEL stowage_outer_reach(Weight w, Working work, Extent groups) {
  for (Index g = this_thread(); g < groups; g += all_threads())
    atomicMax(work.most + g / w.under, work.above[g]);
}
STOWAGE_KERNEL stowage_outers(Weight w, Working work, Extent outers) {
  const float most = form.divisor * 448.0f;
  for (Index i = this_thread(); i < outers; i += all_threads()) {
    const float amax = float_of(work.most[i]);
    if (!(amax < float_of(kInfinity))) atomicMax(work.refused, kInfinity);
    float outer = form.scales == Scales::quotient ? most / amax : amax / most;
    if (form.scales == Scales::quotient)
      outer = outer < 0x1p117f ? outer : 0x1p117f;
    else
      outer = outer < 0x1p-117f ? 0x1p-117f : outer;
    static_cast<float*>(w.parts[1])[i] = amax == 0.0f ? 1.0f : outer;
  }
}

/// The f16 number nearest to a positive one; of subnormal ones the least that is no smaller.
inline std::uint16_t half_of(float x) {
  if (x >= 0x1p-14f) return f32_to_f16(x);
  const float units = x * 0x1p24f, below = nearest_integer(units);  // at most 1024 of them
  return static_cast<std::uint16_t>(below < units ? below + 1.0f : below);
}
/// Keeps a number as the type of scales has it; what it is then.
inline float keep_number(void* numbers, Index g, float x) {
  auto* const halves = static_cast<std::uint16_t*>(numbers) + g;
  switch (form.number) {
    case Number::bf16:
      return bf16_to_f32(*halves = f32_to_bf16(x));
    case Number::f16:
      return f16_to_f32(*halves = f32_to_f16(x));
    default:
      return static_cast<float*>(numbers)[g] = x;
  }
}
/// Likewise a scale, of a group so wide.
inline float keep_scale(void* scales, Index g, float scale, float width) {
  if (form.number == Number::f16) {
    const std::uint16_t kept = half_of(scale);
    static_cast<std::uint16_t*>(scales)[g] = kept;
    return f16_to_f32(kept);
  }
  if (form.number != Number::e8m0) return keep_number(scales, g, scale);
  std::uint32_t exponent = (bits_of(scale) + 0x7FFFFFu) >> 23;
  if (form.floors && width != 0.0f) {
    const std::uint32_t own = bits_of(width) >> 23, less = (bits_of(form.most) >> 23) - 127u;
    exponent = own > less + 1u ? own - less : 1u;
  }
  static_cast<std::uint8_t*>(scales)[g] = static_cast<std::uint8_t>(exponent);
  return float_of(exponent << 23);
}
/// Keeps what stands for 0 in a group with values down to -below; what values over the kept scale,
/// whose reciprocal is r, are moved by. Whether there is such a number.
inline bool keep_zero(const Weight& w, Index g, float below, float scale, float r, float& moved) {
  if (form.zeros == Zeros::code) {
    const float least = -below / scale;
    moved = nearest_integer(clamped(form.least - least, form.least, form.most));
    static_cast<std::int8_t*>(w.parts[1])[g] = static_cast<std::int8_t>(moved);
    return true;
  }
  if (form.zeros == Zeros::rounded) {
    moved = keep_number(w.parts[1], g, clamped(below / scale, form.least, form.most));
    return true;
  }
  const float zero = -form.least * scale - below;
  const float most = form.number == Number::f16 ? 65504.0f : 0x1.fffffep127f;
  if (!((zero < 0.0f ? -zero : zero) <= most)) return false;
  moved = -keep_number(w.parts[1], g, zero) * r;
  return true;
}

/// The scale of each group, and what its values are made to codes with.
STOWAGE_KERNEL stowage_scales(Weight w, Working work, Extent groups) {
  const float most = form.number == Number::f16 ? 65504.0f : 0x1.fffffep127f;
  for (Index g = this_thread(); g < groups; g += all_threads()) {
    const float below = has_zeros() ? float_of(work.below[g]) : 0.0f;
    const float width = has_zeros() ? float_of(work.above[g]) + below : float_of(work.above[g]);
    if (is_under_number()) {
      const float outer = static_cast<const float*>(w.parts[1])[g / w.under];
      const float exact = form.scales == Scales::quotient ? width * outer / form.divisor
                                                          : width / (form.divisor * outer);
      const float in = exact == 0.0f ? 1.0f : clamped(exact, 0x1p-9f, 448.0f);
      const std::uint8_t kept = f32_to_e4m3(in);
      static_cast<std::uint8_t*>(w.parts[0])[g] = kept;
      work.r[g] = under_number(e4m3_value(kept), outer);
      continue;
    }
    if (form.scales == Scales::absmax) {
      if (!(width <= most)) atomicMax(work.refused, kInfinity);
      const float least = form.divisor * 0x1p-126f;
      const float kept = width == 0.0f ? 0.0f : width < least ? least : width;
      static_cast<float*>(w.parts[0])[g] = kept;
      work.r[g] = width == 0.0f ? 0.0f : form.divisor * (1.0f / kept);
      continue;
    }
    const float exact = width / form.divisor;
    if (!(exact <= most)) {
      atomicMax(work.refused, kInfinity);
      continue;
    }
    const float scale = width == 0.0f ? 1.0f : exact < 0x1p-126f ? 0x1p-126f : exact;
    const float r = 1.0f / keep_scale(w.parts[0], g, scale, width);
    work.r[g] = r;
    if (has_zeros() && !keep_zero(w, g, below, scale, r, work.moved[g]))
      atomicMax(work.refused, kInfinity);
  }
}

// --- superblocks of ggml -------------------------------------------------------------------------

/// How often a unit counts a number.
inline std::uint32_t count_of(float number, float unit, float most) {
  if (unit == 0.0f) return 0;
  const float quotient = number / unit;
  return static_cast<std::uint32_t>(nearest_integer(quotient < most ? quotient : most));
}
inline void put_half(std::uint8_t* record, int at, std::uint16_t half) {
  record[at] = static_cast<std::uint8_t>(half);
  record[at + 1] = static_cast<std::uint8_t>(half >> 8);
}
inline void put_counts(std::uint8_t* record, int j, std::uint32_t scale, std::uint32_t offset) {
  const auto add = [record](int at, std::uint32_t bits) {
    record[at] = static_cast<std::uint8_t>(record[at] | bits);
  };
  if (form.scales == Scales::q6_k) {
    record[j] = static_cast<std::uint8_t>(scale);
  } else if (j < 4) {
    add(4 + j, scale), add(8 + j, offset);
  } else {
    add(8 + j, (scale & 15u) | (offset & 15u) << 4);
    add(j, scale >> 4 << 6), add(4 + j, offset >> 4 << 6);
  }
}
STOWAGE_KERNEL stowage_records(Weight w, Working work, Extent records) {
  const bool offsets = form.scales == Scales::q4_k;
  const float most = offsets ? 63.0f : 127.0f;
  const int steps = form.n / form.inner;
  for (Index g = this_thread(); g < records; g += all_threads()) {
    const std::uint32_t *above = work.above + g * steps, *below = work.below + g * steps;
    const auto width_of = [=](int j) {
      return (offsets ? float_of(above[j]) + float_of(below[j]) : float_of(above[j])) /
             form.divisor;
    };
    float widest = 0.0f, lowest = 0.0f;
    bool fits = true;
    for (int j = 0; j < steps; ++j) {
      const float width = width_of(j), low = offsets ? float_of(below[j]) : 0.0f;
      fits = fits && width <= most * 65504.0f;
      widest = widest < width ? width : widest;
      lowest = lowest < low ? low : lowest;
    }
    widest /= most, lowest /= most;
    if (!fits || !(widest <= 65504.0f && lowest <= 65504.0f)) {
      atomicMax(work.refused, kInfinity);
      continue;
    }
    const std::uint16_t d = half_of(widest), e = half_of(lowest);
    const float scale_unit = f16_to_f32(d), offset_unit = f16_to_f32(e);
    auto* const record = static_cast<std::uint8_t*>(w.parts[0]) + g * form.record;
    for (int byte = 0; byte < form.record; ++byte) record[byte] = 0;
    put_half(record, offsets ? 0 : 16, d);
    if (offsets) put_half(record, 2, e);
    for (int j = 0; j < steps; ++j) {
      const std::uint32_t offset = offsets ? count_of(float_of(below[j]), offset_unit, most) : 0u;
      put_counts(record, j, count_of(width_of(j), scale_unit, most), offset);
    }
    for (int j = 0; j < steps; ++j) {
      const Scale kept = step_of(record, j);
      const float r = kept.scale == 0.0f ? 0.0f : 1.0f / kept.scale;
      work.r[g * steps + j] = r;
      if (offsets) work.moved[g * steps + j] = kept.zero * r;
    }
  }
}

// --- blocks of bitsandbytes and torchao ----------------------------------------------------------

/// The absmax of each block, kept as it is or, where scales are nested, in work.moved.
STOWAGE_KERNEL stowage_blocks(Weight w, Working work, Extent blocks) {
  for (Index g = this_thread(); g < blocks; g += all_threads()) {
    const std::uint32_t bits = work.above[g];
    if (bits >= kInfinity) atomicMax(work.refused, bits);
    const float amax = bits > kInfinity ? nan_value() : float_of(bits);
    if (form.codec == Codec::torchao) {
      work.moved[g] = work.r[g] = amax;
      continue;
    }
    const bool whole = (g + 1) * form.n <= w.elements;
    const float divisor = amax < 1e-38f ? 1e-38f : amax;
    work.r[g] = whole ? 1.0f / divisor : divisor;
    (form.scales == Scales::mapped ? work.moved : static_cast<float*>(w.parts[0]))[g] =
        whole ? amax : divisor;
  }
}

/// The mean of what is nested: an fp64 sum in the order of blocks, by one thread.
STOWAGE_KERNEL stowage_mean(Weight w, Working work, Extent blocks) {
  if (this_thread() != 0) return;
  double sum = 0.0;
  for (Index g = 0; g < blocks; ++g) sum += static_cast<double>(work.moved[g]);
  const double mean = blocks == 0 ? 0.0 : sum / static_cast<double>(blocks);
  if (form.codec == Codec::bitsandbytes)
    *static_cast<float*>(w.parts[3]) = static_cast<float>(mean);
  else
    keep_number(w.parts[2], 0,
                form.number == Number::f32 ? static_cast<float>(mean) : f64_to_f32_odd(mean));
}

/// bitsandbytes' map of 256 numbers.
struct Map {
  float number[256];
};
/// The code of a number from -1 to 1: that of the nearest of 65,536 steps, which has the nearest
/// number of the map, of two the lower.
inline std::uint8_t mapped_code(const Map& map, float u) {
  const auto step = static_cast<int>((u + 1.0f) * 0.5f * 65535.0f + 0.5f);
  const float at = -1.0f + 2.0f * static_cast<float>(step) / 65535.0f;
  int below = 0;  // midpoints that lie below
  for (int half = 128; half != 0; half /= 2)
    if (below + half <= 255 &&
        0.5f * (map.number[below + half - 1] + map.number[below + half]) < at)
      below += half;
  return static_cast<std::uint8_t>(below);
}
/// Block scales by their distance from the mean, so many at a time under the largest.
STOWAGE_KERNEL stowage_nest(Weight w, Working work, Extent blocks, Map map) {
  const float mean = form.codec == Codec::torchao ? number_at(w.parts[2], 0)
                                                  : *static_cast<const float*>(w.parts[3]);
  for (Index i = this_thread(); i * form.outer_n < blocks; i += all_threads()) {
    const Index begin = i * form.outer_n, all = blocks;
    const Index end = begin + form.outer_n < all ? begin + form.outer_n : all;
    float most = 0.0f;
    for (Index g = begin; g < end; ++g) {
      const float away = rounded(work.moved[g] - mean), size = away < 0.0f ? -away : away;
      most = most < size ? size : most;
    }
    if (form.codec == Codec::bitsandbytes) {
      static_cast<float*>(w.parts[1])[i] = most;
      const float inverse = 1.0f / most;
      for (Index g = begin; g < end; ++g) {
        const float u = clamped((work.moved[g] - mean) * inverse, -1.0f, 1.0f);
        static_cast<std::uint8_t*>(w.parts[0])[g] =
            most == 0.0f ? std::uint8_t{0} : mapped_code(map, u);
      }
      continue;
    }
    const float factor = keep_number(w.parts[1], i, rounded(256.0f / rounded(2.0f * most)));
    for (Index g = begin; g < end; ++g) {
      const float away = rounded(rounded(work.moved[g] - mean) * factor);
      // 0 times an infinite factor, where all scales are the mean.
      static_cast<std::int8_t*>(w.parts[0])[g] =
          is_nan(away) ? std::int8_t{0}
                       : static_cast<std::int8_t>(
                             static_cast<int>(nearest_integer(clamped(away, -128.0f, 127.0f))));
    }
  }
  const Index i = this_thread();
  if (form.codec == Codec::bitsandbytes && i == 0)
    for (int k = 0; k < 256; ++k) static_cast<float*>(w.parts[2])[k] = map.number[k];
  if (form.codec == Codec::torchao && i == 0)
    for (int k = 0; k < 16; ++k) keep_number(w.parts[3], k, form.values16[k]);
}

// --- codes ---------------------------------------------------------------------------------------

/// The code of a value under the numbers of its step.
inline std::uint32_t code_under(const Weight& w, const Working& work, Index step, float x) {
  const float r = work.r[step];
  if (form.codec == Codec::torchao) return code_of_nearest(rounded(x / r));
  if (form.codec == Codec::bitsandbytes) {
    const bool whole = (step + 1) * form.n <= w.elements;
    return code_of_fraction(clamped(whole ? x * r : x / r, -1.0f, 1.0f));
  }
  const float over = is_under_number() ? x / r : x * r;
  return code_of_scaled(has_zeros() ? over + work.moved[step] : over);
}
STOWAGE_KERNEL stowage_encode(Weight w, const void* values, Working work) {
  for (Index i = this_thread() * together(); i < w.elements; i += all_threads() * together()) {
    const int n = piece_of(w.elements - i);
    float x[kMostTogether];
    std::uint32_t codes[kMostTogether] = {};
    take_values(w, values, i, n, x);
    for (int from = 0; from < together(); from += span()) {
      if (from >= n) continue;
      const Place place = step_of_place(w, i + from);
      const bool one = form.whole || place.left >= span() || place.left >= n - from;
      for (int k = from; k < from + span(); ++k) {  // what fills the last byte is the code of 0
        const Index step = one || k >= n ? place.group : step_of_place(w, i + k).group;
        codes[k] = code_under(w, work, step, x[k]);
      }
    }
    put_codes(w.codes, i, n, codes);
  }
}

/// Plain casts. `refused` gets the bits of what is not finite.
STOWAGE_KERNEL stowage_cast(Weight w, const void* values, std::uint32_t* refused) {
  for (Index i = this_thread() * together(); i < w.elements; i += all_threads() * together()) {
    const int n = piece_of(w.elements - i);
    float x[kMostTogether];
    std::uint32_t codes[kMostTogether];
    if (form.values == Number::f64)
      for (int k = 0; k < together(); ++k)
        x[k] = k < n ? exact_in(values, i + k, form.element == Element::f32) : 0.0f;
    else
      values_in(values, i, n, together(), x);
    for (int k = 0; k < together(); ++k) {
      codes[k] = code_of_value(x[k]);
      const std::uint32_t size = bits_of(x[k]) & 0x7FFFFFFFu;
      if (size >= kInfinity) atomicMax(refused, size);
    }
    put_codes(w.codes, i, n, codes);
  }
}

// --- how far arrays reach ------------------------------------------------------------------------

/// *most: the bits of the largest magnitude of n values.
STOWAGE_KERNEL stowage_amax(const void* values, Extent n, std::uint32_t* most) {
  std::uint32_t seen = 0;
  for (Index i = this_thread(); i < n; i += all_threads())
    seen = larger(seen, bits_of(value_in(values, i)) & 0x7FFFFFFFu);
  raise(most, seen);
}
/// Each of them as a number; what is none, as the positive quiet NaN.
STOWAGE_KERNEL stowage_amax_numbers(std::uint32_t* most, Extent n) {
  for (Index i = this_thread(); i < n; i += all_threads())
    if (most[i] > kInfinity) most[i] = bits_of(nan_value());
}

}  // namespace stowage::cuda
