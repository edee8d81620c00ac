// SPDX-License-Identifier: Apache-2.0
// A folder that a command is filling. Its mark stays where the command is killed, so that the next
// one knows what is there for a leftover; a lock on it says that somebody is still at work.
#pragma once
#include <string>

namespace stowage::cli {

class FolderClaim {
 public:
  /// Takes the folder, which exists; what a command left that was killed is removed. Throws io
  /// where another one is at work.
  explicit FolderClaim(const std::string& folder);
  ~FolderClaim();
  FolderClaim(const FolderClaim&) = delete;
  FolderClaim& operator=(const FolderClaim&) = delete;

  /// Whether the folder has what a command left, or what one is writing.
  static bool is_marked(const std::string& folder);
  void finish() noexcept;  // the folder is whole

 private:
  std::string mark_;
  int fd_ = -1;
};

}  // namespace stowage::cli
