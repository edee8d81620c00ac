// SPDX-License-Identifier: Apache-2.0
// Superblocks, several of a row at a time: how far values of all sub-blocks reach, the records, and
// then the codes, whose values are still in a cache.
#include "kernel/quantize_superblocks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "base/checked.h"
#include "format/superblocks.h"
#include "kernel/chunks.h"
#include "kernel/float_mode.h"
#include "kernel/quantize_dense.h"

namespace stowage {
namespace {

using superblocks::kBlock;
constexpr std::int64_t kTogether = 16;  // superblocks
constexpr float kMostHalf = 65504.0f, kInfinity = std::numeric_limits<float>::infinity();

/// What counts to `most`: the nearest f16 number; of subnormal ones the least that is no smaller.
struct Unit {
  std::uint16_t bits;
  float value;
  explicit Unit(float exact)
      : bits(exact >= 0x1p-14f ? f32_to_f16(exact)
                               : static_cast<std::uint16_t>(std::ceil(exact * 0x1p24f))),
        value(f16_to_f32(bits)) {}

  /// How often it counts to each number: nearest even, as fp32 has no halves from 2^23 on.
  template <std::size_t kSteps>
  void count(const float (&numbers)[kSteps], float most,
             std::uint8_t (&out)[kSteps]) const noexcept {
    constexpr float kNoHalves = 0x1p23f;
    const float by = value == 0 ? kInfinity : value;
    for (std::size_t j = 0; j < kSteps; ++j) {
      const float count = std::min(numbers[j] / by, most);
      out[j] = static_cast<std::uint8_t>(bits_of(count + kNoHalves));
    }
  }
};

/// How far values of a sub-block reach: to both sides, or in magnitude, as bits of numbers.
template <class Super>
using Reach = std::conditional_t<Super::kOffsets, Extremes, std::uint32_t>;

/// Writes the record of a superblock, and how its sub-blocks become codes. Whether there is one.
template <class Super>
bool put_record(const Reach<Super>* reach, float divisor, std::uint8_t* record, float* r,
                float* zero) {
  constexpr std::int64_t kSteps = Super::kSteps;
  constexpr float kMost = Super::kMostCount;
  float scale[kSteps], offset[kSteps] = {}, widest = 0, lowest = 0;
  bool finite = true;
  for (std::int64_t j = 0; j < kSteps; ++j) {
    if constexpr (Super::kOffsets) {
      offset[j] = float_of(reach[j].below);
      scale[j] = (float_of(reach[j].above) + offset[j]) / divisor;
    } else {
      scale[j] = float_of(reach[j]) / divisor;
    }
    finite = finite && scale[j] <= kMost * kMostHalf;
  }
  if (!finite) return false;
  for (std::int64_t j = 0; j < kSteps; ++j)
    widest = std::max(widest, scale[j]), lowest = std::max(lowest, offset[j]);
  widest /= kMost, lowest /= kMost;
  if (!(widest <= kMostHalf && lowest <= kMostHalf)) return false;
  const Unit d(widest), e(lowest);
  std::uint8_t scales[kSteps], offsets[kSteps] = {};
  d.count(scale, kMost, scales);
  if constexpr (Super::kOffsets) e.count(offset, kMost, offsets);
  Super::put(record, d.bits, e.bits, scales, offsets);
  const auto steps = superblocks::steps_of<Super>(record);
  for (std::int64_t j = 0; j < kSteps; ++j) {
    r[j] = steps.scale[j] == 0 ? 0.0f : 1.0f / steps.scale[j];
    zero[j] = steps.offset[j] * r[j];
  }
  return true;
}

template <class Super>
std::uint32_t quantize(const QuantizeJob& job, const Shape& shape) {
  constexpr std::int64_t kSteps = Super::kSteps, kInner = Super::kInner;
  const std::int64_t row = shape.row_elements();
  if (job.n == 0) return 0;
  const std::int64_t line = row % kBlock == 0 ? job.n : row;  // no superblock restarts in it
  const std::int64_t per_line = ceil_div(line, kBlock), count = job.n / line * per_line;
  const auto reach_of = [&](std::int64_t begin, std::int64_t size, Reach<Super>* out) {
    if constexpr (Super::kOffsets)
      job.kernels.quantize.reach[job.in()](job.at(begin), size, kInner, out);
    else
      job.kernels.quantize.amaxes[job.in()]({job.at(begin), size, kInner}, out);
  };
  const auto encode = job.kernels.quantize.encode_from[job.codes()][job.in()];
  const CodeRange range = code_range(job.storage);
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
          Reach<Super> reach[kTogether * kSteps] = {};  // of those that a row has no more of: none
          reach_of(begin, size, reach);
          for (std::int64_t i = 0; i < n; ++i)
            if (!put_record<Super>(reach + i * kSteps, range.divisor,
                                   records + (g + i) * Super::kRecord, r + i * kSteps,
                                   zero + i * kSteps))
              return refused.take(kInfinityBits);
          if constexpr (Super::kOffsets)
            encode({job.at(begin), size, kInner, r, zero, job.code(begin)});
          else
            encode_dense(job, range, begin, size, kInner, r, nullptr);
          g += n;
        }
      });
  return refused.bits();
}

}  // namespace

std::uint32_t quantize_superblocks(const QuantizeJob& job, const Shape& shape) {
  if (job.form.scale.code == ScaleCode::q6_k) return quantize<superblocks::Q6K>(job, shape);
  return quantize<superblocks::Q4K>(job, shape);
}

}  // namespace stowage
