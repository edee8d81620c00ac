// SPDX-License-Identifier: Apache-2.0
// Core: the desks of its threads, and how each finds its own without a lock.
#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/core.h"

namespace stowage::engine {
namespace {

/// A thread's short way to its desk. It does not keep the engine: leases and the engine itself do.
struct Way {
  std::uint64_t engine = 0;  // its serial; addresses are used again
  std::weak_ptr<Desk> desk{};

  ~Way() {
    if (const std::shared_ptr<Desk> kept = desk.lock()) kept->core->forget(*kept);
  }
};

constexpr std::size_t kWays = 4;  // engines that one thread uses in turn
thread_local std::array<Way, kWays> ways;
thread_local std::size_t next_way = 0;

}  // namespace

std::shared_ptr<Desk> Core::desk() {
  for (const Way& way : ways) {
    if (way.engine != serial_) continue;
    if (std::shared_ptr<Desk> found = way.desk.lock()) return found;
  }
  std::shared_ptr<Desk> found = desk_of(std::this_thread::get_id());
  Way& way = ways[next_way++ % kWays];
  way.engine = serial_;
  way.desk = found;
  return found;
}

std::shared_ptr<Desk> Core::desk_of(std::thread::id thread) {
  const std::scoped_lock lock(mutex_);
  for (const std::shared_ptr<Desk>& desk : desks_)
    if (desk->thread == thread) return desk;
  auto desk = std::make_shared<Desk>(shared_from_this(), thread);
  if (!stopping_) desks_.push_back(desk);
  return desk;
}

void Core::forget(const Desk& desk) noexcept {
  if (forked()) return;
  std::shared_ptr<Desk> kept;  // ends after the lock
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find(desks_, &desk, &std::shared_ptr<Desk>::get);
  if (found == desks_.end()) return;
  report_.hits += desk.stay_hits.load(std::memory_order_relaxed);
  report_.acquired += desk.stay_hits.load(std::memory_order_relaxed);
  kept = std::move(*found);
  desks_.erase(found);
}

}  // namespace stowage::engine
