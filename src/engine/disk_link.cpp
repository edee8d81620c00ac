// SPDX-License-Identifier: Apache-2.0
#include "engine/disk_link.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <string>

#include "base/file_error.h"
#include "base/residency.h"
#include "engine/arena.h"
#include "stowage/error.h"

namespace stowage::engine {
namespace {

constexpr double kCached = 0.9;

// Calls body(first, bytes) for pieces that follow each other in a shard.
template <class Body>
void for_each_stretch(const Unit& unit, Body body) {
  for (std::size_t i = 0; i < unit.pieces.size();) {
    const Piece& first = unit.pieces[i];
    std::uint64_t end = first.offset;
    for (; i < unit.pieces.size() && unit.pieces[i].shard == first.shard &&
           unit.pieces[i].offset == end;
         ++i)
      end += unit.pieces[i].bytes;
    body(first, end - first.offset);
  }
}

// Processor time of this thread: others may run meanwhile.
double own_seconds() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// What of the run lies from the byte `at` on, as a read takes it.
std::span<const iovec> rest_of(std::span<const Transfer> run, std::uint64_t at,
                               std::span<iovec> space) {
  std::size_t count = 0;
  for (const Transfer& transfer : run) {
    const Piece& piece = *transfer.piece;
    if (piece.offset + piece.bytes <= at) continue;
    const std::uint64_t done = at > piece.offset ? at - piece.offset : 0;
    space[count++] = {transfer.memory + done, piece.bytes - done};
  }
  return space.first(count);
}

}  // namespace

DiskLink::DiskLink(const File& file, Reads reads, bool may_map, Reader& reader)
    : shards_(OpenShards::of(file)), reads_(reads), reader_(reader) {
  if (reads_ == Reads::automatic) {
    const Reads warm = may_map ? Reads::mapped : Reads::buffered;
    reads_ = are_cached() ? warm : Reads::direct;
  }
  if (reads_ == Reads::direct) open_direct();
  sees_cache_ = reads_ == Reads::mapped &&
                std::ranges::all_of(shards_, [](const Shard& s) { return sees_cache(s.map); });
}

DiskLink::~DiskLink() {
  for (const int direct : direct_)
    if (direct >= 0) ::close(direct);
}

void DiskLink::open_direct() {
  direct_.reserve(shards_.size());
  for (const Shard& shard : shards_) {
    direct_.push_back(shard.map.open_direct());
    if (direct_.back() < 0) reads_ = Reads::buffered;
  }
}

// Past the page cache while the bytes that are left begin at a page: after a short read they may
// not. Returns how many came.
std::uint64_t DiskLink::read(const Piece& first, std::span<const iovec> to, std::uint64_t at) {
  const MappedFile& file = map(first);
  for (;;) {
    const bool direct = reads_ == Reads::direct && at % kPage == 0;
    const int descriptor =
        direct ? direct_[static_cast<std::size_t>(first.shard)] : file.descriptor();
    const ssize_t got = reader_.read(descriptor, to, at);
    if (got > 0) return static_cast<std::uint64_t>(got);
    if (got == 0) {
      throw Error(Code::bad_file, file.path() + ": byte " + std::to_string(at) +
                                      ": must still be there, got a file that was cut short");
    }
    if (direct && errno == EINVAL) {  // a disk whose blocks are larger than a page
      reads_ = Reads::buffered;
    } else if (errno != EINTR) {
      throw_errno(file.path(), "must be readable at byte " + std::to_string(at));
    }
  }
}

void DiskLink::fill(std::span<const Transfer> run) {
  const Piece& last = *run.back().piece;
  const std::uint64_t end = last.offset + last.needed;
  std::array<iovec, kMostTransfers> space;
  for (std::uint64_t at = run.front().piece->offset; at < end;)
    at += read(*run.front().piece, rest_of(run, at, space), at);
}

// Where the system cannot populate, the pages come when they are touched. Where it tried and a page
// could not be had, a touch would only find zeros: reading says what is wrong, or fetches it.
void DiskLink::populate(const Transfer& transfer, std::uint64_t end) {
  const Piece& first = *transfer.piece;
  const MappedFile& file = map(first);
  const std::uint64_t bytes = end - first.offset;
  if (small_pages_.is_away(transfer.id)) renew(transfer.id, *transfer.unit);
  const bool noted = sees_cache_ && small_pages_.is_asked(transfer.id, transfer.unit->bytes) &&
                     seems_cached(file, first.offset, bytes);
  const double begun = noted ? own_seconds() : 0;
  int result = 0;
  do result = reader_.populate(file, first.offset, bytes);
  while (result != 0 && errno == EINTR);
  if (noted && result == 0) small_pages_.note(transfer.id, bytes, own_seconds() - begun);
  if (result == 0 || (errno != EFAULT && errno != EIO && errno != EHWPOISON)) return;
  std::array<std::byte, 2 * kPage> sink;
  const iovec to{sink.data(), sink.size()};
  end = std::min(end, file.size());
  for (std::uint64_t at = first.offset; at < end;) at += read(first, {&to, 1}, at);
}

void DiskLink::fetch(std::span<const Transfer> run) {
  check_unchanged(map(*run.front().piece));
  if (reads_ != Reads::mapped) return fill(run);
  const Piece& last = *run.back().piece;
  populate(run.front(), last.offset + last.bytes);
}

bool DiskLink::is_quick(WeightId id, const Unit& unit) const noexcept {
  if (!sees_cache_ || !small_pages_.is_quick(id)) return false;
  bool cached = true;
  for_each_stretch(unit, [&](const Piece& first, std::uint64_t bytes) {
    cached = cached && seems_cached(map(first), first.offset, bytes);
  });
  return cached;
}

void DiskLink::map_whole(WeightId id, const Unit& unit) {
  const double begun = own_seconds();
  for_each_stretch(unit, [&](const Piece& first, std::uint64_t bytes) {
    check_unchanged(map(first));
    populate({id, &unit, &first, nullptr}, first.offset + bytes);
  });
  small_pages_.note_quick(id, unit.bytes, own_seconds() - begun);
}

void DiskLink::check(const Unit& unit) const {
  for (std::size_t i = 0; i < unit.pieces.size(); ++i)
    if (i == 0 || unit.pieces[i].shard != unit.pieces[i - 1].shard)
      check_unchanged(map(unit.pieces[i]));
}

void DiskLink::drop(WeightId id, const Unit& unit) noexcept {
  // At once: tables of pages go where all of a large page does, and the next one is mapped whole.
  for_each_stretch(
      unit, [&](const Piece& first, std::uint64_t bytes) { map(first).drop(first.offset, bytes); });
  if (!small_pages_.leaves(id, unit.bytes)) return;
  for_each_stretch(unit, [&](const Piece& first, std::uint64_t bytes) {
    map(first).forget(first.offset, bytes);
  });
}

// By one thread: of two that fault in one large page, one finds it taken and reads small ones.
void DiskLink::renew(WeightId id, const Unit& unit) {
  const std::scoped_lock lock(renews_);
  if (!small_pages_.is_away(id)) return;
  for_each_stretch(unit, [&](const Piece& first, std::uint64_t bytes) {
    (void)reader_.populate(map(first), first.offset, bytes);  // what fails is met again
  });
  small_pages_.is_back(id);
}

bool DiskLink::are_cached() const {
  double bytes = 0, cached = 0;
  for (const Shard& shard : shards_) {
    const auto size = static_cast<double>(shard.map.size());
    bytes += size;
    cached += size * cached_part(shard.map);
  }
  return cached >= kCached * bytes;
}

}  // namespace stowage::engine
