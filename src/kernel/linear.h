// SPDX-License-Identifier: Apache-2.0
// The linear family: what an instruction set implements. Pointers and counts only. Sums are fp32;
// each element is summed in an order that depends on its own sizes alone, so that the bytes do not
// depend on how work is split.
#pragma once
#include <cstdint>

#include "kernel/dequantize.h"

namespace stowage {
/// Padding that these kernels may rely on: counts called padded are multiples of this.
inline constexpr std::int64_t kLinearPad = 16;

/// Rows of weight that come quicker together, each from a quarter of its own of all rows of a task,
/// than one after the other; and how many bytes ahead each asks at least.
inline constexpr std::int64_t kStreams = 4, kStreamAhead = 2048;
/// Rows [begin, end) of each of kStreams streams, which are `apart` rows of weight from one to the
/// next. What a row of stream r has in a run's scales is that of elements
/// lag + r more_lag before its own, a number of groups: scales of several rows of each stream were
/// expanded, one after the other.
struct Streams {
  std::int64_t begin = 0, end = 0, apart = 0, lag = 0, more_lag = 0;
  constexpr std::int64_t lag_of(std::int64_t r) const { return lag + r * more_lag; }
};
/// Those of a task that does not say: quarters of its rows.
constexpr Streams quarters(std::int64_t rows) { return {0, rows / kStreams, rows / kStreams}; }

/// y[j, i] += sum_k w[i, k] x[j, k]: rows of codes are multiplied while they are decoded.
struct DotTask {
  Run run;                        // begins with the first row; n is not read; groups are padded,
                                  // unless they are whole rows of the weight
  std::int64_t rows, row_stride;  // elements from row to row
  std::int64_t columns;           // 4-bit codes: padded
  std::int64_t ahead;             // bytes from a code to those that will be read soon
  const float* values;            // 4-bit codes: the table of 16 values
  const float* x;                 // columns, then zeros up to the padded length; 4-bit: arranged
  std::int64_t x_stride, m;
  float* y;
  std::int64_t y_stride;
  bool near = false;  // as in LinearKernels
};
using DotKernel = void (*)(const DotTask& task) noexcept;

/// y[j, i] += sum_k w[i, k] x[j, k] of codes and bf16. Subnormal factors and sums count as 0.
struct Bf16DotTask {
  Run run;                        // as in DotTask; groups as in Bf16Kernels
  std::int64_t rows, row_stride;  // elements from row to row
  std::int64_t columns;           // a multiple of kBf16Block, like row_stride
  const float* values;            // 4-bit codes: the table of 16 values
  const std::uint16_t* x;         // 4-bit codes: arranged, with zeros up to a multiple of kBf16Pad
  std::int64_t x_stride, m;
  float* y;
  std::int64_t y_stride;
  bool one_line = false;  // fp8: all rows have the scales of the first
  bool near = false;      // as in LinearKernels
  Streams streams{};      // fp8: all of its rows, if it has any; of one row of x
  bool rounds = false;  // 4-bit codes: values to bf16 after their scales, not in groups of 16; else
                        // no zeros, and where offsets are, groups of 32 and sums beside x
};
using Bf16DotKernel = void (*)(const Bf16DotTask& task) noexcept;
inline constexpr std::int64_t kBf16Block = 64, kBf16Pad = 128, kBf16WithSums = 160;
/// Where values of 4-bit codes are rounded, so many rows of zeros are behind those of x, and y has
/// room for as many.
inline constexpr std::int64_t kMoreBf16Rows = 3;
inline constexpr std::int64_t kMostBf16Columns = std::int64_t{1} << 31;  // of codes of four bits

/// y[j, i] += scales[i] sum_k w[i, k] x[j, k] of numbers of bf16. Subnormal factors and sums count
/// as 0.
struct PairsTask {
  const std::uint16_t* w;  // [rows, columns] at stride
  std::int64_t w_stride, rows;
  const float* scales;     // [rows]
  const std::uint16_t* x;  // [m, columns] at stride
  std::int64_t x_stride, m;
  std::int64_t columns;  // a multiple of kPairsPad
  float* y;
  std::int64_t y_stride;
};
inline constexpr std::int64_t kPairsPad = 32;

/// Rows of x that fp8 is multiplied with in registers; in groups of 16 and 32, two at a time.
inline constexpr std::int64_t kMostFloat8Rows = 4, kMostFloat8InShort = 8;
/// Rows of x of linear_eights-inl.h, at a time: so many are there, zeros where fewer count.
inline constexpr std::int64_t kMostEights = 8;

/// All null where an instruction set has none.
struct Bf16Kernels {
  /// out: x in the order that codes of four bits are read in, of which the first of two lies in
  /// the high half of its byte or in the low one, with zeros up to a multiple of kBf16Pad; n is one
  /// of kBf16Block. with_sums: of each kBf16Pad numbers sums follow, 16 of fp32, so that they take
  /// kBf16WithSums.
  void (*arrange)(const void* x, std::int64_t n, bool high_first, bool with_sums,
                  std::uint16_t* out) noexcept;
  /// Of codes of four bits in groups of 16 or 32 that rows begin with, or of multiples of
  /// kBf16Block; zeros and offsets not in those of 16.
  Bf16DotKernel nf4, fp4;
  Bf16DotKernel exact;  // what codes stand for are numbers of bf16
  /// Of rows that are multiples of kBf16Block, in groups of 16 and 32 too, and up to
  /// kMostFloat8Rows rows of x, or kMostFloat8InShort, not arranged.
  Bf16DotKernel e4m3, e5m2;
  /// Of a scale for each row, or of groups of multiples of kBf16Block that rows begin with, and up
  /// to kMostEights rows of x.
  Bf16DotKernel eights_e4m3, eights_e5m2, eights_int8;
  void (*pairs)(const PairsTask& task) noexcept;  // of any weight, whose rows were widened to bf16
  std::int64_t eights_columns = 1024;  // so many of kMostEights rows of x stay in the L1 cache
};

/// c[i, j] = or += sum_p a[i, p] b[p, j] of numbers of bf16, in the order of p. b lies in blocks of
/// kMatrixTile columns, each in pairs of p: [depth / 2, kMatrixTile, 2]. Subnormal factors and sums
/// count as 0.
struct MatrixTask {
  const std::uint16_t* a;
  std::int64_t a_stride, rows;  // a multiple of kMatrixTile, like columns
  const std::uint16_t* b;
  std::int64_t b_stride, columns;  // numbers from block to block
  std::int64_t depth;              // a multiple of kMatrixDepth
  float* c;
  std::int64_t c_stride;
  bool add;
  const void* next;  // so many bytes that are read next: they are on their way meanwhile
  std::int64_t next_bytes;
};
inline constexpr std::int64_t kMatrixTile = 16, kMatrixDepth = 32;

/// out[j, i] = c[i, j] * scales[i], for i < rows and j < kMatrixTile. Rows are a multiple of
/// kMatrixTile, and scales of those that are not there are 1.
struct TurnTask {
  const float* c;
  std::int64_t c_stride, rows;
  const float* scales;
  float* out;
  std::int64_t out_stride;
};

/// What a thread that multiplies matrices had before.
struct alignas(64) MatrixState {
  std::uint8_t bytes[64];
};
/// All null where an instruction set has none.
struct MatrixKernels {
  void (*begin)(MatrixState* before) noexcept;  // of each thread, before it multiplies
  void (*end)(const MatrixState* before) noexcept;
  void (*multiply)(const MatrixTask& task) noexcept;
  /// Two rows of n numbers, a multiple of kMatrixTile, as a row of b: pairs of them, and `stride`
  /// numbers from one block of columns to the next.
  void (*pair)(const std::uint16_t* even, const std::uint16_t* odd, std::int64_t n,
               std::uint16_t* out, std::int64_t stride) noexcept;
  /// Whether all sums are finite that a scale other than 1 has multiplied.
  bool (*turn)(const TurnTask& task) noexcept;
  std::int64_t most_by_vectors = 0;  // rows of x up to which other ways are quicker
};

/// What one instruction set has for pairs of bf16.
struct PairKernels {
  DequantizeKernel to_bf16[kCodesCount];  // by Codes; null: as without pairs
  Bf16Kernels rows;
  MatrixKernels matrices;
  bool (*are_quick)() noexcept;  // whether the CPU multiplies them as quickly as fp32
};

/// y[j, i] += sum_k w[i, k] x[j, k] of codes of 4 bits, of a byte in short groups, or densely
/// packed, and x in integers (cpu/linear_bytes-inl.h, linear_words-inl.h, linear_integers-inl.h),
/// or of fp8 and x in fp32 (cpu/linear_float8_moved-inl.h).
struct BytesDotTask {
  Run run;                        // as in DotTask; groups are 16, 32, 64, whole rows or multiples
                                  // of what x is arranged by
  std::int64_t rows, row_stride;  // elements from row to row
  std::int64_t columns;           // a multiple of kBytesBlock and of groups, or less than one
  std::int64_t ahead;             // bytes from a code to those that will be read soon
  const std::uint8_t* x;          // arranged for such codes
  std::int64_t x_stride, m;       // bytes
  float* y;
  std::int64_t y_stride;
  bool one_line = false;                    // fp8: all rows have the scales of the first
  const std::uint8_t* exponents = nullptr;  // fp8: of scales that are powers of two, and not in run
  bool near = false;                        // as in LinearKernels
  bool in_place = false;                    // scales lie in the weight, row by row
  Streams streams{};                        // all of its rows, if it has any; of one row of x
  const std::uint8_t* kept = nullptr;       // scales that are bytes, and not in run
  float outer = 1.0f;                       // under which these stand
  const float* sums = nullptr;              // q4_k: of x, over each group
  int bits = 0;                             // dense: of a code
};
using BytesDotKernel = void (*)(const BytesDotTask& task) noexcept;
inline constexpr std::int64_t kBytesBlock = 64;
inline constexpr std::int64_t kMostBytesRows = 16;  // of x
/// How x is arranged: for two codes in a byte that are digits, for one, for two that choose words,
/// for fp8, and for integers that become words.
enum KindOfX : std::uint8_t { kForDigits, kForBytes, kForWords, kForFloat8, kForIntegers };
inline constexpr int kKindsOfX = 5;
/// And its bytes to an element.
inline constexpr std::int64_t kBytesOfX[kKindsOfX] = {3, 4, 3, 4, 3};

inline constexpr std::int64_t kMostLinesColumns = 65536;
/// The same of one row of x, of up to so many columns, whose scales are read as they lie.
struct LinesKernels {
  BytesDotKernel mxfp4, nvfp4, mxint8, q4_0, q4_k, q6_k, q8_0, awq;
  /// Those of scales that are numbers of their own, `group` columns each; null: none.
  constexpr BytesDotKernel plain(Codes codes, Dtype scale, std::int64_t group, Zero zero) const {
    const bool f16 = scale == Dtype::f16;
    if (group == 128 && zero == Zero::code && codes == Codes::int4 && f16) return awq;
    if (group != 32 || zero != Zero::none) return nullptr;
    if (codes == Codes::int4 && f16) return q4_0;
    if (codes == Codes::int8 && f16) return q8_0;
    if (scale != Dtype::f8_e8m0) return nullptr;
    return codes == Codes::f4_e2m1 ? mxfp4 : codes == Codes::int8 ? mxint8 : nullptr;
  }
};

/// All null where an instruction set has none.
struct BytesKernels {
  /// out: x in the order that the others read; n is a multiple of kBytesBlock, and zeros fill the
  /// last block.
  /// Whether it has only numbers whose products stay normal; else out is
  /// anything.
  bool (*arrange[kKindsOfX][kValueDtypes])(const void* x, std::int64_t n,
                                           std::uint8_t* out) noexcept;
  BytesDotKernel dot[kCodesCount];  // of dense codes: as they lie
  KindOfX kind[kCodesCount];        // of arranged x
  std::int64_t block[kKindsOfX] = {kBytesBlock, kBytesBlock, kBytesBlock, kBytesBlock, kBytesBlock};
  /// Rows of x up to which they are worth it, since other ways may be as quick: by digits where
  /// groups are whole blocks, and shorter; by codes of a byte, or dense; by words; and of fp8.
  std::int64_t most_long = kMostBytesRows, most_short = kMostBytesRows, most_whole = 4,
               most_words = kMostBytesRows, most_float8 = 2;
  std::int64_t most_bf16 = kMostBytesRows;  // of those, if other ways have bf16
  LinesKernels lines{};
  bool whole_in_long = false;  // codes of a byte in groups of a block and more, too

