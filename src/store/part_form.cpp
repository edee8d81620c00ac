// SPDX-License-Identifier: Apache-2.0
#include "store/part_form.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "format/convert.h"
#include "store/part_octets.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTile = kTileRows * kTileColumns;
constexpr std::int64_t kSquare = 32;  // words: what the nearest cache holds of two matrices
constexpr PartForm kNoForm{};
using octets::kOctet, octets::Octets;

// Where the scale of a row and a group lies among tiles, each 32 rows of four quarters.
std::int64_t tiled(std::int64_t row, std::int64_t column, std::int64_t columns) {
  const std::int64_t tile = row / kTileRows * (columns / kTileColumns) + column / kTileColumns;
  return tile * kTile + row % 32 * 16 + row % kTileRows / 32 * kTileColumns + column % kTileColumns;
}

// The largest number where none is large enough: no tensor has it.
std::int64_t round_up(std::int64_t size, std::int64_t to) {
  return checked_mul(ceil_div(size, to), to).value_or(std::numeric_limits<std::int64_t>::max());
}

// Where the words of a tensor and the numbers of its part lie. A word is named by its place along
// the axis of its numbers, and across it.
struct Frame {
  Frame(const PartForm& of, const Shape& part)
      : form(of), run(of.word / of.in_file), rows(part.rows()), columns(part.row_elements()) {
    if (of.in_part == 4) columns *= 2;
    if (of.folded) columns = rows * columns / run, rows = run;
    const bool by_rows = of.axis == PartForm::Axis::rows;
    length = by_rows ? rows : columns;
    width = by_rows ? columns : rows;
    const Shape words = tensor_shape(of, part);
    const int down = by_rows == of.transposed ? 1 : 0;  // the dimension that runs along
    along = words[down], across = words[1 - down];
    breadth = words[1];
    step_along = down == 0 ? breadth : 1, step_across = down == 0 ? 1 : breadth;
  }
  std::int64_t word(std::int64_t i, std::int64_t o) const {
    if (!form.tiled) return i * step_along + o * step_across;
    return step_along == 1 ? tiled(o, i, breadth) : tiled(i, o, breadth);
  }
  // The one at `a` along the axis.
  std::int64_t number(std::int64_t a, std::int64_t o) const {
    return form.axis == PartForm::Axis::rows ? a * columns + o : o * columns + a;
  }
  bool has(std::int64_t a, std::int64_t o) const { return a < length && o < width; }
  // From one to the next along the axis.
  std::int64_t step() const { return form.axis == PartForm::Axis::rows ? columns : 1; }

