// SPDX-License-Identifier: Apache-2.0
// Files as the core sees them: one mapped for reading, and one that is written beside its target
// and appears there whole or not at all. Every failure is an Error that names the path and errno.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/map_guard.h"

namespace stowage {

inline constexpr std::uint64_t kPage = 4096;  // of memory, and of reads past the page cache

/// What tells that an open file is as it was. Its name is no part of it: a file that was deleted,
/// or has another one in its place, keeps its bytes for those who have it open.
struct FileIdentity {
  std::uint64_t size = 0;
  std::int64_t changed =
      0;  // nanoseconds since 1970, in steps of the file system's clock (1-10 ms)
  std::uint64_t inode = 0, device = 0;
  bool operator==(const FileIdentity&) const = default;
};

/// A regular file mapped read-only. Where another process cut the file short or the disk failed,
/// read() throws; a touch of the mapping past the new end finds zeros, and the mapping is then
/// damaged (map_guard.h). Bytes lost inside the last page are zeros that only identity_now() tells.
class MappedFile {
 public:
  /// Throws io (cannot open or map, or too many are open), bad_file (not a regular file).
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const std::string& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return identity_.size; }       // when it was opened
  const FileIdentity& identity() const noexcept { return identity_; }  // likewise
  FileIdentity identity_now() const;  // of the same open file; one system call; throws io
  bool damaged() const noexcept { return guard_ != nullptr && guard_->damaged(); }
  void check_damage() const;  // throws bad_file
  const std::byte* data() const noexcept { return data_; }
  int descriptor() const noexcept { return fd_; }
  /// The same open file past the page cache (O_DIRECT), for the caller to close; -1 where the file
  /// system cannot.
  int open_direct() const;
  /// Fills `out` from `offset`. Throws io; bad_file where the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  /// Fetches the pages of the range and maps them, large ones where the file system can. Returns 0,
  /// or -1 and errno; a page that cannot be had is no error of this call's caller yet.
  int populate(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// Asks the system for the bytes of the range, which read() will be given: advice.
  void expect(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// Releases the pages that lie wholly inside the range; the next touch reads them again.
  void drop(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// The page cache, too, releases those of the range that nothing maps, and what else the large
  /// pages around it have: the next read comes from the disk.
  void forget(std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  void close() noexcept;

  std::string path_;
  int fd_ = -1;
  FileIdentity identity_;
  const std::byte* data_ = nullptr;
  std::unique_ptr<MapGuard> guard_;  // of a mapping that is not empty
};

/// A file under construction in the folder of its target: nameless where the file system can do
/// that (a killed process then leaves nothing), else under a hidden temporary name. What a killed
/// process has left under such a name goes when the same target is written again.
class StagedFile {
 public:
  /// Reserves `bytes` on the disk. Throws io.
  StagedFile(const std::string& target, std::uint64_t bytes);
  StagedFile(StagedFile&& other) noexcept;
  StagedFile& operator=(StagedFile&&) = delete;
  ~StagedFile();  // removes what was not published

  const std::string& target() const noexcept { return target_; }
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void sync();     // the bytes reach the disk
  void publish();  // takes the target's name, replacing an older file in one step

 private:
  void open_named();
  void reserve(std::uint64_t bytes);
  void give_name();
  void close() noexcept;

  std::string target_;
  std::string temporary_;  // empty while nameless
  int fd_ = -1;
};

/// Throws invalid_argument for what the system would read as another path: an empty one, or one
/// with a zero byte.
void check_path(const std::string& path);
/// "a/b" -> "a", "b" -> ".".
std::string folder_of(const std::string& path);
/// What a folder has, "." and ".." too, in no order. Throws io. The iterator of std::filesystem
/// would end the process where memory is short: a function of libstdc++ that may not throw
/// allocates.
std::vector<std::string> names_in(const std::string& folder);
/// Makes renames in `folder` durable. Throws io.
void sync_folder(const std::string& folder);
/// Throws io unless the file system of `folder` has room for `bytes` more.
void check_space(const std::string& folder, std::uint64_t bytes);

}  // namespace stowage
