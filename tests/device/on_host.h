// SPDX-License-Identifier: Apache-2.0
// The texts of kernels for devices, compiled for the host as they stand: what CUDA's language has
// beside C++, and launches that run each block in turn.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "device/form.h"
#include "kernel/cuda/form.cuh"

// --- what is said where a program for a device would have constants ------------------------------
namespace stowage::cuda {
inline Form form;
inline float table[16];
inline int order[16];
inline std::uint32_t table_planes[8];

inline void set_form(const Form& to) {
  form = to;
  std::memcpy(table, to.values16, sizeof table);
  std::memcpy(order, to.order, sizeof order);
  std::ranges::copy(device::planes_of(to), table_planes);
}
}  // namespace stowage::cuda

// --- CUDA's language -----------------------------------------------------------------------------
#define __global__
#define __shared__ static
struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};
#ifdef __SANITIZE_THREAD__
inline thread_local Dim3 threadIdx;
#else
inline Dim3 threadIdx;
#endif
inline Dim3 blockIdx, blockDim, gridDim;

namespace stowage::cuda::on_host {

/// The lanes of a block, each of which goes on until it waits. Under the thread sanitizer they are
/// threads of the system; else they take turns, those of a round in an order that is drawn, so that
/// what should have waited for another lane now and then did not.
class Lanes {
 public:
  explicit Lanes(unsigned count) : count_(count), slots_(count), waiting_(count) {}

  template <class Body>
  void run(const Body& body);
  /// Until all that wait with this one have come here as often: those of its warp.
  void wait();
  /// Until all lanes of the block have come here.
  void meet();
  std::uint64_t& slot(unsigned lane) { return slots_[lane]; }

 private:
  static constexpr std::size_t kStack = 256 << 10;
  unsigned count_;
  std::vector<std::uint64_t> slots_;  // what lanes show each other
#ifdef __SANITIZE_THREAD__
  std::barrier<> all_{count_};
#endif
  struct Lane {
    ucontext_t context{};  // to begin with
    jmp_buf stopped;       // to go on from
    std::vector<char> stack;
    bool began = false, ends = false;
  };
  std::vector<Lane> waiting_;
  jmp_buf main_;
  unsigned current_ = 0, met_ = 0;
  std::uint64_t meetings_ = 0, round_ = 0, leave_ = 0;
  std::function<void()> body_;
  std::mt19937 random_{1};
  static void enter();
  void go_on(unsigned lane);
};
inline Lanes* lanes = nullptr;

inline void Lanes::enter() {
  Lanes& all = *lanes;
  all.body_();
  all.waiting_[all.current_].ends = true;
  _longjmp(all.main_, 1);
}

inline void Lanes::go_on(unsigned lane) {  // no system calls but for the first time
  current_ = lane, threadIdx = {lane};
  if (_setjmp(main_) != 0) return;
  if (waiting_[lane].began) _longjmp(waiting_[lane].stopped, 1);
  waiting_[lane].began = true;
  setcontext(&waiting_[lane].context);
}

template <class Body>
void Lanes::run(const Body& body) {
  lanes = this;
#ifdef __SANITIZE_THREAD__
  std::vector<std::jthread> threads;
  for (unsigned lane = 0; lane < count_; ++lane)
    threads.emplace_back([&, lane] {
      threadIdx = {lane};
      body();
    });
#else
  body_ = body;
  for (Lane& lane : waiting_) {
    lane.stack.resize(kStack), lane.began = lane.ends = false;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, &Lanes::enter, 0);
  }
  std::vector<unsigned> order(count_);
  std::iota(order.begin(), order.end(), 0u);
  while (!order.empty()) {
    ++round_;
    std::ranges::shuffle(order, random_);
    for (const unsigned lane : order) go_on(lane);
    std::erase_if(order, [&](unsigned lane) { return waiting_[lane].ends; });
  }
#endif
}
inline void Lanes::wait() {
#ifdef __SANITIZE_THREAD__
  all_.arrive_and_wait();
#else
  if (_setjmp(waiting_[current_].stopped) == 0) _longjmp(main_, 1);
#endif
}

inline void Lanes::meet() {
#ifdef __SANITIZE_THREAD__
  all_.arrive_and_wait();
#else
  const std::uint64_t meeting = meetings_;
  if (++met_ == count_) met_ = 0, ++meetings_, leave_ = round_ + 1;
  do wait();
  while (meetings_ == meeting || round_ < leave_);  // all leave in one round
#endif
}

