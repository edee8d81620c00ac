// SPDX-License-Identifier: Apache-2.0
// The state of an engine behind one lock: which units are in memory, who uses them, what is being
// read, and what goes when room is needed.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/arena.h"
#include "engine/candidates.h"
#include "engine/order.h"
#include "engine/source.h"
#include "engine/units.h"

namespace stowage::engine {

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(File file, const EngineOptions& options);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core();
  void stop() noexcept;  // ends the readers; later acquires read for themselves

  const File& file() const noexcept { return file_; }
  const std::vector<Unit>& units() const noexcept { return units_; }
  Lease acquire(WeightId id);
  void release(WeightId id, bool borrowed) noexcept;
  Weight weight(WeightId id, bool borrowed) const;
  const void* at(WeightId id, bool borrowed, const void* mapped) const noexcept;
  void expect(std::span<const WeightId> order);
  void set_signature(std::uint64_t signature);
  EngineReport report() const;

 private:
  enum class Stage : std::uint8_t { absent, reading, present };
  struct State {
    Stage stage = Stage::absent;
    std::int32_t leases = 0;  // those that wait for its bytes count
    Arena::Run run = -1;
    std::uint32_t claimed = 0, done = 0;  // pieces
    std::uint64_t used = 0;               // when, in acquires
    // Between its last uses, the latest first. A pass forward and one backward give intervals in
    // turn, so the one before the last is what comes next; in a circle all are equal.
    std::uint64_t intervals[2] = {0, 0};
    std::uint64_t predicted = 0;  // when it was read ahead for
    std::uint64_t wanted = 0;     // the look-ahead that last saw it
    std::exception_ptr error{};
  };
  using Lock = std::unique_lock<std::mutex>;

  const Unit& unit(WeightId id) const { return units_[static_cast<std::size_t>(id)]; }
  State& state(WeightId id) { return states_[static_cast<std::size_t>(id)]; }
  const State& state(WeightId id) const { return states_[static_cast<std::size_t>(id)]; }
  std::byte* memory(const State& s) const noexcept;
  std::uint64_t held() const noexcept;

  bool begin(WeightId id, std::uint64_t next_use);
  bool make_room(std::uint64_t bytes, std::uint64_t next_use);
  std::optional<WeightId> overdue();
  std::optional<WeightId> needed_last(std::uint64_t bytes, std::uint64_t next_use);
  bool take_room(WeightId id) noexcept;
  void evict(WeightId id) noexcept;
  std::uint64_t expected_use(const State& s) const noexcept;

  void read_one(WeightId id, Lock& lock);
  void wait_for(WeightId id, Lock& lock);
  bool get_ready(WeightId id, Lock& lock, bool holds_another);
  void note_use(WeightId id);
  void read_ahead(Place place);
  void work();

  File file_;
  std::vector<Unit> units_;
  std::uint64_t budget_;
  Source source_;
  std::vector<Weight> weights_;  // over the mapping; empty for plain tensors
  mutable std::mutex mutex_;
  std::condition_variable work_, done_, room_;
  std::vector<State> states_;
  std::optional<Arena> arena_;      // none when mapped
  std::uint64_t mapped_bytes_ = 0;  // held, when mapped
  Order order_;
  std::vector<WeightId> queue_;  // being read, with pieces that nobody has claimed
  Candidates candidates_;        // units in memory without a lease
  std::uint64_t clock_ = 0, looks_ = 0, serial_;
  std::size_t present_ = 0;  // units
  int waiting_ = 0;
  bool stopping_ = false;
  EngineReport report_{};
  std::vector<std::thread> workers_;
};

}  // namespace stowage::engine
