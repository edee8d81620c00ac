// SPDX-License-Identifier: Apache-2.0
// What the ways of linear() share. A resting matrix as the linear family reads it: any stretch of a
// row in fp32, and dot products with resting rows, whatever the storage. A call; and the ways, of
// which storage and sizes alone choose one. Each sums an element in an order of its own, so that
// threads never change a byte:
//
//   tiny    everything fits a few stack buffers: no allocation, no thread
//   bytes   4-bit weights that are multiples of one number and few rows of x in 16 bits, where an
//           instruction set multiplies bytes
//   bf16    4-bit weights and x in bf16, where an instruction set multiplies pairs of them: of one
//           row of x those whose values are no integers
//   float8  fp8 weights and up to four rows of x in bf16, likewise
//   eights  codes of a byte and more rows of x in bf16, likewise, eight at a time
//   pairs   other weights of up to 8 bits and several rows of x in bf16, likewise: a few rows of
//           weight are widened to bf16 at a time
//   matrices  more than a few rows of x in bf16 and weights of up to 8 bits or of bf16, where an
//           instruction set multiplies matrices of such numbers; and the gradient
//   rows    up to 12 to 64 rows of x, as the crossover has it: weights are read once, a few rows at
//           a time, by dot products
//   tiles   more rows of x, and the gradient: stretches of weight are widened into scratch
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/kernels.h"
#include "kernel/runs.h"
#include "stowage/descriptor.h"

namespace stowage {

/// A view of a weight, which must outlive it.
class LinearWeight {
 public:
  /// `where` begins the messages. Throws invalid_argument (not a matrix), unsupported (a dialect).
  LinearWeight(const Kernels& kernels, const Weight& weight, const char* where);

  std::int64_t rows() const noexcept { return rows_; }
  std::int64_t columns() const noexcept { return columns_; }

  /// out[i] = w[row, k + i] in fp32, for i < n: the values of dequantize.
  void widen(std::int64_t row, std::int64_t k, std::int64_t n, float* out) const noexcept;
  /// `count` rows from `row`, columns [k, k + n) of each, at `stride` >= n: zeros fill the rest.
  void widen_rows(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n, float* out,
                  std::int64_t stride) const noexcept;

  /// Whether codes have so few bits that values may multiply x of bf16 as such numbers.
  bool fits_pairs() const noexcept { return bits_ <= 8; }
  /// The same in bf16: the values of dequantize; or, where a row has one scale, scales[i], what
  /// codes stand for without it, if bf16 has that exactly. Else scales[i] is 1. As many rows more
  /// will be read soon.
  void widen_pairs(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                   std::uint16_t* out, std::int64_t stride, float* scales) const noexcept;
  /// Whether values of bf16 are what they are multiplied as, if it is by matrices.
  bool fits_matrices() const noexcept { return bits_ <= 8 || is_bf16_; }
  /// widen() in bf16.
  void widen_bf16(std::int64_t row, std::int64_t k, std::int64_t n,
                  std::uint16_t* out) const noexcept;
  /// widen_pairs() of a part of a matrix, of which scales[i] is for the whole row, or 1; zeros fill
  /// rows up to `length` columns, and there are rows of them up to a padded number. Codes that lie
  /// `ahead` bytes further will be read soon.
  void widen_matrix(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                    std::uint16_t* out, std::int64_t stride, std::int64_t length,
                    std::int64_t ahead, float* scales) const noexcept;
  /// Where the codes of a row begin, from column k on, and the bytes of n of them.
  const char* codes_at(std::int64_t row, std::int64_t k) const noexcept {
    return codes_ + bytes_of_codes(row * columns_ + k);
  }
  std::int64_t bytes_of_codes(std::int64_t n) const noexcept { return n * bits_ / 8; }

  /// Whether dot() can read this storage and shape.
  bool has_dot() const noexcept { return dot_rows_ != 0; }
  /// Rows of weight that share the scales of one, from the first on; 0: none do.
  std::int64_t lines() const noexcept { return lines_; }
  bool arranged() const noexcept { return arranged_; }  // dot() wants x arranged
  /// Rows of x up to which dot() is worth it; 0: it cannot. Beyond, decoding once is.
  std::int64_t most_dot_vectors() const noexcept;
  /// y[j, i] += sum over columns [k, k + n) of w[row + i] x[j], for i < count and j < m. x begins
  /// with column k, a padded number, and has zeros from the last column up to the padded length.
  struct Vectors {
    const float* x;
    std::int64_t x_stride, m;
    float* y;
    std::int64_t y_stride;
  };
  void dot(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
           const Vectors& vectors) const noexcept;

