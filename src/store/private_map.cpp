// SPDX-License-Identifier: Apache-2.0
#include "stowage/private_map.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "base/file_error.h"
#include "store/shard.h"

namespace stowage {
namespace {

// A mapping of whole pages, watched as those of readers are: pages of a file that was cut short
// read as zeros.
class PrivateMap {
 public:
  PrivateMap(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes) : bytes_(bytes) {
    // No swap space is set aside: most of it is never written to, and a model may be larger.
    constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE;
    void* const map = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, file.descriptor(),
                             static_cast<off_t>(offset));
    if (map == MAP_FAILED) throw_errno(file.path(), "must map into memory");
    data_ = static_cast<std::byte*>(map);
    (void)::madvise(map, bytes, MADV_HUGEPAGE);
    try {
      guard_ = std::make_unique<MapGuard>(data_, bytes, file.path());
    } catch (...) {
      ::munmap(data_, bytes_);
      throw;
    }
  }
  PrivateMap(const PrivateMap&) = delete;
  ~PrivateMap() {
    guard_.reset();
    ::munmap(data_, bytes_);
  }
  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_;
  std::uint64_t bytes_;
  std::unique_ptr<MapGuard> guard_;
};

}  // namespace

inline namespace v0 {

std::shared_ptr<std::byte> map_private(const File& file, const TensorInfo& tensor) {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = tensor.offset / page * page, ahead = tensor.offset - begin;
  const Shard& shard = OpenShards::of(file)[static_cast<std::size_t>(tensor.shard)];
  auto map = std::make_shared<PrivateMap>(shard.map, begin, ahead + tensor.bytes);
  std::byte* const data = map->data() + ahead;
  return {std::move(map), data};
}

}  // namespace v0
}  // namespace stowage
