// SPDX-License-Identifier: Apache-2.0
#include "engine/core.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>

#include "base/formatted.h"
#include "base/threads.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

/// Adds the seconds that it lived.
class Stall {
 public:
  Stall(double& all, double& of_one) : all_(all), of_one_(of_one) {}
  Stall(const Stall&) = delete;
  ~Stall() {
    const double seconds = seconds_since(begun_);
    all_ += seconds, of_one_ += seconds;
  }

 private:
  double &all_, &of_one_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

std::uint64_t new_serial() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

std::uint64_t scratch_of(const std::vector<Unit>& units, std::uint64_t budget) {
  std::uint64_t most = 0;
  for (const Unit& unit : units)
    if (unit.comes) most = std::max(most, unit.scratch);
  return scratch_for(most, budget);
}

std::uint64_t checked_budget(const File& file, const std::vector<Unit>& units,
                             std::uint64_t scratch, const CoreOptions& options) {
  const auto coming = [](const Unit& unit) { return unit.comes ? unit.bytes : 0; };
  const auto most = std::ranges::max_element(units, {}, coming);
  if (most != units.end() && options.budget < coming(*most) + scratch) {
    std::string beside;
    if (scratch != 0)
      beside = " and scratch of " + std::to_string(scratch) + " for those in another order";
    throw Error(Code::invalid_argument,
                file.paths().front() + ": the budget must hold the largest weight, " + most->name +
                    " of " + std::to_string(most->bytes) + " bytes" + beside + ", got " +
                    std::to_string(options.budget));
  }
  if (options.workers < 0 || options.workers > 256) {
    throw Error(Code::invalid_argument,
                "engine: workers must be 0 to 256, got " + std::to_string(options.workers));
  }
  if (!(options.timeout >= 0) || (options.timeout > 0 && options.workers == 0)) {
    throw Error(Code::invalid_argument,
                formatted("engine: the timeout must be 0, or positive and with workers, got {} s "
                          "with {} workers",
                          options.timeout, options.workers));
  }
  return options.budget / kPage * kPage - scratch;
}

}  // namespace

Core::Core(File file, std::vector<Unit> units, std::unique_ptr<DiskLink> link,
           const CoreOptions& options)
    : file_(std::move(file)),
      units_(std::move(units)),
      scratch_(scratch_of(units_, options.budget)),
      budget_(checked_budget(file_, units_, scratch_, options)),
      ring_(budget_),
      timeout_(options.timeout),
      link_(std::move(link)),
      serial_(new_serial()),
      states_(units_.size()),
      behind_(units_.size()),
      order_(units_.size()),
      candidates_(units_.size()) {
  for (auto& none : behind_) none = -1;
  for (const Unit& one : units_) {  // slices come after what they are of
    if (!one.is_weight)
      weights_.emplace_back();
    else if (one.whole >= 0)
      weights_.push_back(rows_of(weights_[static_cast<std::size_t>(one.whole)], one));
    else if (file_.find_weight(one.name) == nullptr)
      weights_.push_back(file_.stack(one.name));
    else
      weights_.push_back(file_.weight(one.name, {}, true));
  }
  coming_ = static_cast<std::size_t>(std::ranges::count_if(units_, &Unit::comes));
  slices_ = static_cast<std::size_t>(
      std::ranges::count_if(units_, [](const Unit& one) { return one.comes && one.whole >= 0; }));
  if (slices_ != 0) {
    std::vector<std::uint64_t> bytes;
    for (const Unit& one : units_)
      if (one.whole >= 0) bytes.push_back(one.bytes);
    reuse_.emplace(std::move(bytes));
  }
  bound_look_ahead();
  const std::uint64_t all = bytes_of(units_), bytes = std::min(budget_, all);
  if (all <= budget_)
    for (State& s : states_) s.kept = true;
  if (link_->moves()) arena_.emplace(bytes, units_.size(), options.lock);
  if (scratch_ != 0) scratch_arena_.emplace(scratch_, units_.size(), options.lock);
  queue_.reserve(units_.size());
}

