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
#include "store/part_frame.h"
#include "store/part_moves.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;
void put_number(std::byte* part, int held, std::int64_t at, std::uint32_t number) {
  if (held == 4)
    part[at / 2] = (part[at / 2] & static_cast<std::byte>(at % 2 == 0 ? 0xf0 : 0x0f)) |
                   static_cast<std::byte>(number << (at % 2 * 4));
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

[[noreturn]] void refuse_stray(const FormedTensor& tensor, std::int64_t byte) {
  Place place = tensor.place;
  if (place.byte) *place.byte += static_cast<std::uint64_t>(byte);
  refuse(Refusal::dialect_part, place, "a value of no group of the weight, which is not 0");
}

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
                std::byte* part) {
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
        part[first + form.order[static_cast<std::size_t>(j)] * step] =
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
      put_number(part, in_part, first + next * step, in_part <= bits ? held & mask : held);
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

std::size_t bytes_of_numbers(const PartForm& form, const Shape& part) {
  return static_cast<std::size_t>(part.elements() * std::max(form.in_part / 8, 1));
}

std::size_t bytes_of_part(const PartForm& form, const FormedTensor& tensor, const Shape& part) {
  if (form.one) return sizeof kOne;
  if (form.rounded || form.is_whole() || is_nothing(tensor, part)) return tensor.bytes.size();
  if (is_block(form)) return bytes_of_blocks(form, part);
  if (is_string(form)) return static_cast<std::size_t>(part.elements());
  return bytes_of_numbers(form, part);
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
  return shape_of_words(form, part);
}

Bytes part_of_tensor(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                     Dtype compute) {
  Bytes made(bytes_of_part(form, tensor, part));
  form_part(form, tensor, part, compute, made);
  return made;
}

void form_part(const PartForm& form, const FormedTensor& tensor, const Shape& part, Dtype compute,
               std::span<std::byte> out, std::int64_t row_bytes) {
  Room room;
  form_part(form, tensor, part, compute, out, row_bytes, room);
}

void form_part(const PartForm& form, const FormedTensor& tensor, const Shape& part, Dtype compute,
               std::span<std::byte> out, std::int64_t row_bytes, Room& room) {
  if (form.rounded) return round_all(tensor.bytes, compute, out.data());
  if (form.one) return put_value(out.data(), 0, kOne);
  if (form.is_whole()) return void(std::ranges::copy(tensor.bytes, out.begin()));
  if (is_nothing(tensor, part)) return;
  if (is_block(form)) return part_of_blocks(form, tensor, part, out);
  if (is_string(form)) return part_of_strings(form, tensor, part, out);
  const Frame frame(form, part, room, row_bytes);
  if (tensor.bytes.size() != bytes_of(form, frame))
    refuse(Refusal::dialect_part, tensor.place,
           formatted("{} bytes for {} words of {} bits", tensor.bytes.size(),
                     to_string(tensor_shape(form, part)), form.word));
  const Moved moved = move_to_part(frame, tensor.bytes.data(), out.data());
  with_word(form, [&]<class Word>(Word) { read_words<Word>(frame, moved, tensor, out.data()); });
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
  if (bytes.size() != bytes_of_numbers(form, part))
    throw Error(Code::invalid_argument,
                formatted("a part must have numbers of {} bits, got {} bytes for {}", form.in_part,
                          bytes.size(), to_string(part)));
  Room room;
  const Frame frame(form, part, room);
  Bytes made(bytes_of(form, frame));
  const Moved moved = move_to_tensor(frame, bytes.data(), made.data());
  with_word(form, [&]<class Word>(Word) { write_words<Word>(frame, moved, bytes.data(), made); });
  return made;
}

}  // namespace v0
}  // namespace stowage
