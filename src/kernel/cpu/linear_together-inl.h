// SPDX-License-Identifier: Apache-2.0
// How rows of weight are walked with a few rows of arranged x, whatever their codes are: block by
// block, several rows at a time.
#pragma once
#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/streams-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

/// Groups of a block, where a group may be several blocks.
constexpr int kSeveralBlocks = 0;

/// Calls body.operator()<m>(part) for parts of x of up to kMost rows that are alike.
template <int kMost, class Body>
[[gnu::always_inline]] inline void for_each_part(const BytesDotTask& task, Body body) {
  BytesDotTask part = task;
  for (std::int64_t parts = (task.m + kMost - 1) / kMost, left = task.m; parts > 0; --parts) {
    part.m = (left + parts - 1) / parts;
    if (part.m == 1) body.template operator()<1>(part);
    if constexpr (kMost >= 2)
      if (part.m == 2) body.template operator()<2>(part);
    if constexpr (kMost >= 3)
      if (part.m == 3) body.template operator()<3>(part);
    if constexpr (kMost >= 4)
      if (part.m == 4) body.template operator()<4>(part);
    left -= part.m;
    part.x += part.m * part.x_stride;
    part.y += part.m * part.y_stride;
  }
}

/// How many rows of weight one row of x takes at a time, each a quarter of all rows from the next:
/// a row waits for its own last step while the others go on.
constexpr int kTogetherInBytes = kStreams;

/// Where each of some rows of weight is, and the first of the rows of x, at the same block.
template <int kRows>
struct PlaceInRows {
  const BytesDotTask& task;
  const std::uint8_t* codes[kRows];
  std::int64_t groups[kRows];
  const std::uint8_t* x;
  template <class Block>
  [[gnu::always_inline]] const Block& block_of_x(int j) const {
    return *reinterpret_cast<const Block*>(x + j * task.x_stride);
  }
};

