// SPDX-License-Identifier: Apache-2.0
#include "cli/folder_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "stowage/error.h"

namespace stowage::cli {
namespace {
namespace fs = std::filesystem;
constexpr const char* kMark = ".stowage-packing";
}  // namespace

bool FolderClaim::is_marked(const std::string& folder) {
  return fs::exists(fs::path(folder) / kMark);
}

FolderClaim::FolderClaim(const std::string& folder)
    : mark_((fs::path(folder) / kMark).string()),
      fd_(::open(mark_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
  if (fd_ < 0) throw Error(Code::io, folder + ": must be writable, got " + std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(fd_);
    throw Error(Code::io,
                folder + ": must not be written by another process, one is at work there");
  }
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path() != mark_) fs::remove_all(entry.path());
}

FolderClaim::~FolderClaim() {
  if (fd_ >= 0) ::close(fd_);
}

void FolderClaim::finish() noexcept {
  (void)::unlink(mark_.c_str());  // a mark that stays says less than is there, and loses nothing
}

}  // namespace stowage::cli
