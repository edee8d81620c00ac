// SPDX-License-Identifier: Apache-2.0
// Rows of a part, from those bytes of its tensor that they are made of: what a process reads that
// has only these rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "store/part_pieces.h"

namespace stowage {

/// Rows [first, last) of a part.
struct PartRows {
  std::int64_t first = 0, last = 0;
  bool operator==(const PartRows&) const = default;
};

/// Of a part of that shape, whole or in another form, these rows go to `out`.
struct RowsPlace {
  const PartForm* form;
  Shape shape;
  PartRows rows;
  std::span<std::byte> out;
};

/// Fills rows of parts of one tensor of so many bytes and returns how many of them were read: those
/// of the rows, with those of others in the same words (of `folded` parts twice as many), or all
/// where they lie all over the tensor (strings and tiles of rows). Throws as form_parts() does.
std::uint64_t form_rows(std::span<const RowsPlace> parts, const Place& place, std::uint64_t bytes,
                        Dtype compute, const ReadPiece& read);

}  // namespace stowage
