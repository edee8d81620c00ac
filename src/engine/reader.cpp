// SPDX-License-Identifier: Apache-2.0
#include "engine/reader.h"

#include <sys/mman.h>

namespace stowage::engine {
namespace {
#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // Linux 5.14
#endif
}  // namespace

ssize_t Reader::read(int descriptor, std::span<const iovec> to, std::uint64_t offset) {
  return ::preadv(descriptor, to.data(), static_cast<int>(to.size()), static_cast<off_t>(offset));
}

int Reader::populate(const std::byte* mapped, std::size_t bytes) {
  return ::madvise(const_cast<std::byte*>(mapped), bytes, MADV_POPULATE_READ);
}

Reader& system_reader() noexcept {
  static Reader made;
  return made;
}

}  // namespace stowage::engine
