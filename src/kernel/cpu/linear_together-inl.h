// SPDX-License-Identifier: Apache-2.0
// How rows of weight are walked with a few rows of arranged x, whatever their codes are: block by
// block, several rows at a time.
#pragma once
#include <type_traits>

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

/// Where `count` rows begin, one of each of so many streams; bytes from codes to those that will be
/// read soon, and scales to theirs, where these lie in the weight; blocks of a row, and of a group.
struct Begin {
  const std::uint8_t* codes[kStreams];
  std::int64_t groups[kStreams];
  std::int64_t ahead, soon, blocks, most;
};
template <bool kNear>
[[gnu::always_inline]] inline Begin begin_rows(const BytesDotTask& task, std::int64_t row,
                                               const Streams& streams, int count, int bits,
                                               std::int64_t columns) {
  const auto bytes_for = [bits](std::int64_t codes) { return codes * bits / 8; };
  Begin begin{{}, {}, task.ahead, 0, task.columns / columns, 1};
  for (int r = 0; r < count; ++r) {
    const std::int64_t first = task.run.first + (row + r * streams.apart) * task.row_stride;
    begin.codes[r] = static_cast<const std::uint8_t*>(task.run.codes) + bytes_for(first);
    begin.groups[r] = (first - streams.lag_of(r)) / task.run.group;
  }
  if (count == kStreams) {
    const std::int64_t row_bytes = bytes_for(task.row_stride);
    begin.ahead = bytes_ahead<kNear>(row, streams.apart, row_bytes, bytes_for(task.columns));
    begin.soon = scales_ahead(task, rows_ahead(row, streams.apart, row_bytes));
  }
  // A group that is no number of blocks is a row.
  begin.most = task.run.group % columns == 0 ? task.run.group / columns : begin.blocks + 1;
  return begin;
}
/// The same once for all ways: what they have in common is more code than what they do.
template <bool kNear>
[[gnu::noinline]] Begin begin_any_rows(const BytesDotTask& task, std::int64_t row,
                                       const Streams& streams, int count, int bits,
                                       std::int64_t columns) {
  return begin_rows<kNear>(task, row, streams, count, bits, columns);
}

template <class Way>
[[gnu::always_inline]] inline Way make_way(const BytesDotTask& task) {
  if constexpr (std::is_constructible_v<Way, const BytesDotTask&>)
    return Way(task);
  else
    return {};
}

/// Row `row` of each of kRows streams with kM rows of x. A Way says what a block of x is, how many
/// groups a block of codes has, or kSeveralBlocks, of how many bits codes are, by what sums are
/// multiplied at the end, and adds the products of a block. Its scales may come by lines of kOfLine
/// (cpu/linear_bytes_lines-inl.h).
template <class Way, int kRows, int kM, bool kNear = false>
[[gnu::always_inline]] inline void add_together(const BytesDotTask& task, std::int64_t row,
                                                const Streams& streams) {
  constexpr bool kSeveral = Way::kGroups == kSeveralBlocks;
  constexpr std::int64_t kColumns = Way::kColumns;
  constexpr std::int64_t kGroup = kSeveral ? kColumns : kColumns / Way::kGroups;
  constexpr bool kReads = requires(Way way) { way.scales.kOfLine; };  // scales by lines
  constexpr bool kLines = kReads || (kRows == kStreams && !kSeveral);
  Way way = make_way<Way>(task);
  // Inlined where that tells: numbers that come by memory stay there.
  const Begin begin = kNear
                          ? begin_rows<kNear>(task, row, streams, kRows, way.bits(), kColumns)
                          : begin_any_rows<kNear>(task, row, streams, kRows, way.bits(), kColumns);
  PlaceInRows<kRows> at{task, {}, {}, task.x};
  for (int r = 0; r < kRows; ++r) at.codes[r] = begin.codes[r], at.groups[r] = begin.groups[r];
  const std::int64_t ahead = begin.ahead, soon = begin.soon;
  F sums[kRows][kM] = {};
  // Blocks of a group, or, in streams, of a line of scales.
  std::int64_t most = kSeveral ? begin.most : kLines ? kScalesOfLine / Way::kGroups : 1;
  if constexpr (kReads) most = Way::Scales::kOfLine / Way::kGroups;
  for (std::int64_t left = begin.blocks; left > 0;) {
    std::int64_t count = most < left ? most : left;
    if constexpr (kReads)
      way.scales.begin_line(at, (left * kColumns + task.columns % kColumns) / kGroup, soon);
    else if (kLines && soon != 0)
      for (int r = 0; r < kRows; ++r)
        __builtin_prefetch(task.run.scales + at.groups[r] + soon, 0, 2);
    left -= count;
    do {
      for (int r = 0; r < kRows; ++r) ask_for_line<kNear>(at.codes[r] + ahead);
      way.template add<true>(at, sums);
      for (int r = 0; r < kRows; ++r) at.codes[r] += kColumns * way.bits() / 8;
      if constexpr (!kSeveral && !kReads)
        for (int r = 0; r < kRows; ++r) at.groups[r] += Way::kGroups;
      at.x += sizeof(typename Way::Block);
    } while ((kSeveral || kLines) && --count > 0);
    if constexpr (kSeveral)
      for (int r = 0; r < kRows; ++r) at.groups[r] += most <= begin.blocks;
  }
  if constexpr (kColumns > kBytesBlock && kM == 1)
    if (task.columns % kColumns != 0) {
      if constexpr (kReads)
        if (begin.blocks % most == 0) way.scales.begin_line(at, kBytesBlock / kGroup, 0);
      way.template add<false>(at, sums);
    }
  if constexpr (requires { way.scales.end(sums); }) way.scales.end(sums);
  for (int j = 0; j < kM; ++j) {
    F of_x[4] = {};
    for (int r = 0; r < kRows; ++r) of_x[r] = sums[r][j];
    float totals[4];
    Lanes::sum4(of_x, totals);
    for (int r = 0; r < kRows; ++r)
      task.y[j * task.y_stride + row + r * streams.apart] += totals[r] * Way::kUnit;
  }
}
/// One row of x, with kTogether rows of weight at a time: kStreams, or one, of tasks that have no
/// streams.
template <class Way, int kTogether>
[[gnu::noinline]] void add_rows_of_one(const BytesDotTask& task) {
  std::int64_t alone = 0;
  if constexpr (kTogether == kStreams) {
    const Streams streams = task.streams.apart == 0 ? quarters(task.rows) : task.streams;
    std::int64_t i = streams.begin;
    if constexpr (kHasNear)
      for (; task.near && i < streams.end; ++i)
        add_together<Way, kStreams, 1, true>(task, i, streams);
    for (; i < streams.end; ++i) add_together<Way, kStreams, 1>(task, i, streams);
    alone = streams.apart * kStreams;
  }
  for (; alone < task.rows; ++alone) add_together<Way, 1, 1>(task, alone, {});
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
