// SPDX-License-Identifier: Apache-2.0
// MappedFile: open, map, read by descriptor, release pages.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/file.h"
#include "base/file_error.h"
#include "stowage/error.h"

namespace stowage {
namespace {

#ifndef MADV_POPULATE_READ
constexpr int MADV_POPULATE_READ = 22;  // Linux 5.14
#endif

struct stat status_of(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw_errno(path, "must tell its size");
  return status;
}

FileIdentity identity_of(const struct stat& status) {
  return {static_cast<std::uint64_t>(status.st_size),
          std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec,
          status.st_ino, status.st_dev};
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // Without O_NONBLOCK a named pipe would hold us here until somebody writes to it.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) throw_errno(path, "must open for reading");
  try {
    const struct stat status = status_of(fd_, path);
    if (!S_ISREG(status.st_mode)) {
      throw Error(Code::bad_file, path + ": must be a regular file, got something else");
    }
    identity_ = identity_of(status);
    if (size() == 0) return;
    void* const map = ::mmap(nullptr, size(), PROT_READ, MAP_SHARED, fd_, 0);
    if (map == MAP_FAILED) throw_errno(path, "must map into memory");
    data_ = static_cast<const std::byte*>(map);
    // Advice: bytes that are read through this mapping then lie in large pages, where the file
    // system can, and those that do already are mapped whole.
    (void)::madvise(map, size(), MADV_HUGEPAGE);
    guard_ = std::make_unique<MapGuard>(data_, size(), path);
  } catch (...) {
    close();
    throw;
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      identity_(std::exchange(other.identity_, {})),
      data_(std::exchange(other.data_, nullptr)),
      guard_(std::move(other.guard_)) {}

MappedFile::~MappedFile() { close(); }

void MappedFile::close() noexcept {
  guard_.reset();
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size());
  if (fd_ >= 0) ::close(fd_);
}

FileIdentity MappedFile::identity_now() const { return identity_of(status_of(fd_, path_)); }

void MappedFile::check_damage() const {
  if (guard_ != nullptr) guard_->check();
}

int MappedFile::open_direct() const {
  // By its descriptor: the name may be another file's by now.
  return ::open(("/proc/self/fd/" + std::to_string(fd_)).c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
}

void MappedFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path_, "must be readable at byte " + std::to_string(offset));
    if (got == 0) {
      throw Error(Code::bad_file, path_ + ": byte " + std::to_string(offset) +
                                      ": must still be there, got a file that was cut short");
    }
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

int MappedFile::populate(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  auto* const first = const_cast<std::byte*>(data_ + begin);
  const int result = ::madvise(first, offset + bytes - begin, MADV_POPULATE_READ);
  if (result == 0 || errno != EINVAL) return result;
  return ::madvise(first, offset + bytes - begin, MADV_WILLNEED);
}

void MappedFile::expect(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  (void)::posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                        POSIX_FADV_WILLNEED);
}

void MappedFile::drop(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = (offset + page - 1) / page * page;
  const std::uint64_t end = (offset + bytes) / page * page;
  if (begin >= end) return;
  // Advice only: where the system declines, the pages stay, and nothing is wrong.
  (void)::madvise(const_cast<std::byte*>(data_ + begin), end - begin, MADV_DONTNEED);
}

void MappedFile::forget(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  constexpr std::uint64_t kLarge = std::uint64_t{2} << 20;
  const std::uint64_t begin = offset / kLarge * kLarge;
  const std::uint64_t end = (offset + bytes + kLarge - 1) / kLarge * kLarge;
  (void)::posix_fadvise(fd_, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                        POSIX_FADV_DONTNEED);
}

}  // namespace stowage
