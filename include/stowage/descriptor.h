// SPDX-License-Identifier: Apache-2.0
// What a storage says, as data: how codes lie in bytes, which elements share a scale, how scales
// lie, whose arithmetic makes them, and the parts that follow. The only place that knows it:
// everything else asks for a field, or one of the questions below, and nothing asks how wide codes
// are.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "stowage/storage.h"

namespace stowage {
inline namespace v0 {

/// How codes lie in bytes.
enum class Packing : std::uint8_t {
  whole,       // each in bytes of its own, in the weight's shape
  high_first,  // two in a byte, flat over the tensor, the first in the high half
  low_first,   // two in a byte of one row, the first in the low half; no row has an odd one
  dense,       // a row is one string of bits, from the lowest of its first byte up: each code has
               // the next ones, however wide it is; eight fill bytes, and rows have whole eights
};

/// Which elements share a number.
struct Group {
  enum class Kind : std::uint8_t {
    none,    // each has its own value: no number
    tensor,  // all
    row,     // one index of dim 0
    row2,    // one pair of indices of dims 0 and 1
    flat,    // N consecutive ones of the tensor, across rows; the last group may be short
    along,   // N consecutive ones of a row; the last group of each row may be short
    block2,  // M rows by N columns of a matrix, of a stack too; those at its edges may be smaller
    named,   // of each row of a matrix those whose columns a part gives the same number; as many
             // numbers as groups of N columns would be
    column,  // N elements of a column of a matrix, in rows that lie as far apart as they can: of R
             // rows of groups, row o of the matrix is of row o mod R
  };
  Kind kind = Kind::none;
  std::int32_t n = 0;  // of flat, along, block2, named and column
  std::int32_t m = 0;  // of block2
};

/// How the numbers of a level are kept.
enum class ScaleCode : std::uint8_t {
  plain,         // as numbers
  mapped,        // u8 codes of a map of 256 numbers, times an outer scale, plus one offset
  affine,        // i8 codes, divided by an outer factor, plus one mean
  q4_k,          // records of ggml: u6 codes of sub-blocks, times an f16 number; and of offsets
  q6_k,          // likewise: i8 codes of sub-blocks, then the f16 number that they count
  absmax,        // fp32 numbers, F times the scale: products are multiplied by fl(1 / F) too
  product,       // e4m3 numbers, times the outer scale of their group, in fp32
  product_bf16,  // the same in bf16, to which the outer scale is rounded first
  quotient,      // e4m3 numbers, divided by that outer number, in fp32
};
struct Level {
  Group group;
  Dtype type = Dtype::f32;  // of its numbers; unknown where only values will tell it
  ScaleCode code = ScaleCode::plain;
  std::int32_t record = 0;  // bytes of a group, where they are no number; else 0
  std::int32_t inner = 0;   // elements that share one of the scales of a record; else 0
};

/// Whose arithmetic makes codes and scales of values (docs/numbers.md).
enum class Codec : std::uint8_t { cast, amax, bitsandbytes, torchao, ggml };

/// Which power of two a scale that is kept as one takes.
enum class PowerRule : std::uint8_t {
  ceil,   // the least that is no smaller than amax / F: no value is beyond F
  floor,  // 2^(floor(log2 amax) - floor(log2 F)), OCP MX 1.0: values beyond F become F
};

/// How files tell what a weight is.
enum class FileForm : std::uint8_t {
  values,       // by the element type alone
  scaled,       // by a scale beside it, whose shape says of which elements
  quant_state,  // by bitsandbytes' JSON beside it
  manifest,     // by our manifest or label alone
};

/// How large a part is.
enum class Extent : std::uint8_t {
  weight,   // the weight's shape
  pairs,    // [(elements + 1) / 2, 1]
  packed,   // [rows, bytes of the codes of a row]
  scales,   // as the group of scales says, and behind that the bytes of a record
  outers,   // as the group of what scales stand under says
  one,      // []
  values,   // [16]
  map,      // [256]
  columns,  // [columns]
};
/// The suffix of a part that files have as a number in a quant state.
inline constexpr std::string_view kNoTensor = "-";
struct PartRow {
  std::string_view name;    // as layout() says
  std::string_view suffix;  // behind the weight's name in a file
  Extent extent;
  Dtype dtype;  // unknown: that of the format's codes, or of the numbers of the level
};

/// Of one storage. A value; `parts` and names point to constants.
struct Descriptor {
  Codes codes = Codes::f32;
  Packing packing = Packing::whole;
  Codec codec = Codec::cast;
  PowerRule powers = PowerRule::ceil;
  FileForm file = FileForm::values;
  Level scale;             // each value is multiplied by the scale of its group
  float factor = 1;        // of absmax: multiplies each product with a scale, in turn
  Zero zero = Zero::none;  // beside each scale
  Level outer;  // what codes of scales stand under, by groups of scales; none: scales are plain
  Dtype rounds_to = Dtype::unknown;  // values are rounded to it before anything else
  bool transposed = false;           // matrices of a stack lie so: parts are those of lying()
  std::span<const PartRow> parts;    // codes first
};
/// Parts, the first ones, that each row has something of; the others are of all rows.
STOWAGE_API int parts_in_rows(const Storage& storage);
/// How many elements, in the order of the weight, one index of dim 0 of such a part has.
STOWAGE_API std::int64_t elements_of_part_row(const Storage& storage, int part, const Shape& shape);
/// Whether scales of this type are e4m3 numbers, each under one of fp32.
constexpr bool stand_under_one(ScaleType type) noexcept {
  return type >= ScaleType::e4m3 && type <= ScaleType::e4m3_quotient;
}
/// Throws invalid_argument where no row of the table has these codes in this dialect.
STOWAGE_API Descriptor describe(const Storage& storage);

/// How a weight that lies transposed lies: the storage of [E, O, K] for a shape of [E, K, O], and
/// that shape; others as they are.
STOWAGE_API Storage lying(const Storage& storage) noexcept;
STOWAGE_API Shape lying(const Storage& storage, const Shape& shape);
/// What codes reach: values over their scale are clamped to it, and a scale is amax / divisor; with
/// zeros, which use all codes, the span of the values / divisor.
struct CodeRange {
  float least = 0, most = 0, divisor = 0;
};
STOWAGE_API CodeRange code_range(const Storage& storage) noexcept;

/// Plain casts: no scales.
inline bool is_cast(const Storage& storage) noexcept {
  return storage.scaling.kind == Scaling::Kind::none;
}
/// Whether values are taken as they are; other storages see them in fp32.
inline bool sees_exact_values(const Storage& storage) noexcept {
  return is_cast(storage) || storage.dialect == Dialect::torchao;
}
/// Casts to what values are given in too: f32, bf16 and f16.
inline bool is_value_cast(Codes codes) noexcept { return is_value_dtype(trait(codes).disk); }
/// Whether codes run on across rows, which may begin inside of a byte or a group.
inline bool runs_across_rows(const Storage& storage) {
  return describe(storage).packing == Packing::high_first;
}
/// Whether scales are e4m3 numbers, each under one of fp32; values are divided by what they are
/// then when they are quantized: reciprocals would round again.
inline bool stands_under_one(const Descriptor& form) noexcept {
  return form.scale.code >= ScaleCode::product;
}
/// Codes that fill bytes together: no row, and no group of several columns, begins between them.
inline int codes_together(Packing packing) noexcept {
  return packing == Packing::whole ? 1 : packing == Packing::dense ? 8 : 2;
}
/// Whether elements of several rows share a number, but not all of a row.
inline bool spans_rows(const Group& group) noexcept {
  return group.kind == Group::Kind::block2 || group.kind == Group::Kind::column;
}
/// How many scales of a weight of this shape, next to one another, stand under one such number.
STOWAGE_API std::int64_t scales_under_one(const Storage& storage, const Shape& shape);
/// Elements of a row of the part of codes that has so many of its own.
inline std::int64_t elements_of(const Storage& storage, std::int64_t of_part) {
  if (describe(storage).packing == Packing::whole) return of_part;
  return of_part * 8 / trait(storage.codes).bits;
}
/// What kernels read: dense codes become numbers of a byte first.
inline Codes codes_read(const Descriptor& form) noexcept {
  return form.packing == Packing::dense ? Codes::int8 : form.codes;
}
/// Whether codes have a byte each, in the weight's shape.
inline bool has_byte_codes(const Storage& storage) {
  return describe(storage).packing == Packing::whole && !is_value_cast(storage.codes);
}

}  // namespace v0
}  // namespace stowage
