// SPDX-License-Identifier: Apache-2.0
// The ways that read the weight once, a batch of its rows at a time, so that decoding costs most
// (docs/numbers.md): by fp32 dot products or by bytes, for few rows of x, and by pairs of bf16, for
// any number.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernel/linear_weight.h"
#include "kernel/scratch.h"

namespace stowage {
namespace {

constexpr std::int64_t kStackX = 1 << 15;  // bytes of x; more come from the pool
constexpr std::int64_t kMostX = 1 << 18;   // and more than these are left to other ways, or parts
constexpr std::int64_t kBatch = 64;        // rows of weight whose results are rounded together
// And of one row of x, which takes them in streams: long ones, which a processor follows by
// itself. A few rows more are no streams of their own.
constexpr std::int64_t kBatchOfOne = 256, kMoreOfOne = 64;
constexpr std::int64_t sums_of(std::int64_t most) {  // rows of x
  return std::max(most * kBatch, kBatchOfOne + kMoreOfOne);
}
constexpr std::int64_t kLeast = 16;  // of a part, where threads are many

constexpr std::int64_t kCachedX = 8192;                    // floats of x that stay in the L1 cache
constexpr std::int64_t kWidenedRows = 4, kColumns = 4096;  // of weight, widened at a time

constexpr std::int64_t kMostBf16Rows = 60, kFewBf16Rows = 6;  // of x; kernels take no fewer at once
constexpr std::int64_t kFewestPairs = 3;  // rows of x that are worth widening for

// Products below which waking a thread costs more than it gains.
constexpr std::int64_t kParallelProducts = 1 << 18, kParallelBf16Products = 1 << 19;
constexpr std::int64_t kParallelX = 1 << 16;  // numbers of x likewise

/// body(x) with room for so many numbers.
template <class T, class Body>
void with_room(std::int64_t numbers, Body&& body) {
  constexpr std::int64_t kMost = kStackX / std::int64_t{sizeof(T)};
  if (numbers <= kMost) {
    alignas(64) T x[kMost];
    return body(x);
  }
  const Scratch scratch(static_cast<std::size_t>(numbers) * sizeof(T));
  body(static_cast<T*>(scratch.memory()));
}

/// batch(row, count) for all rows of weight, on threads where the products with m rows of x are
/// worth it.
template <class Batch>
void for_each_batch(const LinearCall& call, std::int64_t m, std::int64_t worth, Batch&& batch) {
  const std::int64_t n = call.weight->rows(), threads = call.executor->threads();
  const std::int64_t lines = call.weight->lines();
  const std::int64_t of_one =
      lines == 0 || lines > kBatchOfOne ? kBatchOfOne : kBatchOfOne / lines * lines;
  const auto next = [&](std::int64_t left) {
    if (call.m != 1) return std::min(kBatch, left);
    return left <= of_one + kMoreOfOne ? left : of_one;
  };
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    const ExactFloats exact;
    for (std::int64_t count = 0; begin < end; begin += count) {
      count = next(end - begin);
      batch(begin, count);
    }
  };
  const std::int64_t products = n * call.weight->columns() * std::max<std::int64_t>(1, m / 4);
  if (threads == 1 || products < worth) return rows(0, n);
  // Several parts for each thread, since threads start and run unevenly.
  const std::int64_t part = ceil_div(ceil_div(n, threads * 4), kLeast) * kLeast;
  call.executor->for_each(ceil_div(n, part),
                          [&](std::int64_t i) { rows(i * part, std::min(n, (i + 1) * part)); });
}

/// body(j) for j < m rows of x, to be arranged.
template <class Body>
void for_each_row_of_x(const LinearCall& call, std::int64_t m, Body&& body) {
  const bool few = m * call.weight->columns() < kParallelX;
  (few ? inline_executor() : *call.executor).for_each(m, body);
}

void clear(float* sums, std::int64_t m, std::int64_t count) noexcept {
  std::fill_n(sums, (m - 1) * kBatch + count, 0.0f);
}
bool are_finite(const float* sums, std::int64_t m, std::int64_t count) noexcept {
  bool all = true;
  for (std::int64_t j = 0; j < m; ++j)
    for (std::int64_t i = 0; i < count; ++i) all &= std::isfinite(sums[j * kBatch + i]);
  return all;
}

/// How x is cut along its columns. Each stretch of `step` columns of all rows lies together, so
/// that the four rows that dot products with codes take at a time fit the L1 cache, whatever the
/// size of a row.
struct Stretches {
  std::int64_t m, columns, step;

