// SPDX-License-Identifier: Apache-2.0
// How the groups of a weight that share scales lie among its values while it is quantized.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "kernel/block_rows.h"
#include "kernel/chunks.h"
#include "kernel/quantize_job.h"
#include "stowage/descriptor.h"

namespace stowage {

/// Elements that share a scale: `rows` times `group` of them in lines of `line`, restarting at each
/// line, from each of which it is `step` elements to the next. Those of a line that are read again
/// from a near cache are taken together, so many as fill bytes.
struct Groups {
  std::int64_t group;
  BlockRows blocks;
  std::int64_t rows, line, step, lines, per_line, count, filling, together;
  Groups(const QuantizeJob& job, const Shape& shape)
      : group(group_elements(job.storage, shape)),
        blocks(blocks_of(job, shape)),
        rows(blocks.each()),
        line(line_of(job, shape, group)),
        step(line * blocks.step()),
        lines(job.n / line),
        per_line(ceil_div(line, group)),
        count(blocks.rows(lines) * per_line),
        filling(group == 1 ? codes_together(job.form.packing) : 1),
        together(filled((rows == 1 ? kNear : kNearRows) / (rows * group), kTogether)) {}
  // Rows lie far apart, where a cache has few places for them and no line is asked for in time, so
  // blocks are taken by so many of a line that a row of them is long.
  static constexpr std::int64_t kNear = 4096, kNearRows = 65536, kTogether = 256;

  /// So many groups that are worth a task.
  std::int64_t chunk() const { return filled(kChunkElements / (rows * group), kChunkElements); }
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
  std::int64_t filled(std::int64_t groups, std::int64_t most) const {
    return std::clamp(groups / filling * filling, filling, most);
  }
  static BlockRows blocks_of(const QuantizeJob& job, const Shape& shape) {
    const Group& group = job.form.scale.group;
    return spans_rows(group) ? BlockRows(group, shape) : BlockRows();
  }
  // All, where no group restarts before it is whole.
  static std::int64_t line_of(const QuantizeJob& job, const Shape& shape, std::int64_t group) {
    const Group& of = job.form.scale.group;
    if (spans_rows(of)) return blocks_of(job, shape).columns();
    const bool restarts = of.kind == Group::Kind::along && shape.row_elements() % group != 0;
    return restarts ? shape.row_elements() : job.n;
  }
};

/// Of two parts of a group.
inline void take(std::uint32_t& most, std::uint32_t more) { most = std::max(most, more); }
inline void take(Extremes& most, const Extremes& more) {
  take(most.below, more.below);
  take(most.above, more.above);
}

/// How far groups reach that have one element of each line.
inline void reach_each(const QuantizeJob& job, const Groups& groups, const Groups::Some& some,
                       Extremes* out) {
  std::uint32_t below[Groups::kTogether] = {}, above[Groups::kTogether] = {};
  const ReachKernel kernel = job.kernels.quantize.reach_each[job.in()];
  for (std::int64_t row = 0; row < some.rows; ++row)
    kernel(job.at(some.begin + row * groups.step), some.n, below, above);
  for (std::int64_t i = 0; i < some.n; ++i) out[i] = {below[i], above[i]};
}

}  // namespace stowage
