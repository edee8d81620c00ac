// SPDX-License-Identifier: Apache-2.0
#include "store/part_moves.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "store/part_lines.h"
#include "store/part_octets.h"
#include "store/part_turns.h"

namespace stowage {
namespace {

using octets::kOctet, octets::Octets;
constexpr PartForm kNoForm{};
// Words that the part has as the file has them, but for the highest bits of numbers, at other
// places.
bool moves_words(const PartForm& form) {
  const bool flips = form.in_file <= 8 && form.bias == 1 << (form.in_file - 1);
  return form.in_file == form.in_part && form.axis == PartForm::Axis::columns && !form.tiled &&
         form.order == kNoForm.order && (form.bias == 0 || flips) && form.less == 0;
}
// Each is a word or more of 32 bits, or of fewer that are alike in these.
void flip_words(const std::byte* from, std::byte* to, std::int64_t bytes, std::uint32_t flip) {
  std::int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    auto line = value_at<Line>(from + i, 0);
    for (std::uint32_t& word : line) word ^= flip;
    put_line(line.data(), to + i);
  }
  for (; i < bytes; ++i) to[i] = from[i] ^ static_cast<std::byte>(flip);
}
template <class Word>
void turn_all(const Square<const std::byte>& from, const Square<std::byte>& to, std::uint32_t flip,
              Room& room) {
  std::int64_t done = 0;
  if constexpr (sizeof(Word) == 4) {
    if (to.rows == kLineWords) done = from.rows / kLineWords * kLineWords;
    if (done != 0) turn_words({from.data, from.step, done}, to, flip, room);
  }
  for (std::int64_t i = done; i < from.rows; ++i)
    for (std::int64_t k = 0; k < to.rows; ++k)
      put_value(to.data + k * to.step, i,
                static_cast<Word>(value_at<Word>(from.data + i * from.step, k) ^ flip));
}
template <class Word, bool kBack>
Moved move_words(const Frame& frame, const std::byte* from, std::byte* to) {
  constexpr std::int64_t kSize = sizeof(Word), kWords = kLine / kSize;
  constexpr std::int64_t kBeside = kSize == 4 ? kWordsBeside : kWords;
  constexpr std::int64_t kAlong = kBack ? kWords : kBeside, kAcross = kBack ? kBeside : kWords;
  const std::uint32_t highest = frame.form.in_file == 4 ? 0x88888888u : 0x80808080u;
  const std::uint32_t flip = frame.form.bias == 0 ? 0 : highest;
  const std::int64_t wholes = frame.columns / frame.run, row_bytes = frame.row_bytes();
  if (frame.step_along == 1) {
    for (std::int64_t row = 0; row < frame.rows; ++row) {
      const std::int64_t part = row * row_bytes, tensor = row * frame.step_across * kSize;
      flip_words(from + (kBack ? part : tensor), to + (kBack ? tensor : part), wholes * kSize,
                 flip);
    }
    finish_lines();
    return {wholes, frame.rows};
  }
  const std::int64_t down = frame.step_along * kSize;
  for (std::int64_t i = 0; i < wholes; i += kAlong) {
    for (std::int64_t row = 0; row < frame.rows; row += kAcross) {
      const std::int64_t part = row * row_bytes + i * kSize, tensor = i * down + row * kSize;
      const std::int64_t along = std::min(kAlong, wholes - i);
      const std::int64_t across = std::min(kAcross, frame.rows - row);
      if constexpr (kBack)
        turn_all<Word>({from + part, row_bytes, across}, {to + tensor, down, along}, flip,
                       frame.room);
      else
        turn_all<Word>({from + tensor, down, along}, {to + part, row_bytes, across}, flip,
                       frame.room);
    }
  }
  finish_lines();
  return {wholes, frame.rows};
}

// Numbers of eight rows in a word of the file, of eight columns together in the part.
bool turns_octets(const PartForm& form) {
  return form.in_file == 4 && form.in_part <= 8 && form.word == 32 && !form.tiled &&
         form.axis == PartForm::Axis::rows &&
         (form.in_part == 8 || (form.less == 0 && form.bias == 0));
}
// Eight: numbers of a row of the part as one, of codes or of bytes.
template <bool kBack, class Eight>
Moved turn_octets(const Frame& frame, const std::byte* from, std::byte* to) {
  constexpr bool kSpreads = sizeof(Eight) == 8;
  const PartForm& form = frame.form;
  const std::uint32_t more = kSpreads ? taken(form) : 0;
  const std::int64_t wholes = frame.rows / kOctet, columns = frame.columns / kOctet * kOctet;
  if (!kSpreads && columns != frame.columns) return {};  // rows of the part begin inside of words
  const std::int64_t row_bytes = frame.row_bytes(), size = sizeof(Eight);
  const auto part = [&](std::int64_t i, std::size_t j, std::int64_t k) {
    return (i * kOctet + form.order[j]) * row_bytes + k / kOctet * size;
  };
  const auto tensor = [&](std::int64_t i, std::size_t j, std::int64_t k) {
    return i * frame.step_along + (k + static_cast<std::int64_t>(j)) * frame.step_across;
  };
  Turned done;
  if (!kBack && !kSpreads && frame.step_along == 1) done = turn_codes(frame, from, to);
  for (std::int64_t k = 0; k < columns; k += kOctet) {
    for (std::int64_t i = k < done.across ? done.along : 0; i < wholes; ++i) {
      Octets words;
      for (std::size_t j = 0; j < words.size(); ++j) {
        if constexpr (kBack) {
          const auto eight = value_at<Eight>(from + part(i, j, k), 0);
          const std::uint64_t codes = kSpreads ? octets::joined(eight, form.bias) : eight;
          if (codes >> 32 != 0) return {};  // numbers, one by one, find out which is too large
          words[j] = static_cast<std::uint32_t>(codes);
        } else {
          words[j] = value_at<std::uint32_t>(from, tensor(i, j, k)) + more;
        }
      }
      octets::turn(words);
      for (std::size_t j = 0; j < words.size(); ++j) {
        if constexpr (kBack)
          put_value(to, tensor(i, j, k), words[j] - more);
        else
          put_value(to + part(i, j, k), 0,
                    static_cast<Eight>(kSpreads ? octets::spread(words[j], form.bias) : words[j]));
      }
    }
  }
  return {wholes, columns};
}

// Two codes in a byte, the first in its high half.
bool swaps_halves(const PartForm& form) {
  return form.word == 8 && form.in_file == 4 && form.in_part == 4 && form.order[0] == 1 &&
         form.axis == PartForm::Axis::columns && !form.transposed && !form.tiled &&
         form.bias == 0 && form.less == 0;
}
Moved swap_halves(const Frame& frame, const std::byte* from, std::byte* to) {
  constexpr std::uint32_t kLow = 0x0f0f0f0f;
  const std::int64_t bytes = frame.along * frame.across;
  std::int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    auto line = value_at<Line>(from + i, 0);
    for (std::uint32_t& word : line) word = (word & kLow) << 4 | (word >> 4 & kLow);
    put_line(line.data(), to + i);
  }
  finish_lines();
  for (; i < bytes; ++i) to[i] = from[i] << 4 | from[i] >> 4;
  return {frame.along, frame.across};
}

