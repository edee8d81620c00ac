// SPDX-License-Identifier: Apache-2.0
// One pool for the process: a list of idle blocks behind a mutex.
#include "torch/scratch.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace stowage::door {
namespace {

constexpr std::size_t kMostIdle = std::size_t{64} << 20;
constexpr std::size_t kStep = std::size_t{64}
                              << 10;  // sizes are rounded up, so that they meet again

struct Block {
  std::size_t capacity;
  void* data;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> idle;
  std::size_t idle_bytes = 0;
};

Pool& pool() {
  static Pool* const made = new Pool;  // outlives every tensor of the process
  return *made;
}

}  // namespace

Scratch::Scratch(std::size_t bytes)
    : capacity_((std::max(bytes, kStep) + kStep - 1) / kStep * kStep) {
  Pool& p = pool();
  {
    const std::scoped_lock lock(p.mutex);
    // The smallest that fits, unless most of it would lie unused.
    auto best = p.idle.end();
    for (auto i = p.idle.begin(); i != p.idle.end(); ++i) {
      const bool fits = i->capacity >= capacity_ && i->capacity / 4 <= capacity_;
      if (fits && (best == p.idle.end() || i->capacity < best->capacity)) best = i;
    }
    if (best != p.idle.end()) {
      capacity_ = best->capacity;
      data_ = best->data;
      p.idle_bytes -= capacity_;
      *best = p.idle.back();
      p.idle.pop_back();
      return;
    }
  }
  data_ = std::aligned_alloc(64, capacity_);
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch::~Scratch() {
  Pool& p = pool();
  {
    const std::scoped_lock lock(p.mutex);
    if (p.idle_bytes + capacity_ <= kMostIdle) {
      p.idle.push_back({capacity_, data_});
      p.idle_bytes += capacity_;
      return;
    }
  }
  std::free(data_);
}

}  // namespace stowage::door
