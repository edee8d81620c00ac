// SPDX-License-Identifier: Apache-2.0
#include "store/part_form.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "format/convert.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTile = kTileRows * kTileColumns;
constexpr std::int64_t kInAWord = 8;  // zero points

float rounded(float x, Dtype compute) {
  if (compute == Dtype::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (compute == Dtype::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

Bytes all_rounded(std::span<const std::byte> bytes, Dtype compute) {
  Bytes made(bytes.begin(), bytes.end());
  for (std::size_t at = 0; at + sizeof(float) <= made.size(); at += sizeof(float)) {
    float x = 0;  // at any address
    std::memcpy(&x, made.data() + at, sizeof x);
    x = rounded(x, compute);
    std::memcpy(made.data() + at, &x, sizeof x);
  }
  return made;
}

[[noreturn]] void refuse_stray(const FormedTensor& tensor, std::int64_t byte) {
  Place place = tensor.place;
  if (place.byte) *place.byte += static_cast<std::uint64_t>(byte);
  refuse(Refusal::dialect_part, place, "a value of no group of the weight, which is not 0");
}

// Where the scale of a row and a group lies among tiles, each 32 rows of four quarters.
std::int64_t swizzled(std::int64_t row, std::int64_t group, std::int64_t groups) {
  const std::int64_t tile = row / kTileRows * (groups / kTileColumns) + group / kTileColumns;
  return tile * kTile + row % 32 * 16 + row % kTileRows / 32 * kTileColumns + group % kTileColumns;
}

Bytes unswizzled(const FormedTensor& tensor, const Shape& part) {
  const std::int64_t rows = tensor.info.shape[0], groups = tensor.info.shape[1];
  Bytes made(static_cast<std::size_t>(part.elements()));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at = swizzled(row, group, groups);
      const std::byte scale = tensor.bytes[static_cast<std::size_t>(at)];
      if (row < part[0] && group < part[1])
        made[static_cast<std::size_t>(row * part[1] + group)] = scale;
      else if (scale != std::byte{0})
        refuse_stray(tensor, at);
    }
  }
  return made;
}

// Word [i, g] has those of rows 8 i to 8 i + 7, the first in its lowest bits.
Bytes zeros_down(const FormedTensor& tensor, const Shape& part) {
  const std::int64_t words = tensor.info.shape[0], groups = part[1];
  Bytes made(static_cast<std::size_t>(part.elements()));
  for (std::int64_t row = 0; row < words * kInAWord; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at = (row / kInAWord * groups + group) * 4 + row % kInAWord / 2;
      const auto pair = std::to_integer<int>(tensor.bytes[static_cast<std::size_t>(at)]);
      const int zero = row % 2 == 0 ? pair & 15 : pair >> 4;
      if (row < part[0])
        made[static_cast<std::size_t>(row * groups + group)] = static_cast<std::byte>(zero - 8);
      else if (zero != 0)
        refuse_stray(tensor, at);
    }
  }
  return made;
}

template <class T>
T value_at(std::span<const std::byte> bytes, std::int64_t at) {
  T value;  // at any address
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(at) * sizeof value, sizeof value);
  return value;
}

// Of a matrix of that shape; a square at a time, which the nearest cache holds.
template <class T>
Bytes turned(const FormedTensor& tensor) {
  constexpr std::int64_t kSquare = 32;
  const std::int64_t rows = tensor.info.shape[0], columns = tensor.info.shape[1];
  Bytes made(tensor.bytes.size());
  for (std::int64_t r = 0; r < rows; r += kSquare) {
    for (std::int64_t c = 0; c < columns; c += kSquare) {
      for (std::int64_t column = c; column < std::min(c + kSquare, columns); ++column) {
        for (std::int64_t row = r; row < std::min(r + kSquare, rows); ++row) {
          const T value = value_at<T>(tensor.bytes, row * columns + column);
          std::memcpy(made.data() + static_cast<std::size_t>(column * rows + row) * sizeof value,
                      &value, sizeof value);
        }
      }
    }
  }
  return made;
}