// Bytes in tiles, those of four columns together.
bool moves_tiles(const PartForm& form) {
  return form.tiled && form.word == 8 && form.in_file == 8 && form.in_part == 8 && form.bias == 0 &&
         form.less == 0 && form.axis == PartForm::Axis::columns && !form.transposed;
}
template <bool kBack>
Moved move_tiles(const Frame& frame, const std::byte* from, std::byte* to) {
  const std::int64_t wholes = frame.columns / kTileColumns;
  std::int64_t done = 0;
  if (!kBack && frame.columns % kTilesColumns == 0) done = turn_tiles(frame, from, to);
  for (std::int64_t row = done; row < frame.rows; ++row) {
    for (std::int64_t i = 0; i < wholes; ++i) {
      const std::int64_t part = row * frame.columns + i * kTileColumns;
      const std::int64_t tensor = tiled(row, 0, frame.breadth) + i * kTile;
      std::memcpy(to + (kBack ? tensor : part), from + (kBack ? part : tensor), kTileColumns);
    }
  }
  return {wholes * kTileColumns, frame.rows};
}

// Codes of a byte each, two in a byte of the part.
bool joins_bytes(const PartForm& form) {
  return form.word == 8 && form.in_file == 8 && form.in_part == 4 &&
         form.axis == PartForm::Axis::columns && !form.transposed && !form.tiled;
}
template <bool kBack>
Moved join_bytes(const Frame& frame, const std::byte* from, std::byte* to) {
  const auto bias = static_cast<std::uint8_t>(frame.form.bias);
  const std::int64_t pairs = frame.rows * frame.columns / 2;
  unsigned wide = 0;
  for (std::int64_t i = 0; i < pairs; ++i) {
    if constexpr (kBack) {
      const auto both = std::to_integer<unsigned>(from[i]);
      to[2 * i] = static_cast<std::byte>((both & 15) + bias);
      to[2 * i + 1] = static_cast<std::byte>((both >> 4) + bias);
    } else {
      const auto low = static_cast<std::uint8_t>(std::to_integer<unsigned>(from[2 * i]) - bias);
      const auto high =
          static_cast<std::uint8_t>(std::to_integer<unsigned>(from[2 * i + 1]) - bias);
      wide |= static_cast<unsigned>(low | high) >> 4;
      to[i] = static_cast<std::byte>(low | high << 4);
    }
  }
  if (wide != 0) return {};  // numbers, one by one, find out which
  return {frame.along, frame.across};
}