  const PartForm& form;
  std::int64_t run;                      // numbers in a word
  std::int64_t rows, columns;            // of the part
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

void put_number(std::byte* part, int held, std::int64_t at, std::uint32_t number) {
  if (held == 4)
    part[at / 2] |= static_cast<std::byte>(number << (at % 2 * 4));
  else if (held == 8)
    part[at] = static_cast<std::byte>(number);
  else
    put_value(part, at, static_cast<std::uint16_t>(number));
}
std::uint32_t number_at(const std::byte* part, int held, std::int64_t at) {
  if (held == 4) return std::to_integer<std::uint32_t>(part[at / 2]) >> (at % 2 * 4) & 15;
  if (held == 8) return std::to_integer<std::uint32_t>(part[at]);
  return value_at<std::uint16_t>(part, at);
}

// Taken from a word as one number.
std::uint32_t taken(const PartForm& form) {
  std::uint32_t all = 0;
  for (int bit = 0; bit < form.word; bit += form.in_file) all |= std::uint32_t{form.less} << bit;
  return all;
}

[[noreturn]] void refuse_stray(const FormedTensor& tensor, std::int64_t byte) {
  Place place = tensor.place;
  if (place.byte) *place.byte += static_cast<std::uint64_t>(byte);
  refuse(Refusal::dialect_part, place, "a value of no group of the weight, which is not 0");
}

// Words that a faster way has moved: all that are before both.
struct Moved {
  std::int64_t along = 0, across = 0;
};
template <class Visit>
void each_word(const Frame& frame, const Moved& moved, Visit visit) {
  for (std::int64_t o = 0; o < frame.across; ++o)
    for (std::int64_t i = o < moved.across ? moved.along : 0; i < frame.along; ++i) visit(i, o);
}

[[noreturn]] void refuse_wide(const PartForm& form, const FormedTensor& tensor, std::int64_t byte,
                              std::uint32_t number) {
  Place place = tensor.place;
  if (place.byte) *place.byte += static_cast<std::uint64_t>(byte);
  refuse(Refusal::dialect_part, place,
         formatted("{} for a number of {} bits", static_cast<std::int8_t>(number), form.in_part));
}

// The definition of a form, number by number, and its way back.
template <class Word>
void read_words(const Frame& frame, const Moved& moved, const FormedTensor& tensor,
                std::span<std::byte> part) {
  const PartForm& form = frame.form;
  const std::uint32_t more = taken(form), mask = (1u << form.in_file) - 1;
  const int bits = form.in_file, in_part = form.in_part, run = static_cast<int>(frame.run);
  const std::int64_t step = frame.step();
  const bool is_narrow = in_part < bits;
  each_word(frame, moved, [&](std::int64_t i, std::int64_t o) {
    const std::int64_t at = frame.word(i, o);
    const std::uint32_t word = value_at<Word>(tensor.bytes.data(), at) + more;
    const std::int64_t first = frame.number(i * frame.run, o);
    const bool is_full = frame.has((i + 1) * frame.run - 1, o);
    if (is_full && in_part == 8) {  // zero points of few groups
      for (int j = 0; j < run; ++j)
        part[static_cast<std::size_t>(first + form.order[static_cast<std::size_t>(j)] * step)] =
            static_cast<std::byte>((word >> (j * bits) & mask) - form.bias);
      return;
    }
    for (int j = 0; j < run; ++j) {
      const std::uint32_t number = word >> (j * bits) & mask;
      const std::int64_t next = form.order[static_cast<std::size_t>(j)];
      const std::int64_t byte = at * static_cast<std::int64_t>(sizeof(Word)) + j * bits / 8;
      if (!is_full && !frame.has(i * frame.run + next, o)) {
        if (number != 0) refuse_stray(tensor, byte);
        continue;
      }
      const std::uint32_t held = number - form.bias;
      if (is_narrow && (held & mask) >> in_part != 0) refuse_wide(form, tensor, byte, number);
      put_number(part.data(), in_part, first + next * step, in_part <= bits ? held & mask : held);
    }
  });
}

template <class Word>
void write_words(const Frame& frame, const Moved& moved, const std::byte* part, Bytes& tensor) {
  const PartForm& form = frame.form;
  const std::uint32_t more = taken(form), mask = (1u << std::max(form.in_file, form.in_part)) - 1;
  each_word(frame, moved, [&](std::int64_t i, std::int64_t o) {
    std::uint32_t word = 0;
    for (int j = 0; j < frame.run; ++j) {
      const std::int64_t a = i * frame.run + form.order[static_cast<std::size_t>(j)];
      if (!frame.has(a, o)) continue;
      const std::int64_t at = frame.number(a, o);
      const std::uint32_t number = (number_at(part, form.in_part, at) + form.bias) & mask;
      if (number >> form.in_file != 0)
        throw Error(Code::invalid_argument,
                    formatted("number {} of a part must fit {} bits, got {}", at, form.in_file,
                              static_cast<std::int8_t>(number - form.bias)));
      word |= number << (j * form.in_file);
    }
    put_value(tensor.data(), frame.word(i, o), static_cast<Word>(word - more));
  });
}

// Words that the part has as the file has them, but for the highest bits of numbers, at other
// places.
bool moves_words(const PartForm& form) {
  const bool flips = form.in_file <= 8 && form.bias == 1 << (form.in_file - 1);
  return form.in_file == form.in_part && form.axis == PartForm::Axis::columns && !form.tiled &&
         form.order == kNoForm.order && (form.bias == 0 || flips) && form.less == 0;
}
template <class Word, bool kBack>
Moved move_words(const Frame& frame, const std::byte* from, std::byte* to) {
  const std::uint32_t highest = frame.form.in_file == 4 ? 0x88888888u : 0x80808080u;
  const Word flip = frame.form.bias == 0 ? Word{0} : static_cast<Word>(highest);
  const std::int64_t wholes = frame.columns / frame.run, size = sizeof(Word);
  const std::int64_t row_bytes = frame.columns * frame.form.in_part / 8;
  for (std::int64_t r = 0; r < frame.rows; r += kSquare) {
    for (std::int64_t w = 0; w < wholes; w += kSquare) {
      for (std::int64_t i = w; i < std::min(w + kSquare, wholes); ++i) {
        for (std::int64_t row = r; row < std::min(r + kSquare, frame.rows); ++row) {
          const std::int64_t part = row * row_bytes + i * size;
          const std::int64_t tensor = (i * frame.step_along + row * frame.step_across) * size;
          Word word;
          std::memcpy(&word, from + (kBack ? part : tensor), sizeof word);
          word ^= flip;
          std::memcpy(to + (kBack ? tensor : part), &word, sizeof word);
        }
      }
    }
  }
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
  const std::int64_t row_bytes = frame.columns * (kSpreads ? 2 : 1) / 2, size = sizeof(Eight);
  const auto part = [&](std::int64_t i, std::size_t j, std::int64_t k) {
    return (i * kOctet + form.order[j]) * row_bytes + k / kOctet * size;
  };
  const auto tensor = [&](std::int64_t i, std::size_t j, std::int64_t k) {
    return i * frame.step_along + (k + static_cast<std::int64_t>(j)) * frame.step_across;
  };
  for (std::int64_t k = 0; k < columns; k += kOctet) {
    for (std::int64_t i = 0; i < wholes; ++i) {
      Octets words;
      for (std::size_t j = 0; j < words.size(); ++j) {
        if constexpr (kBack) {
          const Eight eight = value_at<Eight>(from + part(i, j, k), 0);
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

template <class Fn>
void with_word(const PartForm& form, Fn fn) {
  if (form.word == 8) return fn(std::uint8_t{});
  if (form.word == 16) return fn(std::uint16_t{});
  fn(std::uint32_t{});
}

float rounded(float x, Dtype compute) {
  if (compute == Dtype::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (compute == Dtype::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

constexpr float kOne = 1;

void round_all(std::span<const std::byte> bytes, Dtype compute, std::byte* out) {
  const auto count = static_cast<std::int64_t>(bytes.size() / sizeof(float));
  for (std::int64_t i = 0; i < count; ++i)
    put_value(out, i, rounded(value_at<float>(bytes.data(), i), compute));
}

bool is_nothing(const FormedTensor& tensor, const Shape& part) {
  return part.elements() == 0 && tensor.bytes.empty();  // however many rows of nothing
}

std::size_t bytes_of_part(const PartForm& form, const FormedTensor& tensor, const Shape& part) {
  if (form.one) return sizeof kOne;
  if (form.rounded || form.is_whole() || is_nothing(tensor, part)) return tensor.bytes.size();
  if (is_block(form)) return bytes_of_blocks(form, part);
  if (is_string(form)) return static_cast<std::size_t>(part.elements());
  const Frame frame(form, part);
  return static_cast<std::size_t>(frame.rows * frame.columns * form.in_part / 8);
}

std::size_t bytes_of(const PartForm& form, const Frame& frame) {
  return static_cast<std::size_t>(frame.along * frame.across * form.word / 8);
}

}  // namespace

// Whether the other fields fit a part in halves: codes by two in a byte, one of each.
static bool is_folded(const PartForm& form) noexcept {
  return form.in_file == 4 && form.in_part == 4 && form.word == 8 &&
         form.axis == PartForm::Axis::rows && !form.transposed && !form.tiled && form.bias == 0 &&
         form.less == 0;
}

bool is_legal(const PartForm& form) noexcept {
  if (form.in_file == 0)
    return form == PartForm{.rounded = form.rounded, .one = form.one} &&
           !(form.rounded && form.one);
  if (is_block(form)) return is_legal_block(form);
  if (is_string(form)) return is_legal_string(form);
  const auto is_width = [](int bits) { return bits == 4 || bits == 8 || bits == 16; };
  const bool is_narrow = form.in_file == 8 && form.in_part == 4 && form.less == 0;
  const bool widths = is_width(form.in_file) && is_width(form.in_part) &&
                      (form.in_file <= form.in_part || is_narrow) &&
                      (form.word == 8 || form.word == 16 || form.word == 32) &&
                      (form.in_part != 16 || form.in_file == 16) && form.in_file <= form.word;
  if (!widths || form.rounded || form.string || form.axis > PartForm::Axis::rows) return false;
  if ((form.bias | form.less) >> std::min<int>(form.in_file, 8) != 0) return false;
  if (form.bias != 0 && form.in_part == 16) return false;
  if (form.folded && !is_folded(form)) return false;
  std::array<bool, 8> seen{};
  const auto run = static_cast<std::size_t>(form.word / form.in_file);
  for (std::size_t j = 0; j < seen.size(); ++j) {
    if (form.order[j] >= seen.size() || (j < run ? form.order[j] >= run : form.order[j] != j))
      return false;
    seen[form.order[j]] = true;
  }
  return std::ranges::all_of(seen, std::identity{});
}

Shape tensor_shape(const PartForm& form, const Shape& part) {
  if (is_block(form)) return shape_of_blocks(form, part);
  if (is_string(form)) return shape_of_strings(form, part);
  const std::int64_t run = form.word / form.in_file;
  std::int64_t rows = part.rows(), columns = part.row_elements() * (form.in_part == 4 ? 2 : 1);
  if (form.folded) columns = rows * columns / run, rows = run;
  std::int64_t& length = form.axis == PartForm::Axis::rows ? rows : columns;
  length = ceil_div(length, run);
  if (form.transposed) std::swap(rows, columns);
  if (form.tiled) rows = round_up(rows, kTileRows), columns = round_up(columns, kTileColumns);
  return Shape{rows, columns};
}

Bytes part_of_tensor(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                     Dtype compute) {
  Bytes made(bytes_of_part(form, tensor, part));
  form_part(form, tensor, part, compute, made);
  return made;
}

void form_part(const PartForm& form, const FormedTensor& tensor, const Shape& part, Dtype compute,
               std::span<std::byte> out) {
  if (form.rounded) return round_all(tensor.bytes, compute, out.data());
  if (form.one) return put_value(out.data(), 0, kOne);
  if (form.is_whole()) return void(std::ranges::copy(tensor.bytes, out.begin()));
  if (is_nothing(tensor, part)) return;
  if (is_block(form)) return part_of_blocks(form, tensor, part, out);
  if (is_string(form)) return part_of_strings(form, tensor, part, out);
  const Frame frame(form, part);
  if (tensor.bytes.size() != bytes_of(form, frame))
    refuse(Refusal::dialect_part, tensor.place,
           formatted("{} bytes for {} words of {} bits", tensor.bytes.size(),
                     to_string(tensor_shape(form, part)), form.word));
  std::ranges::fill(out, std::byte{});  // numbers of half a byte are put to what is there
  with_word(form, [&]<class Word>(Word) {
    const Moved moved = move_large<Word, false>(frame, tensor.bytes.data(), out.data());
    read_words<Word>(frame, moved, tensor, out);
  });
}

inline namespace v0 {

Bytes tensor_of_part(const PartForm& form, std::span<const std::byte> bytes, const Shape& part) {
  if (form.rounded)
    throw Error(Code::invalid_argument, "a part must not be rounded to become a tensor again");
  if (form.is_whole()) return {bytes.begin(), bytes.end()};
  if (form.one && !std::ranges::equal(bytes, std::as_bytes(std::span(&kOne, 1))))
    throw Error(Code::invalid_argument, "a number over scales must be 1, its tensor has no other");
  if (form.one) return {};
  if (part.elements() == 0 && bytes.empty()) return {};
  if (is_block(form)) return blocks_of_part(form, bytes, part);
  if (is_string(form)) return strings_of_part(form, bytes, part);
  const Frame frame(form, part);
  if (bytes.size() != static_cast<std::size_t>(frame.rows * frame.columns * form.in_part / 8))
    throw Error(Code::invalid_argument,
                formatted("a part must have numbers of {} bits, got {} bytes for {}", form.in_part,
                          bytes.size(), to_string(part)));
  Bytes made(bytes_of(form, frame));
  with_word(form, [&]<class Word>(Word) {
    const Moved moved = move_large<Word, true>(frame, bytes.data(), made.data());
    write_words<Word>(frame, moved, bytes.data(), made);
  });
  return made;
}

}  // namespace v0
}  // namespace stowage
