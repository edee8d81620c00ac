// SPDX-License-Identifier: Apache-2.0
#include "store/faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <utility>

namespace stowage::test {
namespace {

struct {
  bool armed = false;
  int nth = -1, error = 0, calls = 0;
  bool deadly = false;
  std::string failed;
  std::vector<std::string> log;
  std::size_t step = 0;
  int steps = 0;
  bool plain = false, no_disk = false;
  bool steals = false, stolen = false;
  std::string doomed;  // the file
} state;

bool fails(const char* call) {
  if (!state.armed) return false;
  state.log.emplace_back(call);
  if (state.calls++ != state.nth) return false;
  if (state.deadly) ::raise(SIGKILL);
  state.failed = call;
  errno = state.error;
  return true;
}

bool interrupted() {
  if (state.step == 0 || state.steps++ % 2 != 0) return false;
  errno = EINTR;
  return true;
}

std::size_t limited(std::size_t bytes) {
  return state.step == 0 ? bytes : std::min(bytes, state.step);
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

Fault::Fault(int nth, int error) {
  state.armed = true, state.nth = nth, state.error = error, state.calls = 0;
  state.failed.clear(), state.log.clear();
}
Fault::~Fault() { state.armed = false; }
int Fault::calls() { return state.calls; }
std::string Fault::failed() { return state.failed; }
const std::vector<std::string>& Fault::log() { return state.log; }

void die_at(int nth) { state.armed = true, state.deadly = true, state.nth = nth, state.calls = 0; }

SmallSteps::SmallSteps(std::size_t bytes) { state.step = bytes; }
SmallSteps::~SmallSteps() { state.step = 0; }
PlainFileSystem::PlainFileSystem() { state.plain = true; }
PlainFileSystem::~PlainFileSystem() { state.plain = false; }
NoDisk::NoDisk() { state.no_disk = true; }
NoDisk::~NoDisk() { state.no_disk = false; }
StolenLock::StolenLock() { state.steals = true, state.stolen = false; }
StolenLock::~StolenLock() { state.steals = false; }
bool StolenLock::happened() { return state.stolen; }

}  // namespace stowage::test

using stowage::test::fails, stowage::test::interrupted, stowage::test::limited;
using stowage::test::real, stowage::test::state;

extern "C" {

int flock(int fd, int operation) noexcept {
  char name[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  struct stat status {};
  if (state.steals && !state.stolen && ::fstat(fd, &status) == 0 && status.st_nlink > 0 &&
      ::readlink(link.c_str(), name, sizeof name - 1) > 0) {
    state.stolen = true;
    state.doomed = name;
    errno = EWOULDBLOCK;
    return -1;
  }
  return real<int(int, int)>("flock")(fd, operation);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (!state.doomed.empty()) ::unlink(std::exchange(state.doomed, {}).c_str());
  if (fails("fallocate")) return -1;
  if (state.plain) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return real<int(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, length);
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  if (fails("pwrite") || interrupted()) return -1;
  return real<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, from, limited(bytes), offset);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  if (interrupted()) return -1;
  return real<ssize_t(int, void*, size_t, off_t)>("pread")(fd, to, limited(bytes), offset);
}

int fsync(int fd) {
  if (fails("fsync")) return -1;
  return state.no_disk ? 0 : real<int(int)>("fsync")(fd);
}

int linkat(int from, const char* name, int to, const char* target, int flags) noexcept {
  if (fails("linkat")) return -1;
  return real<int(int, const char*, int, const char*, int)>("linkat")(from, name, to, target,
                                                                      flags);
}

int rename(const char* from, const char* to) noexcept {
  return fails("rename") ? -1 : real<int(const char*, const char*)>("rename")(from, to);
}

int unlink(const char* path) noexcept {
  return fails("unlink") ? -1 : real<int(const char*)>("unlink")(path);
}

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    std::va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  if (state.plain && (flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return real<int(const char*, int, ...)>("open")(path, flags, mode);
}

}  // extern "C"
