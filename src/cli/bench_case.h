// SPDX-License-Identifier: Apache-2.0
// What `stowage bench` measures: limits and kernels are cases alike, run in turn.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stowage/executor.h"

namespace stowage::cli {

/// What a figure is compared with. Bytes of `memcpy` are those read and those written.
enum class Limit : std::uint8_t { memcpy, read, multiply_add, matrices };
inline constexpr int kLimits = 4;
const char* to_string(Limit limit) noexcept;

struct BenchCase {
  std::string name;
  Limit limit;
  std::int64_t bytes;  // a run moves
  double work;         // what a run counts for its limit: bytes, or operations
  int threads;
  std::function<void()> run;
};

/// Memory with its pages in place.
class WarmBytes {
 public:
  explicit WarmBytes(std::size_t bytes);
  void* data() const noexcept { return memory_.get(); }
  std::size_t size() const noexcept { return size_; }

 private:
  struct Unmap {
    std::size_t size;
    void operator()(void* memory) const noexcept;
  };
  std::size_t size_;
  std::unique_ptr<void, Unmap> memory_;
};
struct BenchSizes {
  std::int64_t rows, columns;  // of the matrices that are quantized and dequantized
  std::int64_t linear;         // rows and columns of those that are multiplied
  std::int64_t pool_bytes;     // of the weights that few rows of x meet: more than caches hold
  std::int64_t tile_rounds;    // products of tiles in one run of the multiply-add limits
  std::chrono::seconds time;   // after which no further turn begins, once there were enough
};

/// What all cases share. bf16 values lie in `values`; `out` takes as many. Weights lie in three
/// pools: codes of any storage are random bytes, fp32 scales plausible numbers, and scales of other
/// types bytes that are such in each of them.
struct BenchMemory {
  explicit BenchMemory(const BenchSizes& sizes);

  BenchSizes sizes;
  WarmBytes values, out, codes, scales, others;
};

/// The memory must outlive the cases, and so must the executor.
std::vector<BenchCase> limit_cases(BenchMemory& memory, Executor& executor);
std::vector<BenchCase> dequantize_cases(BenchMemory& memory, Executor& executor);
std::vector<BenchCase> quantize_cases(BenchMemory& memory, Executor& executor);
std::vector<BenchCase> linear_cases(BenchMemory& memory, Executor& executor);

}  // namespace stowage::cli