// A core of the parent's is never deleted: its condition variables would wait for threads that do
// not exist here.
std::shared_ptr<Core> Core::make(File file, std::vector<Unit> units, std::unique_ptr<DiskLink> link,
                                 const CoreOptions& options) {
  const std::shared_ptr<Core> made(
      new Core(std::move(file), std::move(units), std::move(link), options), [](Core* core) {
        if (!core->forked()) delete core;
      });
  made->start_workers(options.workers);
  return made;
}

// Readers must not outlive the core: they see it through this pointer alone.
void Core::start_workers(int count) {
  workers_.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) workers_.push_back(start_thread([this] { work(); }));
}

Core::~Core() { stop(); }

void Core::stop() noexcept {
  if (forked()) return;
  std::vector<std::shared_ptr<Session>> sessions;  // end after the lock
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    sessions.swap(sessions_);
  }
  cancel();
  for (std::thread& worker : workers_)
    if (worker.joinable()) worker.join();
}

bool Core::stopped() const {
  if (forked()) return true;
  const std::scoped_lock lock(mutex_);
  return stopping_;
}

void Core::cancel() noexcept {
  if (forked()) return;
  {
    const std::scoped_lock lock(mutex_);
    ++cancels_;
    drop_queue();
  }
  work_.notify_all();
  done_.notify_all();
  room_.notify_all();
}

std::byte* Core::memory(const State& s) const noexcept {
  return arena_ && s.run >= 0 ? arena_->data(s.run) : nullptr;
}

// A use of the weight that is current at `turn`.
void Core::note_use(const Turn& turn) {
  State& s = state(turn.current);
  ++clock_;
  if (s.used != 0) {
    s.intervals[1] = s.intervals[0];
    s.intervals[0] = pass_ = clock_ - s.used;
    order_.learn_interval(s.turn, s.intervals[0]);
  }
  s.used = clock_;
  if (slices_ != 0) s.predicted = s.wanted = 0;  // times are rough: it may have come before them
  s.turn = turn;
  s.again = order_.interval(turn);
}

void Core::note_slice(WeightId id) {
  State& s = state(id);
  ++clock_;
  s.used = clock_;
  if (!s.kept && reuse_->note(slice_index(id))) rank_anew();
}

// Sleeps until something happened. Throws when it is time to give up.
void Core::sleep(std::condition_variable& on, const Wait& wait, Lock& lock) {
  const double left = timeout_ - seconds_since(wait.begun);
  if (timeout_ > 0 && left <= 0) throw_late(wait);
  if (timeout_ > 0) {
    // By the wall clock, whose wait thread sanitizers know; who is woken early asks again.
    on.wait_until(lock, std::chrono::system_clock::now() +
                            std::chrono::microseconds(static_cast<std::int64_t>(left * 1e6) + 1));
  } else {
    on.wait(lock);
  }
}

void Core::check_cancel(const Wait& wait) const {
  if (wait.cancels == cancels_) return;
  throw Error(Code::io,
              formatted("{}: {} must be waited for until it is read, got a cancel after "
                        "{:.3f} s",
                        file_.paths().front(), unit(wait.id).name, seconds_since(wait.begun)));
}

void Core::throw_late(const Wait& wait) const {
  const State& s = state(wait.id);
  const double seconds = seconds_since(wait.begun);
  throw Error(Code::io,
              formatted("{}: {} of {} bytes must come within the timeout of {} s, got {} of them "
                        "in {:.3f} s ({:.3g} MB/s){}",
                        file_.paths().front(), unit(wait.id).name, unit(wait.id).bytes, timeout_,
                        s.stage == Stage::reading ? s.came : 0, seconds,
                        static_cast<double>(s.came) / seconds / 1e6,
                        s.stage == Stage::absent ? ", and no room for it" : ""));
}

