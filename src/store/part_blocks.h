// SPDX-License-Identifier: Apache-2.0
// Parts in blocks: a tensor is one of records, each with bytes of several parts; numbers of four
// bits lie by halves of a run, those of six in two planes. Their words are in the order of the
// part.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "store/refusal.h"
#include "stowage/file.h"

namespace stowage {

/// What a part is made of. The place must outlive it.
struct FormedTensor {
  const Place& place;
  std::span<const std::byte> bytes;
};

bool is_block(const PartForm& form) noexcept;
/// Whether the fields of such a form fit each other.
bool is_legal_block(const PartForm& form) noexcept;
/// The shape of the tensor, in bytes, that has a part of this shape.
Shape shape_of_blocks(const PartForm& form, const Shape& part);
/// Puts the part's bytes into `out`, which has room for them. Throws bad_file for another size, and
/// where a row does not fill its records and runs.
void part_of_blocks(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                    std::span<std::byte> out);
/// How many they are.
std::size_t bytes_of_blocks(const PartForm& form, const Shape& part) noexcept;
/// The way back: what is of other parts is 0. Throws invalid_argument likewise.
std::vector<std::byte> blocks_of_part(const PartForm& form, std::span<const std::byte> bytes,
                                      const Shape& part);

}  // namespace stowage
