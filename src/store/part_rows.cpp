// SPDX-License-Identifier: Apache-2.0
#include "store/part_rows.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.h"

namespace stowage {
namespace {

// Some bytes of a tensor, which are a tensor themselves, of fewer rows of its parts:
//   offset      step          step
//   |-> [ run ] ... [ run ] ... [ run ]      `count` of them
struct Excerpt {
  std::optional<PartRows> rows;  // that it becomes, with the numbers of those that were asked for;
                                 // none: all
  std::uint64_t offset = 0, run = 0, step = 0, count = 0;

  std::uint64_t bytes() const { return run * count; }
  bool operator==(const Excerpt&) const = default;
};

// [first, last) with those beside them that lie in the same words or tiles.
PartRows rounded_out(const PartRows& rows, std::int64_t each, std::int64_t all) {
  return {rows.first / each * each, std::min(ceil_div(rows.last, each) * each, all)};
}

Excerpt all_of(std::uint64_t bytes) { return {{}, 0, bytes, bytes, 1}; }

// Rows one after another, each with as many bytes.
Excerpt beside(const PartRows& rows, std::uint64_t first, std::uint64_t last, std::uint64_t each) {
  return {rows, first * each, (last - first) * each, (last - first) * each, 1};
}

// Each byte has a number of the first half of the rows and one of the second: those of some rows of
// one half come with as many of the other.
Excerpt of_halves(const RowsPlace& part, std::uint64_t bytes) {
  const std::int64_t all = part.shape.rows(), half = all / 2;
  const auto [first, last] = part.rows;
  const std::int64_t count = last - first, at = first < half ? first : first - half;
  if (all % 2 != 0 || at + count > half || bytes % static_cast<std::uint64_t>(half) != 0)
    return all_of(bytes);
  const PartRows with_others =
      first < half ? PartRows{first, last + count} : PartRows{first - count, last};
  return beside(with_others, static_cast<std::uint64_t>(at), static_cast<std::uint64_t>(at + count),
                bytes / static_cast<std::uint64_t>(half));
}

Excerpt excerpt_of(const RowsPlace& part, std::uint64_t bytes) {
  const std::int64_t all = part.shape.rows();
  const PartForm& form = *part.form;
  if (form.is_whole() || form.rounded) {
    if (bytes % static_cast<std::uint64_t>(all) != 0) return all_of(bytes);
    const auto first = static_cast<std::uint64_t>(part.rows.first);
    return beside(part.rows, first, static_cast<std::uint64_t>(part.rows.last),
                  bytes / static_cast<std::uint64_t>(all));
  }
  if (form.folded) return of_halves(part, bytes);
  const auto cut = cut_of(form);
  const Shape words = tensor_shape(form, part.shape);
  const auto row = checked_mul(words[1], bytes_of_word(form));
  const auto held = row ? checked_mul(*row, words[0]) : row;
  if (!cut || !held || *held == 0 || !std::cmp_equal(*held, bytes)) return all_of(bytes);
  const auto row_bytes = static_cast<std::uint64_t>(*row);
  if (!cut->columns) {
    const PartRows rows = rounded_out(part.rows, cut->each * cut->unit, all);
    const std::int64_t last = rows.last == all ? words[0] : rows.last / cut->each;
    return beside(rows, static_cast<std::uint64_t>(rows.first / cut->each),
                  static_cast<std::uint64_t>(last), row_bytes);
  }
  const std::int64_t each = form.axis == PartForm::Axis::rows ? form.word / form.in_file : 1;
  const PartRows rows = rounded_out(part.rows, each, all);
  const std::int64_t width = ceil_div(rows.last, each) - rows.first / each;
  const auto word = static_cast<std::uint64_t>(bytes_of_word(form));
  return {rows, static_cast<std::uint64_t>(rows.first / each) * word,
          static_cast<std::uint64_t>(width) * word, row_bytes,
          static_cast<std::uint64_t>(words[0])};
}

// What all parts of the tensor are made of.
Excerpt excerpt_of(std::span<const RowsPlace> parts, std::uint64_t bytes) {
  std::optional<Excerpt> found;
  for (const RowsPlace& part : parts) {
    if (part.form->one) continue;
    const Excerpt own = excerpt_of(part, bytes);
    if (found && *found != own) return all_of(bytes);
    found = own;
  }
  return found.value_or(Excerpt{});
}

void read_from(const Excerpt& some, const ReadPiece& read, std::uint64_t offset,
               std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const std::uint64_t within = offset % some.run;
    const std::uint64_t size = std::min<std::uint64_t>(some.run - within, bytes.size());
    read(some.offset + offset / some.run * some.step + within, bytes.first(size));
    bytes = bytes.subspan(size), offset += size;
  }
}

// More rows than were asked for, of which those are kept.
class Spare {
 public:
  Spare(const RowsPlace& part, const PartRows& held)
      : out_(part.out),
        row_(part.out.size() / static_cast<std::size_t>(part.rows.last - part.rows.first)),
        skip_(static_cast<std::size_t>(part.rows.first - held.first)) {
    bytes_.resize(row_ * static_cast<std::size_t>(held.last - held.first));
  }
  std::span<std::byte> bytes() { return bytes_; }
  void keep() const {
    if (!out_.empty()) std::memcpy(out_.data(), bytes_.data() + skip_ * row_, out_.size());
  }

 private:
  std::span<std::byte> out_;
  std::size_t row_, skip_;  // bytes of a row; rows
  std::vector<std::byte> bytes_;
};

}  // namespace

std::uint64_t form_rows(std::span<const RowsPlace> parts, const Place& place, std::uint64_t bytes,
                        Dtype compute, const ReadPiece& read) {
  const bool are_none = std::ranges::all_of(
      parts, [](const RowsPlace& part) { return part.rows.first == part.rows.last; });
  if (are_none) return 0;
  const Excerpt some = excerpt_of(parts, bytes);
  std::vector<PartPlace> formed;
  std::vector<Spare> spare;
  spare.reserve(parts.size());
  for (const RowsPlace& part : parts) {
    if (part.form->one) {
      formed.push_back({part.form, part.shape, part.out});
      continue;
    }
    const PartRows held = some.rows.value_or(PartRows{0, part.shape.rows()});
    const bool fits = part.rows == held;
    if (!fits) spare.emplace_back(part, held);
    const std::span out = fits ? part.out : spare.back().bytes();
    if (part.form->is_whole())
      read_from(some, read, 0, out);
    else
      formed.push_back({part.form, {held.last - held.first, part.shape.row_elements()}, out});
  }
  Place at = place;
  if (some.count != 1) at.byte.reset();  // what is read lies in many places
  if (at.byte) *at.byte += some.offset;
  if (!formed.empty())
    form_parts(formed, at, some.bytes(), compute,
               [&](std::uint64_t offset, std::span<std::byte> piece) {
                 read_from(some, read, offset, piece);
               });
  for (const Spare& more : spare) more.keep();
  return some.bytes();
}

}  // namespace stowage
