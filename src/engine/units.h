// SPDX-License-Identifier: Apache-2.0
// What comes and goes as one: a weight with its scales, or a plain tensor; and which bytes of which
// shard that is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "stowage/engine.h"

namespace stowage::engine {

/// Bytes of one tensor: where the mapping has them, and how far into the unit's memory they lie.
struct UnitPart {
  const std::byte* mapped;
  std::uint64_t bytes, place;
};

/// One read: whole pages of a shard that go to whole pages of the unit's memory. The last of a
/// shard may end behind it.
struct Piece {
  int shard;
  std::uint64_t offset, bytes, place;
  std::uint64_t needed;  // bytes of it that the shard has
};

struct Unit {
  std::string name;
  bool is_weight = false;
  std::vector<UnitPart> extents{};  // by address
  std::vector<Piece> pieces{};
  std::uint64_t bytes = 0;  // of memory, whole pages
  bool comes = true;        // into memory; else it is only read through the mapping
};

/// The weights of a file, then the tensors that belong to none; sorted by name.
std::vector<Unit> units_of(const File& file);

}  // namespace stowage::engine
