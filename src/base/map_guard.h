// SPDX-License-Identifier: Apache-2.0
// What reading a mapping does where its file has lost the bytes. A file that is cut short while it
// is mapped, or whose disk cannot be read, shows as SIGBUS at the touch of a page, which would end
// the process. Here it becomes a mark on the mapping: a handler puts zeros under what is left of
// it, and whoever has read from it asks afterwards and throws.
//
// The handler serves faults inside watched mappings only. Every other SIGBUS goes to the handler
// that was there before, or ends the process as it would have. It is installed once, at the first
// mapping. Who installs another later (Python's faulthandler, a debugger's library) has the last
// word, and unless that one passes on what it does not know, a lost page ends the process again.
// The same goes for a thread that blocks SIGBUS.
//
// A mapping of no file may have a filler instead, which the handler asks for its bytes.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace stowage {

/// The most mappings that are watched at a time: the handler may take no lock and no memory, so
/// their table has a fixed size. It is well above the usual limit on open files.
inline constexpr std::size_t kMostMappings = 16384;

/// Puts bytes where a page was touched that has none, and says whether it could. It runs inside of
/// a signal handler: it may only load, store and make system calls, as long as nothing is wrong, on
/// a stack that may have been given by others (Python's faulthandler gives 8 KiB and some).
struct MapFiller {
  bool (*fill)(void* self, const void* address) noexcept = nullptr;
  void* self = nullptr;
};

/// Watches a mapping of a file while it lives.
class MapGuard {
 public:
  /// Of [data, data + bytes), which begins at a page. Throws io where kMostMappings are watched.
  MapGuard(const void* data, std::uint64_t bytes, std::string path, MapFiller filler = {});
  MapGuard(const MapGuard&) = delete;
  MapGuard& operator=(const MapGuard&) = delete;
  ~MapGuard();  // before the mapping ends, so that no other one is taken for it

  /// Whether a page could not be had. All from there on is zeros and stays so.
  bool damaged() const noexcept;
  /// Throws bad_file if it is damaged.
  void check() const;

 private:
  std::string path_;
  std::size_t slot_;
};

/// Threads that change this are those that read from the mapping; a read of theirs that is over
/// for the caller (it ran there, or a thread was joined) is counted.
extern constinit std::atomic<std::uint64_t> damaged_mappings;

/// How many mappings that are open now are damaged. A relaxed load: 0 says that nothing read from
/// any mapping so far was lost.
inline std::uint64_t mappings_damaged() noexcept {
  return damaged_mappings.load(std::memory_order_relaxed);
}

/// Whether `memory` lies in a mapping with a filler, which has then filled it: a system call that
/// was given such memory before it was touched fails with EFAULT.
bool is_filled(const void* memory) noexcept;

/// Throws bad_file, naming the path, if `memory` lies in a damaged mapping. That mapping must be
/// open; other memory may be anything, null too.
void check_memory(const void* memory);

}  // namespace stowage
