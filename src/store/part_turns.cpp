// SPDX-License-Identifier: Apache-2.0
#include "store/part_turns.h"

#include <algorithm>
#include <array>

namespace stowage {
namespace {

// Of 32 bits, four by four.
constexpr std::size_t kQuad = 4;
using Quad = std::uint32_t __attribute__((vector_size(4 * kQuad)));
using Quads = std::array<Quad, kQuad>;
Quads turned(const Quads& of) {
  const Quad low = __builtin_shufflevector(of[0], of[1], 0, 4, 1, 5);
  const Quad high = __builtin_shufflevector(of[0], of[1], 2, 6, 3, 7);
  const Quad low2 = __builtin_shufflevector(of[2], of[3], 0, 4, 1, 5);
  const Quad high2 = __builtin_shufflevector(of[2], of[3], 2, 6, 3, 7);
  return {__builtin_shufflevector(low, low2, 0, 1, 4, 5),
          __builtin_shufflevector(low, low2, 2, 3, 6, 7),
          __builtin_shufflevector(high, high2, 0, 1, 4, 5),
          __builtin_shufflevector(high, high2, 2, 3, 6, 7)};
}

// Bytes, sixteen by sixteen.
constexpr std::size_t kSixteen = 16;
using Sixteen = std::uint8_t __attribute__((vector_size(kSixteen)));
using Sixteens = std::array<Sixteen, kSixteen>;
Sixteen beside_low(Sixteen a, Sixteen b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
Sixteen beside_high(Sixteen a, Sixteen b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
// Byte c of row r has the place 16 r + c: each step turns its eight bits by one to the left.
Sixteens shuffled(const Sixteens& of) {
  Sixteens made;
  for (std::size_t i = 0; i < kSixteen / 2; ++i) {
    made[2 * i] = beside_low(of[i], of[i + kSixteen / 2]);
    made[2 * i + 1] = beside_high(of[i], of[i + kSixteen / 2]);
  }
  return made;
}
Sixteens turned(const Sixteens& of) { return shuffled(shuffled(shuffled(shuffled(of)))); }

constexpr std::int64_t kRun = 8;                   // codes in a word
constexpr std::int64_t kRows = kRun * kLineWords;  // of the part, from a line of the tensor
constexpr std::int64_t kPairRows = 2 * kSixteen;   // of the tensor

// Of four words of 32 rows: the codes of two rows in a byte, those of each word that are even and
// odd.
struct Pairs {
  Sixteens even, odd;
};
using LinePairs = std::array<Pairs, kLineWords / kQuad>;
void pair(const std::byte* from, std::int64_t step, LinePairs& to) {
  constexpr std::uint32_t kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0;
  for (std::size_t i = 0; i < kSixteen; ++i, from += 2 * step) {
    for (std::size_t word = 0; word < to.size(); ++word) {
      const auto first = value_at<Quad>(from, static_cast<std::int64_t>(word));
      const auto second = value_at<Quad>(from + step, static_cast<std::int64_t>(word));
      to[word].even[i] = reinterpret_cast<Sixteen>((first & kLow) | (second << 4 & kHigh));
      to[word].odd[i] = reinterpret_cast<Sixteen>((first >> 4 & kLow) | (second & kHigh));
    }
  }
}

// Rows of the part, so far apart that they share no place in the nearest cache.
constexpr std::int64_t kApart = (kLinesBeside + 1) * kLine;
static_assert(kRows * kApart <= sizeof(Room::bytes));

// A line of each of some rows of the tensor.
void gather_codes(const Frame& frame, const std::byte* from, std::int64_t rows, std::byte* to) {
  const std::int64_t step = frame.step_across * 4;
  for (std::int64_t k = 0; k < rows; k += kPairRows) {
    LinePairs pairs;
    pair(from + k * step, step, pairs);
    std::byte* row = to + k / 2;  // of the first word
    for (const Pairs& of : pairs) {
      const Sixteens even = turned(of.even), odd = turned(of.odd);
      for (std::size_t i = 0; i < kSixteen; ++i) {
        const std::size_t j = i % 4 * 2;
        std::memcpy(row + frame.form.order[j] * kApart, &even[i], kSixteen);
        std::memcpy(row + frame.form.order[j + 1] * kApart, &odd[i], kSixteen);
        if (i % 4 == 3) row += kRun * kApart;
      }
    }
  }
}

}  // namespace

void turn_words(const Square<const std::byte>& from, const Square<std::byte>& to,
                std::uint32_t flip, Room& room) {
  constexpr std::int64_t kRowBytes = kWordsBeside * 4;
  static_assert(kLineWords * kRowBytes <= sizeof(Room::bytes));
  for (std::int64_t i = 0; i < from.rows; i += kQuad) {
    for (std::int64_t k = 0; k < kLineWords; k += kQuad) {
      Quads quads;
      for (std::size_t j = 0; j < kQuad; ++j)
        quads[j] =
            value_at<Quad>(from.data + (i + static_cast<std::int64_t>(j)) * from.step + k * 4, 0) ^
            flip;
      quads = turned(quads);
      for (std::size_t j = 0; j < kQuad; ++j)
        std::memcpy(room.bytes + (k + static_cast<std::int64_t>(j)) * kRowBytes + i * 4, &quads[j],
                    sizeof quads[j]);
    }
  }
  for (std::int64_t k = 0; k < kLineWords; ++k)
    put_lines(room.bytes + k * kRowBytes, to.data + k * to.step, from.rows * 4);
}

Turned turn_codes(const Frame& frame, const std::byte* from, std::byte* to) {
  std::byte* const gathered = frame.room.bytes;
  const std::int64_t along = frame.rows / kRun / kLineWords * kLineWords;
  const std::int64_t across = frame.columns / kPairRows * kPairRows, row_bytes = frame.row_bytes();
  for (std::int64_t k = 0; k < across; k += kCodesBeside) {
    const std::int64_t count = std::min(kCodesBeside, across - k);
    for (std::int64_t i = 0; i < along; i += kLineWords) {
      gather_codes(frame, from + (k * frame.step_across + i) * 4, count, gathered);
      for (std::int64_t row = 0; row < kRows; ++row)
        put_lines(gathered + row * kApart, to + (i * kRun + row) * row_bytes + k / 2, count / 2);
    }
  }
  finish_lines();
  return {along, across};
}

// Each four words of a tile are of rows that are 32 apart.
std::int64_t turn_tiles(const Frame& frame, const std::byte* from, std::byte* to) {
  constexpr std::int64_t kRowsApart = kTileRows / kQuad;
  const std::int64_t rows = frame.rows / kTileRows * kTileRows;
  for (std::int64_t first = 0; first < rows; first += kTileRows) {
    for (std::int64_t row = first; row < first + kRowsApart; ++row) {
      const std::byte* tile = from + tiled(row, 0, frame.breadth);
      for (std::int64_t column = 0; column < frame.columns; column += kTilesColumns) {
        Quads quads;
        for (std::size_t j = 0; j < kQuad; ++j, tile += kTile) quads[j] = value_at<Quad>(tile, 0);
        quads = turned(quads);
        std::byte* place = to + row * frame.columns + column;
        for (std::size_t j = 0; j < kQuad; ++j, place += kRowsApart * frame.columns)
          std::memcpy(place, &quads[j], sizeof quads[j]);
      }
    }
  }
  return rows;
}

}  // namespace stowage
