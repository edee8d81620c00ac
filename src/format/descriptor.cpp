// SPDX-License-Identifier: Apache-2.0
// From a storage to its descriptor: the form of its row, and what its scaling chooses.
#include "stowage/descriptor.h"

#include <algorithm>
#include <array>

#include "format/legal.h"

namespace stowage {
namespace {

using enum Extent;
constexpr Dtype kOfLevel = Dtype::unknown;
constexpr PartRow kWhole{"codes", "", weight, Dtype::unknown};
constexpr PartRow kPairs{"codes", "", pairs, Dtype::u8};
constexpr PartRow kPacked{"codes", "", packed, Dtype::u8};

constexpr std::array kCastParts{kWhole};
constexpr PartRow kScale{"scale", "_scale", scales, kOfLevel};
constexpr PartRow kZero{"zero", "_zero_point", scales, Dtype::i8};
constexpr std::array kScaledParts{kWhole, kScale}, kPackedParts{kPacked, kScale};
constexpr std::array kZeroParts{kWhole, kScale, kZero}, kPackedZeroParts{kPacked, kScale, kZero};
constexpr std::array kPackedNumberParts{kPacked, kScale,
                                        PartRow{"zero", "_zero_point", scales, kOfLevel}};
constexpr PartRow kGroups{"g_idx", "_g_idx", columns, Dtype::i32};
constexpr std::array kNamedParts{kWhole, kScale, kGroups};
constexpr std::array kNamedZeroParts{kWhole, kScale, kZero, kGroups};
constexpr std::array kPackedNamedParts{kPacked, kScale, kGroups};
constexpr std::array kPackedNamedZeroParts{kPacked, kScale, kZero, kGroups};
constexpr std::array kProductParts{kPacked, kScale,
                                   PartRow{"global_scale", "_scale_2", outers, Dtype::f32}};
constexpr std::array kQuotientParts{kPacked, kScale,
                                    PartRow{"global_scale", "_global_scale", outers, Dtype::f32}};
constexpr PartRow kAbsmax{"absmax", ".absmax", scales, Dtype::f32};
constexpr std::array kWholeAbsmaxParts{kWhole, kAbsmax};
constexpr std::array kAbsmaxParts{kPairs, kAbsmax};
constexpr std::array kNestedParts{kPairs, PartRow{"absmax", ".absmax", scales, Dtype::u8},
                                  PartRow{"nested_absmax", ".nested_absmax", outers, Dtype::f32},
                                  PartRow{"nested_map", ".nested_quant_map", map, Dtype::f32},
                                  PartRow{"nested_offset", kNoTensor, one, Dtype::f32}};
constexpr std::array kTorchaoParts{
    kPairs, PartRow{"quantized_scalers", ".quantized_scalers", scales, Dtype::i8},
    PartRow{"quantization_factor", ".quantization_factor", outers, kOfLevel},
    PartRow{"scaler_mean", ".scaler_mean", one, kOfLevel},
    PartRow{"nf4", ".nf4", values, kOfLevel}};
static_assert(kNestedParts.size() <= kMaxParts && kTorchaoParts.size() <= kMaxParts);

Dtype dtype_of(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::f32:
    case ScaleType::absmax:
      return Dtype::f32;
    case ScaleType::bf16:
      return Dtype::bf16;
    case ScaleType::f16:
      return Dtype::f16;
    case ScaleType::f64:
      return Dtype::f64;
    case ScaleType::e8m0:
      return Dtype::f8_e8m0;
    case ScaleType::e4m3:
    case ScaleType::e4m3_bf16:
    case ScaleType::e4m3_quotient:
      return Dtype::f8_e4m3;
    case ScaleType::super:
      return Dtype::u8;
    case ScaleType::of_values:
      break;
  }
  return Dtype::unknown;
}

ScaleCode code_under_one(ScaleType type) noexcept {
  if (type == ScaleType::e4m3_bf16) return ScaleCode::product_bf16;
  return type == ScaleType::e4m3_quotient ? ScaleCode::quotient : ScaleCode::product;
}

// What e4m3 scales stand under.
Group outer_of(const Scaling& scaling) noexcept {
  if (scaling.outer == Scaling::Kind::row) return {Group::Kind::row};
  return {scaling.outer == Scaling::Kind::row2 ? Group::Kind::row2 : Group::Kind::tensor};
}

Group group_of(const Scaling& scaling, Packing packing) noexcept {
  using Kind = Scaling::Kind;
  switch (scaling.kind) {
    case Kind::none:
      break;
    case Kind::tensor:
      return {Group::Kind::tensor};
    case Kind::row:
      return {Group::Kind::row};
    case Kind::row2:
      return {Group::Kind::row2};
    case Kind::block:
      if (scaling.actorder) return {Group::Kind::named, scaling.block};
      return {packing == Packing::high_first ? Group::Kind::flat : Group::Kind::along,
              scaling.block};
    case Kind::block2:
      return {Group::Kind::block2, scaling.block, scaling.rows};
    case Kind::column:
      return {Group::Kind::column, scaling.block};
  }
  return {};
}

// Of codes whose scales are numbers.
std::span<const PartRow> scaled_parts(const Scaling& scaling, Packing packing) noexcept {
  if (scaling.zero == Zero::sum || scaling.zero == Zero::rounded) return kPackedNumberParts;
  const bool zero = scaling.zero == Zero::code;
  if (packing == Packing::whole) {
    if (scaling.actorder) return zero ? std::span<const PartRow>(kNamedZeroParts) : kNamedParts;
    return zero ? std::span<const PartRow>(kZeroParts) : kScaledParts;
  }
  if (scaling.actorder)
    return zero ? std::span<const PartRow>(kPackedNamedZeroParts) : kPackedNamedParts;
  return zero ? std::span<const PartRow>(kPackedZeroParts) : kPackedParts;
}

// Superblocks of ggml, by the codes that they have.
struct Superblock {
  Codes codes;
  ScaleCode code;
  std::int32_t record, inner;
  Zero zero;
};
constexpr std::array kSuperblocks{
    Superblock{Codes::uint4, ScaleCode::q4_k, 16, 32, Zero::offset},
    Superblock{Codes::int6, ScaleCode::q6_k, 18, 16, Zero::none},
};

void add_record(Descriptor& made) noexcept {
  const auto* const super = std::ranges::find(kSuperblocks, made.codes, &Superblock::codes);
  made.codec = Codec::ggml;
  made.scale.code = super->code;
  made.scale.record = super->record;
  made.scale.inner = super->inner;
  made.zero = super->zero;
  made.parts = kPackedParts;
}

Descriptor described(const Storage& storage) {
  const FormRow* const found = form_row(storage.codes, storage.dialect);
  if (found == nullptr) check_legal(storage, "describe");  // which throws
  const FormRow& row = *found;
  const Scaling& scaling = storage.scaling;
  Descriptor made;
  made.codes = storage.codes;
  made.packing = row.packing;
  made.codec = scaling.zero == Zero::rounded ? Codec::amax : row.codec;
  made.powers = row.powers;
  made.file = row.file;
  made.scale = {.group = group_of(scaling, row.packing), .type = dtype_of(scaling.type)};
  made.transposed = scaling.transposed;
  switch (made.codec) {
    case Codec::cast:
      made.parts = kCastParts;
      break;
    case Codec::amax:
      made.zero = scaling.zero;
      made.parts = scaled_parts(scaling, row.packing);
      if (stand_under_one(scaling.type)) {
        made.scale.code = code_under_one(scaling.type);
        made.outer.group = outer_of(scaling);
        made.parts = scaling.type == ScaleType::e4m3_quotient
                         ? std::span<const PartRow>(kQuotientParts)
                         : kProductParts;
      }
      if (scaling.type == ScaleType::absmax) {
        made.scale.code = ScaleCode::absmax;
        made.factor = 1.0f / trait(storage.codes).divisor;
        made.file = FileForm::manifest;
        made.parts = kWholeAbsmaxParts;
      }
      if (scaling.kind != Scaling::Kind::none) break;
      made.codec = Codec::cast;
      made.file = FileForm::values;
      made.parts = kCastParts;
      break;
    case Codec::bitsandbytes:
      made.parts = kAbsmaxParts;
      if (!scaling.nested) break;
      made.scale.code = ScaleCode::mapped;
      made.outer.group = {Group::Kind::flat, static_cast<std::int32_t>(kNestedBlock)};
      made.parts = kNestedParts;
      break;
    case Codec::ggml:
      break;  // as all records
    case Codec::torchao:
      made.scale.code = ScaleCode::affine;
      made.outer = {.group = {Group::Kind::flat, scaling.scaler_block}, .type = made.scale.type};
      made.rounds_to = made.scale.type;
      made.parts = kTorchaoParts;
      break;
  }
  if (scaling.type == ScaleType::super) add_record(made);
  return made;
}

}  // namespace

inline namespace v0 {

// Who goes through elements asks for each of them, of one storage.
Descriptor describe(const Storage& storage) {
  struct Asked {
    Storage storage;
    Descriptor form;
    bool known = false;
  };
  thread_local Asked last;
  if (!last.known || last.storage != storage) last = {storage, described(storage), true};
  return last.form;
}

Storage lying(const Storage& storage) noexcept {
  Storage made = storage;
  made.scaling.transposed = false;
  return made;
}

Shape lying(const Storage& storage, const Shape& shape) {
  if (!storage.scaling.transposed || shape.rank() != 3) return shape;
  return {shape[0], shape[2], shape[1]};
}

CodeRange code_range(const Storage& storage) noexcept {
  const FormatTrait& format = trait(storage.codes);
  const Zero zero = storage.scaling.zero;
  if (zero == Zero::none || zero == Zero::rounded)
    return {format.lowest, format.largest, format.divisor};
  const auto half = static_cast<float>(1 << (format.bits - 1));  // of all codes
  return {-half, half - 1, 2 * half - 1};
}

}  // namespace v0
}  // namespace stowage