  constexpr void set(Codes codes, BytesDotKernel kernel, KindOfX of_x) {
    dot[static_cast<int>(codes)] = kernel;
    kind[static_cast<int>(codes)] = of_x;
  }
};

/// Rows of x that are taken by dot products, at most.
inline constexpr std::int64_t kMostRows = 64;

/// y[j, i] += sum_k w[i, k] x[j, k] for rows of x and a few widened rows of weight.
struct DotsTask {
  const float* w;  // [rows, columns] at stride
  std::int64_t w_stride, rows;
  const float* x;  // [m, columns] at stride
  std::int64_t x_stride, m;
  std::int64_t columns;  // padded
  float* y;
  std::int64_t y_stride;
  const char* next;  // so many bytes that are read next: they are on their way meanwhile
  std::int64_t next_bytes;
};

/// c[i, j] = or += sum_p a[i, p] b[p, j].
struct TileTask {
  const float* a;
  std::int64_t a_stride, rows;
  const float* b;
  std::int64_t b_stride, columns;  // columns are padded, in b and in c
  std::int64_t depth;
  float* c;
  std::int64_t c_stride;
  bool add;
};

/// out[c, r] = in[r, c].
struct TransposeTask {
  const float* in;
  std::int64_t in_stride, rows, columns;
  float* out;
  std::int64_t out_stride;
};

/// out[i, j] = round(y[i, j] + bias[j]); a null bias adds nothing.
struct NarrowTask {
  const float* y;
  std::int64_t y_stride, rows, columns;
  const void* bias;  // [columns], in the type of out
  void* out;
  std::int64_t out_stride;
};

struct LinearKernels {
  void (*widen[kValueDtypes])(const void* x, std::int64_t n, float* out) noexcept;  // not f64
  void (*narrow[kValueDtypes])(const NarrowTask& task) noexcept;                    // not f64
  void (*arrange)(float* x, std::int64_t n) noexcept;  // x in the order 4-bit dots read; n padded
  DotKernel dot[kCodesCount];
  DotKernel dot_rounded[kValueDtypes];  // nf4 whose values are rounded to bf16 or f16; else null
  void (*dots)(const DotsTask& task) noexcept;
  std::int64_t most_rows;  // of x that dots are worth it for; tiles are for more
  void (*tile)(const TileTask& task) noexcept;
  std::int64_t panel;  // columns that tile takes at a time; a multiple of kLinearPad
  std::int64_t part_rows, part_columns;  // of weight that are widened for tiles at a time, so that
                                         // they stay in the L2 cache
  void (*transpose)(const TransposeTask& task) noexcept;
  Bf16Kernels bf16;
  MatrixKernels matrices;
  BytesKernels bytes;
  /// Whether codes of one row of x are asked for into the L1 cache; else into the L2 cache.
  bool near = false;
};
}  // namespace stowage
