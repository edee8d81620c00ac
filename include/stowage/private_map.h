// SPDX-License-Identifier: Apache-2.0
// Tensors of a file as memory that may be written, and is not copied until it is.
#pragma once
#include <memory>

#include "stowage/file.h"

namespace stowage {
inline namespace v0 {

/// The bytes of a tensor of at least one byte, mapped for this caller alone: pages are those of the
/// file until they are written to, then copies that the file never sees. Valid while the pointer
/// lives, also after the file is closed. Throws io where the system cannot map them.
STOWAGE_API std::shared_ptr<std::byte> map_private(const File& file, const TensorInfo& tensor);

}  // namespace v0
}  // namespace stowage
