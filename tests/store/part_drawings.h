// SPDX-License-Identifier: Apache-2.0
// What tests of forms of parts have in common: numbers at random, and the tensor that a drawing
// says they lie in.
#pragma once
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "store/part_form.h"
#include "store/part_pieces.h"

namespace stowage::test {

using Bytes = std::vector<std::byte>;

inline constexpr PartForm kTiles{.in_file = 8, .in_part = 8, .word = 8, .tiled = true};
inline constexpr PartForm kTurnedWords{.in_file = 4, .in_part = 4, .word = 32, .transposed = true};
inline constexpr PartForm kAwq{.in_file = 4,
                               .in_part = 4,
                               .word = 32,
                               .axis = PartForm::Axis::rows,
                               .order = {0, 2, 4, 6, 1, 3, 5, 7},
                               .transposed = true};

struct Size {
  std::int64_t rows, columns;  // in numbers
};

inline Shape part_shape(const PartForm& form, const Size& size) {
  return {size.rows, form.in_part == 4 ? size.columns / 2 : size.columns};
}

// Numbers of the widths that a file has for them, at random; `fill` for all of their bits.
inline Bytes some_part(const PartForm& form, const Size& size, std::mt19937& random,
                       bool fill = false) {
  Bytes made(static_cast<std::size_t>(size.rows * size.columns * form.in_part / 8));
  const std::uint32_t mask = (1u << form.in_file) - 1;
  for (std::size_t i = 0; i < made.size(); ++i) {
    std::uint32_t byte = fill ? 0xff : static_cast<std::uint32_t>(random());
    if (form.in_part == 8) byte = (byte & mask) - form.bias;
    if (form.in_part == 4 && form.in_file == 4)
      byte = ((byte & 15) - form.bias) % 16 | ((byte >> 4) - form.bias) % 16 << 4;
    made[i] = static_cast<std::byte>(byte);
  }
  return made;
}

inline std::uint32_t number_at(const PartForm& form, const Bytes& part, const Size& size,
                               std::int64_t row, std::int64_t column) {
  const auto at = static_cast<std::size_t>(row * size.columns + column);
  std::uint16_t found = 0;
  if (form.in_part == 16) std::memcpy(&found, part.data() + 2 * at, 2);
  if (form.in_part == 8) found = std::to_integer<std::uint8_t>(part[at]);
  if (form.in_part == 4) found = std::to_integer<std::uint8_t>(part[at / 2]) >> (4 * (at % 2)) & 15;
  return (found + form.bias) & ((1u << form.in_file) - 1);
}

// The place in the tensor of the lowest bit of a number: of one row, one column, one order.
using Drawing = std::function<std::int64_t(std::int64_t row, std::int64_t column)>;

// What drawings say: bits alone, from each number of the part.
inline Bytes drawn(const PartForm& form, const Bytes& part, const Size& size, std::size_t bytes,
                   const Drawing& drawing) {
  Bytes made(bytes);
  for (std::int64_t row = 0; row < size.rows; ++row) {
    for (std::int64_t column = 0; column < size.columns; ++column) {
      const std::uint32_t number = number_at(form, part, size, row, column);
      for (int bit = 0; bit < form.in_file; ++bit) {
        const auto at = static_cast<std::size_t>(drawing(row, column) + bit);
        made.at(at / 8) |= static_cast<std::byte>((number >> bit & 1) << at % 8);
      }
    }
  }
  if (form.less == 0) return made;
  for (std::size_t at = 0; at < made.size(); at += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, made.data() + at, sizeof word);
    word -= 0x11111111u * form.less;
    std::memcpy(made.data() + at, &word, sizeof word);
  }
  return made;
}

inline void expect_both_ways(const PartForm& form, const Bytes& part, const Size& size,
                             const Bytes& tensor) {
  const Shape shape = part_shape(form, size);
  const bool is_block = form.record != 0 || form.halves != 0;  // of bytes
  ASSERT_EQ((is_block ? 8 : form.word) * tensor_shape(form, shape).elements(),
            8 * std::ssize(tensor));
  EXPECT_EQ(tensor_of_part(form, part, shape), tensor);
  EXPECT_EQ(part_of_tensor(form, {{"f", "t", 0}, tensor}, shape, Dtype::bf16), part);
  for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{700}, kPiece}) {
    Bytes made(part.size(), std::byte{0xa5});
    const PartPlace place{&form, shape, made};
    const auto read = [&](std::uint64_t offset, std::span<std::byte> bytes) {
      std::copy_n(tensor.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(),
                  bytes.begin());
    };
    form_parts({&place, 1}, {"f", "t", 0}, tensor.size(), Dtype::bf16, read, piece);
    EXPECT_EQ(made, part) << "in pieces of " << piece;
  }
}

}  // namespace stowage::test
