// SPDX-License-Identifier: Apache-2.0
// Parts of numbers of other widths than four, eight or sixteen bits: those of a word, or of all
// words of a line, are one string of bits.
#pragma once
#include <span>
#include <vector>

#include "store/part_blocks.h"

namespace stowage {

bool is_string(const PartForm& form) noexcept;
/// Whether the fields of such a form fit each other.
bool is_legal_string(const PartForm& form) noexcept;
/// The shape of the tensor, in words, that has a part of this shape.
Shape shape_of_strings(const PartForm& form, const Shape& part);
/// Puts the part's bytes into `out`. Throws bad_file for another size, and where bits of no number
/// are not 0.
void part_of_strings(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                     std::span<std::byte> out);
/// The way back. Throws invalid_argument likewise, and for a number that has no code.
std::vector<std::byte> strings_of_part(const PartForm& form, std::span<const std::byte> bytes,
                                       const Shape& part);

}  // namespace stowage
