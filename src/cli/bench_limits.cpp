// SPDX-License-Identifier: Apache-2.0
// The limits: memcpy, reading in four streams, and multiply-adds on operands in the L1 cache: of
// fp32, and of matrices of bf16 where an instruction set has them.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>

#include "cli/bench_case.h"
#include "kernel/kernels.h"

namespace stowage::cli {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// So that reads have a use that the compiler cannot see through.
std::atomic<std::uint64_t> sink;

typedef std::uint64_t Words __attribute__((vector_size(16), aligned(16)));

/// Reads `bytes` (a multiple of 256) as four streams, which keeps more lines in flight than one.
void read_streams(const void* memory, std::int64_t bytes) {
  constexpr int kStreams = 4, kStep = 4;  // a step is one cache line of each stream
  const std::int64_t words = bytes / kStreams / static_cast<std::int64_t>(sizeof(Words));
  const auto* from = static_cast<const Words*>(memory);
  Words sums[kStreams] = {};
  for (std::int64_t i = 0; i + kStep <= words; i += kStep)
    for (int s = 0; s < kStreams; ++s)
      for (int w = 0; w < kStep; ++w) sums[s] += from[s * words + i + w];
  const Words total = sums[0] + sums[1] + sums[2] + sums[3];
  sink.fetch_add(total[0] + total[1], std::memory_order_relaxed);
}

/// Splits `bytes` into equal parts of whole pages for the threads of the executor.
template <class Body>
void in_parts(Executor& executor, std::size_t bytes, Body&& body) {
  const auto threads = static_cast<std::size_t>(executor.threads());
  const std::size_t part = bytes / threads / 4096 * 4096;
  executor.for_each(executor.threads(),
                    [&](std::int64_t i) { body(static_cast<std::size_t>(i) * part, part); });
}

/// Products of tiles that stay in the L1 cache: what is left of the peak with loads and loops.
class TileLoop {
 public:
  static constexpr std::int64_t kRows = 24, kColumns = 32, kDepth = 192;
  static constexpr double kOperations = 2.0 * kRows * kColumns * kDepth;  // of a round

  static void run(std::int64_t rounds) {
    alignas(64) std::array<float, kRows * kDepth> a;
    alignas(64) std::array<float, kDepth * kColumns> b;
    alignas(64) std::array<float, kRows * kColumns> c;
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = 1.0f + 1e-3f * static_cast<float>(i % 97);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = 1.0f - 1e-3f * static_cast<float>(i % 89);
    const TileTask task{a.data(), kDepth, kRows,    b.data(), kColumns,
                        kColumns, kDepth, c.data(), kColumns, false};
    for (std::int64_t i = 0; i < rounds; ++i) kernels().linear.tile(task);
    sink.fetch_add(static_cast<std::uint64_t>(c[0]), std::memory_order_relaxed);
  }
};

/// The same of matrices of bf16, four tiles of sums at a time.
class MatrixLoop {
 public:
  static constexpr std::int64_t kLines = 2 * kMatrixTile, kDepth = 256;
  static constexpr double kOperations = 2.0 * kLines * kLines * kDepth;

  static void run(std::int64_t rounds) {
    alignas(64) std::array<std::uint16_t, kLines * kDepth> a, b;
    alignas(64) std::array<float, kLines * kLines> c;
    for (std::size_t i = 0; i < a.size(); ++i) {  // from 0.5 to 2
      a[i] = static_cast<std::uint16_t>(0x3F00 + i % 251);
      b[i] = static_cast<std::uint16_t>(0x3F00 + i % 241);
    }
    const MatrixKernels& multiply = kernels().linear.matrices;
    const MatrixTask task{a.data(), kDepth, kLines,   b.data(), kMatrixTile * kDepth,
                          kLines,   kDepth, c.data(), kLines,   false,
                          nullptr,  0};
    MatrixState before;
    multiply.begin(&before);
    for (std::int64_t i = 0; i < rounds; ++i) multiply.multiply(task);
    multiply.end(&before);
    sink.fetch_add(static_cast<std::uint64_t>(c[0]), std::memory_order_relaxed);
  }
};

}  // namespace

const char* to_string(Limit limit) noexcept {
  constexpr std::array<const char*, kLimits> kNames = {"memcpy", "read", "multiply-add (gflops)",
                                                       "matrices of bf16 (gflops)"};
  return kNames[static_cast<std::size_t>(limit)];
}

WarmBytes::WarmBytes(std::size_t bytes) : size_(bytes), memory_(nullptr, Unmap{0}) {
  const std::size_t mapped = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = {memory, Unmap{mapped}};
  madvise(memory, mapped, MADV_HUGEPAGE);  // advice: may be refused
  std::memset(memory, 0, mapped);
}
void WarmBytes::Unmap::operator()(void* memory) const noexcept { munmap(memory, size); }

std::vector<BenchCase> limit_cases(BenchMemory& memory, Executor& executor) {
  const std::size_t bytes = memory.out.size();
  const auto moved = static_cast<std::int64_t>(bytes);
  const auto* from = static_cast<const char*>(memory.values.data());
  auto* to = static_cast<char*>(memory.out.data());
  const auto copy = [=, &executor] {
    in_parts(executor, bytes,
             [&](std::size_t begin, std::size_t n) { std::memcpy(to + begin, from + begin, n); });
  };
  const auto read = [=, &executor] {
    in_parts(executor, bytes, [&](std::size_t begin, std::size_t n) {
      read_streams(from + begin, static_cast<std::int64_t>(n));
    });
  };
  const std::int64_t rounds = memory.sizes.tile_rounds;
  const auto multiply = [=, &executor] {
    executor.for_each(executor.threads(), [=](std::int64_t) { TileLoop::run(rounds); });
  };
  const int threads = executor.threads();
  std::vector<BenchCase> cases{
      {"memcpy", Limit::memcpy, 2 * moved, 2.0 * static_cast<double>(moved), threads, copy},
      {"read, 4 streams", Limit::read, moved, static_cast<double>(moved), threads, read},
      {"multiply-add in L1", Limit::multiply_add, 0,
       TileLoop::kOperations * static_cast<double>(rounds * threads), threads, multiply}};
  if (kernels().linear.matrices.multiply != nullptr)
    cases.push_back({"multiply-add of matrices in L1", Limit::matrices, 0,
                     MatrixLoop::kOperations * static_cast<double>(rounds * threads), threads,
                     [=, &executor] {
                       executor.for_each(threads, [=](std::int64_t) { MatrixLoop::run(rounds); });
                     }});
  return cases;
}

}  // namespace stowage::cli
