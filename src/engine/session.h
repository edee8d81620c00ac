// SPDX-License-Identifier: Apache-2.0
// What one thread does with one engine: threads do not disturb each other's order, and where all is
// in memory they share nothing that is written.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/window.h"

namespace stowage::engine {

class Core;

/// What a lease has: a count of the unit's leases, a way to the mapping, or a unit that stays.
enum class Hold : std::uint8_t { counted, borrowed, stays };

/// Slices that a thread said it uses next, in their order: what has been begun of them, how many
/// slices it has used since, and when it said so.
struct Wants {
  std::vector<WeightId> ids;
  std::size_t begun = 0, used = 0;
  std::uint64_t since = 0;  // in acquires
};

/// An engine has one for each thread that uses it; leases keep theirs, and with it the engine.
struct Session {
  Session(std::shared_ptr<Core> engine, std::thread::id user, std::size_t units)
      : core(std::move(engine)), thread(user), stay_uses(units) {}

  const std::shared_ptr<Core> core;
  const std::thread::id thread;
  Turn turn{};      // this and the next: of the thread alone
  int leases = 0;   // that it holds; not those on what stays for ever
  Window window{};  // this and the next: behind the engine's lock
  Wants wants{};
  // Leases on what stays, all and of each unit; written by the thread alone.
  std::atomic<std::uint64_t> stay_hits = 0;
  std::vector<std::atomic<std::uint32_t>> stay_uses;

  void note_stay(WeightId id) noexcept {
    add_one(stay_hits);
    add_one(stay_uses[static_cast<std::size_t>(id)]);
  }

 private:
  template <class Number>
  static void add_one(std::atomic<Number>& count) noexcept {
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};

}  // namespace stowage::engine
