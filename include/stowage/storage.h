// SPDX-License-Identifier: Apache-2.0
// How a weight rests: the table of formats, storage strings, and the parts that a weight of a given
// shape is made of. Everything here is a value; nothing touches weights.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "stowage/error.h"
#include "stowage/shape.h"

namespace stowage {
inline namespace v0 {

enum class Codes : std::uint8_t {
  f32,
  bf16,
  f16,
  f8_e4m3,
  f8_e5m2,
  int8,
  nf4,
  fp4,
  f4_e2m1,
  int4,
  uint4,
  int2,
  int3,
  int5,
  int6,
  int7
};
inline constexpr int kCodesCount = 16;
enum class Dialect : std::uint8_t { standard, torchao };
/// The element type of scales. f32 unless the storage names another; of nf4:torchao, whose parts
/// keep the type of the values that were quantized, `of_values` until there are values. e8m0 are
/// powers of two. e4m3 stand under an fp32 number (Scaling::outer), by which each of them is
/// multiplied first; e4m3_bf16: that number and the products are rounded to bf16; e4m3_quotient:
/// each is divided by it. `super`: a block has a record of scales of its sub-blocks, as ggml's
/// K-quants do. absmax: fp32 largest magnitudes; products with them are multiplied by fl(1 / F)
/// too.
enum class ScaleType : std::uint8_t {
  f32,
  bf16,
  f16,
  f64,
  of_values,
  e8m0,
  e4m3,
  e4m3_bf16,
  e4m3_quotient,
  super,
  absmax
};

/// What stands for 0 in a group, where that is not the code of value 0 (docs/numbers.md).
enum class Zero : std::uint8_t {
  none,
  code,     // one i8 for each group of scales; a code stands for its distance from it
  offset,   // a number for each scale of a record, which is taken off the product
  sum,      // one number of the type of scales for each group, which is added to the product
  rounded,  // likewise one; a code stands for its distance from it, which is rounded to that type
            // before it is multiplied, as the product is after that
};

/// Which values share a scale. `row`: one scale per index of dim 0; `row2`: per index of dims 0 and
/// 1; `block`: N consecutive elements, inside a row, but for the 4-bit codes of bitsandbytes and
/// torchao, whose blocks are flat over the tensor; `block2`: M rows by N columns of a matrix, or of
/// each matrix of a stack, less at its edges; `column`: N elements of one column of a matrix, whose
/// rows lie so far apart that each group has one in every Nth of the matrix.
struct Scaling {
  enum class Kind : std::uint8_t { none, tensor, row, row2, block, block2, column };
  Kind kind = Kind::none;
  std::int32_t block = 0;  // N for Kind::block, block2 and column, else 0
  bool nested = false;     // the scales are themselves quantized to 8 bits (4-bit codes only)
  ScaleType type = ScaleType::f32;
  std::int32_t scaler_block = 0;  // nf4:torchao: block scales that share one factor; else 0
  std::int32_t rows = 0;          // M for Kind::block2, else 0
  Zero zero = Zero::none;         // what each scale has beside it that stands for 0
  bool actorder = false;          // of block: which columns are of a group stands in a part
  bool transposed = false;        // matrices of a stack [E, K, O] lie as [E, O, K], blocks too
  Kind outer = Kind::none;        // of e4m3: which scales stand under one number: row, row2, or all
  bool operator==(const Scaling&) const = default;
};

/// What the codes of a weight mean. Written as one string,
/// `codes[:dialect][:scaling][:type][:zero|:zero_sum|:zero_rounded]
/// [:actorder|:nested|:transposed|:row|:row2]`.
struct Storage {
  Codes codes = Codes::f32;
  Dialect dialect = Dialect::standard;
  Scaling scaling{};
  bool operator==(const Storage&) const = default;
};
/// Reads "f8_e4m3", "nf4:block64:nested", ...; defaults are filled in (int8 -> row, nf4:torchao ->
/// block64, scaler256 and the type of the values). Throws invalid_argument that lists legal ones.
STOWAGE_API Storage parse_storage(std::string_view text);
/// The canonical string: parse_storage(to_string(s)) == s. Defaults are written out except for
/// casts and nf4:torchao ("f8_e4m3", "int8:row", "nf4:block64", "nf4:torchao:bf16").
STOWAGE_API std::string to_string(const Storage& storage);
/// One integer that stands for a storage across a language door, and back (throws on a bad key).
STOWAGE_API std::int64_t storage_key(const Storage& storage) noexcept;
STOWAGE_API Storage storage_from_key(std::int64_t key);
/// What `storage` is for values of this dtype: nf4:torchao becomes nf4:torchao:bf16 and so on;
/// every other storage stays as it is.
STOWAGE_API Storage storage_for_values(const Storage& storage, Dtype values) noexcept;
/// "f32, bf16, f16, f8_e4m3[:tensor|:row|:row2|:block<N>], ...": the text errors show.
STOWAGE_API std::string legal_storages();

/// The table of formats: the single source of every fact about a format.
struct FormatTrait {
  Codes codes;
  std::string_view name;          // as storage strings spell it
  int bits;                       // of one code
  float largest;                  // finite; input is clamped to it
  std::span<const float> values;  // values[code], for codes of at most 8 bits; else empty
  Dtype disk;                     // element type of the codes in a file
  Scaling default_scaling;
  float lowest = -largest;  // the other end of what is scaled without zeros
  float divisor = largest;  // F of the scale rule: the scale of such is amax / F
};
STOWAGE_API const FormatTrait& trait(Codes codes) noexcept;
STOWAGE_API std::span<const FormatTrait> formats() noexcept;

/// One tensor that a resting weight is made of, in memory.
struct Part {
  std::string_view name;  // codes, scale, absmax, ...: as layout() says
  Dtype dtype;
  Shape shape;
  std::int64_t bytes;
};
inline constexpr int kMaxParts = 5;
struct STOWAGE_API Layout {
  std::array<Part, kMaxParts> parts;
  int count = 0;
  std::int64_t bytes() const noexcept;
};
/// The parts of a weight, codes first. 8-bit codes are u8 in the weight's shape, 4-bit codes u8
/// [(elements + 1) / 2, 1] with the first element in the high nibble, or, where groups stay in a
/// row, u8 [rows, K / 2] with the first in the low one; those of 2, 3, 5, 6 and 7 bits u8 [rows,
/// K * bits / 8]; wider casts keep their dtype.
/// scale f32, bf16 or f16 (e8m0: u8): tensor [], row [O, 1, ..], row2 [E, O, 1, ..], block [rows,
/// ceil(K / N)], block2 [ceil(O / M), ceil(K / N)], a stack [E, O, K] one such for each of [O, K],
/// column [O / N, K];
/// `zero`: zero i8, of `zero_sum` and `zero_rounded` in the type of the scales, in the same shape;
/// `actorder`: g_idx i32 [K], the group of each column; e4m3 and its like: scale u8 and
/// global_scale f32 [], `row` behind it [O, 1, ..], `row2` [E, O, 1, ..]; `super`: scale u8 [rows,
/// ceil(K / N), bytes of a record]. `transposed`: of [E, K, O] what [E, O, K] has. `absmax`: that
/// f32 for scale. 4-bit: absmax f32 [blocks]; nested: absmax u8 [blocks], nested_absmax f32
/// [ceil(blocks / 256)], nested_map f32 [256], nested_offset f32 []. nf4:torchao:<D>:
/// quantized_scalers i8 [blocks], quantization_factor D [blocks / scaler block], scaler_mean D [],
/// nf4 D [16]. Throws invalid_argument where the format cannot hold the shape, and for nf4:torchao
/// without its dtype.
STOWAGE_API Layout layout(const Storage& storage, const Shape& shape);
/// Elements that share one scale, in flat order (row: K; tensor and none: all); of `block` within
/// rows groups restart at each row; block2: N, of one row; column: 1. Throws as layout() for no
/// such storage.
STOWAGE_API std::int64_t group_elements(const Storage& storage, const Shape& shape);

}  // namespace v0
}  // namespace stowage