  /// The same for x in bf16, whole rows of it, arranged.
  bool has_dot_bf16(std::int64_t m) const noexcept {
    return dot_bf16_rows_ != 0 && m >= dot_bf16_least_ && m <= dot_bf16_most_;
  }
  /// Whether values are rounded to bf16 for m rows of x; else arranged x may have sums beside it.
  bool rounds_bf16(std::int64_t m) const noexcept { return m > dot_bf16_scaled_; }
  bool has_bf16_sums() const noexcept { return dot_bf16_sums_; }
  bool is_high_first() const noexcept { return runs_.form().packing == Packing::high_first; }
  struct Bf16Vectors {
    const std::uint16_t* x;
    std::int64_t x_stride, m;
    bool rounds = false;
  };
  void dot_bf16(std::int64_t row, std::int64_t count, const Bf16Vectors& to, float* y,
                std::int64_t y_stride) const noexcept;

  /// The same for m rows of x in bf16, which are not arranged.
  bool has_dot_float8(std::int64_t m) const noexcept {
    const bool is_short = runs_.group() == 16 || runs_.group() == 32;
    return dot_float8_rows_ != 0 && m <= (is_short ? kMostFloat8InShort : kMostFloat8Rows);
  }
  void dot_float8(std::int64_t row, std::int64_t count, const Bf16Vectors& to, float* y,
                  std::int64_t y_stride) const noexcept;

  /// The same of codes of a byte, of columns [k, k + n), multiples of kBf16Block, and for up to
  /// kMostEights rows of x, which begins with column k and has rows of zeros up to so many.
  bool has_dot_eights() const noexcept { return dot_eights_rows_ != 0; }
  void dot_eights(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                  const Bf16Vectors& to, float* y, std::int64_t y_stride) const noexcept;

  /// The same for x in bytes, whole rows of it, arranged; for m rows of it.
  bool has_dot_bytes(std::int64_t m) const noexcept { return m <= dot_bytes_most_; }
  KindOfX dot_bytes_kind() const noexcept { return dot_bytes_kind_; }  // of arranged x
  std::int64_t bytes_of_x() const noexcept {                           // of a row of it
    return ceil_div(columns_, dot_bytes_block_) * dot_bytes_block_ * kBytesOfX[dot_bytes_kind_];
  }
  struct BytesVectors {
    const std::uint8_t* x;
    std::int64_t x_stride, m;
  };
  void dot_bytes(std::int64_t row, std::int64_t count, const BytesVectors& to, float* y,
                 std::int64_t y_stride) const noexcept;

 private:
  /// Codes that are on their way while others become bf16: so many bytes further, all of them, or
  /// the first ones of a row.
  struct Asked {
    std::int64_t ahead;
    bool whole;
  };
  template <class MayScale>
  void widen_some_bf16(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                       std::uint16_t* out, std::int64_t stride, std::int64_t length,
                       const Asked& asked, float* scales, MayScale&& may_scale) const noexcept;
  void widen_asking(const Run& run, std::int64_t ahead, std::uint16_t* out) const noexcept;
  /// `count` rows from `first` on, columns [k, k + n) of each.
  struct Rows {
    std::int64_t first, count, k, n;
  };
  /// What a Run is of: of `some` rows from first + done on; or, of one that is long, of columns
  /// from k + column on; or of rows in streams.
  struct Stretch {
    std::int64_t done, some, column, columns;
    Streams streams{};
  };
  /// Calls body(run, stretch) for the runs of rows, `most` of them at a time.
  template <class Body>
  void for_each_run(const Rows& rows, std::int64_t most, Body&& body,
                    std::int64_t done = 0) const noexcept;
  /// The same for one row of x: of kStreams rows that lie far apart, where it is worth it to expand
  /// their scales so. How many rows it took, the first ones.
  template <class Body>
  std::int64_t for_streams(const Rows& rows, std::int64_t most, Body&& body) const noexcept;
  /// The same for lines of blocks, each with the run of its first row.
  template <class Body>
  void for_each_line(const Rows& rows, Body&& body) const noexcept;
  void keep_scales(const LinesKernels& kernels, const Weight& weight) noexcept;
  std::int64_t most_dot_bytes_rows(const Group& group, bool whole_in_long) const noexcept;
  std::int64_t most_dot_bytes_vectors(const BytesKernels& bytes) const noexcept;
  std::int64_t most_dot_bf16_rows(const Descriptor& form) const noexcept;
  std::int64_t least_dot_bf16_vectors(const Descriptor& form) const noexcept;
  std::int64_t most_scaled_bf16_vectors(const Descriptor& form) const noexcept;
  std::int64_t most_dot_float8_rows(const Group& group) const noexcept;
  std::int64_t most_dot_eights_rows(const Group& group) const noexcept;
  std::int64_t most_dot_rows(const Group& group) const noexcept;

