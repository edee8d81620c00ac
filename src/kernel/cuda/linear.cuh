// SPDX-License-Identifier: Apache-2.0
// Products with few rows of x: y = x w^T + bias. Each row of w is read once, by one warp or several
// that share it, and never written anywhere. Sums have a fixed order: lanes take every 32nd piece,
// then halves are added, then the parts of a row in the order of their warps.
#pragma once
#include "kernel/cuda/grid.cuh"
#include "kernel/cuda/values.cuh"

namespace stowage::cuda {

inline constexpr int kMostRows = 16;   // of x
inline constexpr int kMostWarps = 32;  // of a block

/// Whether a scale multiplies a sum of products as well as each of them.
inline bool scales_sums() {
  return form.whole && form.zeros == Zeros::none && form.codec != Codec::torchao &&
         form.scales != Scales::absmax;
}

/// Adds the products of n elements of row o of w, from a column on, with those of x.
inline void multiply(const Weight& w, Index o, Index column, int n, const void* x,
                     float (&sums)[kMostRows]) {
  float values[kMostTogether];  // of a row of x, of one span at a time
  if (!scales_sums()) {
    float weights[kMostTogether];
    decode(w, o, column, n, weights);
    STOWAGE_UNROLL
    for (int from = 0; from < together(); from += span()) {
      STOWAGE_UNROLL
      for (int row = 0; row < form.x_rows; ++row) {
        values_in(x, row * w.row + column + from, n - from, span(), values);
        STOWAGE_UNROLL
        for (int k = 0; k < span(); ++k)
          if (from + k < n) sums[row] = __fmaf_rn(values[k], weights[from + k], sums[row]);
      }
    }
    return;
  }
  std::uint32_t codes[kMostTogether];
  const bool finite = load_codes(w.codes, o * w.row + column, codes);
  STOWAGE_UNROLL
  for (int from = 0; from < together(); from += span()) {
    const float scale = scale_of_span(w, o, column + from).scale;
    STOWAGE_UNROLL
    for (int row = 0; row < form.x_rows; ++row) {
      values_in(x, row * w.row + column + from, span(), span(), values);
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

/// x [rows, K], w [O, K], bias [O] or null, y [rows, O], all but w of the form's dtype. `parts`
/// warps share a row of w; a block has a multiple of so many.
STOWAGE_KERNEL stowage_linear(Weight w, const void* x, const void* bias, void* y, int parts) {
  __shared__ float shared[kMostWarps][kMostRows];
  const int warp = static_cast<int>(threadIdx.x / kWarp),
            lane = static_cast<int>(threadIdx.x % kWarp);
  const int together_rows = static_cast<int>(blockDim.x / kWarp) / parts;
  const Index pieces = up(w.row, together());
  for (Index block = blockIdx.x; block * together_rows < w.rows; block += gridDim.x) {
    const Index o = block * together_rows + warp / parts;
    float sums[kMostRows] = {};
    if (o < w.rows)
      for (Index piece = warp % parts * static_cast<Index>(kWarp) + lane; piece < pieces;
           piece += parts * static_cast<Index>(kWarp)) {
        const Index column = piece * together();
        multiply(w, o, column, piece_of(w.row - column), x, sums);
      }
    STOWAGE_UNROLL
    for (int row = 0; row < form.x_rows; ++row) {
      for (unsigned other = kWarp / 2; other != 0; other /= 2)
        sums[row] = sums[row] + __shfl_xor_sync(kAllLanes, sums[row], other);
      if (lane == 0) shared[warp][row] = sums[row];
    }
    __syncthreads();
    if (warp % parts == 0 && lane < form.x_rows && o < w.rows) {
      float sum = shared[warp][lane];
      for (int part = 1; part < parts; ++part) sum = sum + shared[warp + part][lane];
      if (bias != nullptr) sum = sum + value_in(bias, o);
      put(y, lane * w.rows + o, sum);
    }
    __syncthreads();  // before the next row is put there
  }
}

}  // namespace stowage::cuda
