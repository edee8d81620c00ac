// SPDX-License-Identifier: Apache-2.0
// Keeps buffers that were given back, up to a bound. They are mapped one by one, so
// that what is not kept returns to the system at once and not into the heap of the process.
#include "kernel/scratch.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
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

class ScratchPool {
 public:
  ScratchPool() {
    static ScratchPool* self =
        this;  // in a forked child the mutex must not be held by a lost thread
    pthread_atfork([] { self->mutex_.lock(); }, [] { self->mutex_.unlock(); },
                   [] { self->mutex_.unlock(); });
  }

  void* take(std::size_t bytes) {
    bytes = rounded(bytes);
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
    keep(buffer);
  }

  ScratchUse use(bool restart_peak) noexcept {
    const std::lock_guard lock(mutex_);
    const ScratchUse use = use_;
    if (restart_peak) use_.peak = use_.live;
    return use;
  }

 private:
  // Four sizes for each power of two, so that requests of like size share buffers.
  static std::size_t rounded(std::size_t bytes) {
    if (bytes > SIZE_MAX / 2) refuse(bytes);
    const std::size_t step = std::max(std::bit_floor(bytes) / 4, kPage);
    return (std::max(bytes, kPage) + step - 1) / step * step;
  }

  // The newest that fits and is not wastefully large, since it is the likeliest to be in cache.
  Buffer find_idle(std::size_t bytes) {
    for (auto at = idle_.end(); at != idle_.begin();) {
      --at;
      if (at->bytes < bytes || at->bytes > bytes + bytes / 4) continue;
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
  // The oldest make room; what is larger than all that may be kept drives nothing out.
  void keep(const Buffer& buffer) noexcept {
    if (buffer.bytes > kMostIdle) {
      munmap(buffer.memory, buffer.bytes);
      return;
    }
    idle_.push_back(buffer);  // reserved when it was taken
    use_.idle += buffer.bytes;
    while (use_.idle > kMostIdle) {
      munmap(idle_.front().memory, idle_.front().bytes);
      use_.idle -= idle_.front().bytes;
      idle_.erase(idle_.begin());
    }
  }
  [[noreturn]] static void refuse(std::size_t bytes) {
    throw Error(Code::out_of_memory, "take_scratch: the system must have room, got none for " +
                                         std::to_string(bytes) + " bytes");
  }

  std::mutex mutex_;
  std::vector<Buffer> live_, idle_;
  ScratchUse use_;
};

ScratchPool& pool() {
  static ScratchPool& pool =
      *new ScratchPool;  // never destroyed: other static objects may still hold scratch
  return pool;
}

}  // namespace

inline namespace v0 {

void* take_scratch(std::size_t bytes) { return pool().take(bytes); }
void give_scratch(void* memory) noexcept { pool().give(memory); }
ScratchUse scratch_use(bool restart_peak) noexcept { return pool().use(restart_peak); }

}  // namespace v0
}  // namespace stowage
