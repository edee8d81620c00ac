// SPDX-License-Identifier: Apache-2.0
// Products with few rows of x on tensor cores: 16 rows of w by 8 of x are a tile. Which elements of
// K a step takes is free, as long as both factors take the same; so each lane takes pieces of 16
// bytes of codes that lie together. Weights are rounded to the dtype of x, as dequantize() rounds
// them, and a block adds up the parts of its warps in their order.
#pragma once
#include "kernel/cuda/grid.cuh"
#include "kernel/cuda/values.cuh"

namespace stowage::cuda {

inline constexpr int kTile = 16, kTileX = 8;  // rows of w, of x
inline constexpr int kTiles = 2;              // of rows of x
inline constexpr int kMostPairs = kMostTogether / 2;
inline constexpr int kTileWarps = 8;  // of a block

/// d += a b: a [16, 16] of w and b [16, 8] of x as pairs of halves, d [16, 8]. Lane 4 g + t has of
/// a the pairs t and t + 4 of rows g and g + 8, of b those of column g, and of d two neighbours of
/// either row.
inline void multiply_tile(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                          std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
  if (form.values == Number::bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
#else
  multiply_tile_on_host(d, a0, a1, a2, a3, b0, b1);
#endif
}

/// Whether one scale multiplies all of a row, and halves have what codes stand for: then sums are
/// scaled.
inline bool scales_rows() {
  const bool whole_rows = form.group == Group::row || form.group == Group::tensor;
  const bool exact = form.element == Element::e4m3 || form.element == Element::e5m2 ||
                     form.element == Element::int8;
  return whole_rows && exact && form.scales == Scales::plain && form.zeros == Zeros::none;
}

/// A piece of a row of w as pairs of halves.
inline void take_pairs(const Weight& w, Index o, Index column, std::uint32_t (&out)[kMostPairs]) {
  float values[kMostTogether];
  if (scales_rows()) {
    std::uint32_t codes[kMostTogether];
    const bool finite = load_codes(w.codes, o * w.row + column, codes);
    STOWAGE_UNROLL
    for (int k = 0; k < together(); ++k) values[k] = finite_value_of(codes[k]);
    if (!finite) {
      STOWAGE_UNROLL
      for (int k = 0; k < together(); ++k) values[k] = value_of(codes[k]);
    }
  } else {
    decode(w, o, column, together(), values);
  }
  STOWAGE_UNROLL
  for (int k = 0; k < together(); k += 2) out[k / 2] = rounded_pair(values[k], values[k + 1]);
}
/// Likewise of x, whose halves lie so.
inline void take_pairs(const void* x, Index first, std::uint32_t (&out)[kMostPairs]) {
  const Words* const from = reinterpret_cast<const Words*>(static_cast<const char*>(x) +
                                                           static_cast<long long>(first) * 2);
  STOWAGE_UNROLL
  for (int k = 0; k < together(); k += 8) {
    const Words some = from[k / 8];
    STOWAGE_UNROLL
    for (int at = 0; at < 4; ++at) out[k / 2 + at] = some.word[at];
  }
}

/// As stowage_linear, of whole pieces, for x of bf16 or f16; blocks of kTileWarps warps.
STOWAGE_KERNEL stowage_linear_tiles(Weight w, const void* x, const void* bias, void* y) {
  __shared__ float shared[kTileWarps][kTile][kTiles * kTileX];
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int g = static_cast<int>(threadIdx.x % kWarp) / 4, t = static_cast<int>(threadIdx.x % 4);
  for (Index tile = blockIdx.x; tile * kTile < w.rows; tile += gridDim.x) {
    const Index o = tile * kTile + g;
    float sums[kTiles][4] = {};
    for (Index slab = warp; slab * 4 * together() < w.row; slab += kTileWarps) {
      const Index column = (slab * 4 + t) * together();
      const bool there = column < w.row;
      std::uint32_t upper[kMostPairs] = {}, lower[kMostPairs] = {};
      if (there && o < w.rows) take_pairs(w, o, column, upper);
      if (there && o + 8 < w.rows) take_pairs(w, o + 8, column, lower);
      STOWAGE_UNROLL
      for (int some = 0; some < kTiles; ++some) {
        if (some * kTileX >= form.x_rows) continue;
        std::uint32_t of_x[kMostPairs] = {};
        const int row = some * kTileX + g;
        if (there && row < form.x_rows) take_pairs(x, row * w.row + column, of_x);
        STOWAGE_UNROLL
        for (int k = 0; k < together() / 2; k += 2)
          multiply_tile(sums[some], upper[k], lower[k], upper[k + 1], lower[k + 1], of_x[k],
                        of_x[k + 1]);
      }
    }
    STOWAGE_UNROLL
    for (int some = 0; some < kTiles; ++some) {
      STOWAGE_UNROLL
      for (int at = 0; at < 4; ++at)
        shared[warp][g + at / 2 * 8][some * kTileX + 2 * t + at % 2] = sums[some][at];
    }
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < kTile * form.x_rows;
         at += static_cast<int>(blockDim.x)) {
      const int row = at / kTile, line = at % kTile;
      const Index to = tile * kTile + line;
      if (to >= w.rows) continue;
      float sum = shared[0][line][row];
      for (int part = 1; part < kTileWarps; ++part) sum = sum + shared[part][line][row];
      if (scales_rows()) sum = sum * scale_of_span(w, to, 0).scale;
      if (bias != nullptr) sum = sum + value_in(bias, to);
      put(y, row * w.rows + to, sum);
    }
    __syncthreads();  // before the next tile is put there
  }
}

}  // namespace stowage::cuda
