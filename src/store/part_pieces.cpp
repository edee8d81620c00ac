// SPDX-License-Identifier: Apache-2.0
#include "store/part_pieces.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "store/part_frame.h"
#include "store/part_turns.h"

namespace stowage {

std::optional<Cut> cut_of(const PartForm& form) {
  if (form.is_whole() || form.rounded || form.one || form.folded) return {};
  if (is_block(form)) return Cut{.columns = false, .each = 1, .unit = 1};
  const bool by_rows = form.axis == PartForm::Axis::rows;
  if (is_string(form)) {
    if (by_rows) return {};
    return Cut{.columns = false, .each = 1, .unit = 1};
  }
  const std::int64_t run = form.word / form.in_file;
  if (form.tiled && (by_rows || form.transposed)) return {};
  if (!form.transposed)
    return Cut{.columns = false, .each = by_rows ? run : 1, .unit = form.tiled ? kTileRows : 1};
  if (by_rows) return Cut{.columns = true, .each = 1, .unit = kLineCodes};
  return Cut{.columns = true, .each = run, .unit = kLineWords};
}

std::int64_t bytes_of_word(const PartForm& form) {
  return is_block(form) ? 1 : std::max(form.word / 8, 1);
}

namespace {

constexpr std::int64_t kMost = 8 << 20;  // bytes of a piece, for more than a line of each row

// A tensor in rows that are cut alike for all its parts.
struct Rows {
  Cut cut;
  std::int64_t count, bytes;  // of the tensor; of each

  static std::optional<Rows> of(std::span<const PartPlace> parts, std::uint64_t bytes) {
    std::optional<Rows> found;
    for (const PartPlace& part : parts) {
      if (part.form->one) continue;  // no part of the tensor
      const auto cut = cut_of(*part.form);
      if (!cut || part.out.empty()) return {};
      const Shape words = tensor_shape(*part.form, part.shape);
      const auto row = checked_mul(words[1], bytes_of_word(*part.form));
      const auto all = row ? checked_mul(*row, words[0]) : row;
      if (!all || *all == 0 || !std::cmp_equal(*all, bytes)) return {};
      const Rows rows{*cut, words[0], *row};
      if (found && (found->cut != rows.cut || found->count != rows.count)) return {};
      found = rows;
    }
    return found;
  }
  std::int64_t step(std::int64_t piece) const {
    std::int64_t unit = cut.unit;
    if (cut.columns && bytes <= kMost / (unit * kLinesBeside)) unit *= kLinesBeside;
    return std::max<std::int64_t>(piece / (bytes * unit), 1) * unit;
  }
};

struct Piece {
  std::int64_t first, count;  // rows of the tensor
};

void form_piece(const PartPlace& part, const Cut& cut, const Piece& piece,
                const FormedTensor& tensor, Dtype compute) {
  const std::int64_t rows = part.shape.rows(), row_elements = part.shape.row_elements();
  const std::int64_t row_bytes = static_cast<std::int64_t>(part.out.size()) / rows;
  const std::int64_t first = piece.first * cut.each;
  if (!cut.columns) {
    const std::int64_t count = std::min(piece.count * cut.each, rows - first);
    const auto out = part.out.subspan(static_cast<std::size_t>(first * row_bytes),
                                      static_cast<std::size_t>(count * row_bytes));
    return form_part(*part.form, tensor, {count, row_elements}, compute, out);
  }
  const std::int64_t held = part.form->in_part, columns = row_bytes * 8 / held;
  const std::int64_t count = std::min(piece.count * cut.each, columns - first);
  const std::int64_t elements = held == 4 ? count / 2 : count;
  form_part(*part.form, tensor, {rows, elements}, compute,
            part.out.subspan(static_cast<std::size_t>(first * held / 8)), row_bytes);
}

constexpr std::uint64_t kLarge = 2 << 20;  // bytes of a page

// Memory of a piece. New pages of a large one that are small cost a third of what forming does. Of
// small ones malloc keeps what fits the next one only where none is aligned.
class Held {
 public:
  explicit Held(std::uint64_t bytes) {
    if (bytes < kLarge / 2) {
      small_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      data_ = small_.get();
      return;
    }
    bytes = ceil_div(bytes, kLarge) * kLarge;
    large_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kLarge})));
    data_ = large_.get();
    (void)::madvise(data_, bytes, MADV_HUGEPAGE);  // advice, which the system may decline
  }
  std::span<std::byte> first(std::uint64_t bytes) const { return {data_, bytes}; }

 private:
  struct Aligned {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kLarge}); }
  };
  std::unique_ptr<std::byte[]> small_;
  std::unique_ptr<std::byte, Aligned> large_;
  std::byte* data_ = nullptr;
};

}  // namespace

void form_parts(std::span<const PartPlace> parts, const Place& place, std::uint64_t bytes,
                Dtype compute, const ReadPiece& read, std::int64_t piece) {
  bool are_read = false;
  for (const PartPlace& part : parts) {
    if (part.form->one) form_part(*part.form, {place, {}}, part.shape, compute, part.out);
    are_read = are_read || !part.form->one;
  }
  if (!are_read) return;
  const auto rows = Rows::of(parts, bytes);
  const std::int64_t step = rows ? std::min(rows->step(piece), rows->count) : 0;
  const std::uint64_t most = rows ? static_cast<std::uint64_t>(step * rows->bytes) : bytes;
  const Held held(most);
  if (!rows) {
    const std::span all = held.first(bytes);
    read(0, all);
    for (const PartPlace& part : parts)
      if (!part.form->one) form_part(*part.form, {place, all}, part.shape, compute, part.out);
    return;
  }
  Place at = place;
  for (std::int64_t first = 0; first < rows->count; first += step) {
    const Piece some_rows{first, std::min(step, rows->count - first)};
    const auto offset = static_cast<std::uint64_t>(first * rows->bytes);
    const std::span some = held.first(static_cast<std::uint64_t>(some_rows.count * rows->bytes));
    read(offset, some);
    at.byte = place.byte ? std::optional(*place.byte + offset) : std::nullopt;
    for (const PartPlace& part : parts)
      if (!part.form->one) form_piece(part, rows->cut, some_rows, {at, some}, compute);
  }
}

}  // namespace stowage
