// SPDX-License-Identifier: Apache-2.0
// The system calls that fetch bytes, where tests can put failing and slow ones.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/file.h"

namespace stowage::engine {

/// Each may be called by several threads at once. What fails returns -1 and sets errno.
class Reader {
 public:
  virtual ~Reader() = default;
  /// As preadv: the bytes from `offset` on, into one piece of memory after the other.
  virtual ssize_t read(int descriptor, std::span<const iovec> to, std::uint64_t offset);
  /// As MappedFile::populate.
  virtual int populate(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes);
};

Reader& system_reader() noexcept;

}  // namespace stowage::engine
