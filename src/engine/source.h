// SPDX-License-Identifier: Apache-2.0
// The shards of an open file as the engine reads them, and how: through the page cache or past it.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "engine/units.h"
#include "store/shard.h"

namespace stowage::engine {

/// `file` must outlive it.
class Source {
 public:
  /// `automatic` becomes mapped where most of the bytes lie in the page cache, else direct, which
  /// becomes buffered where the file system knows no direct reads.
  Source(const File& file, Reads reads);
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source();

  Reads reads() const noexcept { return reads_; }
  /// Brings one piece: into `memory`, or mapped, into the page cache and this process. Throws io,
  /// bad_file (cut short, written since it was opened).
  void bring(const Piece& piece, std::byte* memory) const;
  /// Gives back the mapped pages that lie wholly in the piece.
  void drop(const Piece& piece) const noexcept;

 private:
  const MappedFile& map(const Piece& piece) const noexcept {
    return shards_[static_cast<std::size_t>(piece.shard)].map;
  }
  bool is_cached() const;
  void open_direct();

  std::span<const Shard> shards_;
  Reads reads_;
  std::vector<int> direct_;  // descriptors, one for each shard, if reads are direct
};

}  // namespace stowage::engine
