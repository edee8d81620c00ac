// SPDX-License-Identifier: Apache-2.0
// Products with few rows of x: y = x w^T + bias. Each line of w is read once, by one warp or
// several that share it, and never written anywhere. Sums have a fixed order: lanes take every 32nd
// piece, then halves are added, then the parts of a line in the order of their warps.
#pragma once
#include "kernel/cuda/matrices.cuh"

namespace stowage::cuda {

inline constexpr int kMostRows = 16;   // of x
inline constexpr int kMostWarps = 32;  // of a block

/// Whether a scale multiplies a sum of products as well as each of them.
inline bool scales_sums() {
  return form.whole && form.zeros == Zeros::none && form.codec != Codec::torchao &&
         form.scales != Scales::absmax;
}

/// Adds the products of n elements of a line of w, from a column on, with those of rows of x.
inline void multiply(const Weight& w, Line line, Index column, int n, const void* x, Rows rows,
                     float (&sums)[kMostRows]) {
  const Index at = line.begin + column;
  float values[kMostTogether];  // of a row of x, of one span at a time
  if (!scales_sums()) {
    float weights[kMostTogether];
    decode(w, line.row, at, n, weights);
    STOWAGE_UNROLL
    for (int from = 0; from < together(); from += span()) {
      STOWAGE_UNROLL
      for (int row = 0; row < form.x_rows; ++row) {
        if (!has(rows, row)) continue;
        values_in(x, (rows.first + row) * w.columns + column + from, n - from, span(), values);
        STOWAGE_UNROLL
        for (int k = 0; k < span(); ++k)
          if (from + k < n) sums[row] = __fmaf_rn(values[k], weights[from + k], sums[row]);
      }
    }
    return;
  }
  std::uint32_t codes[kMostTogether];
  const bool finite = load_codes(w.codes, line.row * w.row + at, codes);
  STOWAGE_UNROLL
  for (int from = 0; from < together(); from += span()) {
    const float scale = scale_of_span(w, line.row, at + from).scale;
    STOWAGE_UNROLL
    for (int row = 0; row < form.x_rows; ++row) {
      if (!has(rows, row)) continue;
      values_in(x, (rows.first + row) * w.columns + column + from, span(), span(), values);
      float some = 0.0f;
      STOWAGE_UNROLL
      for (int k = 0; k < span(); ++k)
        some = __fmaf_rn(values[k], finite_value_of(codes[from + k]), some);
      if (!finite) {  // what is no number makes the sum none, or infinite
        STOWAGE_UNROLL
        for (int k = 0; k < span(); ++k)
          if (const float weight = value_of(codes[from + k]); !(weight * 0.0f == 0.0f))
            some = __fmaf_rn(values[k], weight, some);
      }
      sums[row] = __fmaf_rn(some, scale, sums[row]);
    }
  }
}

/// x [rows, K], y [rows, O], bias or null, all of the form's dtype: with w [O, K] and bias [O], or,
/// where x has groups that end at `ends`, with w [E, O, K] and bias [E, O]. `parts` warps share a
/// line of w; a block has a multiple of so many.
STOWAGE_KERNEL stowage_linear(Weight w, const void* x, const std::int32_t* ends, Extent x_rows,
                              const void* bias, void* y, int parts) {
  __shared__ float shared[kMostWarps][kMostRows];
  const int warp = static_cast<int>(threadIdx.x / kWarp),
            lane = static_cast<int>(threadIdx.x % kWarp);
  const int lines = static_cast<int>(blockDim.x / kWarp) / parts;  // of a block
  const Index pieces = up(w.columns, together()), blocks = up(w.lines, lines);
  for (Index block = blockIdx.x; block < matrices(w) * blocks; block += gridDim.x) {
    const Index e = form.groups ? block / blocks : 0;
    const Index o = (block - e * blocks) * lines + warp / parts;
    const Line line = line_of(w, e, o);
    const Rows group = rows_of(ends, e, x_rows);
    for (Rows rows = group; rows.first < group.end; rows.first += form.x_rows) {
      float sums[kMostRows] = {};
      if (o < w.lines)
        for (Index piece = warp % parts * static_cast<Index>(kWarp) + lane; piece < pieces;
             piece += parts * static_cast<Index>(kWarp)) {
          const Index column = piece * together();
          multiply(w, line, column, piece_of(w.columns - column), x, rows, sums);
        }
      STOWAGE_UNROLL
      for (int row = 0; row < form.x_rows; ++row) {
        for (unsigned other = kWarp / 2; other != 0; other /= 2)
          sums[row] = sums[row] + __shfl_xor_sync(kAllLanes, sums[row], other);
        if (lane == 0) shared[warp][row] = sums[row];
      }
      __syncthreads();
      if (warp % parts == 0 && has(rows, lane) && o < w.lines) {
        float sum = shared[warp][lane];
        for (int part = 1; part < parts; ++part) sum = sum + shared[warp + part][lane];
        if (scales_sums() && !is_finite(sum))
          sum = product_of_values(w, line, x, rows.first + lane);
        if (bias != nullptr) sum = sum + value_in(bias, e * w.lines + o);
        put(y, (rows.first + lane) * w.lines + o, sum);
      }
      __syncthreads();  // before the next sums are put there
    }
  }
}

}  // namespace stowage::cuda