  Runs runs_;
  const char* codes_;
  std::int64_t rows_, columns_;
  Decode to_f32_, to_bf16_;
  DotKernel dot_;
  int bits_;       // of a code
  bool in_pairs_;  // bf16 has what codes stand for
  bool by_rows_;   // and a row has one scale
  bool is_bf16_;
  bool arranged_;
  std::int64_t dot_rows_;  // as many rows at a time are one Run; 0: dot() cannot
  Bf16DotKernel dot_bf16_;
  bool dot_bf16_sums_;            // where values are not rounded
  std::int64_t dot_bf16_scaled_;  // up to how many rows of x they are not
  std::int64_t dot_bf16_rows_, dot_bf16_least_, dot_bf16_most_;  // of weight at a time; of x
  Bf16DotKernel dot_float8_;
  std::int64_t dot_float8_rows_;
  Bf16DotKernel dot_eights_;
  std::int64_t dot_eights_rows_ = 0;
  BytesDotKernel dot_bytes_;
  KindOfX dot_bytes_kind_;
  std::int64_t dot_bytes_block_;                  // columns of a block of x
  std::int64_t dot_bytes_rows_, dot_bytes_most_;  // of weight at a time; of x, 0: none
  const std::uint8_t* dot_bytes_exponents_;       // of scales that need no expansion so; else null
  BytesDotKernel dot_kept_ = nullptr;  // of one row of x and these scales, under one number
  const std::uint8_t* kept_scales_ = nullptr;
  const float* kept_outer_ = nullptr;
  std::int64_t lines_;  // rows of weight that share the scales of one; else 0
  bool near_;           // codes go to the L1 cache at once
};

/// What all ways need to know of a call. x and y are row-major, [m, ...], of `dtype`.
struct LinearCall {
  const LinearKernels* kernels;
  const LinearWeight* weight;
  const void* x;
  std::int64_t m;
  Dtype dtype;
  const void* bias;  // null: none
  void* y;
  Executor* executor;

  std::int64_t bytes() const noexcept { return bits(dtype) / 8; }
  const void* x_at(std::int64_t element) const noexcept {
    return static_cast<const char*>(x) + element * bytes();
  }
  const void* bias_at(std::int64_t element) const noexcept {
    return bias == nullptr ? nullptr : static_cast<const char*>(bias) + element * bytes();
  }
  void widen_x(std::int64_t element, std::int64_t n, float* out) const noexcept {
    kernels->widen[value_index(dtype)](x_at(element), n, out);
  }
  /// y[row + i, column + j] = round(sums[i, j] + bias[column + j]); y has `columns` columns.
  void finish(const float* sums, std::int64_t stride, std::int64_t row, std::int64_t rows,
              std::int64_t column, std::int64_t n, std::int64_t columns) const noexcept {
    void* out = static_cast<char*>(y) + (row * columns + column) * bytes();
    kernels->narrow[value_index(dtype)]({sums, stride, rows, n, bias_at(column), out, columns});
  }
};

constexpr std::int64_t padded(std::int64_t n) {
  return (n + kLinearPad - 1) / kLinearPad * kLinearPad;
}

bool fits_bf16(const LinearCall& call) noexcept;
/// Whether all sums are finite, as those that a scale multiplies must be: else what values are
/// after it decides.
bool linear_bf16(const LinearCall& call);
bool fits_float8(const LinearCall& call) noexcept;
bool linear_float8(const LinearCall& call);  // likewise
bool fits_eights(const LinearCall& call) noexcept;
bool linear_eights(const LinearCall& call);  // likewise
bool fits_pairs(const LinearCall& call) noexcept;
bool linear_pairs(const LinearCall& call);  // likewise
bool fits_bytes(const LinearCall& call) noexcept;
/// Whether it could: not where x has numbers, or sums become numbers, that it
/// cannot hold.
bool linear_bytes(const LinearCall& call);
bool fits_rows(const LinearCall& call) noexcept;
bool linear_rows(const LinearCall& call);  // likewise

bool fits_matrices(const LinearCall& call) noexcept;
bool fits_grad_matrices(const LinearCall& call) noexcept;
bool linear_matrices(const LinearCall& call);  // likewise

void linear_tiles(const LinearCall& call);
/// y[m, columns] = x[m, rows] W.
void linear_grad_tiles(const LinearCall& call);
void linear_grad_matrices(const LinearCall& call);  // likewise

}  // namespace stowage
