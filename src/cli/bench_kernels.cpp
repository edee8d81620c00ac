// SPDX-License-Identifier: Apache-2.0
// The kernels as cases: a large matrix quantized and dequantized, and products with weights that no
// cache holds.
#include <algorithm>
#include <array>
#include <cstring>

#include "cli/bench_case.h"
#include "kernel/kernels.h"
#include "stowage/quantize.h"

namespace stowage::cli {
namespace {

constexpr Dtype kDtype = Dtype::bf16;

/// Storages of groups and of blocks, as published models have them.
constexpr std::array kPublished{"mxfp4",
                                "f8_e4m3:block32:e8m0",
                                "mxint8",
                                "nvfp4",
                                "int4:block64",
                                "int4:block128:f16:zero",
                                "int8:block32:f16",
                                "f8_e4m3:block128x128",
                                "q4_k",
                                "q6_k",
                                "int3:block128:bf16"};

/// Weights of one storage and shape, one after the other in the pools, so that each is out of the
/// caches when its turn comes again.
class Weights {
 public:
  Weights(const char* storage, const Shape& shape, BenchMemory& memory)
      : storage_(parse_storage(storage)), shape_(shape), layout_(layout(storage_, shape)) {
    std::array<WarmBytes*, 3> pools{&memory.codes, &memory.scales, &memory.others};
    std::array<std::size_t, 3> used{};
    for (int i = 0; i < layout_.count; ++i) {
      const Part& part = layout_.parts[static_cast<std::size_t>(i)];
      const std::size_t pool = i == 0 ? 0 : part.dtype == Dtype::f32 ? 1 : 2;
      copies_.push_back({static_cast<char*>(pools[pool]->data()) + used[pool], 0, pool});
      used[pool] += static_cast<std::size_t>(part.bytes + 63) / 64 * 64;
    }
    for (Copy& copy : copies_) copy.stride = used[copy.pool];
    count_ = memory.codes.size() / used[0];
    for (std::size_t pool = 1; pool < pools.size(); ++pool)
      if (used[pool] != 0) count_ = std::min(count_, pools[pool]->size() / used[pool]);
  }

  std::int64_t bytes() const noexcept { return layout_.bytes(); }
  const Storage& storage() const noexcept { return storage_; }
  /// The first weight's parts.
  std::vector<void*> firsts() const {
    std::vector<void*> firsts;
    for (const Copy& copy : copies_) firsts.push_back(copy.first);
    return firsts;
  }
  Weight next() {
    const std::size_t at = next_++ % count_;
    std::vector<const void*> parts;
    for (const Copy& copy : copies_) parts.push_back(copy.first + at * copy.stride);
    return {storage_, shape_, parts};
  }

