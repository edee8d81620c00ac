// SPDX-License-Identifier: Apache-2.0
// Threads of a launch as numbers, and maxima over a warp, whose order is no matter.
#pragma once
#include "kernel/cuda/form.cuh"

#define STOWAGE_KERNEL extern "C" __global__ void

namespace stowage::cuda {

inline constexpr unsigned kWarp = 32, kAllLanes = 0xFFFFFFFFu;
inline constexpr std::uint32_t kInfinity = 0x7F800000u;

inline Index this_thread() {
  return static_cast<Index>(blockIdx.x) * static_cast<Index>(blockDim.x) +
         static_cast<Index>(threadIdx.x);
}
inline Index all_threads() {
  return static_cast<Index>(gridDim.x) * static_cast<Index>(blockDim.x);
}

inline std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a < b ? b : a; }
/// The largest that a lane of the warp has.
inline std::uint32_t largest_of_warp(std::uint32_t x) {
  for (unsigned other = kWarp / 2; other != 0; other /= 2)
    x = larger(x, __shfl_xor_sync(kAllLanes, x, other));
  return x;
}
/// Raises a number for all lanes at once.
inline void raise(std::uint32_t* to, std::uint32_t x) {
  const std::uint32_t most = largest_of_warp(x);
  if (threadIdx.x % kWarp == 0 && most != 0) atomicMax(to, most);
}

}  // namespace stowage::cuda