// Two codes in a byte, each of its own half of the part.
bool unfolds_halves(const PartForm& form) { return form.folded && form.order[0] == 1; }
template <bool kBack>
Moved unfold_halves(const Frame& frame, const std::byte* from, std::byte* to) {
  if (frame.columns % 2 != 0) return {};  // the second half begins inside of a byte
  const std::byte low{0x0f}, high{0xf0};
  const std::int64_t pairs = frame.columns / 2;
  for (std::int64_t i = 0; i < pairs; ++i) {
    if constexpr (kBack) {
      const std::byte first = from[i], second = from[pairs + i];
      to[2 * i] = first << 4 | (second & low);
      to[2 * i + 1] = (first & high) | second >> 4;
    } else {
      const std::byte first = from[2 * i], second = from[2 * i + 1];
      to[i] = first >> 4 | (second & high);
      to[pairs + i] = (first & low) | second << 4;
    }
  }
  return {frame.along, frame.across};
}

// What has size is moved by words; what is left, by numbers.
template <class Word, bool kBack>
Moved move_large(const Frame& frame, const std::byte* from, std::byte* to) {
  if (moves_words(frame.form)) return move_words<Word, kBack>(frame, from, to);
  if (turns_octets(frame.form))
    return frame.form.in_part == 4 ? turn_octets<kBack, std::uint32_t>(frame, from, to)
                                   : turn_octets<kBack, std::uint64_t>(frame, from, to);
  if (moves_tiles(frame.form)) return move_tiles<kBack>(frame, from, to);
  if (swaps_halves(frame.form)) return swap_halves(frame, from, to);
  if (unfolds_halves(frame.form)) return unfold_halves<kBack>(frame, from, to);
  if (joins_bytes(frame.form)) return join_bytes<kBack>(frame, from, to);
  return {};
}

template <bool kBack>
Moved move_any(const Frame& frame, const std::byte* from, std::byte* to) {
  if (frame.form.word == 8) return move_large<std::uint8_t, kBack>(frame, from, to);
  if (frame.form.word == 16) return move_large<std::uint16_t, kBack>(frame, from, to);
  return move_large<std::uint32_t, kBack>(frame, from, to);
}

}  // namespace

Moved move_to_part(const Frame& frame, const std::byte* tensor, std::byte* part) {
  return move_any<false>(frame, tensor, part);
}
Moved move_to_tensor(const Frame& frame, const std::byte* part, std::byte* tensor) {
  return move_any<true>(frame, part, tensor);
}

}  // namespace stowage