// Helps to read the unit, unless a timeout says that nobody may be held by a read of his own, and
// waits for those who read the rest.
void Core::wait_for_bytes(const Wait& wait, Lock& lock) {
  State& s = state(wait.id);
  while (s.stage == Stage::reading) {
    check_cancel(wait);
    if (reads_for_itself() && s.claimed < s.pieces) {
      read_run(wait.id, lock);
    } else {
      sleep(done_, wait, lock);
    }
  }
}

void Core::wait_for_room(const Wait& wait, Lock& lock) {
  ++waiting_;
  try {
    sleep(room_, wait, lock);
  } catch (...) {
    --waiting_;
    throw;
  }
  --waiting_;
}

// Lent where it is mapped.
bool Core::borrow(WeightId id) noexcept {
  ++report_.borrowed;
  ++state(id).uses.borrowed;
  return false;
}

// Makes the unit present; the caller's lease on it is counted already. False: it must be borrowed
// from the mapping.
bool Core::get_ready(WeightId id, Lock& lock, bool holds_another) {
  State& s = state(id);
  s.unused = false;
  if (s.stage == Stage::present) {
    ++report_.hits;
    ++s.uses.hits;
    return true;
  }
  const Stall stall(report_.stall, s.uses.stall);
  const Wait wait{id, cancels_, Clock::now()};
  const TraceTime traced = trace_time();
  const bool absent = s.stage == Stage::absent;
  std::uint64_t& kind = absent ? report_.misses : report_.late;
  std::uint32_t& of_one = absent ? s.uses.misses : s.uses.late;
  ++kind, ++of_one;
  while (s.stage != Stage::present) {
    check_cancel(wait);  // before a read is begun that nobody would wait for, nor wake a reader for
    if (s.stage == Stage::absent && !begin(id, kNow)) {
      if (holds_another) {
        --kind, --of_one;
        return borrow(id);
      }
      wait_for_room(wait, lock);
      continue;
    }
    wait_for_bytes(wait, lock);
    if (s.stage == Stage::absent && s.error) std::rethrow_exception(s.error);
  }
  trace(TraceKind::wait, unit(id).name, unit(id).bytes, traced);
  return true;
}

void Core::check_id(WeightId id) const {
  if (id >= 0 && static_cast<std::size_t>(id) < units_.size()) return;
  throw Error(Code::invalid_argument, formatted("{}: a weight's id must be below {}, got {}",
                                                file_.paths().front(), units_.size(), id));
}

// Not the thread's own session: what that knows is of the parent's engine.
Lease Core::lend_to_child(WeightId id) {
  return {std::make_shared<Session>(shared_from_this(), std::this_thread::get_id(), 0), id,
          Hold::borrowed, trace_time()};
}

const Unit& Core::checked_unit(WeightId id) const {
  check_id(id);
  return unit(id);
}

Lease Core::acquire(WeightId id) {
  check_id(id);
  if (forked()) return lend_to_child(id);
  std::shared_ptr<Session> own = session();
  const Turn turn = own->turn;
  const bool in_order = !is_slice(id);
  const Turn next = in_order ? turn.then(id) : turn;
  State& s = state(id);
  if (s.stays.load(std::memory_order_acquire)) {
    own->turn = next;
    own->note_stay(id);
    return {std::move(own), id, Hold::stays, trace_time()};
  }
  Lock lock(mutex_);
  ++report_.acquired;
  if (!unit(id).comes) {
    borrow(id);
    ++own->leases;
    return {std::move(own), id, Hold::borrowed, trace_time()};
  }
  if (in_order) {
    order_.learn(turn, id);
    note_use(next);
  } else {
    note_slice(id);
  }
  if (s.leases++ == 0) candidates_.remove(id);
  Hold hold = Hold::counted;
  try {
    if (!get_ready(id, lock, own->leases > 0)) hold = Hold::borrowed;
  } catch (...) {
    give_back(id);
    throw;
  }
  if (hold == Hold::borrowed) give_back(id);
  if (s.kept) s.stays.store(true, std::memory_order_release);
  own->turn = next;
  ++own->leases;
  if (in_order) {
    prefetch(*own);
    fetch_quick(lock);
  } else {
    ++own->wants.used;
    begin_wants(*own);
  }
  lock.unlock();
  return {std::move(own), id, hold, trace_time()};
}