  Stretches(std::int64_t m_, std::int64_t k, bool by_codes) noexcept
      : m(m_), columns(k), step(padded(k)) {
    const std::int64_t cached = kCachedX / std::min<std::int64_t>(m, 4) / kLinearPad * kLinearPad;
    if (!by_codes) step = std::min(step, kColumns);
    if (by_codes && m > 1) step = std::min(step, cached);
  }
  std::int64_t floats() const noexcept {
    return step == 0 ? 0 : m * step * ceil_div(columns, step);
  }
};

/// A call with x widened: [stretch, m, step], zeros after the last column.
class RowsCall {
 public:
  RowsCall(const LinearCall& call, const Stretches& stretches, bool by_codes, float* x)
      : call_(call),
        weight_(*call.weight),
        by_codes_(by_codes),
        k_(stretches.columns),
        step_(stretches.step),
        x_(x) {
    for_each_row_of_x(call, call.m, [&](std::int64_t j) {
      const ExactFloats exact;
      for (std::int64_t c = 0; c < k_; c += step_) {
        const std::int64_t n = std::min(step_, k_ - c);
        float* const to = x + c * call.m + j * step_;
        call.widen_x(j * k_ + c, n, to);
        std::fill(to + n, to + step_, 0.0f);
        if (by_codes_ && weight_.arranged()) call.kernels->arrange(to, step_);
      }
    });
  }

  /// Whether all sums are finite, or of values after their scales.
  bool run() const {
    std::atomic<bool> held = true;
    for_each_batch(call_, call_.m, kParallelProducts, [&](std::int64_t row, std::int64_t count) {
      if (!batch(row, count) && by_codes_) held = false;
    });
    return held;
  }

 private:
  bool batch(std::int64_t row, std::int64_t count) const noexcept {
    alignas(64) float sums[sums_of(kMostRows)];
    clear(sums, call_.m, count);
    for (std::int64_t c = 0; c < k_; c += step_) {
      const LinearWeight::Vectors vectors{x_ + c * call_.m, step_, call_.m, sums, kBatch};
      const std::int64_t n = std::min(step_, k_ - c);
      if (by_codes_)
        weight_.dot(row, count, c, n, vectors);
      else
        add_widened(row, count, c, n, vectors);
    }
    call_.finish(sums, kBatch, 0, call_.m, row, count, weight_.rows());
    return are_finite(sums, call_.m, count);
  }

  /// Without a kernel that reads the codes, or where it would decode them again for each four rows
  /// of x: a few rows of weight at a time are widened into a near cache.
  void add_widened(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                   const LinearWeight::Vectors& to) const noexcept {
    const std::int64_t stride = padded(n) + kLinearPad;
    alignas(64) float w[kWidenedRows * (kColumns + kLinearPad)];
    for (std::int64_t i = 0; i < count; i += kWidenedRows) {
      const std::int64_t some = std::min(kWidenedRows, count - i), next = row + i + some;
      weight_.widen_rows(row + i, some, k, n, w, stride);
      const std::int64_t ahead = std::min(kWidenedRows, weight_.rows() - next);
      call_.kernels->dots({w, stride, some, to.x, to.x_stride, to.m, padded(n), to.y + i,
                           to.y_stride, weight_.codes_at(next, k),
                           weight_.bytes_of_codes(ahead * n)});
    }
  }

