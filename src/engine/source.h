// SPDX-License-Identifier: Apache-2.0
// The shards of a file as the engine reads them, and how: through the page cache or past it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/units.h"

namespace stowage::engine {

class Source {
 public:
  /// Opens the shards again, and makes sure that they are those of `file`. `automatic` becomes
  /// mapped where most of the bytes lie in the page cache, else direct, or buffered where the file
  /// system knows no direct reads. Throws io, bad_file.
  Source(const File& file, Reads reads);
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source();

  Reads reads() const noexcept { return reads_; }
  /// Brings one piece: into `memory`, or mapped, into the page cache and this process. Throws io,
  /// bad_file.
  void bring(const Piece& piece, std::byte* memory) const;
  /// Gives back the mapped pages that lie wholly in the piece.
  void drop(const Piece& piece) const noexcept;

 private:
  struct Shard {
    std::string path;
    const std::byte* mapped = nullptr;
    int buffered = -1, direct = -1;
    std::uint64_t bytes = 0;
    std::int64_t changed_ns = 0;  // modification time when it was opened
  };
  void open(Shard& shard) const;
  void check(const Shard& shard) const;
  void close() noexcept;
  bool is_cached() const;

  std::vector<Shard> shards_;
  Reads reads_;
};

}  // namespace stowage::engine
