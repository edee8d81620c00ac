// SPDX-License-Identifier: Apache-2.0
// What comes and goes as one: a weight with its scales, or a plain tensor; and which bytes of which
// shard that is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/engine.h"

namespace stowage {
struct StackPiece;
}

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
  const StackPiece* piece = nullptr;  // of a stack; then no part of a weight
};

struct Unit {
  std::string name;
  bool is_weight = false;
  std::int64_t first_row = 0, last_row = 0;  // of the weight `whole`; 0, 0: all of its own
  WeightId whole = -1;
  SliceIds slices{};                // if it comes by rows; then it does not come itself
  std::vector<UnitPart> extents{};  // by address
  std::vector<Piece> pieces{};
  std::vector<FormedPart> formed{};
  std::uint64_t scratch = 0;  // bytes while it is read, whole pages
  std::uint64_t down = 0;     // that its only extent moves down when it is there, to a line's begin
  std::uint64_t bytes = 0;    // of memory, whole pages
  bool comes = true;          // into memory; else it is only read through the mapping
  bool is_in_order() const noexcept { return formed.empty() && down == 0; }  // as it is read
};

/// Bytes of a budget for scratch, where the largest that a unit needs is `most`: for one, and where
/// that is a small part of the budget for two, so that one is read while another is put in order.
std::uint64_t scratch_for(std::uint64_t most, std::uint64_t budget) noexcept;

/// The weights of a file and the tensors that belong to none, sorted by name; behind them the
/// slices of those that come by rows. Throws invalid_argument for a weight that cannot.
std::vector<Unit> units_of(const File& file, std::span<const RowCut> cuts = {});
/// Bytes of memory of those that come.
std::uint64_t bytes_of(std::span<const Unit> units) noexcept;
/// How many there are before slices.
std::size_t named_units(std::span<const Unit> units) noexcept;
/// Of those.
std::optional<WeightId> find_unit(std::span<const Unit> named, std::string_view name);
/// The rows of a weight that a slice of it is. Borrows its parts.
Weight rows_of(const Weight& all, const Unit& unit);

}  // namespace stowage::engine
