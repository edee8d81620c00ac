// SPDX-License-Identifier: Apache-2.0
// The shards of an open file as the engine reads them, and how: through the page cache or past it.
#pragma once
#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "engine/link.h"
#include "engine/reader.h"
#include "store/shard.h"

namespace stowage::engine {

/// `file` and `reader` must outlive it.
class Source : public Link {
 public:
  /// `automatic` becomes mapped where most of the bytes lie in the page cache (buffered where it
  /// may not map), else direct, which becomes buffered where the file system knows no direct reads,
  /// or finds at the first one that it wants more than whole pages.
  Source(const File& file, Reads reads, bool may_map, Reader& reader);
  ~Source() override;

  Reads reads() const noexcept override { return reads_; }
  bool moves() const noexcept override { return reads_ != Reads::mapped; }
  bool can_borrow() const noexcept override { return true; }
  std::byte* memory(std::uint64_t) override { return nullptr; }
  /// Mapped pieces come into the page cache and this process. Throws io, bad_file (cut short,
  /// written since it was opened).
  void bring(std::span<const Transfer> run) override;
  void drop(const Unit& unit) noexcept override;
  void leave(WeightId) noexcept override {}

 private:
  const MappedFile& map(const Piece& piece) const noexcept {
    return shards_[static_cast<std::size_t>(piece.shard)].map;
  }
  std::uint64_t read(const Piece& first, std::span<const iovec> to, std::uint64_t at);
  void fill(std::span<const Transfer> run);
  void populate(const Piece& first, std::uint64_t end);
  bool is_cached() const;
  void open_direct();

  std::span<const Shard> shards_;
  std::atomic<Reads> reads_;
  Reader& reader_;
  std::vector<int> direct_;  // descriptors, one for each shard, if reads are direct
};

}  // namespace stowage::engine
