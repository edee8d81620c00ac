// SPDX-License-Identifier: Apache-2.0
// The shards of an open file as the engine reads them, and how: through the page cache or past it.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "engine/reader.h"
#include "engine/units.h"
#include "store/shard.h"

namespace stowage::engine {

/// One piece on its way to memory; mapped ones have none.
struct Transfer {
  const Piece* piece;
  std::byte* memory;
};
inline constexpr std::size_t kMostTransfers = 64;  // in one read

/// `file` and `reader` must outlive it.
class Source {
 public:
  /// `automatic` becomes mapped where most of the bytes lie in the page cache (buffered where it
  /// may not map), else direct, which becomes buffered where the file system knows no direct reads.
  Source(const File& file, Reads reads, bool may_map, Reader& reader);
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source();

  Reads reads() const noexcept { return reads_; }
  /// Brings pieces that follow each other in one shard, at most kMostTransfers: into their memory,
  /// or mapped, into the page cache and this process. Throws io, bad_file (cut short, written since
  /// it was opened).
  void bring(std::span<const Transfer> run) const;
  /// Gives back the mapped pages that lie wholly in the piece.
  void drop(const Piece& piece) const noexcept;

 private:
  const MappedFile& map(const Piece& piece) const noexcept {
    return shards_[static_cast<std::size_t>(piece.shard)].map;
  }
  std::uint64_t read(const Piece& first, std::span<const iovec> to, std::uint64_t at) const;
  void fill(std::span<const Transfer> run) const;
  void populate(const Piece& first, std::uint64_t end) const;
  bool is_cached() const;
  void open_direct();

  std::span<const Shard> shards_;
  Reads reads_;
  Reader& reader_;
  std::vector<int> direct_;  // descriptors, one for each shard, if reads are direct
};

}  // namespace stowage::engine
