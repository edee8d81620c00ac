// SPDX-License-Identifier: Apache-2.0
#include "engine/core.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "stowage/error.h"

namespace stowage::engine {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostSteps = 64;  // of one look-ahead
constexpr std::uint64_t kPatience =
    16;                            // acquires that a unit may be overdue, and 1/4 of all units
constexpr std::uint64_t kNow = 0;  // the next use of what somebody waits for

/// What a thread does with an engine: threads do not disturb each other's order.
struct Hand {
  std::uint64_t engine = 0;
  Place place{};
  int leases = 0;
};
constexpr std::size_t kHands = 4;  // engines that one thread uses in turn
thread_local std::array<Hand, kHands> hands;
thread_local std::size_t next_hand = 0;

Hand& hand_for(std::uint64_t engine) {
  for (Hand& hand : hands)
    if (hand.engine == engine) return hand;
  for (std::size_t i = 0; i < kHands; ++i) {
    Hand& hand = hands[next_hand++ % kHands];
    if (hand.leases == 0) return hand = {.engine = engine};
  }
  return hands[next_hand % kHands] = {.engine = engine};
}

std::uint64_t new_serial() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

std::uint64_t checked_budget(const File& file, const std::vector<Unit>& units,
                             const EngineOptions& options) {
  const auto most = std::ranges::max_element(units, {}, &Unit::bytes);
  if (most != units.end() && options.ram < most->bytes) {
    throw Error(Code::invalid_argument, file.paths().front() +
                                            ": the budget must hold the largest weight, " +
                                            most->name + " of " + std::to_string(most->bytes) +
                                            " bytes, got " + std::to_string(options.ram));
  }
  if (options.workers < 0 || options.workers > 256) {
    throw Error(Code::invalid_argument,
                "engine: workers must be 0 to 256, got " + std::to_string(options.workers));
  }
  return options.ram / kPage * kPage;
}

}  // namespace

Core::Core(File file, const EngineOptions& options)
    : file_(std::move(file)),
      units_(units_of(file_)),
      budget_(checked_budget(file_, units_, options)),
      source_(file_, options.reads),
      states_(units_.size()),
      order_(units_.size()),
      candidates_(units_.size()),
      serial_(new_serial()) {
  std::uint64_t all = 0;
  for (const Unit& unit : units_) {
    weights_.push_back(unit.is_weight ? file_.weight(unit.name) : Weight());
    all += unit.bytes;
  }
  if (source_.reads() != Reads::mapped) arena_.emplace(std::min(budget_, all), units_.size());
  report_.reads = source_.reads();
  queue_.reserve(units_.size());
  // Readers of an engine must not outlive it: they see it through this pointer alone.
  for (int i = 0; i < options.workers; ++i) workers_.emplace_back([this] { work(); });
}

Core::~Core() { stop(); }

void Core::stop() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_)
    if (worker.joinable()) worker.join();
}

std::byte* Core::memory(const State& s) const noexcept {
  return arena_ && s.run >= 0 ? arena_->data(s.run) : nullptr;
}

std::uint64_t Core::held() const noexcept { return arena_ ? arena_->taken() : mapped_bytes_; }

// ---- room ----

bool Core::take_room(WeightId id) noexcept {
  const std::uint64_t bytes = unit(id).bytes;
  if (arena_) {
    const auto run = arena_->take(bytes);
    if (!run) return false;
    state(id).run = *run;
  } else {
    if (mapped_bytes_ + bytes > budget_) return false;
    mapped_bytes_ += bytes;
  }
  report_.peak = std::max(report_.peak, held());
  return true;
}

void Core::evict(WeightId id) noexcept {
  State& s = state(id);
  if (s.stage == Stage::present) --present_;
  s.stage = Stage::absent;
  if (arena_) {
    arena_->give(s.run);
    s.run = -1;
  } else {
    for (const Piece& piece : unit(id).pieces) source_.drop(piece);
    mapped_bytes_ -= unit(id).bytes;
  }
}

// A unit whose time has passed: what was expected of it was wrong, and it would stay for ever.
std::optional<WeightId> Core::overdue() {
  const std::uint64_t patience = kPatience + units_.size() / 4;
  return clock_ < patience ? std::nullopt : candidates_.take_overdue(clock_ - patience);
}

