// SPDX-License-Identifier: Apache-2.0
// How far a weight is from the values it was made from: fp64 sums over pieces whose size is fixed,
// added in order, so that every number of threads gives the same figures.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernel/block_rows.h"
#include "kernel/check_read.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/drivers.h"
#include "kernel/runs.h"
#include "kernel/transposed.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

constexpr std::int64_t kPiece = 1024;  // elements that are widened to fp64 at a time

void check(const void* values, Dtype dtype, const Weight& weight) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "measure: values must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  if (values == nullptr && weight.shape().elements() != 0)
    throw Error(Code::invalid_argument, "measure: values must not be null");
}

/// Which elements share a scale, and the place of that scale in its part.
class BlockPlaces {
 public:
  explicit BlockPlaces(const Weight& weight) {
    const Storage& storage = weight.storage();
    group_ = std::max<std::int64_t>(group_elements(storage, weight.shape()), 1);
    const Group& group = describe(storage).scale.group;
    if (spans_rows(group)) rows_ = BlockRows(group, weight.shape());
    const bool restarts = group.kind == Group::Kind::along ||
                          group.kind == Group::Kind::named;  // of whose columns those side by side
    row_ = restarts ? weight.row_elements() : std::max<std::int64_t>(weight.shape().elements(), 1);
    if (spans_rows(group)) row_ = rows_.columns();
  }
  /// Elements of whole rows of blocks, where blocks have several rows; else 0.
  std::int64_t elements_of_rows() const noexcept {
    return rows_.each() == 1 ? 0 : rows_.period() * row_;
  }
  /// Blocks of these.
  std::int64_t blocks_of_rows() const noexcept { return rows_.rows(rows_.period()) * across(); }
  /// Calls body(block, first, last) for stretches of elements [begin, end) in order, none of which
  /// leaves its block.
  template <class Body>
  void cover(std::int64_t begin, std::int64_t end, Body&& body) const {
    while (begin < end) {
      const std::int64_t row = begin / row_, line = row * row_;  // divided once for each line
      std::int64_t block = (begin - line) / group_;
      const std::int64_t above = rows_.of(row) * across(), stop = std::min(end, line + row_);
      for (; begin < stop; ++block) {
        const std::int64_t last = std::min(stop, line + (block + 1) * group_);
        body(above + block, begin, last);
        begin = last;
      }
    }
  }

 private:
  /// Blocks side by side in a row.
  std::int64_t across() const noexcept { return ceil_div(row_, group_); }

  std::int64_t group_, row_;  // elements; blocks start anew after each row_
  BlockRows rows_;            // which have the same blocks
};

struct BlockSums {
  std::int64_t block = -1;
  double error2 = 0, value2 = 0;

  void add(const BlockSums& sums) noexcept {
    block = sums.block;
    error2 += sums.error2;
    value2 += sums.value2;
  }
};

/// The worst of the blocks whose sums come in order, in pieces. The first and the last one are kept
/// open, since what comes before or after may hold more of them.
class WorstBlock {
 public:
  void add(const BlockSums& sums) noexcept {
    if (first_.block < 0 || first_.block == sums.block) return first_.add(sums);
    if (last_.block != sums.block) {
      close(last_);
      last_ = {};
    }
    last_.add(sums);
  }
  /// What came after everything here.
  void add(const WorstBlock& next) noexcept {
    if (next.first_.block >= 0) add(next.first_);
    consider(next.worst_, next.block_);
    if (next.last_.block >= 0) add(next.last_);
  }
  void finish(Loss& loss) noexcept {
    close(first_);
    close(last_);
    loss.worst_block_error = std::max(worst_, 0.0);
    loss.worst_block = block_;
  }

 private:
  void close(const BlockSums& sums) noexcept {
    if (sums.block >= 0 && sums.value2 != 0)
      consider(std::sqrt(sums.error2 / sums.value2), sums.block);
  }
  void consider(double error, std::int64_t block) noexcept {
    const bool worse = error > worst_ || (error == worst_ && block < block_);
    if (!worse) return;  // NaN, of sums beyond fp64, is not
    worst_ = error;
    block_ = block;
  }

  BlockSums first_, last_;
  double worst_ = -1;  // of closed blocks
  std::int64_t block_ = -1;
};

struct ChunkLoss {
  Loss loss;
  WorstBlock worst;
  std::vector<BlockSums> open;  // blocks of several rows, until the chunk ends
  std::int64_t first = 0;       // of them

  void add(const BlockSums& sums) noexcept {
    loss.sum_error2 += sums.error2;
    loss.sum_value2 += sums.value2;
    if (open.empty())
      worst.add(sums);
    else
      open[static_cast<std::size_t>(sums.block - first)].add(sums);
  }
  void finish() noexcept {
    for (const BlockSums& sums : open) worst.add(sums);
    open.clear();
  }
};

struct Comparison {
  const DequantizeKernels& kernels;
  const char* values;
  Dtype dtype;
  Runs runs;
  BlockPlaces blocks;
  Decode decode;
  double largest;  // of a plain cast; else infinity

