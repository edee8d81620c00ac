// SPDX-License-Identifier: Apache-2.0
#include "engine/source.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/file_error.h"
#include "engine/arena.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;
#endif

constexpr std::uint64_t kCompared = 1 << 16;  // bytes of the header that tell one file from another
constexpr double kCached = 0.9;

std::int64_t modified_ns(const struct stat& status) {
  return status.st_mtim.tv_sec * std::int64_t{1'000'000'000} + status.st_mtim.tv_nsec;
}

// One read at `offset`; 0 at the end of the file.
std::uint64_t read_some(int fd, const std::string& path, std::byte* to, std::uint64_t bytes,
                        std::uint64_t offset) {
  for (;;) {
    const ssize_t got = ::pread(fd, to, bytes, static_cast<off_t>(offset));
    if (got >= 0) return static_cast<std::uint64_t>(got);
    if (errno != EINTR) throw_errno(path, "must be readable at byte " + std::to_string(offset));
  }
}

[[noreturn]] void throw_short(const std::string& path, std::uint64_t offset) {
  throw Error(Code::bad_file, path + ": byte " + std::to_string(offset) +
                                  ": must still be there, got a file that was cut short");
}

}  // namespace

Source::Source(const File& file, Reads reads) : shards_(file.paths().size()), reads_(reads) {
  for (std::size_t i = 0; i < shards_.size(); ++i) shards_[i].path = file.paths()[i];
  for (const TensorInfo& tensor : file.tensors()) {
    Shard& shard = shards_[static_cast<std::size_t>(tensor.shard)];
    shard.mapped = file.bytes(tensor).data() - tensor.offset;
    shard.bytes = std::max(shard.bytes, tensor.offset + tensor.bytes);
  }
  try {
    for (Shard& shard : shards_) open(shard);
    if (reads_ == Reads::automatic) reads_ = is_cached() ? Reads::mapped : Reads::direct;
    if (reads_ == Reads::direct &&
        std::ranges::any_of(shards_, [](const Shard& s) { return s.direct < 0; }))
      reads_ = Reads::buffered;
  } catch (...) {
    close();
    throw;
  }
}

Source::~Source() { close(); }

void Source::close() noexcept {
  for (const Shard& shard : shards_) {
    if (shard.buffered >= 0) ::close(shard.buffered);
    if (shard.direct >= 0) ::close(shard.direct);
  }
}

void Source::open(Shard& shard) const {
  shard.buffered = ::open(shard.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (shard.buffered < 0) throw_errno(shard.path, "must open for reading");
  struct stat status {};
  if (::fstat(shard.buffered, &status) != 0) throw_errno(shard.path, "must tell its size");
  shard.changed_ns = modified_ns(status);
  if (reads_ != Reads::mapped && reads_ != Reads::buffered)
    shard.direct = ::open(shard.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (shard.mapped == nullptr) return;
  // The path may have come to name another file since the mapping was made: its header, which says
  // what lies where, would differ.
  const std::uint64_t bytes = std::min(shard.bytes, kCompared);
  std::vector<std::byte> there(bytes);
  for (std::uint64_t done = 0; done < bytes;) {
    const auto got = read_some(shard.buffered, shard.path, there.data() + done, bytes - done, done);
    if (got == 0) throw_short(shard.path, done);
    done += got;
  }
  if (std::memcmp(there.data(), shard.mapped, bytes) != 0)
    throw Error(Code::bad_file, shard.path + ": must be the file that was opened, got another one");
}

void Source::check(const Shard& shard) const {
  struct stat now {};
  if (::fstat(shard.buffered, &now) != 0) throw_errno(shard.path, "must tell its size");
  if (static_cast<std::uint64_t>(now.st_size) < shard.bytes)
    throw_short(shard.path, static_cast<std::uint64_t>(now.st_size));
  if (modified_ns(now) != shard.changed_ns)
    throw Error(Code::bad_file,
                shard.path + ": must stay as it was when opened, got a file written since");
}

void Source::bring(const Piece& piece, std::byte* memory) const {
  const Shard& shard = shards_[static_cast<std::size_t>(piece.shard)];
  check(shard);
  if (reads_ == Reads::mapped) {
    void* const at = const_cast<std::byte*>(shard.mapped + piece.offset);
    // Advice: where it fails, the pages come when they are touched.
    (void)::madvise(at, piece.bytes, MADV_POPULATE_READ);
    return;
  }
  for (std::uint64_t done = 0; done < piece.needed;) {
    // Past the first short read nothing is aligned any more.
    const bool direct = reads_ == Reads::direct && done % kPage == 0;
    const std::uint64_t got = read_some(direct ? shard.direct : shard.buffered, shard.path,
                                        memory + done, piece.bytes - done, piece.offset + done);
    if (got == 0) throw_short(shard.path, piece.offset + done);
    done += got;
  }
}

void Source::drop(const Piece& piece) const noexcept {
  const Shard& shard = shards_[static_cast<std::size_t>(piece.shard)];
  (void)::madvise(const_cast<std::byte*>(shard.mapped + piece.offset), piece.bytes, MADV_DONTNEED);
}

bool Source::is_cached() const {
  std::uint64_t pages = 0, cached = 0;
  std::vector<unsigned char> there;
  for (const Shard& shard : shards_) {
    if (shard.mapped == nullptr) continue;
    there.assign((shard.bytes + kPage - 1) / kPage, 0);
    if (::mincore(const_cast<std::byte*>(shard.mapped), shard.bytes, there.data()) != 0)
      return false;
    pages += there.size();
    for (const unsigned char page : there) cached += page & 1u;
  }
  return static_cast<double>(cached) >= kCached * static_cast<double>(pages);
}

}  // namespace stowage::engine
