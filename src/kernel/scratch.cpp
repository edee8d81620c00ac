// SPDX-License-Identifier: Apache-2.0
// Keeps buffers that were given back, newest first, up to a bound. They are mapped one by one, so
// that what is not kept returns to the system at once and not into the heap of the process.
#include "kernel/scratch.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace stowage {
namespace {

constexpr std::size_t kPage = 4096, kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMostIdle = std::size_t{64} << 20;  // one widened 4096 x 4096 matrix, twice

struct Buffer {
  void* memory;
  std::size_t bytes;
};

class Pool {
 public:
  Pool() {
    static Pool* self = this;  // in a forked child the mutex must not be held by a lost thread
    pthread_atfork([] { self->mutex_.lock(); }, [] { self->mutex_.unlock(); },
                   [] { self->mutex_.unlock(); });
  }

  void* take(std::size_t bytes) {
    bytes = std::max(bytes, std::size_t{1});
    if (bytes > SIZE_MAX - kHugePage) refuse(bytes);
    bytes = (bytes + kPage - 1) / kPage * kPage;
    const std::lock_guard lock(mutex_);
    live_.reserve(live_.size() + 1);  // nothing below throws once a buffer is in hand
    idle_.reserve(live_.size() + idle_.size() + 1);
    const Buffer buffer = find_idle(bytes);
    live_.push_back(buffer);
    use_.live += buffer.bytes;
    use_.peak = std::max(use_.peak, use_.live);
    return buffer.memory;
  }

  void give(void* memory) noexcept {
    if (memory == nullptr) return;
    const std::lock_guard lock(mutex_);
    const auto at = std::ranges::find(live_, memory, &Buffer::memory);
    if (at == live_.end()) return;  // not ours
    const Buffer buffer = *at;
    live_.erase(at);
    use_.live -= buffer.bytes;
    idle_.push_back(buffer);
    use_.idle += buffer.bytes;
    while (use_.idle > kMostIdle) unmap(idle_.begin());
  }

  ScratchUse use(bool restart_peak) noexcept {
    const std::lock_guard lock(mutex_);
    const ScratchUse use = use_;
    if (restart_peak) use_.peak = use_.live;
    return use;
  }

 private:
  using Place = std::vector<Buffer>::iterator;

  // The newest that fits and is not wastefully large, since it is the likeliest to be in cache.
  Buffer find_idle(std::size_t bytes) {
    for (Place at = idle_.end(); at != idle_.begin();) {
      --at;
      if (at->bytes < bytes || at->bytes > 2 * bytes + kHugePage) continue;
      const Buffer found = *at;
      idle_.erase(at);
      use_.idle -= found.bytes;
      return found;
    }
    return map(bytes);
  }

  static Buffer map(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) refuse(bytes);
    if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // advice: may be refused
    return {memory, bytes};
  }
  void unmap(Place at) noexcept {
    munmap(at->memory, at->bytes);
    use_.idle -= at->bytes;
    idle_.erase(at);
  }
  [[noreturn]] static void refuse(std::size_t bytes) {
    throw Error(Code::out_of_memory, "take_scratch: the system must have room, got none for " +
                                         std::to_string(bytes) + " bytes");
  }

  std::mutex mutex_;
  std::vector<Buffer> live_, idle_;
  ScratchUse use_;
};

Pool& pool() {
  static Pool& pool = *new Pool;  // never destroyed: other static objects may still hold scratch
  return pool;
}

}  // namespace

inline namespace v0 {

void* take_scratch(std::size_t bytes) { return pool().take(bytes); }
void give_scratch(void* memory) noexcept { pool().give(memory); }
ScratchUse scratch_use(bool restart_peak) noexcept { return pool().use(restart_peak); }

}  // namespace v0
}  // namespace stowage
