// SPDX-License-Identifier: Apache-2.0
#include "store/scale_shape.h"

#include <bit>
#include <set>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage {
namespace {

using Kind = Scaling::Kind;

bool fits(const Storage& storage, const Shape& weight, const Shape& scale) {
  try {
    return layout(storage, weight).parts[1].shape == scale;
  } catch (const Error&) {
    return false;  // this storage cannot hold such a shape
  }
}

// ceil(columns / N) == groups holds for a range of N. Writers choose a power of two or an even
// split; nobody else's choice can be told from the shape.
std::set<std::int64_t> block_sizes(std::int64_t columns, std::int64_t groups) {
  const std::int64_t least = ceil_div(columns, groups);
  std::set<std::int64_t> sizes;
  if (columns % groups == 0) sizes.insert(least);
  const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(least)));
  if (ceil_div(columns, power) == groups) sizes.insert(power);
  return sizes;
}

}  // namespace

Storage storage_from_scale(Codes codes, const TensorInfo& weight, const TensorInfo& scale,
                           const Place& place) {
  Storage storage{.codes = codes, .scaling = {.kind = Kind::tensor}};
  const Shape &w = weight.shape, &s = scale.shape;
  if (s.rank() == 0 || s == Shape{1}) return storage;
  for (const Kind kind : {Kind::row, Kind::row2}) {
    storage.scaling.kind = kind;
    if (fits(storage, w, s)) return storage;
  }
  storage.scaling.kind = Kind::row;
  if (w.rank() > 1 && s == Shape{w.rows()}) return storage;  // one scale a row, written flat
  const std::string shapes = formatted("{} for {}", to_string(s), to_string(w));
  const bool block =
      s.rank() == 2 && w.rank() > 0 && s[0] == w.rows() && s[1] > 0 && s[1] <= w.row_elements();
  if (!block) refuse(Refusal::scale_shape, place, shapes);
  const auto sizes = block_sizes(w.row_elements(), s[1]);
  if (sizes.size() != 1) {
    refuse(Refusal::scale_block, place,
           formatted("{}, which {} sizes give", shapes, sizes.empty() ? "no usual" : "two"));
  }
  const auto size = checked_cast<std::int32_t>(*sizes.begin());
  storage.scaling = {.kind = Kind::block, .block = size.value_or(0)};
  if (!size || !fits(storage, w, s)) refuse(Refusal::scale_shape, place, shapes);
  return storage;
}

}  // namespace stowage
