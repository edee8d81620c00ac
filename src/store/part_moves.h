// SPDX-License-Identifier: Apache-2.0
// The fast ways of forms that large parts have: words, octets and halves at a time instead of
// number by number.
#pragma once
#include <cstddef>
#include <cstdint>

#include "store/part_frame.h"

namespace stowage {

/// Words that have been moved: all that are before both.
struct Moved {
  std::int64_t along = 0, across = 0;
};

/// From a tensor to its part, as far as a fast way goes; what is left goes number by number.
Moved move_to_part(const Frame& frame, const std::byte* tensor, std::byte* part);
/// The way back.
Moved move_to_tensor(const Frame& frame, const std::byte* part, std::byte* tensor);

}  // namespace stowage
