// SPDX-License-Identifier: Apache-2.0
#include "store/part_blocks.h"

#include <algorithm>
#include <array>
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

// So many bytes of each record, one after another; or back. Spans of blocks that exist are known
// to the compiler.
template <bool kBack>
void copy_spans(const PartForm& form, const std::byte* from, std::byte* to, std::size_t records) {
  const auto copy = [&](auto span) {
    for (std::size_t i = 0; i < records; ++i) {
      const std::size_t record = i * form.record + form.at, packed = i * span;
      std::memcpy(to + (kBack ? record : packed), from + (kBack ? packed : record), span);
    }
  };
  if (form.span == 1) return copy(std::integral_constant<std::size_t, 1>{});
  if (form.span == 2) return copy(std::integral_constant<std::size_t, 2>{});
  if (form.span == 16) return copy(std::integral_constant<std::size_t, 16>{});
  if (form.span == 32) return copy(std::integral_constant<std::size_t, 32>{});
  copy(std::size_t{form.span});
}

// The low halves of eight bytes in four, and back.
std::uint32_t drawn_together(std::uint64_t x) {
  x &= 0x0f0f0f0f0f0f0f0f;
  x = (x | x >> 4) & 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return static_cast<std::uint32_t>(x | x >> 16);
}
std::uint64_t drawn_apart(std::uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}

// byte j of a run in the file:   [ 7..4: number j + n/2 | 3..0: number j ]
// byte j in the part:            [ 7..4: number 2j + 1 | 3..0: number 2j ]
template <bool kBack>
void join_halves(std::size_t numbers, Bytes& bytes) {
  std::array<std::byte, 128> run;
  const std::size_t size = numbers / 2, high = size / 2;
  for (std::size_t begin = 0; begin < bytes.size(); begin += size) {
    std::byte* const to = bytes.data() + begin;
    std::memcpy(run.data(), to, size);
    for (std::size_t i = 0; i < high; i += 4) {
      if constexpr (kBack) {
        std::uint32_t first = 0, second = 0;
        std::memcpy(&first, run.data() + i, sizeof first);
        std::memcpy(&second, run.data() + high + i, sizeof second);
        const std::uint64_t both = drawn_apart(first) | drawn_apart(second) << 4;
        std::memcpy(to + 2 * i, &both, sizeof both);
      } else {
        std::uint64_t both = 0;
        std::memcpy(&both, run.data() + 2 * i, sizeof both);
        const std::uint32_t first = drawn_together(both), second = drawn_together(both >> 4);
        std::memcpy(to + i, &first, sizeof first);
        std::memcpy(to + high + i, &second, sizeof second);
      }
    }
  }
}

// The first number that its tensor must not have; none: how many there are.
std::size_t first_beyond(const PartForm& form, const Bytes& numbers) {
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
         (form.halves == 0 || form.in_file == 4) &&
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
  if (form.record == 0)
    std::ranges::copy(tensor.bytes, made.begin());
  else
    copy_spans<false>(form, tensor.bytes.data(), made.data(), bytes / form.span);
  if (form.halves != 0) join_halves<false>(form.halves, made);
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
  Bytes made(bytes.begin(), bytes.end());
  if (const std::size_t at = first_beyond(form, made); at < made.size())
    throw Error(Code::invalid_argument, formatted("number {} of a part must be at most {}, got {}",
                                                  at, form.most, std::to_integer<int>(made[at])));
  if (form.halves != 0) join_halves<true>(form.halves, made);
  if (form.record == 0) return made;
  Bytes records(static_cast<std::size_t>(shape_of_blocks(form, part).elements()));
  copy_spans<true>(form, made.data(), records.data(), made.size() / form.span);
  return records;
}

}  // namespace stowage