  const LinearCall& call_;
  const LinearWeight& weight_;
  bool by_codes_;  // else by widened rows
  std::int64_t k_, step_;
  const float* x_;
};

// Numbers between rows of x in bf16: no power of two, which would put all rows into the same few
// sets of a cache.
std::int64_t bf16_stride(const LinearCall& call, std::int64_t block = kBf16Pad) noexcept {
  return ceil_div(call.weight->columns(), kBf16Pad) * block + (call.m == 1 ? 0 : 32);
}

/// Rows [first, first + m) of x in bf16, arranged in memory. Whether all sums are finite, where
/// others may be what is right: those that a scale multiplies, and those of rows whose last columns
/// go on into the next row, whose scales are then factors of zeros.
bool some_bf16_rows(const LinearCall& call, std::int64_t first, std::int64_t m,
                    std::uint16_t* arranged, std::int64_t stride) {
  const std::int64_t k = call.weight->columns();
  const bool high_first = call.weight->is_high_first();
  const bool rounds = call.weight->rounds_bf16(call.m);
  const bool with_sums = !rounds && call.weight->has_bf16_sums();
  if (rounds) std::fill_n(arranged + m * stride, kMoreBf16Rows * stride, std::uint16_t{0});
  for_each_row_of_x(call, m, [&](std::int64_t j) {
    call.kernels->bf16.arrange(call.x_at((first + j) * k), k, high_first, with_sums,
                               arranged + j * stride);
  });
  const LinearWeight::Bf16Vectors x{arranged, stride, m, rounds};
  const bool are_values = rounds && k % kBf16Pad == 0;
  std::atomic<bool> finite = true;
  for_each_batch(call, m, kParallelBf16Products, [&](std::int64_t row, std::int64_t count) {
    alignas(64) float sums[sums_of(kMostBf16Rows + kMoreBf16Rows)];
    clear(sums, m, count);
    call.weight->dot_bf16(row, count, x, sums, kBatch);
    if (!are_values && !are_finite(sums, m, count)) finite = false;
    call.finish(sums, kBatch, first, m, row, count, call.weight->rows());
  });
  return finite;
}

constexpr std::int64_t kPairsRows = 4, kPairsColumns = 4096;  // widened at a time

/// Rows of x with zeros beyond their columns.
void copy_rows(const LinearCall& call, std::int64_t first, std::int64_t m, std::uint16_t* out,
               std::int64_t stride) {
  const std::int64_t k = call.weight->columns();
  for_each_row_of_x(call, m, [&](std::int64_t j) {
    const auto* from = static_cast<const std::uint16_t*>(call.x_at((first + j) * k));
    std::fill(std::copy_n(from, k, out + j * stride), out + (j + 1) * stride, std::uint16_t{0});
  });
}

/// Rows [first, first + m) of x, copied to memory.
bool some_rows_of_pairs(const LinearCall& call, std::int64_t first, std::int64_t m,
                        std::uint16_t* in_pairs, std::int64_t stride) {
  const LinearWeight& weight = *call.weight;
  const std::int64_t k = weight.columns();
  copy_rows(call, first, m, in_pairs, stride);
  std::atomic<bool> finite = true;
  for_each_batch(call, m, kParallelBf16Products, [&](std::int64_t row, std::int64_t count) {
    alignas(64) float sums[sums_of(kMostBf16Rows)];
    alignas(64) std::uint16_t w[kPairsRows * (kPairsColumns + kPairsPad)];
    float scales[kPairsRows];
    clear(sums, m, count);
    for (std::int64_t i = 0; i < count; i += kPairsRows)
      for (std::int64_t c = 0; c < k; c += kPairsColumns) {
        const std::int64_t some = std::min(kPairsRows, count - i);
        const std::int64_t n = std::min(kPairsColumns, k - c);
        const std::int64_t columns = ceil_div(n, kPairsPad) * kPairsPad;
        // No power of two, which would put all rows into the same few sets of a cache.
        const std::int64_t w_stride = columns + kPairsPad;
        weight.widen_pairs(row + i, some, c, n, w, w_stride, scales);
        call.kernels->bf16.pairs(
            {w, w_stride, some, scales, in_pairs + c, stride, m, columns, sums + i, kBatch});
      }
    if (!are_finite(sums, m, count)) finite = false;
    call.finish(sums, kBatch, first, m, row, count, weight.rows());
  });
  return finite;
}

/// Rows [first, first + m) of x, copied to memory that has room for kMostEights more.
bool some_rows_of_eights(const LinearCall& call, std::int64_t first, std::int64_t m,
                         std::uint16_t* x, std::int64_t stride) {
  const LinearWeight& weight = *call.weight;
  const std::int64_t k = weight.columns(), step = call.kernels->bf16.eights_columns;
  const std::int64_t each = ceil_div(m, ceil_div(m, kMostEights));
  copy_rows(call, first, m, x, stride);
  std::fill_n(x + m * stride, kMostEights * stride, std::uint16_t{0});
  std::atomic<bool> finite = true;
  for_each_batch(call, m, kParallelBf16Products, [&](std::int64_t row, std::int64_t count) {
    alignas(64) float sums[sums_of(kMostBf16Rows)];
    clear(sums, m, count);
    for (std::int64_t c = 0; c < k; c += step)
      for (std::int64_t j = 0; j < m; j += each)
        weight.dot_eights(row, count, c, std::min(step, k - c),
                          {x + j * stride + c, stride, std::min(each, m - j)}, sums + j * kBatch,
                          kBatch);
    if (!are_finite(sums, m, count)) finite = false;
    call.finish(sums, kBatch, first, m, row, count, weight.rows());
  });
  return finite;
}

/// Whether some_rows(call, first, m, x, stride) is true for parts of the rows of x that are alike,
/// with room for each and so many rows more.
template <class Some>
bool by_parts_of_x(const LinearCall& call, std::int64_t stride, std::int64_t more,
                   const Some& some_rows) {
  const std::int64_t most = std::clamp(kMostX / stride, kFewBf16Rows, kMostBf16Rows);
  const std::int64_t some = ceil_div(call.m, ceil_div(call.m, most));
  bool held = true;
  with_room<std::uint16_t>((some + more) * stride, [&](std::uint16_t* x) {
    for (std::int64_t j = 0; j < call.m && held; j += some)
      held = some_rows(call, j, std::min(some, call.m - j), x, stride);
  });
  return held;
}

auto bytes_arrange(const LinearCall& call) noexcept {
  return call.kernels->bytes.arrange[call.weight->dot_bytes_kind()][value_index(call.dtype)];
}

}  // namespace

