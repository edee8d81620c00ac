// SPDX-License-Identifier: Apache-2.0
// A child of the test's process: what it finds, or that it hangs.
#pragma once
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>

namespace stowage::test {

/// Under a sanitizer a child may hang: threads of its parent held locks of the sanitizer's own
/// heap, which stay locked; and TSan does not follow threads that start in a child.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kForksBesideThreads = false;
#else
inline constexpr bool kForksBesideThreads = true;
#endif
inline constexpr const char* kNoForks = "the sanitizer's heap keeps locks of lost threads";

inline constexpr int kMostMilliseconds = 60'000;  // of a child's life

enum class End { at_once, by_exit };  // _exit(), or exit() with all that it destroys

/// Whether threads run beside the caller's.
inline bool has_threads() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()) > 1;
}

/// How the child ended that ran `body`: "" where that was true, and the child ended by itself
/// within a minute. A test that forks beside threads asks `kForksBesideThreads` first: here it
/// fails each time where it does not, and not once in a hundred.
inline std::string in_child(const std::function<bool()>& body, End end = End::at_once) {
#if defined(__SANITIZE_ADDRESS__)
  if (has_threads()) return "forked beside threads: the test must skip where kNoForks holds";
#endif
  const pid_t child = ::fork();
  if (child < 0) return "no child";
  if (child == 0) {
    int status = 3;
    try {
      status = body() ? 0 : 1;
    } catch (const std::exception& error) {
      (void)!::write(STDERR_FILENO, error.what(), std::string_view(error.what()).size());
      status = 2;
    }
    if (end == End::by_exit) std::exit(status);
    ::_exit(status);
  }
  // Not by an alarm of the child's: it may hang where it has signals blocked, starting a thread.
  const int handle = static_cast<int>(::syscall(SYS_pidfd_open, child, 0));
  pollfd ends = {handle, POLLIN, 0};
  const bool hung = handle >= 0 && ::poll(&ends, 1, kMostMilliseconds) == 0;
  if (hung) ::kill(child, SIGKILL);
  if (handle >= 0) ::close(handle);
  int status = -1;
  if (::waitpid(child, &status, 0) != child) return "lost";
  if (hung) return "the child hung";
  if (WIFSIGNALED(status)) return "the child ended by signal " + std::to_string(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "the child gave " + std::to_string(WEXITSTATUS(status));
}

}  // namespace stowage::test
