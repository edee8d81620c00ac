// SPDX-License-Identifier: Apache-2.0
// The largest magnitudes of many arrays at once: models have thousands of weights, most of them too
// small to be worth a task each, and some too large for one.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "base/map_guard.h"
#include "kernel/chunks.h"
#include "kernel/drivers.h"
#include "kernel/quantize_job.h"

namespace stowage {
namespace {

/// Where each array ends if all lie one after the other.
std::vector<std::int64_t> ends_of(std::span<const Values> arrays) {
  std::vector<std::int64_t> ends;
  ends.reserve(arrays.size());
  std::int64_t total = 0;
  for (const Values& array : arrays) {
    if (!is_value_dtype(array.dtype))
      throw Error(Code::invalid_argument, "amax: values must be f64, f32, bf16 or f16, got " +
                                              std::string(disk_name(array.dtype)));
    if (array.data == nullptr && array.count != 0)
      throw Error(Code::invalid_argument, "amax: values must not be null");
    ends.push_back(total += array.count);
  }
  return ends;
}

float value_of(std::uint32_t bits) {
  return bits > kInfinityBits ? std::numeric_limits<float>::quiet_NaN()
                              : __builtin_bit_cast(float, bits);
}

}  // namespace

void amax_with(const Kernels& kernels, std::span<const Values> arrays, float* out,
               Executor& executor) {
  const std::vector<std::int64_t> ends = ends_of(arrays);
  std::vector<Largest> largest(arrays.size());  // a maximum has no order, so any cut will do
  const std::int64_t total = ends.empty() ? 0 : ends.back();
  for_each_chunk(executor, total, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    auto i = static_cast<std::size_t>(std::ranges::upper_bound(ends, begin) - ends.begin());
    for (std::int64_t stop = 0; begin < end; begin = stop, ++i) {
      const Values& array = arrays[i];
      stop = std::min(end, ends[i]);
      const auto* data = static_cast<const char*>(array.data);
      const std::int64_t first = begin - (ends[i] - array.count);
      largest[i].take(kernels.quantize.amax[value_index(array.dtype)](
          data + first * (bits(array.dtype) / 8), stop - begin));
    }
  });
  std::ranges::transform(largest, out, [](const Largest& l) { return value_of(l.bits()); });
}

inline namespace v0 {

void amax(std::span<const Values> arrays, float* out, Executor* executor) {
  amax_with(kernels(), arrays, out, or_default(executor));
  if (mappings_damaged() == 0) return;
  for (const Values& array : arrays) check_memory(array.data);
}

}  // namespace v0
}  // namespace stowage
