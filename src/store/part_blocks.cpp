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
#include "store/part_lines.h"

namespace stowage {
namespace {

using Bytes = std::vector<std::byte>;

// Of a row of a part.
std::int64_t bytes_of_row(const PartForm& form, const Shape& part) {
  return form.in_part < 8 ? part.row_elements() : part.row_elements() * (form.in_part / 8);
}
std::int64_t in_records(const PartForm& form, std::int64_t bytes) {
  if (form.record == 0) return bytes;
  return checked_mul<std::int64_t>(ceil_div<std::int64_t>(bytes, form.span), form.record)
      .value_or(std::numeric_limits<std::int64_t>::max());
}
// Of a run, in the part.
std::int64_t bytes_of_run(const PartForm& form) { return form.halves * form.in_part / 8; }
bool fills_blocks(const PartForm& form, const Shape& part) {
  const std::int64_t bytes = bytes_of_row(form, part);
  return (form.record == 0 || bytes % form.span == 0) &&
         (form.halves == 0 || bytes % bytes_of_run(form) == 0);
}

// byte j of a run in the file:   [ 7..4: number j + n/2 | 3..0: number j ]
// byte j in the part:            [ 7..4: number 2j + 1 | 3..0: number 2j ]
constexpr std::size_t kRun = 16;
using Pairs = std::uint16_t __attribute__((vector_size(kRun)));
using Halves = std::uint8_t __attribute__((vector_size(kRun / 2)));
// Two numbers in a byte of each pair of bytes.
Halves joined(Pairs numbers) { return __builtin_convertvector(numbers | numbers >> 4, Halves); }
void join_run(const std::byte* from, std::byte* to, std::size_t half) {
  Pairs both;
  std::memcpy(&both, from, sizeof both);
  const Halves low = joined(both & 0x0f0f), high = joined(both >> 4 & 0x0f0f);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + half, &high, sizeof high);
}
using Run = std::uint8_t __attribute__((vector_size(kRun)));
Run joined_run(const std::byte* from) {
  Pairs both;
  std::memcpy(&both, from, sizeof both);
  Pairs low = both & 0x0f0f, high = both >> 4 & 0x0f0f;
  low |= low >> 4, high |= high >> 4;
  return __builtin_shufflevector(reinterpret_cast<Run>(low), reinterpret_cast<Run>(high), 0, 2, 4,
                                 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
void join_halves(const std::byte* from, std::byte* to, std::size_t bytes) {
  std::size_t i = 0;
  for (; 2 * i + kRun <= bytes; i += kRun / 2) join_run(from + 2 * i, to + i, bytes / 2);
  for (; i < bytes / 2; ++i) {
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

// Of six bits, a run of 4n numbers, n of them in a quarter:
//   byte j, then n + j in the file         [ 7..4: lower bits of number 2n + j | 3..0: of number j
//   ]
//                                          [ 7..4: of number 3n + j | 3..0: of number n + j ]
//   byte j behind those of all runs        [ 7..6: upper bits of 3n + j | 5..4 | 3..2 | 1..0: of j
//   ] in the part, eight in six bytes        one string
constexpr std::uint64_t kSix = 0x3f003f003f003f, kTwelve = 0x00000fff00000fff;
std::uint64_t join_six(std::uint64_t x) {
  x = (x & kSix) | (x >> 2 & kSix << 6);
  x = (x & kTwelve) | (x >> 4 & kTwelve << 12);
  return (x & 0xffffff) | (x >> 8 & 0xffffff000000);
}
std::uint64_t part_six(std::uint64_t x) {
  x = (x & 0xffffff) | (x & 0xffffff000000) << 8;
  x = (x & kTwelve) | (x & kTwelve << 12) << 4;
  return (x & kSix) | (x & kSix << 6) << 2;
}
using Run6 = std::array<std::uint8_t, 256>;
void join_planes(const std::uint8_t* low, const std::uint8_t* high, std::size_t n, std::byte* to) {
  Run6 all;
  for (std::size_t j = 0; j < n; ++j) {
    const unsigned a = low[j], b = low[n + j], h = high[j];
    all[j] = static_cast<std::uint8_t>((a & 15) | (h & 3) << 4);
    all[n + j] = static_cast<std::uint8_t>((b & 15) | (h >> 2 & 3) << 4);
    all[2 * n + j] = static_cast<std::uint8_t>(a >> 4 | (h >> 4 & 3) << 4);
    all[3 * n + j] = static_cast<std::uint8_t>(b >> 4 | h >> 6 << 4);
  }
  for (std::size_t i = 0; i < 4 * n; i += 8, to += 6) {
    std::uint64_t eight;
    std::memcpy(&eight, all.data() + i, sizeof eight);
    eight = join_six(eight);
    std::memcpy(to, &eight, 6);
  }
}
void split_planes(const std::byte* from, std::uint8_t* low, std::uint8_t* high, std::size_t n) {
  Run6 all;
  for (std::size_t i = 0; i < 4 * n; i += 8, from += 6) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, from, 6);
    eight = part_six(eight);
    std::memcpy(all.data() + i, &eight, sizeof eight);
  }
  for (std::size_t j = 0; j < n; ++j) {
    const unsigned a = all[j], b = all[n + j], c = all[2 * n + j], d = all[3 * n + j];
    low[j] = static_cast<std::uint8_t>((a & 15) | (c & 15) << 4);
    low[n + j] = static_cast<std::uint8_t>((b & 15) | (d & 15) << 4);
    high[j] = static_cast<std::uint8_t>(a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6);
  }
}
// `count`: bytes of the part.
template <bool kBack>
void move_planes(const PartForm& form, const std::byte* from, std::byte* to, std::size_t count) {
  const std::size_t quarter = form.halves / 4u, run = static_cast<std::size_t>(bytes_of_run(form));
  const std::size_t lower = std::size_t{form.span} / 3 * 2;  // bytes of a record
  std::size_t held = form.at;
  for (std::size_t i = 0; i < count; i += form.span, held += form.record) {
    for (std::size_t r = 0; r * run < form.span; ++r) {
      const std::size_t low = held + r * 2 * quarter, high = held + lower + r * quarter;
      if constexpr (kBack)
        split_planes(from + i + r * run, reinterpret_cast<std::uint8_t*>(to + low),
                     reinterpret_cast<std::uint8_t*>(to + high), quarter);
      else
        join_planes(reinterpret_cast<const std::uint8_t*>(from + low),
                    reinterpret_cast<const std::uint8_t*>(from + high), quarter, to + i + r * run);
    }
  }
}

// Runs of each record, one after another; or back.
template <bool kBack>
void move_runs(const PartForm& form, const std::byte* from, std::byte* to, std::size_t count,
               auto bytes) {
  const std::size_t span = form.record == 0 ? bytes : form.span;
  const std::size_t record = form.record == 0 ? bytes : form.record;
  const bool are_halves = form.halves != 0;
  std::size_t first = form.at;  // of a record, in the tensor
  for (std::size_t i = 0; i < count; i += span, first += record) {
    for (std::size_t run = 0; run < span; run += bytes) {
      const std::size_t packed = i + run, held = first + run;
      if (!are_halves)
        std::memcpy(to + (kBack ? held : packed), from + (kBack ? packed : held), bytes);
      else if (kBack)
        split_halves(from + packed, to + held, bytes);
      else
        join_halves(from + held, to + packed, bytes);
    }
  }
}
// Of records that have one run each, as many as fill lines of the part; returns its bytes. Halves
// are those of kRun bytes.
template <std::size_t kBytes, bool kHalves>
std::size_t put_runs(const PartForm& form, const std::byte* from, std::byte* to,
                     std::size_t count) {
  const std::byte* held = from + form.at;
  std::size_t i = 0;
  for (; i + kLine <= count; i += kLine) {
    Line line;
    auto* run = reinterpret_cast<std::byte*>(line.data());
    for (std::size_t r = 0; r < kLine / kBytes; ++r, run += kBytes, held += form.record) {
      if constexpr (kHalves) {
        const Run codes = joined_run(held);
        std::memcpy(run, &codes, sizeof codes);
      } else {
        std::memcpy(run, held, kBytes);
      }
    }
    put_line(line.data(), to + i);
  }
  finish_lines();
  return i;
}
std::size_t put_records(const PartForm& form, const std::byte* from, std::byte* to,
                        std::size_t count) {
  const bool are_halves = form.halves != 0;
  if (form.record == 0 || (are_halves && form.span != form.halves / 2)) return 0;
  if (form.span == 2 && !are_halves) return put_runs<2, false>(form, from, to, count);
  if (form.span == kRun && are_halves) return put_runs<kRun, true>(form, from, to, count);
  if (form.span == 32 && !are_halves) return put_runs<32, false>(form, from, to, count);
  return 0;
}
// The compiler knows the runs of blocks that exist. `count`: bytes of the part.
template <bool kBack>
void move_blocks(const PartForm& form, const std::byte* from, std::byte* to, std::size_t count) {
  if (form.in_part == 6) return move_planes<kBack>(form, from, to, count);
  if constexpr (!kBack) {
    const std::size_t done = put_records(form, from, to, count);
    if (done != 0) from += done / form.span * form.record, to += done, count -= done;
  }
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
  if (form.in_file == 6)  // planes
    return plain == words && fits && form.record != 0 && form.halves != 0 && form.halves % 8 == 0 &&
           form.most == 0 && form.span % bytes_of_run(form) == 0;
  return plain == words && is_width && fits && form.halves % 16 == 0 &&
         (form.halves == 0 || (form.in_file == 4 && form.span % (form.halves / 2) == 0)) &&
         (form.most == 0 || (form.record != 0 && form.in_file == 8));
}

Shape shape_of_blocks(const PartForm& form, const Shape& part) {
  return {part.rows(), in_records(form, bytes_of_row(form, part))};
}

std::size_t bytes_of_blocks(const PartForm& form, const Shape& part) noexcept {
  return static_cast<std::size_t>(part.rows() * bytes_of_row(form, part));
}

void part_of_blocks(const PartForm& form, const FormedTensor& tensor, const Shape& part,
                    std::span<std::byte> out) {
  const auto held = static_cast<std::size_t>(shape_of_blocks(form, part).elements());
  if (!fills_blocks(form, part) || tensor.bytes.size() != held)
    refuse(Refusal::dialect_part, tensor.place,
           formatted("{} bytes for blocks of {}", tensor.bytes.size(), to_string(part)));
  move_blocks<false>(form, tensor.bytes.data(), out.data(), out.size());
  if (const std::size_t at = first_beyond(form, out); at < out.size()) {
    Place place = tensor.place;
    if (place.byte) *place.byte += at / form.span * form.record + form.at + at % form.span;
    refuse(Refusal::dialect_part, place,
           formatted("{} for at most {}", std::to_integer<int>(out[at]), form.most));
  }
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