/// Row `row` of each of kRows streams with kM rows of x. A Way says what a block of x is, how many
/// groups a block of codes has, or kSeveralBlocks, of how many bits codes are, by what sums are
/// multiplied at the end, and adds the products of a block.
template <class Way, int kRows, int kM, bool kNear = false>
[[gnu::always_inline]] inline void add_together(const BytesDotTask& task, std::int64_t row,
                                                const Streams& streams) {
  const std::int64_t apart = streams.apart;
  constexpr bool kSeveral = Way::kGroups == kSeveralBlocks;
  constexpr std::int64_t kColumns = Way::kColumns;
  const auto bytes_for = [](std::int64_t codes) { return codes * Way::kBits / 8; };
  const std::int64_t ahead =
      kRows == kStreams
          ? bytes_ahead<kNear>(row, apart, bytes_for(task.row_stride), bytes_for(task.columns))
          : task.ahead;
  const Way way;
  PlaceInRows<kRows> at{task, {}, {}, task.x};
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t first = task.run.first + (row + r * apart) * task.row_stride;
    at.codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + bytes_for(first);
    at.groups[r] = (first - streams.lag_of(r)) / task.run.group;
  }
  const std::int64_t soon =  // scales
      kRows == kStreams && !kSeveral
          ? scales_ahead(task, rows_ahead(row, apart, bytes_for(task.row_stride)))
          : 0;
  F sums[kRows][kM] = {};
  const std::int64_t blocks = task.columns / kColumns;
  // Blocks of a group; one that is no number of them is a row. Or of a line of scales.
  constexpr std::int64_t kOfLine = kSeveral ? 1 : kScalesOfLine / Way::kGroups;
  const std::int64_t most = !kSeveral                        ? kOfLine
                            : task.run.group % kColumns == 0 ? task.run.group / kColumns
                                                             : blocks + 1;
  for (std::int64_t left = blocks; left > 0;) {
    std::int64_t count = most < left ? most : left;
    left -= count;
    if (soon != 0)
      for (int r = 0; r < kRows; ++r)
        __builtin_prefetch(task.run.scales + at.groups[r] + soon, 0, 2);
    do {
      for (int r = 0; r < kRows; ++r) ask_for_line<kNear>(at.codes[r] + ahead);
      way.template add<true>(at, sums);
      for (int r = 0; r < kRows; ++r) at.codes[r] += bytes_for(kColumns);
      if constexpr (!kSeveral)
        for (int r = 0; r < kRows; ++r) at.groups[r] += Way::kGroups;
      at.x += sizeof(typename Way::Block);
    } while (--count > 0);
    if constexpr (kSeveral)
      for (int r = 0; r < kRows; ++r) at.groups[r] += most <= blocks;
  }
  if constexpr (kColumns > kBytesBlock && kM == 1)
    if (task.columns % kColumns != 0) way.template add<false>(at, sums);
  for (int j = 0; j < kM; ++j) {
    F of_x[4] = {};
    for (int r = 0; r < kRows; ++r) of_x[r] = sums[r][j];
    float totals[4];
    Lanes::sum4(of_x, totals);
    for (int r = 0; r < kRows; ++r)
      task.y[j * task.y_stride + row + r * apart] += totals[r] * Way::kUnit;
  }
}
/// One row of x, with kTogether rows of weight at a time.
template <class Way, int kTogether>
[[gnu::noinline]] void add_rows_of_one(const BytesDotTask& task) {
  const Streams streams = task.streams.apart != 0 ? task.streams
                          : kTogether == kStreams ? quarters(task.rows)
                                                  : Streams{};
  std::int64_t i = streams.begin;
  if constexpr (kTogether == kStreams) {
    if constexpr (kHasNear)
      for (; task.near && i < streams.end; ++i)
        add_together<Way, kStreams, 1, true>(task, i, streams);
    for (; i < streams.end; ++i) add_together<Way, kStreams, 1>(task, i, streams);
  } else {
    for (; i < streams.end; ++i)
      for (int r = 0; r < kStreams; ++r)
        add_together<Way, 1, 1>(task, i + r * streams.apart, streams.only(r));
  }
  for (i = streams.apart * kStreams; i < task.rows; ++i) add_together<Way, 1, 1>(task, i, {});
}

/// Two rows of x at a time, with two neighbors of weight, where there are registers for them; what
/// is left, and rows that end in half a block, with one of x.
template <class Way, int kMost, int kTogether>
void add_rows_by_twos(BytesDotTask task) {
  for (std::int64_t some = 0; task.m > 0;
       task.m -= some, task.x += some * task.x_stride, task.y += some * task.y_stride) {
    BytesDotTask one = task;  // of the rows of weight that are left
    if constexpr (kMost > 1)
      if (task.m > 1 && task.columns % Way::kColumns == 0) {
        std::int64_t i = 0;
        for (; i + 2 <= task.rows; i += 2) add_together<Way, 2, 2>(task, i, {.apart = 1});
        one.run.first += i * task.row_stride, one.y += i, one.rows -= i;
      }
    some = one.rows < task.rows ? 2 : 1;
    for (std::int64_t j = 0; j < some && one.rows > 0; ++j) {
      add_rows_of_one<Way, kTogether>(one);
      one.x += one.x_stride, one.y += one.y_stride;
    }
  }
}

/// Up to kMost rows of x at a time, and of weight kTogether for one of them.
template <class Way, int kMost, int kTogether = kTogetherInBytes>
void add_rows(const BytesDotTask& task) {
  if constexpr (kWidth == 16)
    return add_rows_by_twos<Way, kMost, kTogether>(task);
  else
    for_each_part<kMost>(task, [&]<int kM>(const BytesDotTask& part) {
      if constexpr (kM == 1) return add_rows_of_one<Way, kTogether>(part);
      for (std::int64_t i = 0; i < part.rows; ++i) add_together<Way, 1, kM>(part, i, {});
    });
}

}  // namespace
}  // namespace stowage