bool fits_bytes(const LinearCall& call) noexcept {
  if (fits_bf16(call) || fits_eights(call)) return false;  // which are quicker
  if (call.dtype == Dtype::bf16 && call.m > call.kernels->bytes.most_bf16) return false;
  return call.weight->has_dot_bytes(call.m) && bytes_arrange(call) != nullptr &&
         call.weight->columns() <= kMostX / call.m;
}

bool linear_bytes(const LinearCall& call) {
  const std::int64_t k = call.weight->columns();
  const std::int64_t stride = call.weight->bytes_of_x();
  std::atomic<bool> held = true;
  with_room<std::uint8_t>(call.m * stride, [&](std::uint8_t* x) {
    const auto arrange = bytes_arrange(call);
    for_each_row_of_x(call, call.m, [&](std::int64_t j) {
      if (!arrange(call.x_at(j * k), k, x + j * stride)) held = false;
    });
    if (!held) return;
    for_each_batch(call, call.m, kParallelProducts, [&](std::int64_t row, std::int64_t count) {
      alignas(64) float sums[sums_of(kMostBytesRows)];
      clear(sums, call.m, count);
      call.weight->dot_bytes(row, count, {x, stride, call.m}, sums, kBatch);
      if (!are_finite(sums, call.m, count)) held = false;
      call.finish(sums, kBatch, 0, call.m, row, count, call.weight->rows());
    });
  });
  return held;
}

bool fits_rows(const LinearCall& call) noexcept {
  return call.m <= call.kernels->most_rows && padded(call.weight->columns()) <= kMostX / call.m;
}

bool linear_rows(const LinearCall& call) {
  const bool by_codes = call.m <= call.weight->most_dot_vectors();
  const Stretches stretches(call.m, call.weight->columns(), by_codes);
  bool held = true;
  with_room<float>(stretches.floats(),
                   [&](float* x) { held = RowsCall(call, stretches, by_codes, x).run(); });
  return held;
}

bool fits_bf16(const LinearCall& call) noexcept {
  return call.dtype == Dtype::bf16 && call.weight->has_dot_bf16(call.m);
}

bool linear_bf16(const LinearCall& call) {
  const std::int64_t block = call.weight->has_bf16_sums() ? kBf16WithSums : kBf16Pad;
  const std::int64_t more = call.weight->rounds_bf16(call.m) ? kMoreBf16Rows : 0;
  return by_parts_of_x(call, bf16_stride(call, block), more, &some_bf16_rows);
}

bool fits_float8(const LinearCall& call) noexcept {
  // Of three rows g++ 12 keeps a sum in memory, so that four take less time.
  if (call.m == 3 && call.weight->has_dot_eights()) return false;
  const bool few = call.m <= kMostFloat8Rows || call.weight->columns() <= kMostX / call.m;
  return call.dtype == Dtype::bf16 && few && call.weight->has_dot_float8(call.m);
}

bool linear_float8(const LinearCall& call) {
  const std::int64_t stride = bf16_stride(call), m = call.m;
  std::atomic<bool> finite = true;
  with_room<std::uint16_t>(m * stride, [&](std::uint16_t* x) {
    copy_rows(call, 0, m, x, stride);
    for_each_batch(call, m, kParallelBf16Products, [&](std::int64_t row, std::int64_t count) {
      alignas(64) float sums[sums_of(kMostFloat8InShort)];
      clear(sums, m, count);
      call.weight->dot_float8(row, count, {x, stride, m}, sums, kBatch);
      if (!are_finite(sums, m, count)) finite = false;
      call.finish(sums, kBatch, 0, m, row, count, call.weight->rows());
    });
  });
  return finite;
}

bool fits_eights(const LinearCall& call) noexcept {
  return call.dtype == Dtype::bf16 && call.m >= kFewestPairs && call.weight->has_dot_eights();
}

bool linear_eights(const LinearCall& call) {
  return by_parts_of_x(call, bf16_stride(call), kMostEights, &some_rows_of_eights);
}

bool fits_pairs(const LinearCall& call) noexcept {
  return call.dtype == Dtype::bf16 && call.kernels->bf16.pairs != nullptr &&
         call.m >= kFewestPairs && call.weight->fits_pairs();
}

bool linear_pairs(const LinearCall& call) {
  return by_parts_of_x(call, bf16_stride(call), 0, &some_rows_of_pairs);
}

}  // namespace stowage
