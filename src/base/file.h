// SPDX-License-Identifier: Apache-2.0
// Files as the core sees them: one mapped for reading, and one that is written beside its target
// and appears there whole or not at all. Every failure is an Error that names the path and errno.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace stowage {

/// A regular file mapped read-only. read() goes through the file descriptor, so a file that another
/// process cut short gives an error there; touching the mapping past the new end is a SIGBUS, which
/// no library can turn into an error.
class MappedFile {
 public:
  /// Throws io (cannot open or map), bad_file (not a regular file).
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  const std::string& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }  // when it was opened
  std::uint64_t size_now() const;                        // throws io
  const std::byte* data() const noexcept { return data_; }
  /// Fills `out` from `offset`. Throws io; bad_file where the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  /// Releases the pages that lie wholly inside the range; the next touch reads them again.
  void drop(std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  const std::byte* data_ = nullptr;
};

/// A file under construction in the folder of its target: nameless where the file system can do
/// that (a killed process then leaves nothing), else under a hidden temporary name.
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
/// Makes renames in `folder` durable. Throws io.
void sync_folder(const std::string& folder);
/// Throws io unless the file system of `folder` has room for `bytes` more.
void check_space(const std::string& folder, std::uint64_t bytes);

}  // namespace stowage
