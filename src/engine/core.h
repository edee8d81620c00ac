// SPDX-License-Identifier: Apache-2.0
// The state of an engine behind one lock: which units are in memory, who uses them, what is being
// read, and what goes when room is needed. A unit that is kept (all are where everything fits the
// budget) never goes, and from its second use on is leased without the lock.
//
// In a forked child the readers do not exist, the lock may be held for ever, and the memory is not
// there (arena.h): every way in asks forked() first, and the child is lent the mapping.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "engine/arena.h"
#include "engine/candidates.h"
#include "engine/disk_link.h"
#include "engine/order.h"
#include "engine/reader.h"
#include "engine/reuse.h"
#include "engine/session.h"
#include "engine/trace.h"
#include "engine/units.h"

namespace stowage::engine {

struct CoreOptions {
  std::uint64_t budget = 0;
  int workers = 0;
  double timeout = 0;  // seconds; 0: none
  bool lock = false;   // of the memory
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  /// `units` of `file` over `link`, within the options' budget. Throws invalid_argument,
  /// out_of_memory (no room for the budget, or no more threads).
  static std::shared_ptr<Core> make(File file, std::vector<Unit> units,
                                    std::unique_ptr<DiskLink> link, const CoreOptions& options);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core();
  /// Ends those who wait and, when their reads are over, the readers. Later acquires read for
  /// themselves. Must be called: sessions keep the engine until then.
  void stop() noexcept;
  void cancel() noexcept;  // ends those who wait
  bool stopped() const;
  /// Whether this is a child of the process that made it.
  bool forked() const noexcept { return process_ != process_generation(); }

  const File& file() const noexcept { return file_; }
  const std::vector<Unit>& units() const noexcept { return units_; }
  /// Throws invalid_argument where there is none.
  const Unit& checked_unit(WeightId id) const;
  /// Bytes of the budget through which parts come that the file has in another order.
  std::uint64_t scratch() const noexcept { return scratch_; }
  Lease acquire(WeightId id);
  void release(Session& session, WeightId id, Hold hold, TraceTime begun) noexcept;
  Weight weight(WeightId id, Hold hold) const;
  const void* at(WeightId id, Hold hold, const void* mapped) const noexcept;
  bool want(std::span<const WeightId> ids, bool after);
  /// The weight by rows whose slices are used next after those of this one; negative: none.
  WeightId behind(WeightId id) const noexcept {
    return behind_[static_cast<std::size_t>(id)].load(std::memory_order_relaxed);
  }
  void set_behind(std::span<const WeightId> order) noexcept;
  void keep(std::span<const WeightId> ids);
  void expect(std::span<const WeightId> order);
  void set_signature(std::uint64_t signature);
  EngineReport report() const;
  std::vector<WeightUses> uses() const;
  WeightUses uses(WeightId id) const;
  void foresee(std::span<const std::uint64_t> uses);

  void forget(const Session& session) noexcept;  // its thread has ended

 private:
  Core(File file, std::vector<Unit> units, std::unique_ptr<DiskLink> link,
       const CoreOptions& options);
  void start_workers(int count);

  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  enum class Stage : std::uint8_t { absent, reading, present };
  struct State {
    Stage stage = Stage::absent;
    bool kept = false;                // never goes, and keeps its room after an error
    bool roomed = false;              // has its run, or its bytes are counted as mapped
    std::atomic<bool> stays = false;  // kept and present; set by its first use
    bool cut = false;         // reading, but some pieces never will be: it goes when the rest is
    std::int32_t leases = 0;  // those that wait for its bytes count
    Arena::Run run = -1, scratch = -1;
    std::uint32_t claimed = 0, done = 0, pieces = 0;
    std::uint64_t came = 0;   // bytes of pieces that are done
    std::uint64_t used = 0;   // when, in acquires
    Turn turn{};              // then
    std::uint64_t again = 0;  // after how many acquires it comes again, by that turn; 0: unknown
    // Between its last uses, the latest first. A pass forward and one backward give intervals in
    // turn, so the one before the last is what comes next; in a circle all are equal.
    std::uint64_t intervals[2] = {0, 0};
    std::uint64_t predicted = 0;  // when it was prefetched for
    std::uint64_t wanted = 0;     // when a window expects it; in the past: none does
    bool unused = false;          // prefetched, and nobody asked yet
    WeightUses uses{};            // but for those that sessions have
    std::exception_ptr error{};
  };
  /// What one acquire() waits for, and since when.
  struct Wait {
    WeightId id;
    std::uint64_t cancels;
    Clock::time_point begun;
  };
  struct Claim {
    WeightId id;
    const Piece* piece;
  };

  bool is_slice(WeightId id) const { return unit(id).whole >= 0; }
  const Unit& unit(WeightId id) const { return units_[static_cast<std::size_t>(id)]; }
  State& state(WeightId id) { return states_[static_cast<std::size_t>(id)]; }
  const State& state(WeightId id) const { return states_[static_cast<std::size_t>(id)]; }
  std::byte* memory(const State& s) const noexcept;
  std::uint64_t held() const noexcept;
  WeightUses uses_of(std::size_t i) const noexcept;

