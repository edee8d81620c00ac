// SPDX-License-Identifier: Apache-2.0
// Parts in another order than their tensor has, formed while it is read: a piece of it lies in a
// near cache when its numbers are put to their places, and no second one of the whole is made.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "store/part_form.h"

namespace stowage {

/// A part of a tensor, and where its bytes go.
struct PartPlace {
  const PartForm* form;
  Shape shape;
  std::span<std::byte> out;
};

/// What a row of a tensor is of a part.
struct Cut {
  bool columns;       // else rows
  std::int64_t each;  // of them, in numbers
  std::int64_t unit;  // rows of a tensor that are not parted
  bool operator==(const Cut&) const = default;
};
/// None: only the whole tensor becomes the part.
std::optional<Cut> cut_of(const PartForm& form);
std::int64_t bytes_of_word(const PartForm& form);

/// Gives the bytes of the tensor from an offset on.
using ReadPiece = std::function<void(std::uint64_t offset, std::span<std::byte> bytes)>;

inline constexpr std::int64_t kPiece = 256 << 10;  // bytes: with lines of a part in a near cache

/// Fills parts of one tensor of so many bytes, or numbers that it is only said to have; none is
/// whole. A piece has about `piece` bytes. Throws as form_part() and `read` do.
void form_parts(std::span<const PartPlace> parts, const Place& place, std::uint64_t bytes,
                Dtype compute, const ReadPiece& read, std::int64_t piece = kPiece);

}  // namespace stowage
