// SPDX-License-Identifier: Apache-2.0
// Page-aligned memory that is taken once and handed out in runs of pages. Nothing here allocates or
// faults after the constructor. A forked child does not have it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/file.h"

namespace stowage::engine {

class Arena {
 public:
  using Run = std::int32_t;  // names a run that was taken

  /// Room for `bytes` (whole pages) in at most `most_runs` runs: all of it is there when this
  /// returns, and where `lock` says so cannot be swapped. Throws out_of_memory.
  Arena(std::uint64_t bytes, std::size_t most_runs, bool lock = false);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// The smallest free run that holds `bytes` (whole pages), if one does.
  std::optional<Run> take(std::uint64_t bytes) noexcept;
  void give(Run run) noexcept;
  std::byte* data(Run run) const noexcept { return data_ + at(run).offset; }
  std::uint64_t bytes(Run run) const noexcept { return at(run).bytes; }
  /// Bytes of the free run that give(run) would leave.
  std::uint64_t hole(Run run) const noexcept;
  std::uint64_t taken() const noexcept { return taken_; }

 private:
  struct Block {
    std::uint64_t offset = 0, bytes = 0;
    Run before = -1, after = -1;         // neighbours in memory
    Run last_free = -1, next_free = -1;  // the list of free blocks; unused blocks by next_free
    bool free = false;
  };
  Block& at(Run run) noexcept { return blocks_[static_cast<std::size_t>(run)]; }
  const Block& at(Run run) const noexcept { return blocks_[static_cast<std::size_t>(run)]; }
  void touch();
  void lock();
  void add_free(Run run) noexcept;
  void remove_free(Run run) noexcept;
  void swallow_after(Run run) noexcept;

  std::byte* data_ = nullptr;
  std::uint64_t size_, taken_ = 0;
  std::vector<Block> blocks_;
  Run first_free_ = -1, unused_ = 0;
};

}  // namespace stowage::engine
