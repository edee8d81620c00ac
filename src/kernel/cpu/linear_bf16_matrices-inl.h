// SPDX-License-Identifier: Apache-2.0
// Products of matrices of bf16 in AVX512-BF16: a pair of numbers of a row, in all lanes, times the
// pairs of sixteen columns. Sums of eight rows by three blocks of columns are held in registers,
// and a stretch of these blocks stays in the L1 cache for all rows.
#pragma once
#include "kernel/cpu/linear_matrices-inl.h"

namespace stowage {
namespace {

constexpr std::int64_t kStretch = 256;  // of the depth
constexpr int kRowsAtOnce = 8, kBlocksAtOnce = 3;

/// Lines that are read next, a few with each step.
struct Fetch {
  const char* next;
  std::int64_t each;
  [[gnu::always_inline]] void step() {
    for (std::int64_t i = 0; i < each; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

/// Sums of rows a and kBlocks blocks of columns b over a stretch of the depth.
template <int kBlocks>
[[gnu::always_inline]] inline void add_block(const MatrixTask& task, const std::uint16_t* a,
                                             const std::uint16_t* b, std::int64_t depth, float* c,
                                             bool add) {
  __m512 sums[kRowsAtOnce][kBlocks];
  for (int r = 0; r < kRowsAtOnce; ++r)
    for (int v = 0; v < kBlocks; ++v)
      sums[r][v] = add ? _mm512_loadu_ps(c + r * task.c_stride + v * kTile) : _mm512_setzero_ps();
  for (std::int64_t p = 0; p < depth; p += 2) {
    __m512bh columns[kBlocks];
    for (int v = 0; v < kBlocks; ++v)
      columns[v] =
          reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + v * task.b_stride + p * kTile));
    for (int r = 0; r < kRowsAtOnce; ++r) {
      std::int32_t pair;
      __builtin_memcpy(&pair, a + r * task.a_stride + p, sizeof pair);
      const auto row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < kBlocks; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], row, columns[v]);
    }
  }
  for (int r = 0; r < kRowsAtOnce; ++r)
    for (int v = 0; v < kBlocks; ++v)
      _mm512_storeu_ps(c + r * task.c_stride + v * kTile, sums[r][v]);
}

template <int kBlocks>
void add_panel(const MatrixTask& task, std::int64_t column, std::int64_t p, Fetch& fetch) {
  const std::int64_t depth = task.depth - p < kStretch ? task.depth - p : kStretch;
  const std::uint16_t* b = task.b + column / kTile * task.b_stride + p * kTile;
  for (std::int64_t row = 0; row < task.rows; row += kRowsAtOnce) {
    fetch.step();
    add_block<kBlocks>(task, task.a + row * task.a_stride + p, b, depth,
                       task.c + row * task.c_stride + column, task.add || p != 0);
  }
}

void multiply_in_pairs(const MatrixTask& task) noexcept {
  const std::int64_t blocks = task.columns / kTile;
  const std::int64_t panels = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce;
  const std::int64_t steps =
      (task.depth + kStretch - 1) / kStretch * panels * (task.rows / kRowsAtOnce);
  Fetch fetch{static_cast<const char*>(task.next), (task.next_bytes / 64 + steps - 1) / steps};
  for (std::int64_t p = 0; p < task.depth; p += kStretch)
    for (std::int64_t block = 0, left = panels; left > 0; --left) {  // panels as alike as can be
      const std::int64_t some = (blocks - block + left - 1) / left;
      if (some == 3) add_panel<3>(task, block * kTile, p, fetch);
      if (some == 2) add_panel<2>(task, block * kTile, p, fetch);
      if (some == 1) add_panel<1>(task, block * kTile, p, fetch);
      block += some;
    }
}

void begin_in_pairs(MatrixState*) noexcept {}
void end_in_pairs(const MatrixState*) noexcept {}

/// Ticks of some products that do not wait for each other.
template <class Multiply>
[[gnu::always_inline]] inline std::uint64_t ticks_of(Multiply multiply) {
  __m512 sums[12];
  for (__m512& sum : sums) sum = _mm512_set1_ps(1.0f);
  const std::uint64_t begin = __rdtsc();
  for (int i = 0; i < 64; ++i)
    for (__m512& sum : sums) {
      sum = multiply(sum);
      __asm__ volatile("" : "+v"(sum));
    }
  return __rdtsc() - begin;
}
/// Whether pairs of bf16 are multiplied as quickly as numbers of fp32: not where an instruction
/// stands for several of them. The best of many runs, so that it is the same each time; in turn,
/// since a processor may take some microseconds until it has all of such vectors at work.
bool are_pairs_quick() noexcept {
  const __m512 ones = _mm512_set1_ps(1.0f);
  const __m512bh pairs = reinterpret_cast<__m512bh>(ones);
  std::uint64_t least = ~std::uint64_t{0}, least_of_pairs = least;
  for (int run = 0; run < 64; ++run) {
    const std::uint64_t now =
        ticks_of([=](__m512 sum) { return _mm512_fmadd_ps(ones, ones, sum); });
    const std::uint64_t by_pairs =
        ticks_of([=](__m512 sum) { return _mm512_dpbf16_ps(sum, pairs, pairs); });
    if (now < least) least = now;
    if (by_pairs < least_of_pairs) least_of_pairs = by_pairs;
  }
  return 2 * least_of_pairs < 3 * least;
}

}  // namespace
}  // namespace stowage
