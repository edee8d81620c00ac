// SPDX-License-Identifier: Apache-2.0
#include "store/part_strings.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::int64_t kStringWord = 32, kStringBytes = 4;

// Numbers of a word that has whole ones, from the lowest bits up: the rest of it is 0.
std::int64_t whole_in_word(const PartForm& form) { return kStringWord / form.in_file; }
bool lies_in_rows(const PartForm& form) { return form.axis == PartForm::Axis::columns; }

// Numbers of a row of the part, which has bytes of them or a string.
std::int64_t columns_of(const PartForm& form, const Shape& part) {
  return form.in_part == 8 ? part.row_elements() : part.row_elements() * 8 / form.in_part;
}
// Words for so many numbers; more than any where there are none.
std::int64_t words_for(const PartForm& form, std::int64_t numbers) {
  if (!form.string) return ceil_div(numbers, whole_in_word(form));
  const auto bits = checked_mul<std::int64_t>(numbers, form.in_file);
  return bits ? ceil_div(*bits, kStringWord) : std::numeric_limits<std::int64_t>::max();
}

std::uint32_t string_word(const std::byte* tensor, std::int64_t at) {
  std::uint32_t word;
  std::memcpy(&word, tensor + at * kStringBytes, sizeof word);
  return word;
}
void put_string_word(std::byte* tensor, std::int64_t at, std::uint32_t word) {
  std::memcpy(tensor + at * kStringBytes, &word, sizeof word);
}

[[noreturn]] void refuse_bits(const FormedTensor& tensor, std::int64_t word) {
  Place place = tensor.place;
  if (place.byte) *place.byte += static_cast<std::uint64_t>(word * kStringBytes);
  refuse(Refusal::dialect_part, place, "bits of no number of the weight, which are not 0");
}

// StringRows of a part that are strings too: each word has the next bits of one.
//   whole numbers   word w:  [ 0 | numbers (w + 1) r - 1 ... w r ],  r = 32 / bits
//   one string      word w:  bits 32 w to 32 w + 31 of it
struct StringRows {
  const PartForm& form;
  std::int64_t rows, words, bytes, bits;  // of the part; of a row of the tensor and of the part
  std::int64_t each;                      // bits of the string in a word
  StringRows(const PartForm& of, const Shape& part)
      : form(of),
        rows(part.rows()),
        words(words_for(of, columns_of(of, part))),
        bytes(part.row_elements()),
        bits(columns_of(of, part) * of.in_file),
        each(of.string ? kStringWord : whole_in_word(of) * of.in_file) {}

  void read(const FormedTensor& tensor, std::byte* out) const {
    for (std::int64_t row = 0; row < rows; ++row, out += bytes) {
      std::uint64_t held = 0;
      std::int64_t count = 0, done = 0, left = bits;
      for (std::int64_t w = row * words; w < (row + 1) * words; ++w) {
        const std::uint64_t word = string_word(tensor.bytes.data(), w);
        const std::int64_t some = std::min(each, left);
        if (word >> some != 0) refuse_bits(tensor, w);
        held |= word << count;
        count += some, left -= some;
        const std::int64_t whole = left == 0 ? count / 8 : count / kStringWord * kStringBytes;
        std::memcpy(out + done, &held, static_cast<std::size_t>(whole));
        done += whole, count -= whole * 8;
        held = whole == 8 ? 0 : held >> (whole * 8);
      }
    }
  }
  void write(const std::byte* part, std::byte* tensor) const {
    for (std::int64_t row = 0; row < rows; ++row, part += bytes) {
      std::uint64_t held = 0;
      std::int64_t count = 0, done = 0, left = bits;
      for (std::int64_t w = row * words; w < (row + 1) * words; ++w) {
        const std::int64_t some = std::min(each, left);
        if (count < some) {
          const std::int64_t more = std::min(kStringBytes, bytes - done);
          std::uint32_t next = 0;
          std::memcpy(&next, part + done, static_cast<std::size_t>(more));
          held |= std::uint64_t{next} << count;
          done += more, count += more * 8;
        }
        put_string_word(tensor, w,
                        static_cast<std::uint32_t>(held & ((std::uint64_t{1} << some) - 1)));
        held >>= some;
        count -= some, left -= some;
      }
    }
  }
};

// Numbers of a byte each, which lie down the columns of the tensor: few, so one by one.
struct StringColumns {
  const PartForm& form;
  std::int64_t rows, columns;
  StringColumns(const PartForm& of, const Shape& part)
      : form(of), rows(part.rows()), columns(part.row_elements()) {}

