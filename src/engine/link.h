// SPDX-License-Identifier: Apache-2.0
// What a core brings its units over: a disk (source.h) or the way to a device (device_link.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/units.h"

namespace stowage::engine {

/// One piece on its way to memory; units that do not move have none.
struct Transfer {
  WeightId id;
  const Unit* unit;
  const Piece* piece;
  std::byte* memory;  // for the piece
};
inline constexpr std::size_t kMostTransfers = 64;  // in one read

class Link {
 public:
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  virtual ~Link() = default;

  virtual Reads reads() const noexcept = 0;  // for the report
  /// Whether units come into memory of their own; if not, they stay where the file is mapped.
  virtual bool moves() const noexcept = 0;
  /// Whether a unit that finds no room may be used where the file is mapped.
  virtual bool can_borrow() const noexcept = 0;
  /// Memory for units that move, for as long as the link lives; null: the host's own, page-aligned,
  /// will do. Throws out_of_memory.
  virtual std::byte* memory(std::uint64_t bytes) = 0;
  /// Brings pieces that follow each other in one shard, at most kMostTransfers. Any thread.
  virtual void bring(std::span<const Transfer> run) = 0;
  /// Gives back the mapped pages that lie wholly in the unit.
  virtual void drop(const Unit& unit) noexcept = 0;
  /// The unit's memory is given to others from now on; under the core's lock.
  virtual void leave(WeightId id) noexcept = 0;
};

}  // namespace stowage::engine
