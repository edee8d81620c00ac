// SPDX-License-Identifier: Apache-2.0
// Columns of a tensor that become rows of a part, or rows of it columns: a few lines of each row
// are gathered in the nearest cache and written one after another.
#pragma once
#include <cstddef>
#include <cstdint>

#include "store/part_frame.h"
#include "store/part_lines.h"

namespace stowage {

/// A square of words, or what there is of it.
template <class Byte>
struct Square {
  Byte* data;
  std::int64_t step, rows;  // bytes from a row to the next
};

inline constexpr std::int64_t kLineWords = kLine / 4, kLineCodes = kLine * 2;  // of 32 bits, of 4
/// Rows of the tensor whose words or codes fill lines of a row that are beside each other.
inline constexpr std::int64_t kWordsBeside = kLinesBeside * kLineWords;
inline constexpr std::int64_t kCodesBeside = kLinesBeside * kLineCodes;

/// Words of 32 bits of so many rows, at most kWordsBeside and a multiple of kLineWords, become
/// those of kLineWords rows.
void turn_words(const Square<const std::byte>& from, const Square<std::byte>& to,
                std::uint32_t flip, Room& room);

/// What has been turned: words of the tensor along, and across.
struct Turned {
  std::int64_t along = 0, across = 0;
};
/// Codes of four bits of eight rows in a word of 32 bits, the words of a row of the tensor beside
/// each other.
Turned turn_codes(const Frame& frame, const std::byte* from, std::byte* to);

inline constexpr std::int64_t kTilesColumns = 4 * kTileColumns;
/// Scales in tiles, of a part whose columns are a multiple of kTilesColumns; returns of how many
/// rows: those that fill tiles.
std::int64_t turn_tiles(const Frame& frame, const std::byte* from, std::byte* to);

}  // namespace stowage
