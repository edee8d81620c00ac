// SPDX-License-Identifier: Apache-2.0
// What a weight of a given shape is made of: names, element types, shapes and bytes of its parts.
#include <algorithm>
#include <numeric>
#include <string>

#include "base/checked.h"
#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

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

void expect_matrix(const Storage& storage, const Shape& shape) {
  if (shape.rank() == 2) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have 2 dimensions, got shape " + to_string(shape));
}

void expect_matrices(const Storage& storage, const Shape& shape) {
  if (shape.rank() == 2 || shape.rank() == 3) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have 2 or 3 dimensions, got shape " +
                                          to_string(shape));
}

void expect_groups(const Storage& storage, const Shape& shape, std::int64_t groups) {
  if (groups <= kMostNamed) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have at most " + std::to_string(kMostNamed) +
                                          " groups in each row, got shape " + to_string(shape));
}

// The first `kept` sizes, then 1 for every other dimension.
Shape keep_leading(const Shape& shape, int kept) {
  std::array<std::int64_t, Shape::kMaxRank> sizes{};
  for (int i = 0; i < shape.rank(); ++i)
    sizes[static_cast<std::size_t>(i)] = i < kept ? shape[i] : 1;
  return Shape(std::span<const std::int64_t>(sizes.data(), static_cast<std::size_t>(shape.rank())));
}

// Elements of each tuple of indices of the first dimensions.
std::int64_t elements_from(const Shape& shape, int dim) {
  std::int64_t product = 1;
  for (int i = dim; i < shape.rank(); ++i) product *= shape[i];
  return product;
}

// Elements that lie side by side with scales of their own: of a row, of a pair of indices, or of a
// row of a matrix.
std::int64_t line_elements(const Storage& storage, const Shape& shape) {
  switch (storage.scaling.kind) {
    case Scaling::Kind::row2:
      return group_elements(storage, shape);
    case Scaling::Kind::block2:
      return shape[shape.rank() - 1];
    default:
      return shape.row_elements();
  }
}

// Codes that fill bytes together: none of them has another row or another scale than the others.
Shape packed_shape(const Storage& storage, const Shape& shape) {
  expect_rank(storage, shape, storage.scaling.kind == Scaling::Kind::row2 ? 3 : 2);
  const int together = codes_together(describe(storage).packing);
  if (line_elements(storage, shape) % together != 0)
    throw Error(
        Code::invalid_argument,
        "layout: a weight stored as " + to_string(storage) + " must have " +
            (together == 2 ? "an even number" : "a multiple of " + std::to_string(together)) +
            (together == 2 ? " of elements in each row" : " elements in each row") +
            ", got shape " + to_string(shape));
  return {shape.rows(),
          shape.row_elements() / together * (together * trait(storage.codes).bits / 8)};
}

// Scales that stand under a number of each pair of indices: none is of two.
void expect_whole_groups(const Storage& storage, const Shape& shape) {
  if (storage.scaling.outer != Scaling::Kind::row2) return;
  const std::int64_t block = storage.scaling.block;
  if (shape.rank() >= 3 && elements_from(shape, 2) % block == 0) return;
  throw Error(Code::invalid_argument,
              "layout: a weight stored as " + to_string(storage) +
                  " must have at least 3 dimensions, and for each pair of indices a multiple of " +
                  std::to_string(block) + " elements, got shape " + to_string(shape));
}

Shape scale_shape(const Level& level, const Storage& storage, const Shape& shape) {
  const Group& group = level.group;
  switch (group.kind) {
    case Group::Kind::row:
      expect_rank(storage, shape, 1);
      return keep_leading(shape, 1);
    case Group::Kind::row2:
      expect_rank(storage, shape, 2);
      return keep_leading(shape, 2);
    case Group::Kind::along:
      expect_rank(storage, shape, 1);
      if (level.record != 0)
        return {shape.rows(), ceil_div<std::int64_t>(shape.row_elements(), group.n), level.record};
      return {shape.rows(), ceil_div<std::int64_t>(shape.row_elements(), group.n)};
    case Group::Kind::flat:
      return {ceil_div<std::int64_t>(shape.elements(), group.n)};
    case Group::Kind::named:
      expect_matrix(storage, shape);
      expect_groups(storage, shape, ceil_div<std::int64_t>(shape[1], group.n));
      return {shape[0], ceil_div<std::int64_t>(shape[1], group.n)};
    case Group::Kind::block2:
      expect_matrices(storage, shape);
      if (shape.rank() == 3)
        return {shape[0], ceil_div<std::int64_t>(shape[1], group.m),
                ceil_div<std::int64_t>(shape[2], group.n)};
      return {ceil_div<std::int64_t>(shape[0], group.m), ceil_div<std::int64_t>(shape[1], group.n)};
    case Group::Kind::column:
      return {shape[0] / group.n, shape[1]};
    case Group::Kind::none:
    case Group::Kind::tensor:
      break;
  }
  return {};
}

Shape part_shape(const Descriptor& form, Extent extent, const Storage& storage,
                 const Shape& shape) {
  switch (extent) {
    case Extent::weight:
      return shape;
    case Extent::pairs:
      return {ceil_div<std::int64_t>(shape.elements(), 2), 1};
    case Extent::packed:
      return packed_shape(storage, shape);
    case Extent::scales:
      return scale_shape(form.scale, storage, shape);
    case Extent::outers:
      if (form.outer.group.kind != Group::Kind::flat)
        return scale_shape(form.outer, storage, shape);
      return {ceil_div<std::int64_t>(scale_shape(form.scale, storage, shape).elements(),
                                     form.outer.group.n)};
    case Extent::one:
      break;
    case Extent::values:
      return {16};
    case Extent::map:
      return {256};
    case Extent::columns:
      return {shape.row_elements()};
  }
  return {};
}

