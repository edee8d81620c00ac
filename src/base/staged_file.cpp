// SPDX-License-Identifier: Apache-2.0
// StagedFile: written beside its target, published by one rename.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/file_error.h"
#include "stowage/error.h"

namespace stowage {
namespace {

std::string link_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

std::size_t name_begins(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? 0 : slash + 1;
}

// Hidden, and without the target's ending, so that no reader of the folder takes it for a model.
std::string temporary_name(const std::string& target) {
  static std::atomic<unsigned> counter{0};
  const std::size_t name = name_begins(target);
  return target.substr(0, name) + "." + target.substr(name) + "." + std::to_string(::getpid()) +
         "." + std::to_string(counter++) + ".tmp";
}

// Whoever writes a file has it locked, so one that can be locked belongs to a process that was
// killed. Locks work where process numbers would not: between containers, and between machines. It
// goes before the lock does: a writer that has only made it would find it unlocked, and then gone.
void remove_if_abandoned(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return;
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  ::close(fd);
}

// What killed writers of the same target have left. Where the folder cannot be read, it stays.
void remove_abandoned(const std::string& target) noexcept try {
  const std::string start = "." + target.substr(name_begins(target)) + ".";
  for (const std::string& name : names_in(folder_of(target)))
    if (name.starts_with(start) && name.ends_with(".tmp"))
      remove_if_abandoned(folder_of(target) + "/" + name);
} catch (...) {
}

// A file without a name, or -1 where the file system or a missing /proc does not allow one.
int open_nameless(const std::string& target) {
  const int fd = ::open(folder_of(target).c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
  if (fd >= 0 && ::access(link_of(fd).c_str(), F_OK) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

}  // namespace

StagedFile::StagedFile(const std::string& target, std::uint64_t bytes)
    : target_(target), fd_(open_nameless(target)) {
  remove_abandoned(target);
  if (fd_ >= 0) (void)::flock(fd_, LOCK_EX | LOCK_NB);
  while (fd_ < 0) open_named();
  try {
    reserve(bytes);
  } catch (...) {
    close();
    throw;
  }
}

void StagedFile::open_named() {
  temporary_ = temporary_name(target_);
  fd_ = ::open(temporary_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
  if (fd_ < 0 && errno != EEXIST) {
    temporary_.clear();
    throw_errno(target_, "its folder must be writable");
  }
  if (fd_ < 0) return;
  // Before it was locked, another writer may have taken it for abandoned: that one has the lock
  // now, or had it when it removed the file. Where nobody can lock, nobody removes.
  const bool lost = ::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  struct stat status {};
  if (!lost && (::fstat(fd_, &status) != 0 || status.st_nlink > 0)) return;
  close();
}

StagedFile::StagedFile(StagedFile&& other) noexcept
    : target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      fd_(std::exchange(other.fd_, -1)) {}

StagedFile::~StagedFile() { close(); }

void StagedFile::close() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

void StagedFile::reserve(std::uint64_t bytes) {
  const auto length = static_cast<off_t>(bytes);
  int result = 0;
  do result = bytes == 0 ? 0 : ::fallocate(fd_, 0, 0, length);
  while (result != 0 && errno == EINTR);
  // A file system that cannot reserve still has to take the size; a full disk then shows in write.
  if (result != 0 && errno == EOPNOTSUPP) result = ::ftruncate(fd_, length);
  if (result != 0) throw_errno(target_, "must have " + std::to_string(bytes) + " bytes of space");
}

// Up to where a large page begins, and then the rest: the page cache of a file that was just
// written is made of pages as large as the writes that begin where they do, and is mapped by these.
void StagedFile::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  constexpr std::uint64_t kLarge = std::uint64_t{2} << 20;
  while (!bytes.empty()) {
    const std::uint64_t to_large = kLarge - offset % kLarge;
    const bool whole = to_large == kLarge || bytes.size() < to_large + kLarge;
    const std::uint64_t some = whole ? bytes.size() : to_large;
    const ssize_t put = ::pwrite(fd_, bytes.data(), some, static_cast<off_t>(offset));
    if (put < 0 && (errno == EINTR || (errno == EFAULT && is_filled(bytes.data())))) continue;
    if (put == 0) errno = EIO;
    if (put <= 0) throw_errno(target_, "must take bytes at " + std::to_string(offset));
    bytes = bytes.subspan(static_cast<std::size_t>(put));
    offset += static_cast<std::uint64_t>(put);
  }
}

void StagedFile::sync() {
  if (::fsync(fd_) != 0) throw_errno(target_, "must reach the disk");
}

void StagedFile::give_name() {
  while (temporary_.empty()) {
    const std::string name = temporary_name(target_);
    if (::linkat(AT_FDCWD, link_of(fd_).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      temporary_ = name;
    } else if (errno != EEXIST) {
      throw_errno(target_, "must get a name");
    }
  }
}

void StagedFile::publish() {
  give_name();
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    throw_errno(target_, "must take its name");
  }
  temporary_.clear();
  close();
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  std::vector<std::string> names;
  while (entries) {
    errno = 0;
    const dirent* const entry = ::readdir(entries.get());
    if (entry == nullptr && errno == 0) return names;
    if (entry == nullptr) break;
    names.emplace_back(entry->d_name);
  }
  throw_errno(folder, "must be readable");
}

void sync_folder(const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw_errno(folder, "must open as a folder");
  const int result = ::fsync(fd);
  const int number = errno;
  ::close(fd);
  errno = number;
  // Some network file systems cannot sync a folder (EINVAL); the rename itself is done.
  if (result != 0 && number != EINVAL) throw_errno(folder, "must reach the disk");
}

void check_space(const std::string& folder, std::uint64_t bytes) {
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) != 0) throw_errno(folder, "must be a folder to write in");
  const std::uint64_t free = static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
  if (bytes > free) {
    throw Error(Code::io, folder + ": must have " + std::to_string(bytes) +
                              " bytes of space, got " + std::to_string(free));
  }
}

}  // namespace stowage
