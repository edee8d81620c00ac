// SPDX-License-Identifier: Apache-2.0
// How much of a file lies in the page cache.
#pragma once
#include "base/file.h"

namespace stowage {

/// The part of a file's bytes that lie in the page cache, 0 to 1; 0 where the system does not say.
/// Of a file that the caller may not write to it is estimated by reading some bytes of it.
double cached_part(const MappedFile& file);

/// Whether the system tells this process which pages of the file lie there, and if so whether some
/// bytes do: one page of each 2 MiB is asked for, a microsecond for 16 MiB of large pages.
bool sees_cache(const MappedFile& file);
bool seems_cached(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes);

}  // namespace stowage
