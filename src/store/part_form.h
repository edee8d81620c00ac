// SPDX-License-Identifier: Apache-2.0
// Parts of weights and the tensors that dialects have of them in another form: both ways, by the
// same data.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "store/part_blocks.h"
#include "store/part_frame.h"
#include "store/part_strings.h"
#include "stowage/file.h"

namespace stowage {

/// Whether the fields fit each other.
bool is_legal(const PartForm& form) noexcept;
/// The shape of the tensor, in words, or in bytes where it is one of records, that has a part of
/// this shape; no tensor has it where a size is larger than any.
Shape tensor_shape(const PartForm& form, const Shape& part);

/// The bytes of a part of that shape. `compute`: a value dtype, for numbers that are rounded.
/// Throws bad_file where the tensor has another size than tensor_shape() gives, where bits that
/// belong to no number of the part are not 0, and where a number is wider than the part has them:
/// they could not be written again.
std::vector<std::byte> part_of_tensor(const PartForm& form, const FormedTensor& tensor,
                                      const Shape& part, Dtype compute);
/// The same into `out`, of exactly that size, or, where `row_bytes` says how far apart the rows of
/// the part lie there, up to its end. Where nothing is refused no memory is allocated.
void form_part(const PartForm& form, const FormedTensor& tensor, const Shape& part, Dtype compute,
               std::span<std::byte> out, std::int64_t row_bytes = 0);
/// The same for who has a small stack: less than 6 KiB are taken of it.
void form_part(const PartForm& form, const FormedTensor& tensor, const Shape& part, Dtype compute,
               std::span<std::byte> out, std::int64_t row_bytes, Room& room);

}  // namespace stowage
