// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/threads.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

// The stated order, written down once more, one operation at a time.
float by_hand(const float* x, const Weight& weight, std::int64_t row, const float* bias) {
  std::array<volatile float, 16> sums{};
  const std::int64_t columns = weight.shape()[1];
  for (std::int64_t k = 0; k < columns; ++k) {
    const volatile float product = x[k] * reference::value_at(weight, row * columns + k);
    volatile float& sum = sums[static_cast<std::size_t>(k % 16)];
    sum = sum + product;
  }
  for (std::size_t s = 8; s > 0; s /= 2)
    for (std::size_t j = 0; j < s; ++j) sums[j] = sums[j] + sums[j + s];
  return bias == nullptr ? sums[0] : sums[0] + bias[row];
}

using LinearFixedOn = samples::EachIsa;
STOWAGE_FOR_EACH_ISA(LinearFixedOn);

TEST_P(LinearFixedOn, IsTheStatedOrderOnAnyNumberOfThreads) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  const Sizes sizes[] = {{1, 1, 1},   {3, 5, 0},    {2, 7, 15},    {1, 4, 16},
                         {17, 3, 33}, {2, 3, 5000}, {40, 70, 100}, {5, 4, 96}};
  const auto pool = make_pool(3);
  std::vector<std::string> storages(std::begin(kStorages), std::end(kStorages));
  for (const char* type : {"f32", "bf16", "f16", "f64"})
    storages.push_back(std::string("nf4:torchao:block16:scaler2:") + type);
  for (const std::string& storage : storages)
    for (const auto& [m, n, k] : sizes)
      for (const Data data : {Data::normal, Data::adversarial}) {
        if (!samples::holds(parse_storage(storage), {n, k})) continue;
        const Weight weight = make_weight(storage, {n, k}, data);
        const Values x = make_values(Dtype::f32, m * k, data, 2);
        const Values bias = make_values(Dtype::f32, n, data, 3);
        const auto* xs = static_cast<const float*>(x.data());
        const auto* biases = m == 1 ? nullptr : static_cast<const float*>(bias.data());
        std::vector<float> expected;
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t row = 0; row < n; ++row)
            expected.push_back(by_hand(xs + i * k, weight, row, biases));
        for (Executor* executor : {&inline_executor(), pool.get()}) {
          std::vector<float> y(expected.size(), -1.0f);
          linear_fixed_with(table(), xs, m, weight, biases, y.data(), *executor);
          ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
              << storage << " k " << k;
        }
      }
}

}  // namespace
}  // namespace stowage::linear_test