  // core_room.cpp
  bool begin(WeightId id, std::uint64_t next_use);
  bool make_room(std::uint64_t bytes, std::uint64_t next_use);
  std::optional<WeightId> overdue();
  std::optional<WeightId> needed_last(std::uint64_t bytes, std::uint64_t next_use);
  bool take_scratch(WeightId id) noexcept;
  void give_scratch(WeightId id) noexcept;
  bool take_room(WeightId id) noexcept;
  void evict(WeightId id) noexcept;
  std::uint64_t in_ring(WeightId id) const noexcept;
  std::size_t slice_index(WeightId id) const noexcept;
  void rank_anew();
  void become_present(WeightId id);
  void add_candidate(WeightId id);
  std::uint64_t expected_use(WeightId id) const noexcept;

  // core_ahead.cpp
  void bound_look_ahead() noexcept;
  void prefetch(Session& session);
  void extend(Window& window, std::uint64_t room);
  std::uint64_t acquires_of(std::size_t uses) const noexcept;
  void begin_wants(Session& session);
  void put_off(WeightId id, std::uint64_t time);
  bool begin_ahead(WeightId id, std::uint64_t time);
  void begin_foreseen();

  // core_reads.cpp
  void work();
  Claim claim(WeightId id);
  std::size_t claim_run(WeightId wanted, std::span<Claim> run);
  void read_run(WeightId id, Lock& lock);
  void fetch_quick(Lock& lock);
  void read(std::span<const Claim> run, Lock& lock);
  bool finish(const Claim& claim, const std::exception_ptr& error);
  std::uint64_t put_in_order(const Unit& of, std::byte* to, const std::byte* from);
  void form(WeightId id, Lock& lock);
  void end(WeightId id);
  void tell() noexcept;  // those who wait
  void drop_queue() noexcept;

  // core_sessions.cpp
  std::shared_ptr<Session> session();  // the calling thread's
  std::shared_ptr<Session> session_of(std::thread::id thread);

  // core.cpp
  void check_id(WeightId id) const;
  Lease lend_to_child(WeightId id);
  void note_use(const Turn& turn);
  void note_slice(WeightId id);
  bool get_ready(WeightId id, Lock& lock, bool holds_another);
  bool borrow(WeightId id) noexcept;
  void give_back(WeightId id) noexcept;
  bool reads_for_itself() const noexcept { return timeout_ == 0 || stopping_; }
  void wait_for_bytes(const Wait& wait, Lock& lock);
  void wait_for_room(const Wait& wait, Lock& lock);
  void sleep(std::condition_variable& on, const Wait& wait, Lock& lock);
  void check_cancel(const Wait& wait) const;
  [[noreturn]] void throw_late(const Wait& wait) const;

  File file_;
  std::vector<Unit> units_;
  std::uint64_t scratch_;
  std::uint64_t budget_;     // without scratch
  std::uint64_t ring_;       // the budget without the room of units that were asked to be kept
  std::uint64_t ahead_ = 0;  // bytes of it that a window has, with the unit that is used
  double timeout_;           // seconds; 0: none
  const std::unique_ptr<DiskLink> link_;
  std::vector<Weight> weights_;  // over the mapping; empty for plain tensors
  const std::uint64_t serial_;
  const std::uint64_t process_ = process_generation();
  mutable std::mutex mutex_;
  std::condition_variable work_, done_, room_;
  std::vector<State> states_;
  std::vector<std::atomic<WeightId>> behind_;  // of weights by rows
  std::optional<Arena> arena_;                 // none when mapped
  std::optional<Arena> scratch_arena_;         // none where no unit needs it
  std::uint64_t mapped_bytes_ = 0;             // held, when mapped
  Order order_;
  std::vector<WeightId> queue_;     // being read, with pieces that nobody has claimed
  std::vector<WeightId> foreseen_;  // to be read before the first use; the last comes first
  Candidates candidates_;           // units in memory without a lease
  std::vector<std::shared_ptr<Session>> sessions_;
  std::uint64_t clock_ = 0;        // acquires
  std::uint64_t pass_ = 0;         // in a pass, as far as is known
  std::uint64_t epoch_ = 1;        // of what windows hold
  std::uint64_t cancels_ = 0;      // how often those who wait were ended
  std::size_t present_ = 0;        // units
  std::size_t coming_ = 0;         // units that come into memory at all
  std::size_t slices_ = 0;         // of these
  std::uint64_t slice_bytes_ = 0;  // in memory, of those that may go
  std::optional<Reuse> reuse_;     // of slices, where there are some
  int waiting_ = 0;                // for room
  bool stopping_ = false;
  EngineReport report_{};
  std::vector<std::thread> workers_;
};

constexpr std::uint64_t kNow = 0;  // the next use of what somebody waits for

/// The core of an Engine, over what `reader` reads.
std::shared_ptr<Core> core_on_disk(File file, const EngineOptions& options,
                                   Reader& reader = system_reader());

}  // namespace stowage::engine
