// SPDX-License-Identifier: Apache-2.0
// How the groups of a weight that share scales lie among its values while it is quantized.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "kernel/block_rows.h"
#include "kernel/quantize_job.h"
#include "stowage/descriptor.h"

namespace stowage {

/// Elements that share a scale: `rows` times `group` of them in lines of `line`, restarting at each
/// line. Those of a line that are read again from a near cache are taken together.
struct Groups {
  std::int64_t group;
  BlockRows blocks;
  std::int64_t rows, line, lines, per_line, count, together;
  Groups(const QuantizeJob& job, const Shape& shape)
      : group(group_elements(job.storage, shape)),
        blocks(blocks_of(job, shape)),
        rows(blocks.each()),
        line(line_of(job, shape, group)),
        lines(job.n / line),
        per_line(ceil_div(line, group)),
        count(blocks.rows(lines) * per_line),
        together(std::clamp((rows == 1 ? kNear : kNearRows) / (rows * group), std::int64_t{1},
                            kTogether)) {}
  // Rows lie far apart, where a cache has few places for them and no line is asked for in time, so
  // blocks are taken by so many of a line that a row of them is long.
  static constexpr std::int64_t kNear = 4096, kNearRows = 65536, kTogether = 256;

  /// Groups from g on, of one line.
  struct Some {
    std::int64_t g, n, begin, size, rows;
  };
  Some from(std::int64_t g, std::int64_t end) const {
    const std::int64_t at = lines == 1 ? 0 : g / per_line;  // no division a row
    const std::int64_t row = rows == 1 ? at : blocks.first(at), first = g - at * per_line;
    const std::int64_t n = std::min({together, end - g, per_line - first});
    return {g, n, row * line + first * group, std::min(n * group, line - first * group),
            rows == 1 ? 1 : blocks.count(at, lines)};
  }

 private:
  static BlockRows blocks_of(const QuantizeJob& job, const Shape& shape) {
    const Group& group = job.form.scale.group;
    return group.kind == Group::Kind::block2 ? BlockRows(group, shape) : BlockRows();
  }
  // All, where no group restarts before it is whole.
  static std::int64_t line_of(const QuantizeJob& job, const Shape& shape, std::int64_t group) {
    const Group::Kind kind = job.form.scale.group.kind;
    if (kind == Group::Kind::block2) return blocks_of(job, shape).columns();
    const bool restarts = kind == Group::Kind::along && shape.row_elements() % group != 0;
    return restarts ? shape.row_elements() : job.n;
  }
};

}  // namespace stowage
