// SPDX-License-Identifier: Apache-2.0
// How much of a file lies in the page cache.
#pragma once
#include "base/file.h"

namespace stowage {

/// The part of a file's bytes that lie in the page cache, 0 to 1; 0 where the system does not say.
/// Of a file that the caller may not write to it is estimated by reading some bytes of it.
double cached_part(const MappedFile& file);

}  // namespace stowage