// nf4:torchao names the dtype of its parts, and has no short groups.
void check_torchao(const Descriptor& form, const Storage& storage, const Shape& shape) {
  const std::string text = to_string(storage);
  if (form.rounds_to == Dtype::unknown)
    throw Error(Code::invalid_argument, "layout: a weight stored as " + text +
                                            " must name the dtype of its parts where no values "
                                            "give it: " +
                                            text + ":f32, " + text + ":bf16, " + text + ":f16 or " +
                                            text + ":f64");
  const std::int64_t block = form.scale.group.n, scaler_block = form.outer.group.n;
  if (shape.rank() > 2 || shape.elements() % (block * scaler_block) != 0)
    throw Error(Code::invalid_argument, "layout: a weight stored as " + text +
                                            " must have at most 2 dimensions and a multiple of " +
                                            std::to_string(block * scaler_block) +
                                            " elements (block " + std::to_string(block) +
                                            " x scaler block " + std::to_string(scaler_block) +
                                            "), got shape " + to_string(shape));
}

// Of matrices that lie transposed, whose groups are whole.
void check_transposed(const Storage& storage, const Shape& shape) {
  const std::int64_t block = storage.scaling.block;
  if (shape.rank() == 3 && shape[1] % block == 0) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have 3 dimensions, the second a multiple of " +
                                          std::to_string(block) + ", got shape " +
                                          to_string(shape));
}

// Of a matrix, no group of which is short.
void check_columns(const Storage& storage, const Shape& shape) {
  const std::int64_t block = storage.scaling.block;
  if (shape.rank() == 2 && shape[0] % block == 0) return;
  throw Error(Code::invalid_argument, "layout: a weight stored as " + to_string(storage) +
                                          " must have 2 dimensions, the first a multiple of " +
                                          std::to_string(block) + ", got shape " +
                                          to_string(shape));
}

}  // namespace

inline namespace v0 {

std::int64_t Layout::bytes() const noexcept {
  return std::accumulate(parts.begin(), parts.begin() + count, std::int64_t{0},
                         [](std::int64_t sum, const Part& part) { return sum + part.bytes; });
}

Layout layout(const Storage& storage, const Shape& given) {
  check_legal(storage, "layout");
  if (storage.scaling.transposed) check_transposed(storage, given);
  if (storage.scaling.kind == Scaling::Kind::column) check_columns(storage, given);
  const Shape shape = lying(storage, given);
  const Descriptor form = describe(storage);
  if (form.codec == Codec::torchao) check_torchao(form, storage, shape);
  expect_whole_groups(storage, shape);
  Layout made;
  for (const PartRow& part : form.parts) {
    Dtype dtype = part.dtype != Dtype::unknown ? part.dtype : form.scale.type;
    if (dtype == Dtype::f8_e8m0 || dtype == Dtype::f8_e4m3) dtype = Dtype::u8;  // unlike in files
    if (part.extent == Extent::weight)
      dtype = has_byte_codes(storage) ? Dtype::u8 : trait(storage.codes).disk;
    add(made, part.name, dtype, part_shape(form, part.extent, storage, shape));
  }
  return made;
}

std::int64_t group_elements(const Storage& storage, const Shape& shape) {
  const Group group = describe(storage).scale.group;
  switch (group.kind) {
    case Group::Kind::row:
      return shape.row_elements();
    case Group::Kind::row2:
      return elements_from(shape, 2);
    case Group::Kind::along:
    case Group::Kind::flat:
    case Group::Kind::block2:
    case Group::Kind::named:
      return group.n;
    case Group::Kind::column:
      return 1;
    case Group::Kind::none:
    case Group::Kind::tensor:
      break;
  }
  return shape.elements();
}

int parts_in_rows(const Storage& storage) {
  const Scaling::Kind kind = storage.scaling.kind;
  if (kind == Scaling::Kind::tensor || kind == Scaling::Kind::column) return 1;
  const Descriptor form = describe(storage);
  const auto outer = form.outer.group.kind;
  const bool has_outers = outer == Group::Kind::row || outer == Group::Kind::row2;
  return 1 + static_cast<int>(std::ranges::count_if(form.parts, [&](const PartRow& part) {
           return part.extent == Extent::scales || (has_outers && part.extent == Extent::outers);
         }));
}

std::int64_t elements_of_part_row(const Storage& storage, int part, const Shape& shape) {
  const Descriptor form = describe(storage);
  const Extent extent = form.parts[static_cast<std::size_t>(part)].extent;
  const Group& group = form.scale.group;
  if (extent == Extent::pairs) return 2;
  if (extent != Extent::scales) return shape.row_elements();
  if (group.kind == Group::Kind::flat) return group.n;
  const bool is_matrix = group.kind == Group::Kind::block2 && shape.rank() == 2;
  return is_matrix ? group.m * shape.row_elements() : shape.row_elements();
}

std::int64_t scales_under_one(const Storage& storage, const Shape& shape) {
  const Descriptor form = describe(storage);
  if (form.outer.group.kind == Group::Kind::row2)
    return elements_from(shape, 2) / form.scale.group.n;
  const std::int64_t scales = scale_shape(form.scale, storage, shape).elements();
  if (form.outer.group.kind == Group::Kind::row && shape.rows() != 0) return scales / shape.rows();
  return form.outer.group.n != 0 ? form.outer.group.n : scales;
}

}  // namespace v0
}  // namespace stowage