using Order = std::array<int, kInAWord>;  // the row of each code of a word
constexpr Order kInOrder{0, 1, 2, 3, 4, 5, 6, 7}, kAwqOrder{0, 2, 4, 6, 1, 3, 5, 7};

std::uint32_t code_of(std::uint32_t word, int i) { return word >> (4 * i) & 15; }

// Word [g, i] has those of rows 8 i to 8 i + 7 in that order, `more` less.
Bytes zeros_across(const FormedTensor& tensor, const Order& order, std::uint32_t more) {
  const std::int64_t groups = tensor.info.shape[0], words = tensor.info.shape[1];
  Bytes made(static_cast<std::size_t>(groups * words * kInAWord));
  for (std::int64_t group = 0; group < groups; ++group) {
    for (std::int64_t i = 0; i < words; ++i) {
      const auto word = value_at<std::uint32_t>(tensor.bytes, group * words + i) + more;
      for (int j = 0; j < kInAWord; ++j) {
        const std::int64_t row = i * kInAWord + order[static_cast<std::size_t>(j)];
        made[static_cast<std::size_t>(row * groups + group)] =
            static_cast<std::byte>(static_cast<int>(code_of(word, j)) - 8);
      }
    }
  }
  return made;
}

// Word [k, i] has the codes of column k of rows 8 i to 8 i + 7; one of the part's those of eight
// columns of a row. So eight words make eight.
Bytes awq_codes(const FormedTensor& tensor) {
  const std::int64_t columns = tensor.info.shape[0], words = tensor.info.shape[1];
  Bytes made(tensor.bytes.size());
  for (std::int64_t k = 0; k < columns; k += kInAWord) {
    for (std::int64_t i = 0; i < words; ++i) {
      std::array<std::uint32_t, kInAWord> rows{};
      for (int column = 0; column < kInAWord; ++column) {
        const auto word = value_at<std::uint32_t>(tensor.bytes, (k + column) * words + i);
        for (std::size_t j = 0; j < kInAWord; ++j)
          rows[static_cast<std::size_t>(kAwqOrder[j])] |= code_of(word, static_cast<int>(j))
                                                          << (4 * column);
      }
      for (std::size_t row = 0; row < kInAWord; ++row) {
        const std::int64_t at = ((i * kInAWord + static_cast<std::int64_t>(row)) * columns + k) / 2;
        std::memcpy(made.data() + at, &rows[row], sizeof rows[row]);
      }
    }
  }
  return made;
}

// The largest number where none is large enough: no tensor has it.
std::int64_t round_up(std::int64_t size, std::int64_t to) {
  return checked_mul(ceil_div(size, to), to).value_or(std::numeric_limits<std::int64_t>::max());
}

}  // namespace

Bytes part_of_tensor(PartForm form, const FormedTensor& tensor, const Shape& part, Dtype compute) {
  switch (form) {
    case PartForm::whole:
      break;
    case PartForm::rounded:
      return all_rounded(tensor.bytes, compute);
    case PartForm::unswizzled:
      return unswizzled(tensor, part);
    case PartForm::zeros_down:
      return zeros_down(tensor, part);
    case PartForm::turned:
      return turned<std::uint16_t>(tensor);
    case PartForm::turned_words:
      return turned<std::uint32_t>(tensor);
    case PartForm::zeros_across:
      return zeros_across(tensor, kInOrder, 0);
    case PartForm::zeros_less_one:
      return zeros_across(tensor, kInOrder, 0x11111111);
    case PartForm::awq_codes:
      return awq_codes(tensor);
    case PartForm::awq_zeros:
      return zeros_across(tensor, kAwqOrder, 0);
  }
  return {tensor.bytes.begin(), tensor.bytes.end()};
}

Shape swizzled_shape(const Shape& scales) {
  return Shape{round_up(scales[0], kTileRows), round_up(scales[1], kTileColumns)};
}

Shape zeros_down_shape(const Shape& zeros) { return Shape{ceil_div(zeros[0], kInAWord), zeros[1]}; }

}  // namespace stowage
