// SPDX-License-Identifier: Apache-2.0
// Tensors of a file that become parts of a weight in another form.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "stowage/file.h"

namespace stowage {

/// The bytes of a part from those of a tensor. `compute`: a value dtype.
std::vector<std::byte> part_of_tensor(PartForm form, std::span<const std::byte> bytes,
                                      Dtype compute);
}  // namespace stowage
