// SPDX-License-Identifier: Apache-2.0
// Lines of the nearest cache are written whole: a part is far larger than what caches hold, and its
// rows are often a power of two of bytes apart, where few of them have room beside each other.
#include "store/part_moves.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "store/part_octets.h"

namespace stowage {
namespace {

using octets::kOctet, octets::Octets;
constexpr PartForm kNoForm{};
constexpr std::int64_t kLine = 64;  // bytes
using Line = std::array<std::uint32_t, kLine / 4>;

// Past the caches where they can be: a line that is written whole need not be read before. What is
// written so is seen by other threads after finish_lines().
void put_line(const Line& line, std::byte* to) {
#ifdef __SSE2__
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (std::size_t i = 0; i < line.size(); i += 4)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i * 4),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(&line[i])));
    return;
  }
#endif
  std::memcpy(to, line.data(), kLine);
}
void finish_lines() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Words that the part has as the file has them, but for the highest bits of numbers, at other
// places.
bool moves_words(const PartForm& form) {
  const bool flips = form.in_file <= 8 && form.bias == 1 << (form.in_file - 1);
  return form.in_file == form.in_part && form.axis == PartForm::Axis::columns && !form.tiled &&
         form.order == kNoForm.order && (form.bias == 0 || flips) && form.less == 0;
}
template <class Word>
void flip_words(const std::byte* from, std::byte* to, std::int64_t count, Word flip) {
  for (std::int64_t i = 0; i < count; ++i)
    put_value(to, i, static_cast<Word>(value_at<Word>(from, i) ^ flip));
}
// A square of words of a line each, or what there is of it.
template <class Byte>
struct Square {
  Byte* data;
  std::int64_t step, rows;  // bytes from a row to the next
};
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
void turn_square(const Square<const std::byte>& from, const Square<std::byte>& to,
                 std::uint32_t flip) {
  constexpr std::int64_t kWords = kLine / 4;
  std::array<Line, kWords> square;
  for (std::int64_t i = 0; i < kWords; i += kQuad) {
    for (std::int64_t k = 0; k < kWords; k += kQuad) {
      Quads quads;
      for (std::size_t j = 0; j < kQuad; ++j)
        quads[j] =
            value_at<Quad>(from.data + (i + static_cast<std::int64_t>(j)) * from.step + k * 4, 0) ^
            flip;
      quads = turned(quads);
      for (std::size_t j = 0; j < kQuad; ++j)
        std::memcpy(&square[static_cast<std::size_t>(k) + j][static_cast<std::size_t>(i)],
                    &quads[j], sizeof quads[j]);
    }
  }
  for (std::int64_t k = 0; k < kWords; ++k)
    put_line(square[static_cast<std::size_t>(k)], to.data + k * to.step);
}
template <class Word>
void turn_words(const Square<const std::byte>& from, const Square<std::byte>& to, Word flip) {
  if constexpr (sizeof(Word) == 4)
    if (from.rows == kLine / 4 && to.rows == kLine / 4) return turn_square(from, to, flip);
  for (std::int64_t i = 0; i < from.rows; ++i)
    for (std::int64_t k = 0; k < to.rows; ++k)
      put_value(to.data + k * to.step, i,
                static_cast<Word>(value_at<Word>(from.data + i * from.step, k) ^ flip));
}
template <class Word, bool kBack>
Moved move_words(const Frame& frame, const std::byte* from, std::byte* to) {
  constexpr std::int64_t kSize = sizeof(Word), kWords = kLine / kSize;
  const std::uint32_t highest = frame.form.in_file == 4 ? 0x88888888u : 0x80808080u;
  const Word flip = frame.form.bias == 0 ? Word{0} : static_cast<Word>(highest);
  const std::int64_t wholes = frame.columns / frame.run, row_bytes = frame.row_bytes();
  if (frame.step_along == 1) {
    for (std::int64_t row = 0; row < frame.rows; ++row) {
      const std::int64_t part = row * row_bytes, tensor = row * frame.step_across * kSize;
      flip_words(from + (kBack ? part : tensor), to + (kBack ? tensor : part), wholes, flip);
    }
    return {wholes, frame.rows};
  }
  const std::int64_t down = frame.step_along * kSize;
  for (std::int64_t i = 0; i < wholes; i += kWords) {
    for (std::int64_t row = 0; row < frame.rows; row += kWords) {
      const std::int64_t part = row * row_bytes + i * kSize, tensor = i * down + row * kSize;
      const std::int64_t along = std::min(kWords, wholes - i);
      const std::int64_t across = std::min(kWords, frame.rows - row);
      if constexpr (kBack)
        turn_words<Word>({from + part, row_bytes, across}, {to + tensor, down, along}, flip);
      else
        turn_words<Word>({from + tensor, down, along}, {to + part, row_bytes, across}, flip);
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
// Several octets of words that lie beside each other in the file, and lines of the part's rows.
constexpr std::size_t kLanes = 4, kBeside = kLine / 4, kLineOctets = kLine / 4;
using Words = std::uint32_t __attribute__((vector_size(4 * kLanes)));
void turn_lines(const Frame& frame, const std::byte* from, std::byte* to) {
  std::array<Line, kBeside * kOctet> lines;
  const std::int64_t wholes = frame.rows / kOctet / std::int64_t{kBeside} * std::int64_t{kBeside};
  const std::int64_t row_bytes = frame.row_bytes(), octets = frame.columns / kOctet;
  for (std::int64_t first = 0; first < octets; first += kLineOctets) {
    const auto count = std::min(kLineOctets, static_cast<std::size_t>(octets - first));
    for (std::int64_t i = 0; i < wholes; i += kBeside) {
      for (std::size_t at = 0; at < count * kBeside; at += kLanes) {
        const std::size_t q = at / kBeside, beside = at % kBeside;
        const std::int64_t k = (first + static_cast<std::int64_t>(q)) * kOctet;
        const std::byte* const word = from + (i + static_cast<std::int64_t>(beside)) * 4;
        std::array<Words, kOctet> words;
        for (std::size_t j = 0; j < words.size(); ++j)
          words[j] =
              value_at<Words>(word + (k + static_cast<std::int64_t>(j)) * frame.step_across * 4, 0);
        octets::turn(words);
        for (std::size_t j = 0; j < words.size(); ++j)
          for (std::size_t lane = 0; lane < kLanes; ++lane)
            lines[(beside + lane) * kOctet + frame.form.order[j]][q] = words[j][lane];
      }
      std::byte* row = to + i * kOctet * row_bytes + first * 4;
      for (const Line& line : lines) {
        if (count == line.size())
          put_line(line, row);
        else
          std::memcpy(row, line.data(), count * 4);
        row += row_bytes;
      }
    }
  }
  finish_lines();
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
  std::int64_t done = 0;
  if (!kBack && !kSpreads && frame.step_along == 1) {
    turn_lines(frame, from, to);
    done = wholes / std::int64_t{kBeside} * std::int64_t{kBeside};
  }
  for (std::int64_t k = 0; k < columns; k += kOctet) {
    for (std::int64_t i = done; i < wholes; ++i) {
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
  constexpr std::uint64_t kLow = 0x0f0f0f0f0f0f0f0f;
  const std::int64_t bytes = frame.along * frame.across, wholes = bytes / 8;
  for (std::int64_t i = 0; i < wholes; ++i) {
    const auto eight = value_at<std::uint64_t>(from, i);
    put_value(to, i, (eight & kLow) << 4 | (eight >> 4 & kLow));
  }
  for (std::int64_t i = wholes * 8; i < bytes; ++i) to[i] = from[i] << 4 | from[i] >> 4;
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
  for (std::int64_t row = 0; row < frame.rows; ++row) {
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
