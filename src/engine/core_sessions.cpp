// SPDX-License-Identifier: Apache-2.0
// Core: the sessions of its threads, and how each finds its own without a lock.
#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/core.h"

namespace stowage::engine {
namespace {

/// A thread's short way to its session. It does not keep the engine: leases and the engine itself
/// do.
struct Way {
  std::uint64_t engine = 0;  // its serial; addresses are used again
  std::weak_ptr<Session> session{};

  ~Way() {
    if (const std::shared_ptr<Session> kept = session.lock()) kept->core->forget(*kept);
  }
};

constexpr std::size_t kWays = 4;  // engines that one thread uses in turn
thread_local std::array<Way, kWays> ways;
thread_local std::size_t next_way = 0;

}  // namespace

std::shared_ptr<Session> Core::session() {
  for (const Way& way : ways) {
    if (way.engine != serial_) continue;
    if (std::shared_ptr<Session> found = way.session.lock()) return found;
  }
  std::shared_ptr<Session> found = session_of(std::this_thread::get_id());
  Way& way = ways[next_way++ % kWays];
  way.engine = serial_;
  way.session = found;
  return found;
}

std::shared_ptr<Session> Core::session_of(std::thread::id thread) {
  const std::scoped_lock lock(mutex_);
  for (const std::shared_ptr<Session>& session : sessions_)
    if (session->thread == thread) return session;
  auto session = std::make_shared<Session>(shared_from_this(), thread, states_.size());
  if (!stopping_) sessions_.push_back(session);
  return session;
}

void Core::forget(const Session& session) noexcept {
  if (forked()) return;
  std::shared_ptr<Session> kept;  // ends after the lock
  const std::scoped_lock lock(mutex_);
  const auto found = std::ranges::find(sessions_, &session, &std::shared_ptr<Session>::get);
  if (found == sessions_.end()) return;
  report_.hits += session.stay_hits.load(std::memory_order_relaxed);
  report_.acquired += session.stay_hits.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < states_.size(); ++i)
    states_[i].uses.hits += session.stay_uses[i].load(std::memory_order_relaxed);
  kept = std::move(*found);
  sessions_.erase(found);
}

}  // namespace stowage::engine
