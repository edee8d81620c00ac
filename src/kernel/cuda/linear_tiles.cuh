// SPDX-License-Identifier: Apache-2.0
// Products with few rows of x on tensor cores: 16 rows of w by 8 of x are a tile. Which elements of
// K a step takes is free, as long as both factors take the same; so each lane takes pieces of 16
// bytes of codes that lie together. Weights are rounded to the dtype of x, as dequantize() rounds
// them, and a block adds up the parts of its warps in their order.
#pragma once
#include "kernel/cuda/matrices.cuh"

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

/// Whether one scale multiplies all of a line, and halves have what codes stand for: then sums are
/// scaled.
inline bool scales_lines() {
  const bool whole_lines = form.group == Group::row || form.group == Group::tensor ||
                           (form.groups && form.group == Group::row2);
  const bool exact = form.element == Element::e4m3 || form.element == Element::e5m2 ||
                     form.element == Element::int8;
  return whole_lines && exact && form.scales == Scales::plain && form.zeros == Zeros::none;
}

/// A piece of a line of w as pairs of halves.
inline void take_pairs(const Weight& w, Line line, Index column, std::uint32_t (&out)[kMostPairs]) {
  const Index at = line.begin + column;
  float values[kMostTogether];
  if (scales_lines()) {
    std::uint32_t codes[kMostTogether];
    const bool finite = load_codes(w.codes, line.row * w.row + at, codes);
    STOWAGE_UNROLL
    for (int k = 0; k < together(); ++k) values[k] = finite_value_of(codes[k]);
    if (!finite) {
      STOWAGE_UNROLL
      for (int k = 0; k < together(); ++k) values[k] = value_of(codes[k]);
    }
  } else {
    decode(w, line.row, at, together(), values);
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

// --- slabs: four-bit codes by tables in registers, sums scaled
// ----------------------------------------------------------

inline constexpr int kSlab = 64, kSlabPairs = kSlab / 4 / 2;  // elements of K; pairs of a lane

/// The table: four lower or upper bytes of its halves in a word. It is read once, into registers:
/// as constants each would be moved there again for each use.
struct Planes {
  std::uint32_t lower[4], upper[4];
};
inline Planes planes() {
  Planes made;
  STOWAGE_UNROLL
  for (int at = 0; at < 4; ++at)
    made.lower[at] = table_planes[at], made.upper[at] = table_planes[4 + at];
  return made;
}
/// Byte i: that of the half which code i of four stands for; `which`: their lower three bits,
/// `side`: places of bytes, 4 more where the fourth bit is set.
inline std::uint32_t looked_up(const std::uint32_t (&plane)[4], std::uint32_t which,
                               std::uint32_t side) {
  const std::uint32_t few = __byte_perm(plane[0], plane[1], which);
  const std::uint32_t many = __byte_perm(plane[2], plane[3], which);
  return __byte_perm(few, many, side);
}
/// Eight codes as four pairs of halves, in their order.
inline void pairs_of_codes(const Planes& of, std::uint32_t word, std::uint32_t (&out)[kSlabPairs],
                           int at) {
  const bool high_first = form.packing == Packing::high_first;
  const std::uint32_t which = word & 0x77777777u, side = (word >> 1 & 0x44444444u) | 0x32103210u;
  STOWAGE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t lower = looked_up(of.lower, which >> (16 * half), side >> (16 * half));
    const std::uint32_t upper = looked_up(of.upper, which >> (16 * half), side >> (16 * half));
    out[at + 2 * half] = __byte_perm(lower, upper, high_first ? 0x4051u : 0x5140u);
    out[at + 2 * half + 1] = __byte_perm(lower, upper, high_first ? 0x6273u : 0x7362u);
  }
}
struct alignas(8) TwoWords {
  std::uint32_t word[2];
};
/// A lane's part of a slab, from where its codes lie.
inline void take_slab(const Planes& of, const std::uint8_t* from,
                      std::uint32_t (&out)[kSlabPairs]) {
  const TwoWords codes = *reinterpret_cast<const TwoWords*>(from);
  pairs_of_codes(of, codes.word[0], out, 0);
  pairs_of_codes(of, codes.word[1], out, 4);
}
inline void take_slab(const Words* x, std::uint32_t (&out)[kSlabPairs]) {
  STOWAGE_UNROLL
  for (int k = 0; k < kSlabPairs; k += 4) {
    const Words some = x[k / 4];
    STOWAGE_UNROLL
    for (int at = 0; at < 4; ++at) out[k + at] = some.word[at];
  }
}

inline Index at_most(Index x, Index most) { return x < most ? x : most; }

/// Adds the slabs of a warp, for lines o and o + 8 of a matrix. Lines and rows that w or x lack are
/// the last ones once more: what comes of them is put nowhere.
inline void add_slabs(const Weight& w, Index matrix, Index o, int warp, int g, int t, const void* x,
                      Rows rows, float (&sums)[kTiles][4]) {
  const Planes of = planes();
  const Line lines[2] = {line_of(w, matrix, at_most(o, w.lines - 1)),
                         line_of(w, matrix, at_most(o + 8, w.lines - 1))};
  const Index mine = t * (kSlab / 4);  // where this lane's part of a slab begins
  const std::uint8_t* codes[2];
  const Words* of_x[kTiles];
  for (int at = 0; at < 2; ++at)
    codes[at] =
        w.codes + (static_cast<long long>(lines[at].row) * w.row + lines[at].begin + mine) / 2;
  for (int some = 0; some < kTiles; ++some)
    of_x[some] = reinterpret_cast<const Words*>(
        static_cast<const char*>(x) +
        static_cast<long long>(at_most(rows.first + some * kTileX + g, rows.end - 1) * w.columns +
                               mine) *
            2);
  for (Index column = warp * kSlab; column < w.columns; column += kTileWarps * kSlab) {
    std::uint32_t upper[kSlabPairs], lower[kSlabPairs], pairs[kSlabPairs];
    take_slab(of, codes[0] + column / 2, upper);
    take_slab(of, codes[1] + column / 2, lower);
    const float scale[2] = {scale_of_span(w, lines[0].row, lines[0].begin + column).scale,
                            scale_of_span(w, lines[1].row, lines[1].begin + column).scale};
    STOWAGE_UNROLL
    for (int some = 0; some < kTiles; ++some) {
      if (!has(rows, some * kTileX)) continue;
      take_slab(of_x[some] + column / 8, pairs);
      float products[4] = {};
      STOWAGE_UNROLL
      for (int k = 0; k < kSlabPairs; k += 2)
        multiply_tile(products, upper[k], lower[k], upper[k + 1], lower[k + 1], pairs[k],
                      pairs[k + 1]);
      STOWAGE_UNROLL
      for (int at = 0; at < 4; ++at)
        sums[some][at] = __fmaf_rn(products[at], scale[at / 2], sums[some][at]);
    }
  }
}

// --- all others
// -------------------------------------------------------------------------------------

/// Likewise in pieces.
inline void add_pieces(const Weight& w, Index matrix, Index o, int warp, int g, int t,
                       const void* x, Rows rows, float (&sums)[kTiles][4]) {
  for (Index slab = warp; slab * 4 * together() < w.columns; slab += kTileWarps) {
    const Index column = (slab * 4 + t) * together();
    const bool there = column < w.columns;
    std::uint32_t upper[kMostPairs] = {}, lower[kMostPairs] = {};
    if (there && o < w.lines) take_pairs(w, line_of(w, matrix, o), column, upper);
    if (there && o + 8 < w.lines) take_pairs(w, line_of(w, matrix, o + 8), column, lower);
    STOWAGE_UNROLL
    for (int some = 0; some < kTiles; ++some) {
      if (!has(rows, some * kTileX)) continue;
      std::uint32_t of_x[kMostPairs] = {};
      const int row = some * kTileX + g;
      if (there && has(rows, row)) take_pairs(x, (rows.first + row) * w.columns + column, of_x);
      STOWAGE_UNROLL
      for (int k = 0; k < together() / 2; k += 2)
        multiply_tile(sums[some], upper[k], lower[k], upper[k + 1], lower[k + 1], of_x[k],
                      of_x[k + 1]);
    }
  }
}

/// As stowage_linear, of whole pieces, for x of bf16 or f16; blocks of kTileWarps warps.
STOWAGE_KERNEL stowage_linear_tiles(Weight w, const void* x, const std::int32_t* ends,
                                    Extent x_rows, const void* bias, void* y) {
  __shared__ float shared[kTileWarps][kTile][kTiles * kTileX];
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int g = static_cast<int>(threadIdx.x % kWarp) / 4, t = static_cast<int>(threadIdx.x % 4);
  const Index tiles = up(w.lines, kTile);
  for (Index block = blockIdx.x; block < matrices(w) * tiles; block += gridDim.x) {
    const Index e = form.groups ? block / tiles : 0, begin = (block - e * tiles) * kTile;
    const Rows group = rows_of(ends, e, x_rows);
    for (Rows rows = group; rows.first < group.end; rows.first += form.x_rows) {
      float sums[kTiles][4] = {};
      if (form.slabs)
        add_slabs(w, e, begin + g, warp, g, t, x, rows, sums);
      else
        add_pieces(w, e, begin + g, warp, g, t, x, rows, sums);
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
        const Index to = begin + line;
        if (to >= w.lines || !has(rows, row)) continue;
        float sum = shared[0][line][row];
        for (int part = 1; part < kTileWarps; ++part) sum = sum + shared[part][line][row];
        if (scales_lines()) {
          const Line of = line_of(w, e, to);
          sum = sum * scale_of_span(w, of.row, of.begin).scale;
        }
        if ((form.slabs || scales_lines()) && !is_finite(sum))
          sum = product_of_values(w, line_of(w, e, to), x, rows.first + row);
        if (bias != nullptr) sum = sum + value_in(bias, e * w.lines + to);
        put(y, (rows.first + row) * w.lines + to, sum);
      }
      __syncthreads();  // before the next tile is put there
    }
  }
}

}  // namespace stowage::cuda
