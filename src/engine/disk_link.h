// SPDX-License-Identifier: Apache-2.0
// The shards of an open file as the engine reads them, and how: through the page cache or past it.
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "engine/reader.h"
#include "engine/small_pages.h"
#include "engine/units.h"
#include "store/shard.h"

namespace stowage::engine {

/// One piece on its way to memory; units that do not move have none.
struct Transfer {
  WeightId id;
  const Unit* unit;
  const Piece* piece;
  std::byte* memory;  // for the piece
};
inline constexpr std::size_t kMostTransfers = 64;  // in one read

/// `file` and `reader` must outlive it.
class DiskLink {
 public:
  /// `automatic` becomes mapped where most of the bytes lie in the page cache (buffered where it
  /// may not map), else direct, which becomes buffered where the file system knows no direct reads,
  /// or finds at the first one that it wants more than whole pages.
  DiskLink(const File& file, Reads reads, bool may_map, Reader& reader);
  DiskLink(const DiskLink&) = delete;
  DiskLink& operator=(const DiskLink&) = delete;
  ~DiskLink();

  Reads reads() const noexcept { return reads_; }  // for the report
  /// Whether units come into memory of their own; if not, they stay where the file is mapped.
  bool moves() const noexcept { return reads_ != Reads::mapped; }
  /// Fetches pieces that follow each other in one shard, at most kMostTransfers. Any thread. Mapped
  /// pieces come into the page cache and this process. Throws io, bad_file (cut short, written
  /// since it was opened).
  void fetch(std::span<const Transfer> run);
  /// Whether fetching the unit takes less than to have it done by another thread.
  bool is_quick(WeightId id, const Unit& unit) const noexcept;
  /// Fetches all of such a unit.
  void map_whole(WeightId id, const Unit& unit);
  /// Throws bad_file where a file with pieces of the unit is not as it was when it was opened.
  void check(const Unit& unit) const;
  /// Gives back the mapped pages that lie wholly in the unit; to the system, if it had better read
  /// them anew (small_pages.h).
  void drop(WeightId id, const Unit& unit) noexcept;

 private:
  const MappedFile& map(const Piece& piece) const noexcept {
    return shards_[static_cast<std::size_t>(piece.shard)].map;
  }
  std::uint64_t read(const Piece& first, std::span<const iovec> to, std::uint64_t at);
  void fill(std::span<const Transfer> run);
  void populate(const Transfer& first, std::uint64_t end);
  void renew(WeightId id, const Unit& unit);
  bool are_cached() const;
  void open_direct();

  std::span<const Shard> shards_;
  std::atomic<Reads> reads_;
  Reader& reader_;
  std::vector<int> direct_;  // descriptors, one for each shard, if reads are direct
  bool sees_cache_ = false;  // whether the system tells which pages of all shards are cached
  SmallPages small_pages_;
  std::mutex renews_;
};

}  // namespace stowage::engine