  // Calls visit(word, bit) where number `row` of column `column` begins; it may go on in the next
  // word of the column.
  template <class Visit>
  void at(std::int64_t row, std::int64_t column, Visit visit) const {
    const std::int64_t bit = form.string ? row * form.in_file
                                         : row / whole_in_word(form) * kStringWord +
                                               row % whole_in_word(form) * form.in_file;
    visit(bit / kStringWord * columns + column, bit % kStringWord);
  }
  // That bits of no number are 0.
  void check(const FormedTensor& tensor, std::int64_t words) const {
    const std::int64_t each = form.string ? kStringWord : whole_in_word(form) * form.in_file;
    for (std::int64_t w = 0; w < words; ++w) {
      const std::int64_t some = std::min(each, rows * form.in_file - w * each);
      for (std::int64_t at = w * columns; at < (w + 1) * columns; ++at)
        if (std::uint64_t{string_word(tensor.bytes.data(), at)} >> some != 0)
          refuse_bits(tensor, at);
    }
  }
  void read(const std::byte* tensor, std::byte* out) const {
    const std::uint32_t mask = (1u << form.in_file) - 1;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t column = 0; column < columns; ++column)
        at(row, column, [&](std::int64_t word, std::int64_t bit) {
          std::uint64_t number = string_word(tensor, word) >> bit;
          if (bit + form.in_file > kStringWord)
            number |= std::uint64_t{string_word(tensor, word + columns)} << (kStringWord - bit);
          out[row * columns + column] = static_cast<std::byte>((number & mask) - form.bias);
        });
  }
  void write(const std::byte* part, std::byte* tensor) const {
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t column = 0; column < columns; ++column)
        at(row, column, [&](std::int64_t word, std::int64_t bit) {
          const std::int64_t place = row * columns + column;
          const auto number = static_cast<std::int8_t>(part[place]);
          const std::int64_t code = std::int64_t{number} + form.bias;
          if (code < 0 || code >> form.in_file != 0)
            throw Error(Code::invalid_argument,
                        formatted("number {} of a part must fit {} bits, got {}", place,
                                  form.in_file, number));
          const std::uint64_t both = static_cast<std::uint64_t>(code) << bit;
          put_string_word(tensor, word,
                          string_word(tensor, word) | static_cast<std::uint32_t>(both));
          if (both >> kStringWord != 0)
            put_string_word(tensor, word + columns,
                            string_word(tensor, word + columns) |
                                static_cast<std::uint32_t>(both >> kStringWord));
        });
  }
};

}  // namespace

bool is_string(const PartForm& form) noexcept {
  return form.in_file > 1 && form.in_file < 8 && form.in_file != 4 && !is_block(form);
}

bool is_legal_string(const PartForm& form) noexcept {
  const PartForm plain{.in_file = form.in_file,
                       .in_part = form.in_part,
                       .word = kStringWord,
                       .axis = form.axis,
                       .bias = form.bias,
                       .string = form.string};
  if (form != plain) return false;
  if (form.axis == PartForm::Axis::columns) return form.in_part == form.in_file && form.bias == 0;
  return form.axis == PartForm::Axis::rows && form.in_part == 8 && form.bias >> form.in_file == 0;
}

Shape shape_of_strings(const PartForm& form, const Shape& part) {
  if (lies_in_rows(form)) return {part.rows(), words_for(form, columns_of(form, part))};
  return {words_for(form, part.rows()), part.row_elements()};
}

void part_of_strings(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                     std::span<std::byte> out) {
  const Shape words = shape_of_strings(form, part);
  const bool fills = !lies_in_rows(form) || part.row_elements() % form.in_part == 0;
  if (!fills || !std::cmp_equal(tensor.bytes.size(), words.elements() * kStringBytes))
    refuse(Refusal::dialect_part, tensor.place,
           formatted("{} bytes for {} words of 32 bits", tensor.bytes.size(), to_string(words)));
  if (lies_in_rows(form)) return StringRows(form, part).read(tensor, out.data());
  const StringColumns columns(form, part);
  columns.check(tensor, words[0]);
  columns.read(tensor.bytes.data(), out.data());
}

std::vector<std::byte> strings_of_part(const PartForm& form, std::span<const std::byte> bytes,
                                       const Shape& part) {
  const bool fills = !lies_in_rows(form) || part.row_elements() % form.in_part == 0;
  if (!fills || !std::cmp_equal(bytes.size(), part.elements()))
    throw Error(Code::invalid_argument,
                formatted("a part must have numbers of {} bits, got {} bytes for {}", form.in_part,
                          bytes.size(), to_string(part)));
  Bytes made(static_cast<std::size_t>(shape_of_strings(form, part).elements() * kStringBytes));
  if (lies_in_rows(form))
    StringRows(form, part).write(bytes.data(), made.data());
  else
    StringColumns(form, part).write(bytes.data(), made.data());
  return made;
}

}  // namespace stowage
