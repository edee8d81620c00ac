// SPDX-License-Identifier: Apache-2.0
// From codes to values: the arithmetic of docs/numbers.md, one operation of fp32 at a time. `form`
// is a constant of a program for a device, so that each switch over it is one case.
#pragma once
#include "format/convert.h"
#include "kernel/cuda/form.cuh"

namespace stowage::cuda {

inline constexpr int kMostTogether = 32;

inline float nan_value() { return float_of(0x7FC00000u); }
inline Index up(Index n, Index of) { return (n + of - 1) / of; }

inline int together();

// --- codes ---------------------------------------------------------------------------------------

struct alignas(16) Words {
  std::uint32_t word[4];
};
inline bool is_aligned(const void* at) { return (reinterpret_cast<std::uintptr_t>(at) & 15u) == 0; }

inline std::uint32_t byte_at(const void* from, Index i) {
  return static_cast<const std::uint8_t*>(from)[i];
}
inline std::uint16_t half_at(const void* from, Index i) {
  return static_cast<const std::uint16_t*>(from)[i];
}
inline std::uint32_t word_at(const void* from, Index i) {
  return static_cast<const std::uint32_t*>(from)[i];
}
inline std::uint32_t code_mask() { return form.bits == 32 ? ~0u : (1u << form.bits) - 1u; }

/// The code at a place, whatever else shares its bytes.
inline std::uint32_t code_at(const std::uint8_t* codes, Index i) {
  switch (form.packing) {
    case Packing::whole:
      return form.bits == 8 ? codes[i] : form.bits == 16 ? half_at(codes, i) : word_at(codes, i);
    case Packing::high_first:
      return (codes[i / 2] >> (i % 2 == 0 ? 4 : 0)) & 15u;
    case Packing::low_first:
      return (codes[i / 2] >> (i % 2 == 0 ? 0 : 4)) & 15u;
    case Packing::dense:
      break;
  }
  const int shift = static_cast<int>(i % 8) * form.bits;
  const std::uint8_t* const from = codes + i / 8 * form.bits + shift / 8;
  const std::uint32_t low = from[0];
  const std::uint32_t high = shift % 8 + form.bits > 8 ? from[1] : 0u;  // none is beyond the last
  return (low | high << 8) >> (shift % 8) & code_mask();
}

/// Whether some of the four codes of a word are no finite numbers.
inline bool has_special(std::uint32_t word) {
  if (form.element != Element::e4m3 && form.element != Element::e5m2) return false;
  const std::uint32_t most = form.element == Element::e4m3 ? 0x01010101u : 0x04040404u;
  return (((word & 0x7F7F7F7Fu) + most) & 0x80808080u) != 0;
}

/// The codes of together() elements from a place on that is a multiple of it, 16 bytes at once.
/// Whether all stand for finite numbers, as far as that was looked at.
inline bool load_codes(const std::uint8_t* codes, Index first,
                       std::uint32_t (&out)[kMostTogether]) {
  const std::uint8_t* const from = codes + static_cast<long long>(first) * form.bits / 8;
  if (form.packing == Packing::dense || !(form.whole || is_aligned(from))) {
    STOWAGE_UNROLL
    for (int k = 0; k < together(); ++k) out[k] = code_at(codes, first + k);
    return form.packing == Packing::dense;
  }
  bool finite = true;
  STOWAGE_UNROLL
  for (int begin = 0; begin < together(); begin += 128 / form.bits) {
    const Words some = reinterpret_cast<const Words*>(from)[begin * form.bits / 128];
    for (const std::uint32_t word : some.word) finite = finite && !has_special(word);
    STOWAGE_UNROLL
    for (int k = 0; k < 128 / form.bits; ++k) {
      const int bit = k * form.bits;
      const int at = form.packing == Packing::high_first ? bit ^ 4 : bit;
      out[begin + k] = some.word[at / 32] >> (at % 32) & code_mask();
    }
  }
  return finite;
}

/// What a code stands for.
inline float value_of(std::uint32_t code) {
  const std::uint32_t size = code & 0x7Fu, sign = (code & 0x80u) << 24;
  switch (form.element) {
    case Element::f32:
      return float_of(code);
    case Element::bf16:
      return bf16_to_f32(static_cast<std::uint16_t>(code));
    case Element::f16:
      return f16_to_f32(static_cast<std::uint16_t>(code));
    case Element::e4m3:  // its bits as those of fp32, where exponents count from 120 less
      return size == 0x7Fu ? nan_value()
                           : float_of(bits_of(float_of(size << 20) * 0x1p120f) | sign);
    case Element::e5m2:
      if (size >= 0x7Cu) return size == 0x7Cu ? float_of(0x7F800000u | sign) : nan_value();
      return float_of(bits_of(float_of(size << 21) * 0x1p112f) | sign);
    case Element::e2m1:
      return float_of(bits_of(float_of((code & 7u) << 22) * 0x1p126f) | (code & 8u) << 28);
    case Element::int8:
      return static_cast<float>(static_cast<std::int8_t>(code));
    case Element::biased:
      return static_cast<float>(static_cast<int>(code) - form.bias);
    default:
      return table[code];
  }
}

/// The same of one that stands for a finite number: its sign and size lie in place after one shift.
inline float finite_value_of(std::uint32_t code) {
  const auto shifted = static_cast<std::int32_t>(code << (32 - form.bits));
  switch (form.element) {
    case Element::e4m3:
      return float_of(static_cast<std::uint32_t>(shifted >> 4) & 0x87F00000u) * 0x1p120f;
    case Element::e5m2:
      return float_of(static_cast<std::uint32_t>(shifted >> 3) & 0x8FE00000u) * 0x1p112f;
    case Element::e2m1:
      return float_of(static_cast<std::uint32_t>(shifted >> 6) & 0x81C00000u) * 0x1p126f;
    default:
      return value_of(code);
  }
}

// --- numbers -------------------------------------------------------------------------------------

/// Number i of a part.
inline float number_at(const void* numbers, Index i) {
  switch (form.number) {
    case Number::bf16:
      return bf16_to_f32(half_at(numbers, i));
    case Number::f16:
      return f16_to_f32(half_at(numbers, i));
    case Number::e8m0: {
      const std::uint32_t exponent = static_cast<const std::uint8_t*>(numbers)[i];
      if (exponent == 255u) return nan_value();
      return exponent == 0u ? 0x1p-127f : float_of(exponent << 23);
    }
    default:
      return static_cast<const float*>(numbers)[i];
  }
}
/// Rounded to the type of the numbers, as torch rounds.
inline float rounded(float x) {
  switch (form.number) {
    case Number::bf16:
      return bf16_to_f32(f32_to_bf16(x));
    case Number::f16:
      return f16_to_f32(f32_to_f16(x));
    default:
      return x;
  }
}
inline float e4m3_value(std::uint32_t code) {
  const std::uint32_t size = code & 0x7Fu;
  if (size == 0x7Fu) return nan_value();
  return float_of(bits_of(float_of(size << 20) * 0x1p120f) | (code & 0x80u) << 24);
}
/// What an e4m3 scale is under its number.
inline float under_number(float scale, float outer) {
  if (form.scales == Scales::quotient) return scale / outer;
  if (form.scales == Scales::product_bf16) {
    const float rough = bf16_to_f32(f32_to_bf16(outer));
    return bf16_to_f32(f32_to_bf16(scale * rough));
  }
  return scale * outer;
}

// --- groups --------------------------------------------------------------------------------------

/// Where a code lies, of element i in the order of the shape.
inline Index place_of(const Weight& w, Index i) {
  if (!form.transposed) return i;
  const Index matrix = i / w.row, inside = i - matrix * w.row;
  const Index line = inside / w.columns, column = inside - line * w.columns;
  return matrix * w.row + column * w.lines + line;
}

/// The group of what lies at place i, and how many elements from there on are in it for sure.
struct Place {
  Index group, left;
};
inline Place within(Index i, Index n) {
  const Index group = i / n;
  return {group, (group + 1) * n - i};
}
inline Place place_in_groups(const Weight& w, Index i) {
  switch (form.group) {
    case Group::none:
    case Group::tensor:
      return {0, w.elements - i};
    case Group::row:
      return within(i, w.row);
    case Group::row2:
      return within(i, w.pair);
    case Group::flat:
      return within(i, form.n);
    case Group::along: {
      const Place row = within(i, w.row), some = within(i - row.group * w.row, form.n);
      return {row.group * up(w.row, form.n) + some.group,
              some.left < row.left ? some.left : row.left};
    }
    case Group::block2: {
      const Place line = within(i, w.columns), some = within(i - line.group * w.columns, form.n);
      const Index matrix = line.group / w.lines, inside = line.group - matrix * w.lines;
      return {(matrix * up(w.lines, form.m) + inside / form.m) * up(w.columns, form.n) + some.group,
              some.left < line.left ? some.left : line.left};
    }
    case Group::named: {
      const Index line = i / w.columns, column = i - line * w.columns;
      const void* const names = w.parts[form.zeros == Zeros::none ? 1 : 2];
      return {line * up(w.columns, form.n) + static_cast<const std::int32_t*>(names)[column], 1};
    }
    case Group::column:
      break;
  }
  const Index line = i / w.row;
  return {line % (w.rows / form.n) * w.row + (i - line * w.row), 1};
}

// --- scales --------------------------------------------------------------------------------------

struct Scale {
  float scale, zero;  // what stands for 0, or is taken off, or added
};

/// An f16 number in a record, whose bytes lie anywhere.
inline float half_in(const std::uint8_t* record, int at) {
  return f16_to_f32(static_cast<std::uint16_t>(record[at] | record[at + 1] << 8));
}
/// Step j of a record of ggml (format/superblocks.h).
inline Scale step_of(const std::uint8_t* record, int j) {
  if (form.scales == Scales::q6_k)
    return {half_in(record, 16) * static_cast<float>(static_cast<std::int8_t>(record[j])), 0.0f};
  std::uint32_t scale = 0, offset = 0;
  if (j < 4) {
    scale = record[4 + j] & 63u, offset = record[8 + j] & 63u;
  } else {
    const std::uint32_t low = record[8 + j];
    scale = (low & 15u) | static_cast<std::uint32_t>(record[j]) >> 6 << 4;
    offset = low >> 4 | static_cast<std::uint32_t>(record[4 + j]) >> 6 << 4;
  }
  return {half_in(record, 0) * static_cast<float>(scale),
          half_in(record, 2) * static_cast<float>(offset)};
}

/// The scale of a group; `inside`: which element of a superblock asks.
inline Scale scale_of(const Weight& w, Index group, int inside) {
  Scale made{1.0f, 0.0f};
  switch (form.scales) {
    case Scales::plain:
    case Scales::absmax:
      if (form.group != Group::none) made.scale = number_at(w.parts[0], group);
      break;
    case Scales::mapped: {
      const auto* const map = static_cast<const float*>(w.parts[2]);
      const float outer = static_cast<const float*>(w.parts[1])[group / form.outer_n];
      const float product = map[byte_at(w.parts[0], group)] * outer;
      made.scale = product + *static_cast<const float*>(w.parts[3]);
      break;
    }
    case Scales::affine: {  // each result is rounded to the type of the parts
      const auto q = static_cast<float>(static_cast<std::int8_t>(byte_at(w.parts[0], group)));
      const float quotient = rounded(q / number_at(w.parts[1], group / form.outer_n));
      made.scale = rounded(quotient + number_at(w.parts[2], 0));
      break;
    }
    case Scales::q4_k:
    case Scales::q6_k:
      return step_of(static_cast<const std::uint8_t*>(w.parts[0]) + group * form.record,
                     inside / form.inner);
    default:
      made.scale = under_number(e4m3_value(byte_at(w.parts[0], group)),
                                static_cast<const float*>(w.parts[1])[group / w.under]);
  }
  if (form.zeros == Zeros::code)
    made.zero = static_cast<float>(static_cast<std::int8_t>(byte_at(w.parts[1], group)));
  else if (form.zeros == Zeros::sum || form.zeros == Zeros::rounded)
    made.zero = number_at(w.parts[1], group);
  return made;
}

/// A value of a format under its scale.
inline float scaled(float value, Scale by) {
  if (form.codec == Codec::cast) return value;
  if (form.codec == Codec::torchao) return rounded(value * by.scale);
  switch (form.zeros) {
    case Zeros::none:
      break;
    case Zeros::code:
      return (value - by.zero) * by.scale;
    case Zeros::offset:
      return value * by.scale - by.zero;
    case Zeros::sum:
      return value * by.scale + by.zero;
    case Zeros::rounded:
      return rounded(rounded(value - by.zero) * by.scale);
  }
  const float product = value * by.scale;
  return form.scales == Scales::absmax ? product * form.factor : product;
}

/// What a code stands for; of torchao's as the weight has it.
inline float meant(const Weight& w, std::uint32_t code, bool finite) {
  if (form.codec == Codec::torchao) return number_at(w.parts[3], static_cast<Index>(code));
  return finite ? finite_value_of(code) : value_of(code);
}

/// The superblock's element that lies at place i.
inline int inside_of(const Weight& w, Index i) {
  return form.record == 0 ? 0 : static_cast<int>(i % w.row % form.n);
}

/// Element i in the order of the shape.
inline float value_at(const Weight& w, Index i) {
  const Index at = place_of(w, i);
  const Place place = place_in_groups(w, at);
  return scaled(meant(w, code_at(w.codes, at), false), scale_of(w, place.group, inside_of(w, at)));
}

// --- pieces --------------------------------------------------------------------------------------

inline int together() { return form.together; }
/// Elements of a piece that have one scale, where a group has so many and they begin with it.
inline int span() { return together() < 16 ? together() : 16; }
/// How many elements of a piece there are, of so many that are left.
inline int piece_of(Index left) {
  return form.whole || left >= together() ? together() : static_cast<int>(left);
}

/// The group of a span that lies in one.
inline Index group_of_span(const Weight& w, Index row, Index column) {
  switch (form.group) {
    case Group::row:
      return row;
    case Group::along:
      return row * up(w.row, form.n) + column / form.n;
    case Group::row2:
      return row * (w.row / w.pair) + column / w.pair;
    case Group::block2:
      if (w.row == w.columns && w.lines == w.rows)  // a matrix
        return row / form.m * up(w.columns, form.n) + column / form.n;
      break;
    default:
      break;
  }
  return place_in_groups(w, row * w.row + column).group;
}
inline Scale scale_of_span(const Weight& w, Index row, Index column) {
  const int inside = form.record == 0 ? 0 : static_cast<int>(column % form.n);
  return scale_of(w, group_of_span(w, row, column), inside);
}

/// The values of n elements of a row from a column on.
inline void decode(const Weight& w, Index row, Index column, int n, float (&out)[kMostTogether]) {
  const Index first = row * w.row + column;
  if (!form.whole && (n < together() || first % together() != 0 || form.transposed)) {
    STOWAGE_UNROLL
    for (int k = 0; k < together(); ++k)
      if (k < n) out[k] = value_at(w, first + k);
    return;
  }
  std::uint32_t codes[kMostTogether];
  const bool finite = load_codes(w.codes, first, codes);
  STOWAGE_UNROLL
  for (int from = 0; from < together(); from += span()) {
    if (!form.whole) {
      STOWAGE_UNROLL
      for (int k = from; k < from + span(); ++k) {
        const Place own = place_in_groups(w, first + k);
        const Scale scale = scale_of(w, own.group, inside_of(w, first + k));
        out[k] = scaled(meant(w, codes[k], false), scale);
      }
      continue;
    }
    const Scale scale = scale_of_span(w, row, column + from);
    STOWAGE_UNROLL
    for (int k = from; k < from + span(); ++k)  // nearly always: no branch for each
      out[k] = scaled(meant(w, codes[k], true), scale);
    if (!finite) STOWAGE_UNROLL
    for (int k = from; k < from + span(); ++k) out[k] = scaled(meant(w, codes[k], false), scale);
  }
}

}  // namespace stowage::cuda
