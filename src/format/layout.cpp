// SPDX-License-Identifier: Apache-2.0
// What a weight of a given shape is made of: names, element types, shapes and bytes of its parts.
#include <numeric>
#include <string>

#include "base/checked.h"
#include "format/legal.h"

namespace stowage {
namespace {

using Kind = Scaling::Kind;

void add(Layout& made, std::string_view name, Dtype dtype, const Shape& shape) {
  const auto bit_count = checked_mul<std::int64_t>(shape.elements(), bits(dtype));
  if (!bit_count)
    throw Error(
        Code::invalid_argument,
        "layout: " + std::string(name) + " must fit 64-bit sizes, got shape " + to_string(shape));
  made.parts[static_cast<std::size_t>(made.count++)] = {name, dtype, shape, *bit_count / 8};
}

void expect_rank(const Storage& storage, const Shape& shape, int least) {
  if (shape.rank() >= least) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have at least " + std::to_string(least) +
                                          (least == 1 ? " dimension" : " dimensions") +
                                          ", got shape " + to_string(shape));
}

// The first `kept` sizes, then 1 for every other dimension.
Shape keep_leading(const Shape& shape, int kept) {
  std::array<std::int64_t, Shape::kMaxRank> sizes{};
  for (int i = 0; i < shape.rank(); ++i)
    sizes[static_cast<std::size_t>(i)] = i < kept ? shape[i] : 1;
  return Shape(std::span<const std::int64_t>(sizes.data(), static_cast<std::size_t>(shape.rank())));
}

Shape scale_shape(const Storage& storage, const Shape& shape) {
  switch (storage.scaling.kind) {
    case Kind::row:
      expect_rank(storage, shape, 1);
      return keep_leading(shape, 1);
    case Kind::row2:
      expect_rank(storage, shape, 2);
      return keep_leading(shape, 2);
    case Kind::block: {
      expect_rank(storage, shape, 1);
      return {shape.rows(), ceil_div<std::int64_t>(shape.row_elements(), storage.scaling.block)};
    }
    case Kind::none:
    case Kind::tensor:
      break;
  }
  return {};
}

Layout layout4(const Storage& storage, const Shape& shape) {
  Layout made;
  const std::int64_t n = shape.elements();
  const std::int64_t blocks = ceil_div<std::int64_t>(n, storage.scaling.block);
  add(made, "codes", Dtype::u8, {ceil_div<std::int64_t>(n, 2), 1});
  add(made, "absmax", storage.scaling.nested ? Dtype::u8 : Dtype::f32, {blocks});
  if (!storage.scaling.nested) return made;
  add(made, "nested_absmax", Dtype::f32, {ceil_div(blocks, kNestedBlock)});
  add(made, "nested_map", Dtype::f32, {256});
  add(made, "nested_offset", Dtype::f32, {});
  return made;
}

Dtype dtype_of(const Storage& storage) {
  switch (storage.scaling.type) {
    case ScaleType::f32:
      return Dtype::f32;
    case ScaleType::bf16:
      return Dtype::bf16;
    case ScaleType::f16:
      return Dtype::f16;
    case ScaleType::f64:
      return Dtype::f64;
    case ScaleType::of_values:
      break;
  }
  const std::string text = to_string(storage);
  throw Error(Code::invalid_argument, "layout: a weight stored as " + text +
                                          " must name the dtype of its parts where no values give "
                                          "it: " +
                                          text + ":f32, " + text + ":bf16, " + text + ":f16 or " +
                                          text + ":f64");
}

Layout layout_torchao(const Storage& storage, const Shape& shape) {
  const Dtype dtype = dtype_of(storage);
  const std::int64_t n = shape.elements(), block = storage.scaling.block,
                     scaler_block = storage.scaling.scaler_block;
  if (shape.rank() > 2 || n % (block * scaler_block) != 0)
    throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                            " must have at most 2 dimensions and a multiple of " +
                                            std::to_string(block * scaler_block) +
                                            " elements (block " + std::to_string(block) +
                                            " x scaler block " + std::to_string(scaler_block) +
                                            "), got shape " + to_string(shape));
  Layout made;
  add(made, "codes", Dtype::u8, {n / 2, 1});
  add(made, "quantized_scalers", Dtype::i8, {n / block});
  add(made, "quantization_factor", dtype, {n / block / scaler_block});
  add(made, "scaler_mean", dtype, {});
  add(made, "nf4", dtype, {16});
  return made;
}

}  // namespace

inline namespace v0 {

std::int64_t Layout::bytes() const noexcept {
  return std::accumulate(parts.begin(), parts.begin() + count, std::int64_t{0},
                         [](std::int64_t sum, const Part& part) { return sum + part.bytes; });
}

Layout layout(const Storage& storage, const Shape& shape) {
  check_legal(storage, "layout");
  if (storage.dialect == Dialect::torchao) return layout_torchao(storage, shape);
  const FormatTrait& format = trait(storage.codes);
  if (format.bits == 4) return layout4(storage, shape);
  Layout made;
  add(made, "codes", format.bits == 8 ? Dtype::u8 : format.disk, shape);
  if (storage.scaling.kind != Kind::none)
    add(made, "scale", Dtype::f32, scale_shape(storage, shape));
  return made;
}

std::int64_t group_elements(const Storage& storage, const Shape& shape) noexcept {
  switch (storage.scaling.kind) {
    case Kind::row:
      return shape.row_elements();
    case Kind::row2: {
      std::int64_t product = 1;
      for (int i = 2; i < shape.rank(); ++i) product *= shape[i];
      return product;
    }
    case Kind::block:
      return storage.scaling.block;
    case Kind::none:
    case Kind::tensor:
      break;
  }
  return shape.elements();
}

}  // namespace v0
}  // namespace stowage
