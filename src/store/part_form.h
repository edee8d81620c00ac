// SPDX-License-Identifier: Apache-2.0
// Tensors of a file that become parts of a weight in another form.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "store/refusal.h"
#include "stowage/file.h"

namespace stowage {

/// What a part is made of.
struct FormedTensor {
  const TensorInfo& info;
  Place place;
  std::span<const std::byte> bytes;
};

/// The bytes of a part of that shape, which the file's dialect has checked against the tensor's.
/// `compute`: a value dtype. Throws bad_file where bytes that belong to nothing are not 0: they
/// could not be written again.
std::vector<std::byte> part_of_tensor(PartForm form, const FormedTensor& tensor, const Shape& part,
                                      Dtype compute);
/// What a tensor of scales [rows, groups] has in that form: sizes are rounded up.
Shape swizzled_shape(const Shape& scales);
Shape zeros_down_shape(const Shape& zeros);

}  // namespace stowage