// Of the few units that are needed last, and later than `next_use`: one whose going leaves a hole
// of `bytes`, else the first. What the look-ahead has just seen stays unless somebody waits.
std::optional<WeightId> Core::needed_last(std::uint64_t bytes, std::uint64_t next_use) {
  return candidates_.take_last(
      next_use, [&](WeightId id) { return !arena_ || arena_->hole(state(id).run) >= bytes; },
      [&](WeightId id) { return next_use == kNow || state(id).wanted != looks_; });
}

bool Core::make_room(std::uint64_t bytes, std::uint64_t next_use) {
  std::optional<WeightId> chosen = overdue();
  if (!chosen) chosen = needed_last(bytes, next_use);
  if (!chosen) return false;
  evict(*chosen);
  ++report_.evicted;
  return true;
}

std::uint64_t Core::expected_use(const State& s) const noexcept {
  if (s.predicted > s.used) return s.predicted;
  const std::uint64_t interval = s.intervals[1] != 0 ? s.intervals[1] : s.intervals[0];
  return s.used + (interval != 0 ? interval : states_.size());
}

// Starts to read an absent unit if there is room, or room can be made of what is needed later.
bool Core::begin(WeightId id, std::uint64_t next_use) {
  while (!take_room(id))
    if (!make_room(unit(id).bytes, next_use)) return false;
  State& s = state(id);
  s.claimed = s.done = 0;
  s.error = nullptr;
  if (unit(id).pieces.empty()) {
    s.stage = Stage::present;
    ++present_;
    if (s.leases == 0) candidates_.add(id, expected_use(s));
    return true;
  }
  s.stage = Stage::reading;
  if (next_use == kNow) {
    queue_.insert(queue_.begin(), id);
  } else {
    queue_.push_back(id);
  }
  work_.notify_all();
  return true;
}

// ---- reading ----

// Reads one piece of a unit that has pieces left, without the lock.
void Core::read_one(WeightId id, Lock& lock) {
  State& s = state(id);
  const auto& pieces = unit(id).pieces;
  const Piece& piece = pieces[s.claimed++];
  if (s.claimed == pieces.size()) std::erase(queue_, id);
  std::byte* const to = arena_ ? memory(s) + piece.place : nullptr;
  std::exception_ptr error;
  lock.unlock();
  try {
    source_.bring(piece, to);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error) {
    if (!s.error) s.error = error;
  } else {
    report_.bytes_read += piece.bytes;
  }
  if (++s.done < pieces.size()) return;
  if (s.error) {
    evict(id);
    if (s.leases == 0) s.error = nullptr;  // nobody asked; who does will see for himself
  } else {
    s.stage = Stage::present;
    ++present_;
    if (s.leases == 0) candidates_.add(id, expected_use(s));
  }
  done_.notify_all();
  if (waiting_ > 0) room_.notify_all();
}

void Core::work() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    read_one(queue_.front(), lock);
  }
}

// Helps to read the unit, then waits for those who read the rest.
void Core::wait_for(WeightId id, Lock& lock) {
  State& s = state(id);
  while (s.stage == Stage::reading) {
    if (s.claimed < unit(id).pieces.size()) {
      read_one(id, lock);
    } else {
      done_.wait(lock);
    }
  }
}

// ---- use ----

void Core::note_use(WeightId id) {
  State& s = state(id);
  ++clock_;
  if (s.used != 0) {
    s.intervals[1] = s.intervals[0];
    s.intervals[0] = clock_ - s.used;
  }
  s.used = clock_;
}

// Walks the expected order for as many bytes as the budget has, and begins to read what is absent.
void Core::read_ahead(Place place) {
  if (workers_.empty() || stopping_ || waiting_ > 0 || present_ == units_.size()) return;
  ++looks_;
  std::uint64_t bytes = unit(place.current).bytes;
  state(place.current).wanted = looks_;
  for (int step = 1; step <= kMostSteps; ++step) {
    const WeightId next = order_.next(place);
    if (next == kNone) break;
    place.previous = place.current;
    place.current = next;
    State& s = state(next);
    if (s.wanted == looks_) continue;  // twice in the window: its bytes are counted
    s.wanted = looks_;
    bytes += unit(next).bytes;
    if (bytes > budget_) break;
    if (s.stage != Stage::absent) continue;
    if (!begin(next, clock_ + static_cast<std::uint64_t>(step))) break;
    s.predicted = clock_ + static_cast<std::uint64_t>(step);
    ++report_.ahead;
  }
}

