// SPDX-License-Identifier: Apache-2.0
// The files that the other side of the door has open.
#pragma once
#include <cstdint>
#include <memory>

#include "stowage/file.h"

namespace stowage::door {

/// Throws invalid_argument, naming `where`, for a handle that is not an open file's.
std::shared_ptr<const File> file_of(const char* where, std::int64_t handle);

}  // namespace stowage::door
