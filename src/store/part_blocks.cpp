// SPDX-License-Identifier: Apache-2.0
#include "store/part_blocks.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;

// Of a row of a part.
std::int64_t bytes_of_row(const PartForm& form, const Shape& part) {
  return form.in_part == 4 ? part.row_elements() : part.row_elements() * (form.in_part / 8);
}
std::int64_t in_records(const PartForm& form, std::int64_t bytes) {
  if (form.record == 0) return bytes;
  return checked_mul<std::int64_t>(ceil_div<std::int64_t>(bytes, form.span), form.record)
      .value_or(std::numeric_limits<std::int64_t>::max());
}
bool fills_blocks(const PartForm& form, const Shape& part) {
  const std::int64_t bytes = bytes_of_row(form, part);
  return (form.record == 0 || bytes % form.span == 0) &&
         (form.halves == 0 || bytes % (form.halves / 2) == 0);
}

// byte j of a run in the file:   [ 7..4: number j + n/2 | 3..0: number j ]
// byte j in the part:            [ 7..4: number 2j + 1 | 3..0: number 2j ]
void join_halves(const std::byte* from, std::byte* to, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / 2; ++i) {
    std::uint16_t both;
    std::memcpy(&both, from + 2 * i, sizeof both);
    const unsigned low = both & 0x0f0fu, high = both >> 4 & 0x0f0fu;
    to[i] = static_cast<std::byte>(low | low >> 4);
    to[bytes / 2 + i] = static_cast<std::byte>(high | high >> 4);
  }
}
void split_halves(const std::byte* from, std::byte* to, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / 2; ++i) {
    const auto first = std::to_integer<unsigned>(from[i]);
    const auto second = std::to_integer<unsigned>(from[bytes / 2 + i]);
    const unsigned low = (first | first << 4) & 0x0f0fu, high = (second | second << 4) & 0x0f0fu;
    const auto both = static_cast<std::uint16_t>(low | high << 4);
    std::memcpy(to + 2 * i, &both, sizeof both);
  }
}

// Runs of each record, one after another; or back.
template <bool kBack>
void move_runs(const PartForm& form, const std::byte* from, std::byte* to, std::size_t count,
               auto bytes) {
  const std::size_t span = form.record == 0 ? bytes : form.span;
  const std::size_t record = form.record == 0 ? bytes : form.record;
  for (std::size_t i = 0; i < count; i += span) {
    for (std::size_t run = 0; run < span; run += bytes) {
      const std::size_t packed = i + run, held = i / span * record + form.at + run;
      if (form.halves == 0)
        std::memcpy(to + (kBack ? held : packed), from + (kBack ? packed : held), bytes);
      else if (kBack)
        split_halves(from + packed, to + held, bytes);
      else
        join_halves(from + held, to + packed, bytes);
    }
  }
}
// The compiler knows the runs of blocks that exist. `count`: bytes of the part.
template <bool kBack>
void move_blocks(const PartForm& form, const std::byte* from, std::byte* to, std::size_t count) {
  const auto move = [&](auto bytes) { move_runs<kBack>(form, from, to, count, bytes); };
  const std::size_t bytes = form.halves == 0 ? form.span : form.halves / 2u;
  if (bytes == 1) return move(std::integral_constant<std::size_t, 1>{});
  if (bytes == 2) return move(std::integral_constant<std::size_t, 2>{});
  if (bytes == 4) return move(std::integral_constant<std::size_t, 4>{});
  if (bytes == 8) return move(std::integral_constant<std::size_t, 8>{});
  if (bytes == 16) return move(std::integral_constant<std::size_t, 16>{});
  if (bytes == 32) return move(std::integral_constant<std::size_t, 32>{});
  move(bytes);
}

// The first number that its tensor must not have; none: how many there are.
std::size_t first_beyond(const PartForm& form, std::span<const std::byte> numbers) {
  if (form.most == 0) return numbers.size();
  const auto at =
      std::ranges::find_if(numbers, [&](std::byte b) { return b > std::byte{form.most}; });
  return static_cast<std::size_t>(at - numbers.begin());
}

}  // namespace

bool is_block(const PartForm& form) noexcept { return form.record != 0 || form.halves != 0; }

bool is_legal_block(const PartForm& form) noexcept {
  const PartForm words{.in_file = form.in_file,
                       .in_part = form.in_file,
                       .word = std::max<std::uint8_t>(form.in_file, 8)};
  PartForm plain = form;
  plain.record = plain.at = plain.span = plain.halves = plain.most = 0;
  const bool fits = form.record == 0 ? form.at == 0 && form.span == 0
                                     : form.span != 0 && form.span % (form.word / 8) == 0 &&
                                           form.at + form.span <= form.record;
  const bool is_width = form.in_file == 4 || form.in_file == 8 || form.in_file == 16;
  return plain == words && is_width && fits && form.halves % 16 == 0 &&
         (form.halves == 0 || (form.in_file == 4 && form.span % (form.halves / 2) == 0)) &&
         (form.most == 0 || (form.record != 0 && form.in_file == 8));
}

Shape shape_of_blocks(const PartForm& form, const Shape& part) {
  return {part.rows(), in_records(form, bytes_of_row(form, part))};
}

std::vector<std::byte> part_of_blocks(const PartForm& form, const FormedTensor& tensor,
                                      const Shape& part) {
  const auto bytes = static_cast<std::size_t>(part.rows() * bytes_of_row(form, part));
  const auto held = static_cast<std::size_t>(shape_of_blocks(form, part).elements());
  if (!fills_blocks(form, part) || tensor.bytes.size() != held)
    refuse(Refusal::dialect_part, tensor.place,
           formatted("{} bytes for blocks of {}", tensor.bytes.size(), to_string(part)));
  Bytes made(bytes);
  move_blocks<false>(form, tensor.bytes.data(), made.data(), bytes);
  if (const std::size_t at = first_beyond(form, made); at < made.size()) {
    Place place = tensor.place;
    if (place.byte) *place.byte += at / form.span * form.record + form.at + at % form.span;
    refuse(Refusal::dialect_part, place,
           formatted("{} for at most {}", std::to_integer<int>(made[at]), form.most));
  }
  return made;
}

std::vector<std::byte> blocks_of_part(const PartForm& form, std::span<const std::byte> bytes,
                                      const Shape& part) {
  if (!fills_blocks(form, part) ||
      !std::cmp_equal(bytes.size(), part.rows() * bytes_of_row(form, part)))
    throw Error(Code::invalid_argument,
                formatted("a part must fill its blocks, got {} bytes for {}", bytes.size(),
                          to_string(part)));
  if (const std::size_t at = first_beyond(form, bytes); at < bytes.size())
    throw Error(Code::invalid_argument, formatted("number {} of a part must be at most {}, got {}",
                                                  at, form.most, std::to_integer<int>(bytes[at])));
  Bytes made(static_cast<std::size_t>(shape_of_blocks(form, part).elements()));
  move_blocks<true>(form, bytes.data(), made.data(), bytes.size());
  return made;
}

}  // namespace stowage
