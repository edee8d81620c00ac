// SPDX-License-Identifier: Apache-2.0
// Core: who reads which piece, and what follows when it has come or failed.
#include <algorithm>
#include <array>
#include <cstring>

#include "engine/core.h"
#include "store/stacks.h"

namespace stowage::engine {
namespace {

constexpr std::uint64_t kMostRun = 1 << 20;     // bytes of small pieces that are read as one
constexpr std::uint64_t kMostMapped = 4 << 20;  // and of those that are only mapped

using Errors = std::array<std::exception_ptr, kMostTransfers>;

// What the body threw, for those who wait for the unit.
template <class Body>
std::exception_ptr attempt(Body body) {
  try {
    body();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// What fails together is tried one by one, so that each has an error of its own or none.
void fetch(DiskLink& link, std::span<const Transfer> run, Errors& errors) {
  errors[0] = attempt([&] { link.fetch(run); });
  if (!errors[0] || run.size() == 1) return;
  for (std::size_t i = 0; i < run.size(); ++i)
    errors[i] = attempt([&] { link.fetch(run.subspan(i, 1)); });
}

// A reader's first run would fault its stack's pages, in whichever pass that comes.
[[gnu::noinline]] void touch_stack() noexcept {
  volatile std::byte pages[4 * kPage];
  for (std::size_t at = 0; at < sizeof pages; at += kPage) pages[at] = std::byte{};
}

}  // namespace

Core::Claim Core::claim(WeightId id) {
  State& s = state(id);
  return {id, &unit(id).pieces[s.claimed++]};
}

// The unit's next piece, and those that lie beside it in the file and are wanted too. Passes
// forward and backward both find their neighbours in one walk.
std::size_t Core::claim_run(WeightId wanted, std::span<Claim> run) {
  std::size_t count = 0;
  run[count++] = claim(wanted);
  const Piece& first = *run[0].piece;
  const std::uint64_t most = link_->moves() ? kMostRun : kMostMapped;
  std::uint64_t begin = first.offset, end = begin + first.bytes;
  for (const WeightId id : queue_) {
    if (count == run.size() || end - begin >= most) break;
    const State& s = state(id);
    if (s.claimed == s.pieces) continue;
    const Piece& next = unit(id).pieces[s.claimed];
    if (next.shard != first.shard || end - begin + next.bytes > most) continue;
    if (next.offset == end) {
      end += next.bytes;
    } else if (next.offset + next.bytes == begin) {
      begin = next.offset;
    } else {
      continue;
    }
    run[count++] = claim(id);
  }
  std::erase_if(queue_, [&](WeightId id) { return state(id).claimed == state(id).pieces; });
  std::ranges::sort(run.first(count), {}, [](const Claim& c) { return c.piece->offset; });
  return count;
}

// Reads without the lock.
void Core::read(std::span<const Claim> run, Lock& lock) {
  std::array<Transfer, kMostTransfers> transfers;
  for (std::size_t i = 0; i < run.size(); ++i) {
    const auto& [id, piece] = run[i];
    const State& s = state(id);
    std::byte* const to = piece->to_scratch ? scratch_arena_->data(s.scratch) : memory(s);
    transfers[i] = {id, &unit(id), piece, to ? to + piece->place : nullptr};
  }
  Errors errors{};
  lock.unlock();
  const TraceTime begun = trace_time();
  fetch(*link_, std::span(transfers).first(run.size()), errors);
  for (const Claim& claim : run)
    trace(TraceKind::read, unit(claim.id).name, claim.piece->bytes, begun);
  lock.lock();
  std::array<WeightId, kMostTransfers> unordered;
  std::size_t count = 0;
  for (std::size_t i = 0; i < run.size(); ++i)
    if (finish(run[i], errors[i])) unordered[count++] = run[i].id;
  tell();
  for (std::size_t i = 0; i < count; ++i) form(unordered[i], lock);
}

void Core::tell() noexcept {
  done_.notify_all();
  if (waiting_ > 0) room_.notify_all();
}

// Whether all of its bytes are there, some of which are to be put in order.
bool Core::finish(const Claim& claim, const std::exception_ptr& error) {
  State& s = state(claim.id);
  if (!error) {
    report_.bytes_read += claim.piece->bytes;
    s.came += claim.piece->bytes;
  } else if (!s.error) {
    s.error = error;
  }
  if (++s.done < s.pieces) return false;
  if (!s.error && !s.cut && link_->moves() && !unit(claim.id).is_in_order()) return true;
  end(claim.id);
  return false;
}

void Core::end(WeightId id) {
  State& s = state(id);
  if (!s.error && !s.cut) return become_present(id);
  evict(id);
  if (s.leases == 0) s.error = nullptr;  // nobody asked; who does will see for himself
}

// What was read, in the order and at the place of use. Returns how many bytes that are.
std::uint64_t Core::put_in_order(const Unit& of, std::byte* to, const std::byte* from) {
  link_->check(of);  // whole as it was when it was opened, or not at all
  std::uint64_t bytes = 0;
  if (of.down != 0) {
    const UnitPart& all = of.extents.front();
    std::memmove(to + all.place, to + all.place + of.down, all.bytes);
    bytes += all.bytes;
  }
  const WeightInfo* const weight = file_.find_weight(of.name);  // null: of a stack
  for (const FormedPart& part : of.formed) {
    const std::span tensor(from + part.from, part.held);
    const std::span out(to + part.place, part.bytes);
    if (part.piece != nullptr)
      OpenStacks::of(file_)->form(*part.piece, tensor, out);
    else
      file_.form_part(*weight, part.part, tensor, out);
    bytes += part.bytes;
  }
  return bytes;
}

// Without the lock: the unit is still being read, by nobody else.
void Core::form(WeightId id, Lock& lock) {
  State& s = state(id);
  const Unit& of = unit(id);
  std::byte* const to = memory(s);
  const std::byte* const from = s.scratch >= 0 ? scratch_arena_->data(s.scratch) : nullptr;
  lock.unlock();
  const auto begun = Clock::now();
  const TraceTime traced = trace_time();
  std::uint64_t bytes = 0;
  const std::exception_ptr error = attempt([&] { bytes = put_in_order(of, to, from); });
  trace(TraceKind::form, of.name, bytes, traced);
  lock.lock();
  report_.bytes_formed += bytes;
  report_.forming += std::chrono::duration<double>(Clock::now() - begun).count();
  s.error = error;
  give_scratch(id);
  end(id);
  if (!foreseen_.empty()) begin_foreseen();
  tell();
}

// What nobody has begun to read is not read; of what somebody has, the rest is not.
void Core::drop_queue() noexcept {
  for (const WeightId id : queue_) {
    State& s = state(id);
    s.cut = true;
    s.pieces = s.claimed;
    if (s.done == s.pieces) evict(id);
  }
  queue_.clear();
  foreseen_.clear();
  ++epoch_;
}

// Reads a run that begins with the unit's next piece.
void Core::read_run(WeightId id, Lock& lock) {
  std::array<Claim, kMostTransfers> run;
  const std::size_t count = claim_run(id, run);
  if (!queue_.empty()) work_.notify_one();
  read(std::span(run).first(count), lock);
}

// Wakes who reads what is wanted; what takes less than that is done at once. Two threads that
// multiply on two processors wait longer for a third one than large pages take to be mapped.
void Core::fetch_quick(Lock& lock) {
  while (!queue_.empty()) {
    const WeightId id = queue_.front();
    State& s = state(id);
    if (!reads_for_itself() || s.claimed != 0 || !link_->is_quick(id, unit(id)))
      return work_.notify_one();
    queue_.erase(queue_.begin());
    s.claimed = s.pieces;
    lock.unlock();
    const TraceTime begun = trace_time();
    const std::exception_ptr error = attempt([&] { link_->map_whole(id, unit(id)); });
    trace(TraceKind::read, unit(id).name, unit(id).bytes, begun);
    lock.lock();
    for (const Piece& piece : unit(id).pieces) finish({id, &piece}, error);
    tell();
  }
}

void Core::work() {
  touch_stack();
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    read_run(queue_.front(), lock);
  }
}

}  // namespace stowage::engine
