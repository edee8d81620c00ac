// SPDX-License-Identifier: Apache-2.0
// Where the words of a tensor and the numbers of its part lie: what the definition of a form and
// its fast ways have in common.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checked.h"
#include "stowage/file.h"

namespace stowage {

inline constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTile = kTileRows * kTileColumns;

/// Where the scale of a row and a group lies among tiles, each 32 rows of four quarters.
inline std::int64_t tiled(std::int64_t row, std::int64_t column, std::int64_t columns) {
  const std::int64_t tile = row / kTileRows * (columns / kTileColumns) + column / kTileColumns;
  return tile * kTile + row % 32 * 16 + row % kTileRows / 32 * kTileColumns + column % kTileColumns;
}

/// The shape, in words, of the tensor that has a part of this shape, where numbers fill its words;
/// no tensor has it where a size is larger than any.
inline Shape shape_of_words(const PartForm& form, const Shape& part) {
  const auto round_up = [](std::int64_t size, std::int64_t to) {
    return checked_mul(ceil_div(size, to), to).value_or(std::numeric_limits<std::int64_t>::max());
  };
  const std::int64_t run = form.word / form.in_file;
  std::int64_t rows = part.rows(), columns = part.row_elements() * (form.in_part == 4 ? 2 : 1);
  if (form.folded) columns = rows * columns / run, rows = run;
  std::int64_t& length = form.axis == PartForm::Axis::rows ? rows : columns;
  length = ceil_div(length, run);
  if (form.transposed) std::swap(rows, columns);
  if (form.tiled) rows = round_up(rows, kTileRows), columns = round_up(columns, kTileColumns);
  return {rows, columns};
}

/// Where lines are gathered before they are written: memory of the nearest cache, whose owner knows
/// how large a stack it has. Few bytes of it are left to a handler of signals.
struct alignas(64) Room {
  std::byte bytes[40 << 10];
};

/// A word is named by its place along the axis of its numbers, and across it.
struct Frame {
  /// `row_bytes`: from one row of the part to the next in memory; 0: they lie together.
  Frame(const PartForm& of, const Shape& part, Room& lines, std::int64_t row_bytes = 0)
      : form(of),
        room(lines),
        run(of.word / of.in_file),
        rows(part.rows()),
        columns(part.row_elements()) {
    if (of.in_part == 4) columns *= 2;
    if (of.folded) columns = rows * columns / run, rows = run;
    pitch = row_bytes == 0 ? columns : row_bytes * 8 / of.in_part;
    const bool by_rows = of.axis == PartForm::Axis::rows;
    length = by_rows ? rows : columns;
    width = by_rows ? columns : rows;
    const Shape words = shape_of_words(of, part);
    const int down = by_rows == of.transposed ? 1 : 0;  // the dimension that runs along
    along = words[down], across = words[1 - down];
    breadth = words[1];
    step_along = down == 0 ? breadth : 1, step_across = down == 0 ? 1 : breadth;
  }
  std::int64_t word(std::int64_t i, std::int64_t o) const {
    if (!form.tiled) return i * step_along + o * step_across;
    return step_along == 1 ? tiled(o, i, breadth) : tiled(i, o, breadth);
  }
  /// The one at `a` along the axis.
  std::int64_t number(std::int64_t a, std::int64_t o) const {
    return form.axis == PartForm::Axis::rows ? a * pitch + o : o * pitch + a;
  }
  bool has(std::int64_t a, std::int64_t o) const { return a < length && o < width; }
  /// From one to the next along the axis.
  std::int64_t step() const { return form.axis == PartForm::Axis::rows ? pitch : 1; }
  std::int64_t row_bytes() const { return pitch * form.in_part / 8; }

  const PartForm& form;
  Room& room;
  std::int64_t run;                      // numbers in a word
  std::int64_t rows, columns, pitch;     // of the part; numbers from a row to the next
  std::int64_t length, width;            // of the part along the axis, and across
  std::int64_t along, across, breadth;   // of the tensor, in words; of one of its rows
  std::int64_t step_along, step_across;  // from word to word, but in tiles
};

template <class T>
T value_at(const std::byte* from, std::int64_t at) {
  T value;  // at any address
  std::memcpy(&value, from + static_cast<std::size_t>(at) * sizeof value, sizeof value);
  return value;
}
template <class T>
void put_value(std::byte* to, std::int64_t at, T value) {
  std::memcpy(to + static_cast<std::size_t>(at) * sizeof value, &value, sizeof value);
}

/// Taken from a word as one number.
inline std::uint32_t taken(const PartForm& form) {
  std::uint32_t all = 0;
  for (int bit = 0; bit < form.word; bit += form.in_file) all |= std::uint32_t{form.less} << bit;
  return all;
}

}  // namespace stowage
