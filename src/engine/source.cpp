// SPDX-License-Identifier: Apache-2.0
#include "engine/source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/file_error.h"
#include "engine/arena.h"

namespace stowage::engine {
namespace {

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;
#endif

constexpr double kCached = 0.9;

}  // namespace

Source::Source(const File& file, Reads reads) : shards_(OpenShards::of(file)), reads_(reads) {
  if (reads_ == Reads::automatic) reads_ = is_cached() ? Reads::mapped : Reads::direct;
  if (reads_ == Reads::direct) open_direct();
}

Source::~Source() {
  for (const int direct : direct_)
    if (direct >= 0) ::close(direct);
}

void Source::open_direct() {
  direct_.reserve(shards_.size());
  for (const Shard& shard : shards_) {
    direct_.push_back(shard.map.open_direct());
    if (direct_.back() < 0) reads_ = Reads::buffered;
  }
}

void Source::bring(const Piece& piece, std::byte* memory) const {
  const MappedFile& file = map(piece);
  check_unchanged(file);
  if (reads_ == Reads::mapped) {
    // Advice: where it fails, the pages come when they are touched.
    (void)::madvise(const_cast<std::byte*>(file.data() + piece.offset), piece.bytes,
                    MADV_POPULATE_READ);
    return;
  }
  std::uint64_t done = 0;
  while (reads_ == Reads::direct && done < piece.needed && done % kPage == 0) {
    const ssize_t got = ::pread(direct_[static_cast<std::size_t>(piece.shard)], memory + done,
                                piece.bytes - done, static_cast<off_t>(piece.offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw_errno(file.path(), "must be readable at byte " + std::to_string(piece.offset + done));
    }
    if (got == 0) break;
    done += static_cast<std::uint64_t>(got);
  }
  // After a short read nothing is aligned any more; and this says what is missing.
  if (done < piece.needed) file.read(piece.offset + done, {memory + done, piece.needed - done});
}

void Source::drop(const Piece& piece) const noexcept { map(piece).drop(piece.offset, piece.bytes); }

bool Source::is_cached() const {
  std::uint64_t pages = 0, cached = 0;
  std::vector<unsigned char> there;
  for (const Shard& shard : shards_) {
    if (shard.map.size() == 0) continue;
    there.assign((shard.map.size() + kPage - 1) / kPage, 0);
    auto* const data = const_cast<std::byte*>(shard.map.data());
    if (::mincore(data, shard.map.size(), there.data()) != 0) return false;
    pages += there.size();
    for (const unsigned char page : there) cached += page & 1u;
  }
  return static_cast<double>(cached) >= kCached * static_cast<double>(pages);
}

}  // namespace stowage::engine
