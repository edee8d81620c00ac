// SPDX-License-Identifier: Apache-2.0
// The map by the rule that reproduces torch 2.14 bit for bit (CRC32 of the 1,024 bytes: 1b137aeb),
// and its quantizer. Source: bitsandbytes create_dynamic_map and csrc/cpu_ops.cpp, 0.50.
#include "format/dynamic_map.h"

#include <algorithm>
#include <cmath>

#include "format/legal.h"

namespace stowage {
namespace {

constexpr int kDecades = 7;  // magnitudes 10^-6 .. 1, with 1, 2, 4, .. 64 values

// torch.linspace(0.1, 1, n) in fp32: from the nearer end, with one rounding for each point.
float linspace(int k, int n) {
  constexpr float kFirst = 0.1f;
  const float step = (1.0f - kFirst) / static_cast<float>(n - 1);
  return k < n / 2 ? std::fma(step, static_cast<float>(k), kFirst)
                   : std::fma(-step, static_cast<float>(n - 1 - k), 1.0f);
}

std::array<float, 256> make_map() {
  std::array<float, 256> map{};
  std::size_t count = 0;
  for (int decade = 0; decade < kDecades; ++decade) {
    const int intervals = 1 << decade;
    const auto unit = static_cast<float>(std::pow(10.0, decade - (kDecades - 1)));
    for (int k = 0; k < intervals; ++k) {
      const float mean = (linspace(k, intervals + 1) + linspace(k + 1, intervals + 1)) / 2.0f;
      map[count++] = unit * mean;
      map[count++] = -(unit * mean);
    }
  }
  map[count++] = 0.0f;
  map[count++] = 1.0f;
  std::ranges::sort(map);
  return map;
}

constexpr std::size_t kSteps = 65536;

// The code of each step of [-1, 1]: how many midpoints of the map lie below it.
std::array<std::uint8_t, kSteps> make_step_codes() {
  const auto& map = dynamic_map();
  std::array<std::uint8_t, kSteps> codes{};
  std::size_t below = 0;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const float value = -1.0f + 2.0f * static_cast<float>(step) / 65535.0f;
    while (below < 255 && 0.5f * (map[below] + map[below + 1]) < value) ++below;
    codes[step] = static_cast<std::uint8_t>(below);
  }
  return codes;
}

}  // namespace

const std::array<float, 256>& dynamic_map() noexcept {
  static const std::array<float, 256> map = make_map();
  return map;
}

std::uint8_t dynamic_code(float u) noexcept {
  static const std::array<std::uint8_t, kSteps> codes = make_step_codes();
  return codes[static_cast<std::uint16_t>((u + 1.0f) * 0.5f * 65535.0f + 0.5f)];
}

void nest_scales(std::span<const float> absmax, std::uint8_t* codes, float* nested_absmax,
                 float* nested_offset) noexcept {
  const auto n = static_cast<std::int64_t>(absmax.size());
  double sum = 0;
  for (const float scale : absmax) sum += scale;
  const float offset = n == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(n));
  *nested_offset = offset;
  for (std::int64_t first = 0; first < n; first += kNestedBlock) {
    const auto group = absmax.subspan(static_cast<std::size_t>(first),
                                      static_cast<std::size_t>(std::min(kNestedBlock, n - first)));
    float largest = 0.0f;
    for (const float scale : group) largest = std::max(largest, std::fabs(scale - offset));
    *nested_absmax++ = largest;
    const float inverse = 1.0f / largest;
    for (const float scale : group)
      *codes++ = largest == 0.0f
                     ? std::uint8_t{0}
                     : dynamic_code(std::clamp((scale - offset) * inverse, -1.0f, 1.0f));
  }
}

}  // namespace stowage
