// SPDX-License-Identifier: Apache-2.0
// Superblocks, several of a row at a time: how far values of all sub-blocks reach, the records, and
// then the codes, whose values are still in a cache.
#include "kernel/quantize_superblocks.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "format/q4_k.h"
#include "kernel/chunks.h"
#include "kernel/float_mode.h"

namespace stowage {
namespace {

using q4_k::kBlock, q4_k::kInner, q4_k::kRecord, q4_k::kSteps;
constexpr std::int64_t kTogether = 16;  // superblocks
constexpr float kMostCount = 63.0f, kMostCode = 15.0f, kMostHalf = 65504.0f;

/// What counts to `most`: the nearest f16 number; of subnormal ones the least that is no smaller.
struct Unit {
  std::uint16_t bits;
  float value;
  explicit Unit(float exact)
      : bits(exact >= 0x1p-14f ? f32_to_f16(exact)
                               : static_cast<std::uint16_t>(std::ceil(exact * 0x1p24f))),
        value(f16_to_f32(bits)) {}

  q4_k::Counts count(const float (&numbers)[kSteps]) const noexcept {
    std::uint32_t counts[kSteps] = {};
    for (std::int64_t j = 0; value != 0 && j < kSteps; ++j)
      counts[j] =
          static_cast<std::uint32_t>(std::nearbyint(std::min(numbers[j] / value, kMostCount)));
    return {counts[0] | counts[1] << 8 | counts[2] << 16 | counts[3] << 24,
            counts[4] | counts[5] << 8 | counts[6] << 16 | counts[7] << 24};
  }
};

/// Writes the record of a superblock, and how its sub-blocks become codes. Whether there is one.
bool put_record(const Extremes* reach, std::uint8_t* record, float* r, float* zero) {
  float scale[kSteps], offset[kSteps], widest = 0, lowest = 0;
  for (std::int64_t j = 0; j < kSteps; ++j) {
    offset[j] = float_of(reach[j].below);
    scale[j] = (float_of(reach[j].above) + offset[j]) / kMostCode;
    if (!(scale[j] <= kMostCount * kMostHalf)) return false;
    widest = std::max(widest, scale[j]), lowest = std::max(lowest, offset[j]);
  }
  widest /= kMostCount, lowest /= kMostCount;
  if (!(widest <= kMostHalf && lowest <= kMostHalf)) return false;
  const Unit d(widest), e(lowest);
  q4_k::put(record, d.bits, e.bits, d.count(scale), e.count(offset));
  const q4_k::Steps steps = q4_k::steps_of(record);
  for (std::int64_t j = 0; j < kSteps; ++j) {
    r[j] = steps.scale[j] == 0 ? 0.0f : 1.0f / steps.scale[j];
    zero[j] = steps.offset[j] * r[j];
  }
  return true;
}

}  // namespace

std::uint32_t quantize_superblocks(const QuantizeJob& job, const Shape& shape) {
  const std::int64_t row = shape.row_elements();
  if (job.n == 0) return 0;
  const std::int64_t line = row % kBlock == 0 ? job.n : row;  // no superblock restarts in it
  const std::int64_t per_line = ceil_div(line, kBlock), count = job.n / line * per_line;
  const auto reach_of = job.kernels.quantize.reach[job.in()];
  const auto encode = job.kernels.quantize.encode_from[job.codes()][job.in()];
  auto* const records = static_cast<std::uint8_t*>(job.parts[1]);
  Largest refused;
  for_each_chunk(
      job.executor, count, kChunkElements / kBlock, [&](std::int64_t g, std::int64_t end) {
        float r[kTogether * kSteps], zero[kTogether * kSteps];
        while (g < end) {
          const std::int64_t first = g % per_line,
                             n = std::min({kTogether, end - g, per_line - first});
          const std::int64_t begin = g / per_line * line + first * kBlock;
          const std::int64_t size = std::min(n * kBlock, line - first * kBlock);
          Extremes reach[kTogether * kSteps] = {};  // of sub-blocks that a row has no more of: none
          reach_of(job.at(begin), size, kInner, reach);
          for (std::int64_t i = 0; i < n; ++i)
            if (!put_record(reach + i * kSteps, records + (g + i) * kRecord, r + i * kSteps,
                            zero + i * kSteps))
              return refused.take(kInfinityBits);
          encode({job.at(begin), size, kInner, r, zero, job.code(begin)});
          g += n;
        }
      });
  return refused.bits();
}

}  // namespace stowage