// Makes the unit present; the caller's lease on it is counted already. False: it must be borrowed
// from the mapping.
bool Core::get_ready(WeightId id, Lock& lock, bool holds_another) {
  State& s = state(id);
  if (s.stage == Stage::present) {
    ++report_.hits;
    return true;
  }
  const Clock::time_point begun = Clock::now();
  bool asked = s.stage == Stage::absent;
  asked ? ++report_.misses : ++report_.late;
  while (s.stage != Stage::present) {
    if (s.stage == Stage::absent && !begin(id, kNow)) {
      if (holds_another) {
        --(asked ? report_.misses : report_.late);
        ++report_.borrowed;
        return false;
      }
      ++waiting_;
      room_.wait(lock);
      --waiting_;
      continue;
    }
    wait_for(id, lock);
    if (s.stage == Stage::absent && s.error) std::rethrow_exception(s.error);
  }
  report_.stall += std::chrono::duration<double>(Clock::now() - begun).count();
  return true;
}

Lease Core::acquire(WeightId id) {
  if (id < 0 || static_cast<std::size_t>(id) >= units_.size()) {
    throw Error(Code::invalid_argument, file_.paths().front() + ": a weight's id must be below " +
                                            std::to_string(units_.size()) + ", got " +
                                            std::to_string(id));
  }
  Hand& hand = hand_for(serial_);
  Lock lock(mutex_);
  ++report_.acquired;
  order_.learn(hand.place, id);
  note_use(id);
  State& s = state(id);
  if (s.leases++ == 0) candidates_.remove(id);
  bool borrowed = false;
  try {
    borrowed = !get_ready(id, lock, hand.leases > 0);
  } catch (...) {
    --s.leases;
    throw;
  }
  if (borrowed) --s.leases;
  hand.place = {hand.place.signature, hand.place.current, id};
  ++hand.leases;
  read_ahead(hand.place);
  lock.unlock();
  return {shared_from_this(), id, borrowed};
}

void Core::release(WeightId id, bool borrowed) noexcept {
  --hand_for(serial_).leases;
  const std::scoped_lock lock(mutex_);
  State& s = state(id);
  if (borrowed) {
    if (s.stage == Stage::absent)
      for (const Piece& piece : unit(id).pieces) source_.drop(piece);
    return;
  }
  if (--s.leases > 0) return;
  candidates_.add(id, expected_use(s));
  if (waiting_ > 0) room_.notify_all();
}

const void* Core::at(WeightId id, bool borrowed, const void* mapped) const noexcept {
  if (borrowed || !arena_) return mapped;
  const auto& extents = unit(id).extents;
  const auto* const byte = static_cast<const std::byte*>(mapped);
  auto after = std::ranges::upper_bound(extents, byte, {}, &Extent::mapped);
  if (after == extents.begin()) return mapped;
  const Extent& extent = *--after;
  if (byte - extent.mapped >= static_cast<std::ptrdiff_t>(extent.bytes)) return mapped;
  // The run is the lease's own until it ends, so that no lock is needed to look at it.
  return memory(state(id)) + extent.place + (byte - extent.mapped);
}

Weight Core::weight(WeightId id, bool borrowed) const {
  const Weight& mapped = weights_[static_cast<std::size_t>(id)];
  if (!unit(id).is_weight)
    throw Error(Code::invalid_argument, unit(id).name + ": must be a weight, got a plain tensor");
  const auto count = static_cast<std::size_t>(layout(mapped.storage(), mapped.shape()).count);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < count; ++i)
    parts[i] = at(id, borrowed, mapped.part(static_cast<int>(i)));
  return {mapped.storage(), mapped.shape(), std::span(parts).first(count)};
}

void Core::expect(std::span<const WeightId> order) {
  const std::scoped_lock lock(mutex_);
  Place place{.signature = hand_for(serial_).place.signature};
  for (std::size_t i = 0; i <= order.size() && !order.empty();
       ++i) {  // the last leads to the first
    const WeightId id = order[i % order.size()];
    if (id < 0 || static_cast<std::size_t>(id) >= units_.size())
      throw Error(Code::invalid_argument, "engine: expected ids must be below " +
                                              std::to_string(units_.size()) + ", got " +
                                              std::to_string(id));
    order_.learn(place, id);
    place = {place.signature, place.current, id};
  }
}

void Core::set_signature(std::uint64_t signature) { hand_for(serial_).place.signature = signature; }

EngineReport Core::report() const {
  const std::scoped_lock lock(mutex_);
  EngineReport report = report_;
  report.held = held();
  return report;
}

}  // namespace stowage::engine
