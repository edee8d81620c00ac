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

// The largest N of ceil(columns / N) == groups, for two groups or more.
std::int64_t most_columns(std::int64_t columns, std::int64_t groups) {
  return (columns - 1) / (groups - 1);
}

// ceil(columns / N) == groups holds for a range of N. Writers choose a power of two or an even
// split; nobody else's choice can be told from the shape.
std::set<std::int64_t> block_sizes(std::int64_t columns, std::int64_t groups) {
  const std::int64_t least = ceil_div(columns, groups);
  std::set<std::int64_t> sizes;
  if (columns % groups == 0) sizes.insert(least);
  const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(least)));
  if (ceil_div(columns, power) == groups) sizes.insert(power);
  if (sizes.empty() && least == most_columns(columns, groups)) sizes.insert(least);  // no other
  return sizes;
}

// What the shape may mean, for who has to say it.
std::string readings(Codes codes, const Shape& weight, std::int64_t groups,
                     const std::set<std::int64_t>& usual) {
  const std::string_view name = trait(codes).name;
  if (!usual.empty())
    return formatted(", which may be {}:block{} or {}:block{}", name, *usual.begin(), name,
                     *usual.rbegin());
  const std::int64_t columns = weight.row_elements();
  return formatted(", which no usual size gives: it may be {}:block{} to {}:block{}", name,
                   ceil_div(columns, groups), name, most_columns(columns, groups));
}

}  // namespace

Storage storage_from_scale(Codes codes, const TensorInfo& weight, const TensorInfo& scale,
                           const Place& place) {
  Storage storage{.codes = codes, .scaling = {.kind = Kind::tensor}};
  const Shape &w = weight.shape, &s = scale.shape;
  if (s.rank() == 0) return storage;
  for (const Kind kind : {Kind::row, Kind::row2}) {
    storage.scaling.kind = kind;
    if (fits(storage, w, s)) return storage;
  }
  storage.scaling.kind = Kind::tensor;
  if (s == Shape{1}) return storage;
  storage.scaling.kind = Kind::row;
  if (w.rank() > 1 && s == Shape{w.rows()}) return storage;  // one scale a row, written flat
  const std::string shapes = formatted("{} for {}", to_string(s), to_string(w));
  const bool block =
      s.rank() == 2 && w.rank() > 0 && s[0] == w.rows() && s[1] > 0 && s[1] <= w.row_elements();
  if (!block) refuse(Refusal::scale_shape, place, shapes);
  if (s[1] == 1) return storage;  // a block that holds the whole row
  const auto sizes = block_sizes(w.row_elements(), s[1]);
  if (sizes.size() != 1)
    refuse(Refusal::scale_block, place, shapes + readings(codes, w, s[1], sizes));
  const auto size = checked_cast<std::int32_t>(*sizes.begin());
  storage.scaling = {.kind = Kind::block, .block = size.value_or(0)};
  if (!size || !fits(storage, w, s)) refuse(Refusal::scale_shape, place, shapes);
  return storage;
}

}  // namespace stowage
