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

/// One read: whole pages of a shard that go to whole pages of the unit's memory, or of the scratch
/// that it has while it is read. The last of a shard may end behind it.
struct Piece {
  int shard;
  std::uint64_t offset, bytes, place;
  std::uint64_t needed;  // bytes of it that the shard has
  bool to_scratch = false;
};

/// A part that the file has in another order: it is made of a tensor in scratch when that is there.
struct FormedPart {
  int part;                  // of the weight
  std::uint64_t from, held;  // in scratch, and bytes of the tensor
  std::uint64_t place, bytes;
};

struct Unit {
  std::string name;
  bool is_weight = false;
  std::vector<UnitPart> extents{};  // by address
  std::vector<Piece> pieces{};
  std::vector<FormedPart> formed{};
  std::uint64_t scratch = 0;  // bytes while it is read, whole pages
  std::uint64_t bytes = 0;    // of memory, whole pages
  bool comes = true;          // into memory; else it is only read through the mapping
};

/// Bytes of a budget for scratch, where the largest that a unit needs is `most`: for one, and where
/// that is a small part of the budget for two, so that one is read while another is put in order.
std::uint64_t scratch_for(std::uint64_t most, std::uint64_t budget) noexcept;

/// The weights of a file, then the tensors that belong to none; sorted by name.
std::vector<Unit> units_of(const File& file);

}  // namespace stowage::engine