  void widen_values(std::int64_t begin, std::int64_t end, double* room) const {
    if (dtype == Dtype::f64) {
      std::memcpy(room, values + begin * 8, static_cast<std::size_t>(end - begin) * 8);
      return;
    }
    const Run run{values, begin, nullptr, 1, end - begin};
    kernels.to[static_cast<int>(cast_codes(dtype))][value_index(Dtype::f64)](run, room);
  }

  BlockSums add_block(std::int64_t block, const double* x, const double* w, std::int64_t n,
                      Loss& loss) const {
    BlockSums sums{block};
    for (std::int64_t i = 0; i < n; ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(w[i])) {
        ++loss.nonfinite;
        continue;
      }
      const double error = std::fabs(x[i] - w[i]);
      loss.saturated += std::fabs(x[i]) > largest ? 1 : 0;
      loss.max_error = std::max(loss.max_error, error);
      sums.error2 += error * error;
      sums.value2 += x[i] * x[i];
    }
    return sums;
  }

  void add_piece(std::int64_t begin, std::int64_t end, ChunkLoss& chunk) const {
    double x[kPiece], w[kPiece];
    widen_values(begin, end, x);
    double* place = w;
    runs.cover(begin, end, [&](const Run& run) {
      decode(run, place);
      place += run.n;
    });
    blocks.cover(begin, end, [&](std::int64_t block, std::int64_t first, std::int64_t last) {
      const BlockSums sums =
          add_block(block, x + (first - begin), w + (first - begin), last - first, chunk.loss);
      chunk.add(sums);
    });
  }
};

// Against the values in the order in which codes lie: a copy of them.
Loss measure_transposed(const Kernels& kernels, const void* values, Dtype dtype,
                        const Weight& weight, Executor& executor) {
  const Weight lies = lying(weight);
  const Shape& shape = weight.shape();
  const std::int64_t width = bits(dtype) / 8, bytes = weight.row_elements() * width;
  std::vector<char> turned(static_cast<std::size_t>(shape[0] * bytes));
  for (std::int64_t i = 0; i < shape[0]; ++i)
    transpose_matrix(static_cast<const char*>(values) + i * bytes, shape[1], shape[2], width,
                     turned.data() + i * bytes, executor);
  return measure_with(kernels, turned.data(), dtype, lies, executor);
}

}  // namespace

Loss measure_with(const Kernels& kernels, const void* values, Dtype dtype, const Weight& weight,
                  Executor& executor) {
  check(values, dtype, weight);
  if (is_transposed(weight)) return measure_transposed(kernels, values, dtype, weight, executor);
  const std::int64_t n = weight.shape().elements();
  const Storage& storage = weight.storage();
  const bool cast = is_cast(storage);
  const Comparison comparison{
      kernels.dequantize,
      static_cast<const char*>(values),
      dtype,
      Runs(kernels, weight),
      BlockPlaces(weight),
      Decode(kernels.dequantize, describe(storage), Dtype::f64),
      cast ? double{trait(storage.codes).largest} : std::numeric_limits<double>::infinity()};
  const std::int64_t rows = comparison.blocks.elements_of_rows();
  const std::int64_t step = rows == 0 ? kChunkElements : rows;
  std::vector<ChunkLoss> chunks(static_cast<std::size_t>(ceil_div(n, step)));
  for_each_chunk(executor, n, step, [&](std::int64_t begin, std::int64_t end) {
    ChunkLoss& chunk = chunks[static_cast<std::size_t>(begin / step)];
    if (rows != 0) {
      const std::int64_t blocks = comparison.blocks.blocks_of_rows();
      chunk.open.resize(static_cast<std::size_t>(blocks));
      chunk.first = begin / step * blocks;
    }
    for (std::int64_t at = begin; at < end; at += kPiece)
      comparison.add_piece(at, std::min(at + kPiece, end), chunk);
    chunk.finish();
  });
  Loss total;
  WorstBlock worst;
  for (const ChunkLoss& chunk : chunks) {
    total += chunk.loss;
    worst.add(chunk.worst);
  }
  total.elements = n;
  worst.finish(total);
  return total;
}

inline namespace v0 {

Loss& Loss::operator+=(const Loss& other) noexcept {
  elements += other.elements;
  saturated += other.saturated;
  nonfinite += other.nonfinite;
  max_error = std::max(max_error, other.max_error);
  sum_error2 += other.sum_error2;
  sum_value2 += other.sum_value2;
  worst_block_error = std::max(worst_block_error, other.worst_block_error);
  worst_block = -1;  // no number names a block of two weights
  return *this;
}

double Loss::rms() const noexcept {
  return elements == 0 ? 0 : std::sqrt(sum_error2 / static_cast<double>(elements));
}

double Loss::relative() const noexcept {
  return sum_value2 == 0 ? 0 : std::sqrt(sum_error2 / sum_value2);
}

Loss measure(const void* values, Dtype dtype, const Weight& weight, Executor* executor) {
  const Loss loss = measure_with(kernels(), values, dtype, weight, or_default(executor));
  check_read(weight, values);
  return loss;
}

}  // namespace v0
}  // namespace stowage