 private:
  struct Copy {
    char* first;
    std::size_t stride, pool;
  };
  Storage storage_;
  Shape shape_;
  Layout layout_;
  std::vector<Copy> copies_;
  std::size_t count_, next_ = 0;
};

void fill_random(const WarmBytes& memory, std::uint64_t state) {
  auto* to = static_cast<std::uint64_t*>(memory.data());
  for (std::size_t i = 0; i < memory.size() / 8; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    to[i] = state;
  }
}

BenchCase dequantize_case(const char* storage, BenchMemory& memory, Executor& executor) {
  const std::int64_t rows = memory.sizes.rows;
  const auto weights =
      std::make_shared<Weights>(storage, Shape{rows, memory.sizes.columns}, memory);
  const std::int64_t bytes = weights->bytes() + static_cast<std::int64_t>(memory.out.size());
  return {std::string(storage) + " -> bf16",
          Limit::memcpy,
          bytes,
          static_cast<double>(bytes),
          executor.threads(),
          [=, &memory, &executor] {
            dequantize(weights->next(), {0, rows}, memory.out.data(), kDtype, &executor);
          }};
}

BenchCase quantize_case(const char* storage, BenchMemory& memory, Executor& executor) {
  const Shape shape{memory.sizes.rows, memory.sizes.columns};
  const auto weights = std::make_shared<Weights>(storage, shape, memory);
  const auto bytes = static_cast<std::int64_t>(memory.values.size());
  return {"bf16 -> " + std::string(storage),
          Limit::read,
          bytes,
          static_cast<double>(bytes),
          executor.threads(),
          [=, &memory, &executor] {
            quantize_into(memory.values.data(), kDtype, shape, weights->storage(),
                          weights->firsts(), {.executor = &executor});
          }};
}

/// What a refresh of fp8 scales reads: the largest magnitude of a weight's values.
BenchCase amax_case(BenchMemory& memory, Executor& executor) {
  const auto bytes = static_cast<std::int64_t>(memory.values.size());
  return {"bf16 -> amax",
          Limit::read,
          bytes,
          static_cast<double>(bytes),
          executor.threads(),
          [=, &memory, &executor] {
            const Values values[]{{memory.values.data(), kDtype, bytes / 2}};
            amax(values, static_cast<float*>(memory.out.data()), &executor);
          }};
}

/// Few rows of x are bound by reading the weight, many by multiplying.
BenchCase linear_case(const std::shared_ptr<Weights>& weights, const std::string& storage,
                      std::int64_t m, BenchMemory& memory, Executor& executor) {
  const int times = m == 1 ? 8 : 1;  // several weights a run, where one is too quick for a clock
  const auto size = static_cast<double>(memory.sizes.linear);
  const std::int64_t bytes = times * weights->bytes();
  const double operations = 2.0 * times * static_cast<double>(m) * size * size;
  const bool by_matrices = kernels().linear.matrices.multiply != nullptr;
  const Limit limit = m == 1 ? Limit::read : by_matrices ? Limit::matrices : Limit::multiply_add;
  return {"linear " + storage + ", " + std::to_string(m) + (m == 1 ? " row" : " rows"),
          limit,
          bytes,
          limit == Limit::read ? static_cast<double>(bytes) : operations,
          executor.threads(),
          [=, &memory, &executor] {
            for (int i = 0; i < times; ++i)
              linear(memory.values.data(), m, kDtype, weights->next(), nullptr, memory.out.data(),
                     &executor);
          }};
}

}  // namespace

BenchMemory::BenchMemory(const BenchSizes& of)
    : sizes(of),
      values(static_cast<std::size_t>(2 * of.rows * of.columns)),
      out(values.size()),
      codes(static_cast<std::size_t>(std::max(of.pool_bytes, of.rows * of.columns))),
      scales(codes.size() / 8),
      others(codes.size() / 8) {
  fill_random(codes, 1);
  fill_random(values, 2);
  auto* value = static_cast<std::uint16_t*>(values.data());
  for (std::size_t i = 0; i < values.size() / 2; ++i)  // any sign, numbers from 2^-8 up to 1
    value[i] = static_cast<std::uint16_t>((value[i] & 0x83FF) | 0x3C00);
  auto* code = static_cast<unsigned char*>(codes.data());
  for (std::size_t i = 0; i < codes.size(); ++i)  // no NaN of an 8-bit format
    if ((code[i] & 0x7C) == 0x7C) code[i] = 0;
  auto* scale = static_cast<float*>(scales.data());
  for (std::size_t i = 0; i < scales.size() / 4; ++i)
    scale[i] = 0.01f + 1e-5f * static_cast<float>(i % 1000);
  auto* other = static_cast<unsigned char*>(others.data());
  for (std::size_t i = 0; i < others.size(); ++i)  // as scales are: from 2^-71 (e8m0) up to 2
    other[i] = static_cast<unsigned char>(0x38 + i * 7 % 8);
}

std::vector<BenchCase> dequantize_cases(BenchMemory& memory, Executor& executor) {
  std::vector<BenchCase> cases;
  for (const char* storage :
       {"f8_e4m3", "f8_e4m3:row", "f8_e5m2", "int8:row", "nf4", "nf4:block64:nested"})
    cases.push_back(dequantize_case(storage, memory, executor));
  for (const char* storage : kPublished)
    cases.push_back(dequantize_case(storage, memory, executor));
  return cases;
}

std::vector<BenchCase> quantize_cases(BenchMemory& memory, Executor& executor) {
  std::vector<BenchCase> cases;
  for (const char* storage : {"f8_e4m3", "f8_e4m3:row", "int8:row", "nf4"})
    cases.push_back(quantize_case(storage, memory, executor));
  for (const char* storage : kPublished) cases.push_back(quantize_case(storage, memory, executor));
  cases.push_back(amax_case(memory, executor));
  return cases;
}

std::vector<BenchCase> linear_cases(BenchMemory& memory, Executor& executor) {
  std::vector<BenchCase> cases;
  const Shape shape{memory.sizes.linear, memory.sizes.linear};
  for (const char* storage : {"nf4", "nf4:block64:nested", "f8_e4m3:row", "int8:row"}) {
    const auto weights = std::make_shared<Weights>(storage, shape, memory);
    for (const std::int64_t m : {1, 16, 512})
      cases.push_back(linear_case(weights, storage, m, memory, executor));
  }
  for (const char* storage : kPublished)
    cases.push_back(linear_case(std::make_shared<Weights>(storage, shape, memory), storage, 1,
                                memory, executor));
  return cases;
}

}  // namespace stowage::cli
