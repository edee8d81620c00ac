// SPDX-License-Identifier: Apache-2.0
// What linear touches and holds: nothing beyond its arguments, and a bounded tile of weight.
#include <gtest/gtest.h>

#include "base/threads.h"
#include "kernel/fenced.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

using samples::Fenced;

/// Copies of arrays, each against a fence.
class FencedCopies {
 public:
  explicit FencedCopies(Fenced::Against against) : against_(against) {}
  char* copy(const void* from, std::size_t bytes) {
    memory_.push_back(std::make_unique<Fenced>(bytes));
    return memory_.back()->piece({static_cast<const std::byte*>(from), bytes}, against_);
  }
  char* copy(const Values& values) { return copy(values.data(), values.bytes.size()); }
  Weight copy(const Weight& weight) {
    const Layout layout = stowage::layout(weight.storage(), weight.shape());
    std::vector<const void*> parts;
    for (int i = 0; i < layout.count; ++i)
      parts.push_back(copy(weight.part(i), static_cast<std::size_t>(
                                               layout.parts[static_cast<std::size_t>(i)].bytes)));
    return {weight.storage(), weight.shape(), parts};
  }

 private:
  Fenced::Against against_;
  std::vector<std::unique_ptr<Fenced>> memory_;
};

void run_fenced(const Kernels& kernels, Fenced::Against against, const std::string& storage,
                Dtype dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  FencedCopies fenced(against);
  const Weight plain = make_weight(storage, {n, k}, Data::normal), weight = fenced.copy(plain);
  const Values x = make_values(dtype, m * k, Data::normal, 1);
  const Values g = make_values(dtype, m * n, Data::normal, 2);
  const Values bias = make_values(dtype, n, Data::normal, 3);
  char *y = fenced.copy(g), *gx = fenced.copy(x);  // as large, to be overwritten
  linear_with(kernels, fenced.copy(x), m, dtype, weight, fenced.copy(bias), y, inline_executor());
  linear_grad_input_with(kernels, fenced.copy(g), m, dtype, weight, gx, inline_executor());
  const Values expected = run_linear(kernels, x, m, plain, &bias, inline_executor());
  const Values gradient = run_gradient(kernels, g, m, plain, inline_executor());
  EXPECT_EQ(std::memcmp(y, expected.data(), expected.bytes.size()), 0) << storage;
  EXPECT_EQ(std::memcmp(gx, gradient.data(), gradient.bytes.size()), 0) << storage;
}

STOWAGE_ON_EACH_ISA(LinearMemoryOn, NothingOutsideTheArgumentsIsTouched) {
  for (const std::string& storage : storages())
    for (const std::int64_t k : {1, 7, 16, 31, 33, 64, 100, 129, 256, 448, 1025})
      for (const std::int64_t m : {1, 3, 18})
        for (const auto against : {Fenced::Against::end, Fenced::Against::begin})
          if (samples::holds(parse_storage(storage), {1, k}))
            run_fenced(table, against, storage, kDtypes[k % 3], m, 1 + k % 17, k);
}

TEST(LinearMemory, HoldsAFewRowsOfXAndATileForEachThread) {
  constexpr std::size_t kShared = std::size_t{3} << 20, kEach = std::size_t{1} << 19;
  const Weight weight = make_weight("int8:row", {1100, 1300}, Data::normal);
  for (const int threads : {1, 2, 16, 120}) {
    const auto pool = make_pool(threads);
    for (const std::int64_t m : {1, 16, 17, 600}) {
      const Values x = make_values(Dtype::bf16, m * 1300, Data::normal, 1);
      const Values g = make_values(Dtype::bf16, m * 1100, Data::normal, 1);
      const std::size_t before = scratch_use(true).live;
      run_linear(kernels(), x, m, weight, nullptr, *pool);
      run_gradient(kernels(), g, m, weight, *pool);
      const ScratchUse use = scratch_use();
      EXPECT_EQ(use.live, before);
      EXPECT_LE(use.peak - before, kShared + static_cast<std::size_t>(threads) * kEach)
          << threads << " threads, " << m << " rows";
    }
  }
}

// One row may be arranged in four bytes for each of its elements.
TEST(LinearMemory, OneRowAndTinyShapesTakeNoTiles) {
  for (const std::string& storage : storages())
    for (const std::int64_t m : {1, 64}) {
      const std::int64_t size = m == 1 ? 4096 : 16;
      const Weight weight = make_weight(storage, {16, size}, Data::normal);
      const Values x = make_values(Dtype::bf16, m * size, Data::normal, 1);
      const std::size_t before = scratch_use(true).live;
      run_linear(kernels(), x, m, weight, nullptr, inline_executor());
      EXPECT_LE(scratch_use().peak, before + (m == 1 ? 4 * 4096 : 0)) << storage << " " << m;
    }
}

STOWAGE_ON_EACH_ISA(LinearMemoryOn, LeavesTheFloatingPointModeAsItWas) {
#if defined(__SSE__)
  constexpr unsigned kFlushToZero = 0x8040;
  // 2^-130 is subnormal: flushed, the product with 1 would be lost.
  const float tiny = 0x1p-130f, one = 1.0f;
  const void* parts[] = {&one};
  const Weight weight(parse_storage("f32"), {1, 1}, parts);
  const unsigned before = __builtin_ia32_stmxcsr();
  float y = 0, gx = 0, fixed = 0;
  __builtin_ia32_ldmxcsr(before | kFlushToZero);
  linear_with(table, &tiny, 1, Dtype::f32, weight, nullptr, &y, inline_executor());
  linear_grad_input_with(table, &tiny, 1, Dtype::f32, weight, &gx, inline_executor());
  linear_fixed_with(table, &tiny, 1, weight, nullptr, &fixed, inline_executor());
  const unsigned after = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(after & kFlushToZero, kFlushToZero);
  EXPECT_EQ(y, tiny);
  EXPECT_EQ(gx, tiny);
  EXPECT_EQ(fixed, tiny);
#endif
}

}  // namespace
}  // namespace stowage::linear_test
