// SPDX-License-Identifier: Apache-2.0
// Each kernel family on each instruction set that runs here, on a matrix that fits the L2 cache.
// Names read <family>/<instruction set>/<storage>[/<rows of x>].
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "kernel/drivers.h"
#include "kernel/kernels.h"

namespace stowage {
namespace {

constexpr std::int64_t kRows = 256, kColumns = 1024;
constexpr const char* kStorages[] = {"bf16",     "f8_e4m3", "f8_e4m3:row",       "f8_e5m2",
                                     "int8:row", "nf4",     "nf4:block64:nested"};

std::vector<float> numbers(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i * 2654435761u % 2001) / 1000.0f - 1.0f;
  return values;
}

Weight make_weight(const std::string& storage) {
  const Shape shape{kRows, kColumns};
  return quantize(numbers(shape.elements()).data(), Dtype::f32, shape, parse_storage(storage));
}

void count_weights(benchmark::State& state) {
  state.counters["weights/s"] = benchmark::Counter(static_cast<double>(kRows * kColumns),
                                                   benchmark::Counter::kIsIterationInvariantRate);
}

void bench_dequantize(benchmark::State& state, const Kernels& kernels, const std::string& storage) {
  const Weight weight = make_weight(storage);
  std::vector<std::uint16_t> out(kRows * kColumns);
  for (auto _ : state) {
    dequantize_with(kernels, weight, {0, kRows}, out.data(), Dtype::bf16, inline_executor());
    benchmark::ClobberMemory();
  }
  count_weights(state);
}

void bench_quantize(benchmark::State& state, const Kernels& kernels, const std::string& storage) {
  const Weight weight = make_weight(storage);
  const Layout layout = stowage::layout(weight.storage(), weight.shape());
  std::vector<std::vector<std::byte>> memory;
  std::vector<void*> parts;
  for (int i = 0; i < layout.count; ++i)
    memory.emplace_back(static_cast<std::size_t>(layout.parts[static_cast<std::size_t>(i)].bytes));
  for (auto& part : memory) parts.push_back(part.data());
  const std::vector<float> values = numbers(kRows * kColumns);
  for (auto _ : state) {
    quantize_with(kernels, values.data(), Dtype::f32, weight.shape(), weight.storage(), parts,
                  {.executor = &inline_executor()});
    benchmark::ClobberMemory();
  }
  count_weights(state);
}

void bench_amax(benchmark::State& state, const Kernels& kernels, Dtype dtype) {
  const std::vector<std::byte> values(static_cast<std::size_t>(kRows * kColumns * bits(dtype) / 8));
  const Values all[]{{values.data(), dtype, kRows * kColumns}};
  for (auto _ : state) {
    float most = 0;
    amax_with(kernels, all, &most, inline_executor());
    benchmark::DoNotOptimize(most);
  }
  count_weights(state);
}

void bench_linear(benchmark::State& state, const Kernels& kernels, const std::string& storage,
                  std::int64_t m) {
  const Weight weight = make_weight(storage);
  const std::vector<float> x = numbers(m * kColumns);
  std::vector<float> y(static_cast<std::size_t>(m * kRows));
  for (auto _ : state) {
    linear_with(kernels, x.data(), m, Dtype::f32, weight, nullptr, y.data(), inline_executor());
    benchmark::ClobberMemory();
  }
  count_weights(state);
}

const bool registered = [] {
  for (const auto& [isa, table] : runnable_kernels()) {
    const Kernels* kernels = table;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      benchmark::RegisterBenchmark(
          ("amax/" + std::string(isa) + "/" + std::string(disk_name(dtype))).c_str(),
          [=](benchmark::State& state) { bench_amax(state, *kernels, dtype); });
    for (const std::string storage : kStorages) {
      const std::string tail = "/" + std::string(isa) + "/" + storage;
      benchmark::RegisterBenchmark(("dequantize" + tail).c_str(), [=](benchmark::State& state) {
        bench_dequantize(state, *kernels, storage);
      });
      benchmark::RegisterBenchmark(("quantize" + tail).c_str(), [=](benchmark::State& state) {
        bench_quantize(state, *kernels, storage);
      });
      for (const std::int64_t m : {1, 4, 16, 256})
        benchmark::RegisterBenchmark(
            ("linear" + tail + "/" + std::to_string(m)).c_str(),
            [=](benchmark::State& state) { bench_linear(state, *kernels, storage, m); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace stowage
