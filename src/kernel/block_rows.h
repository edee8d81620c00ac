// SPDX-License-Identifier: Apache-2.0
// Groups of several rows: which of them lie above one another, in a matrix and in a stack of them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "stowage/descriptor.h"

namespace stowage {

/// Lines, the elements of which lie side by side, and the rows of blocks that they are of. Each
/// matrix begins a row of blocks; its last one may have fewer lines. Groups of one column are
/// blocks whose lines lie as far apart as there are rows of them.
class BlockRows {
 public:
  BlockRows() = default;
  BlockRows(const Group& group, const Shape& shape)
      : columns_(shape[shape.rank() - 1]), each_(group.m) {
    const std::int64_t lines = shape[shape.rank() - 2];
    if (group.kind == Group::Kind::column) {
      each_ = group.n, apart_ = lines / each_;
      return;
    }
    if (shape.rank() == 2 || lines % each_ == 0) return;  // as if all were one matrix
    lines_ = lines;
    above_ = ceil_div(lines, each_);
  }

  /// Elements of a line.
  std::int64_t columns() const noexcept { return columns_; }
  /// Lines that a row of blocks has, unless it is the last one of a matrix.
  std::int64_t each() const noexcept { return each_; }
  /// From one of them to the next.
  std::int64_t step() const noexcept { return std::max<std::int64_t>(apart_, 1); }
  /// Of which row of blocks a line is.
  std::int64_t of(std::int64_t line) const noexcept {
    if (apart_ != 0) return line % apart_;
    if (lines_ == 0) return line / each_;
    return line / lines_ * above_ + line % lines_ / each_;
  }
  /// The first line of a row of blocks, and how many it has of `lines` that there are.
  std::int64_t first(std::int64_t row) const noexcept {
    if (apart_ != 0) return row;
    if (lines_ == 0) return row * each_;
    return row / above_ * lines_ + row % above_ * each_;
  }
  std::int64_t count(std::int64_t row, std::int64_t lines) const noexcept {
    if (apart_ != 0) return each_;
    if (lines_ == 0) return std::min(each_, lines - row * each_);
    return std::min(each_, lines_ - row % above_ * each_);
  }
  /// Rows of blocks of so many lines, which are whole matrices.
  std::int64_t rows(std::int64_t lines) const noexcept {
    if (apart_ != 0) return apart_;
    return lines_ == 0 ? ceil_div(lines, each_) : lines / lines_ * above_;
  }
  /// The least lines after which a row of blocks always begins.
  std::int64_t period() const noexcept { return lines_ == 0 ? each_ * step() : lines_; }

 private:
  std::int64_t columns_ = 1, each_ = 1;
  std::int64_t lines_ = 0;  // of a matrix, where its last row of blocks has fewer; else 0
  std::int64_t above_ = 0;  // rows of blocks of such a matrix
  std::int64_t apart_ = 0;  // from a line to the next one of its row of blocks, if not neighbours
};

}  // namespace stowage