// One lease less. Somebody else may have read the unit for whom gave up: then it can go now.
void Core::give_back(WeightId id) noexcept {
  State& s = state(id);
  if (--s.leases > 0 || s.stage != Stage::present) return;
  add_candidate(id);
  if (waiting_ > 0) room_.notify_all();
}

void Core::release(Session& session, WeightId id, Hold hold, TraceTime begun) noexcept {
  trace(TraceKind::use, unit(id).name, unit(id).bytes, begun);
  if (hold == Hold::stays || forked()) return;
  --session.leases;
  // What is only mapped is the system's to keep; of what else comes by rows, pages go again.
  if (!unit(id).comes && unit(id).slices.count == 0) return;
  Lock lock(mutex_);
  State& s = state(id);
  if (hold == Hold::borrowed) {
    const bool goes = s.stage == Stage::absent;
    lock.unlock();
    if (goes) link_->drop(id, unit(id));  // who reads it meanwhile maps its pages again
    return;
  }
  give_back(id);
}

const void* Core::at(WeightId id, Hold hold, const void* mapped) const noexcept {
  if (hold == Hold::borrowed || !arena_ || forked()) return mapped;
  const auto& extents = unit(id).extents;
  const auto* const byte = static_cast<const std::byte*>(mapped);
  auto after = std::ranges::upper_bound(extents, byte, {}, &UnitPart::mapped);
  if (after == extents.begin()) return mapped;
  const UnitPart& extent = *--after;
  if (byte - extent.mapped >= static_cast<std::ptrdiff_t>(extent.bytes)) return mapped;
  // The run is the lease's own until it ends, so that no lock is needed to look at it.
  return memory(state(id)) + extent.place + (byte - extent.mapped);
}

Weight Core::weight(WeightId id, Hold hold) const {
  const Weight& mapped = weights_[static_cast<std::size_t>(id)];
  if (!unit(id).is_weight)
    throw Error(Code::invalid_argument, unit(id).name + ": must be a weight, got a plain tensor");
  const auto count = static_cast<std::size_t>(layout(mapped.storage(), mapped.shape()).count);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < count; ++i) parts[i] = at(id, hold, mapped.part(static_cast<int>(i)));
  return {mapped.storage(), mapped.shape(), std::span(parts).first(count)};
}

void Core::set_signature(std::uint64_t signature) {
  if (!forked()) session()->turn.signature = signature;
}

EngineReport Core::report() const {
  if (forked()) return {.reads = Reads::mapped};
  const std::scoped_lock lock(mutex_);
  EngineReport report = report_;
  report.reads = link_->reads();
  for (const auto& session : sessions_) {
    const std::uint64_t hits = session->stay_hits.load(std::memory_order_relaxed);
    report.hits += hits;
    report.acquired += hits;
  }
  report.held = held();
  return report;
}

std::vector<WeightUses> Core::uses() const {
  std::vector<WeightUses> all(states_.size());
  if (forked()) return all;
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = uses_of(i);
  return all;
}

WeightUses Core::uses(WeightId id) const {
  check_id(id);
  if (forked()) return {};
  const std::scoped_lock lock(mutex_);
  return uses_of(static_cast<std::size_t>(id));
}

WeightUses Core::uses_of(std::size_t i) const noexcept {
  WeightUses uses = states_[i].uses;
  for (const auto& session : sessions_)
    uses.hits += session->stay_uses[i].load(std::memory_order_relaxed);
  return uses;
}

}  // namespace stowage::engine