template <class T, class Combine>
T exchanged(T mine, const Combine& combine) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned first = threadIdx.x / 32 * 32;
  std::memcpy(&lanes->slot(threadIdx.x), &mine, sizeof mine);
  lanes->wait();
  const T made = combine([&](unsigned lane) {
    T of;
    std::memcpy(&of, &lanes->slot(first + lane), sizeof of);
    return of;
  });
  lanes->wait();  // nobody writes before all have read
  return made;
}

/// Each thread after the other, for kernels in which none waits.
template <class Kernel, class... Arguments>
void launch(Kernel* kernel, unsigned blocks, unsigned threads, Arguments... arguments) {
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  for (unsigned b = 0; b < blocks; ++b)
    for (unsigned lane = 0; lane < threads; ++lane) {
      blockIdx = {b}, threadIdx = {lane};
      kernel(arguments...);
    }
}
/// Lanes of a block at the same time, whole warps of them that all do the same.
template <class Kernel, class... Arguments>
void launch_together(Kernel* kernel, unsigned blocks, unsigned threads, Arguments... arguments) {
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  static std::map<unsigned, Lanes> kept;
  Lanes& all = kept.try_emplace(threads, threads).first->second;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx = {b};
    all.run([=] { kernel(arguments...); });
  }
}

}  // namespace stowage::cuda::on_host

template <class T>
T __shfl_sync(unsigned /*lanes*/, T mine, unsigned from) {
  return stowage::cuda::on_host::exchanged(mine, [=](const auto& of) { return of(from); });
}
template <class T>
T __shfl_xor_sync(unsigned /*lanes*/, T mine, unsigned other) {
  const unsigned from = threadIdx.x % 32 ^ other;
  return stowage::cuda::on_host::exchanged(mine, [=](const auto& of) { return of(from); });
}
inline bool __all_sync(unsigned /*lanes*/, bool mine) {
  return stowage::cuda::on_host::exchanged(mine, [](const auto& of) {
    bool all = true;
    for (unsigned lane = 0; lane < 32; ++lane) all = all && of(lane);
    return all;
  });
}
inline void __syncthreads() { stowage::cuda::on_host::lanes->meet(); }
inline std::uint32_t __byte_perm(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
  const std::uint64_t bytes = a | static_cast<std::uint64_t>(b) << 32;
  std::uint32_t made = 0;
  for (unsigned i = 0; i < 4; ++i)
    made |= static_cast<std::uint32_t>(bytes >> (which >> 4 * i & 7u) * 8 & 0xFFu) << 8 * i;
  return made;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline std::uint32_t atomicMax(std::uint32_t* at, std::uint32_t x) {
  std::atomic_ref<std::uint32_t> value(*at);
  std::uint32_t before = value.load(std::memory_order_relaxed);
  while (before < x && !value.compare_exchange_weak(before, x, std::memory_order_relaxed)) {
  }
  return before;
}

#include "kernel/cuda/dequantize.cuh"
#include "kernel/cuda/linear.cuh"

namespace stowage::cuda {

/// What tensor cores make of the halves that the lanes of a warp have: sums in fp32.
inline void multiply_tile_on_host(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                  std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                  std::uint32_t b1) {
  std::uint32_t a[16][8], b[8][8];  // pairs of rows of w, and of columns
  const std::uint32_t mine[] = {a0, a1, a2, a3, b0, b1};
  for (unsigned which = 0; which < 6; ++which)
    on_host::exchanged(mine[which], [&](const auto& of) {
      for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        if (which < 4)
          a[g + which % 2 * 8][t + which / 2 * 4] = of(lane);
        else
          b[g][t + which % 2 * 4] = of(lane);
      }
      return 0u;
    });
  const auto half = [](std::uint32_t pair, int k) {
    const auto bits = static_cast<std::uint16_t>(pair >> k * 16);
    return form.values == Number::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  };
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (unsigned at = 0; at < 4; ++at)
    for (unsigned pair = 0; pair < 8; ++pair)
      for (const int k : {0, 1})
        d[at] += half(a[g + at / 2 * 8][pair], k) * half(b[2 * t + at % 2][pair], k);
}

}  // namespace stowage::cuda

#include "kernel/cuda/linear_tiles.cuh"
#include "kernel/cuda/quantize.cuh"
