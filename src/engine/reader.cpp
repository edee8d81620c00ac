// SPDX-License-Identifier: Apache-2.0
#include "engine/reader.h"

namespace stowage::engine {

ssize_t Reader::read(int descriptor, std::span<const iovec> to, std::uint64_t offset) {
  return ::preadv(descriptor, to.data(), static_cast<int>(to.size()), static_cast<off_t>(offset));
}

int Reader::populate(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes) {
  return file.populate(offset, bytes);
}

Reader& system_reader() noexcept {
  static Reader made;
  return made;
}

}  // namespace stowage::engine
