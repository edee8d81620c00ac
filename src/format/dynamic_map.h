// SPDX-License-Identifier: Apache-2.0
// bitsandbytes' signed 8-bit dynamic map, which nested block scales are quantized with.
#pragma once
#include <array>
#include <cstdint>
#include <span>

namespace stowage {

/// The 256 ascending values: the `nested_map` of every weight that we quantize. The decoder uses
/// the map of the weight instead, since the map's last bits differ between builds of torch.
const std::array<float, 256>& dynamic_map() noexcept;

/// The code that bitsandbytes >= 0.50 gives `u` in [-1, 1]: u is first rounded to one of 65,536
/// steps, and that step takes the nearest value of the map (a tie takes the lower code). Not always
/// the value nearest to u itself.
std::uint8_t dynamic_code(float u) noexcept;

/// The parts of nested block scales, from the `absmax` of each block: codes[n], nested_absmax
/// [ceil(n / 256)] and nested_offset. All absmax must be finite.
void nest_scales(std::span<const float> absmax, std::uint8_t* codes, float* nested_absmax,
                 float* nested_offset) noexcept;

}  // namespace stowage
