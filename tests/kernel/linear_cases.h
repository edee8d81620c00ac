// SPDX-License-Identifier: Apache-2.0
// What the linear tests share: weights of every storage, inputs of several kinds, the fp64 result
// and the error that the design allows.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/threads.h"
#include "format/convert.h"
#include "format/reference.h"
#include "kernel/drivers.h"
#include "kernel/kernels.h"
#include "kernel/samples.h"
#include "stowage/weight.h"

namespace stowage::linear_test {

inline const std::vector<std::string>& storages() {
  static const auto all = [] {
    auto names = samples::covering(samples::product_features, samples::is_of_matrices);
    for (const char* common : {"nf4", "nf4:nested", "int8:block32"}) names.emplace_back(common);
    return names;
  }();
  return all;
}
inline constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

enum class Data { normal, heavy, adversarial };

/// Values in the given dtype, as bytes.
struct Values {
  Dtype dtype;
  std::vector<std::byte> bytes;
  double operator[](std::int64_t i) const { return reference::read(bytes.data(), dtype, i); }
  const void* data() const { return bytes.data(); }
};
inline std::size_t bytes_of(Dtype dtype, std::int64_t n) {
  return static_cast<std::size_t>(n * bits(dtype) / 8);
}
inline Values made_values(Dtype dtype, std::int64_t n, Data data, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Values values{dtype, std::vector<std::byte>(bytes_of(dtype, n))};
  for (std::int64_t i = 0; i < n; ++i) {
    float x = normal(random);
    if (data == Data::heavy) x = x / (0.02f + std::abs(normal(random)));
    // Neighbours that cancel up to the last bits, at scales far apart.
    if (data == Data::adversarial)
      x = (i % 2 == 0 ? 1.0f : -1.0f) *
          std::ldexp(1.0f + 0.001f * x, static_cast<int>(i / 2 % 9) - 4);
    if (dtype == Dtype::f32) std::memcpy(&values.bytes[bytes_of(dtype, i)], &x, 4);
    const std::uint16_t half = dtype == Dtype::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
    if (dtype != Dtype::f32) std::memcpy(&values.bytes[bytes_of(dtype, i)], &half, 2);
  }
  return values;
}
inline std::string key_of(Dtype dtype, std::int64_t n, Data data, std::uint32_t seed) {
  return std::string(disk_name(dtype)) + std::to_string(n) + ":" +
         std::to_string(static_cast<int>(data)) + ":" + std::to_string(seed);
}
inline const Values& make_values(Dtype dtype, std::int64_t n, Data data, std::uint32_t seed) {
  return samples::kept(key_of(dtype, n, data, seed),
                       [&] { return made_values(dtype, n, data, seed); });
}

/// A weight that owns its parts, quantized by the reference codec.
inline Weight made_weight(const std::string& storage, const Shape& shape, Data data,
                          std::uint32_t seed) {
  const Storage parsed = parse_storage(storage);
  const Layout layout = stowage::layout(parsed, shape);
  auto memory = std::make_shared<std::vector<std::vector<std::byte>>>();
  std::vector<void*> parts;
  for (int i = 0; i < layout.count; ++i)
    memory->emplace_back(static_cast<std::size_t>(layout.parts[static_cast<std::size_t>(i)].bytes) +
                         1);
  for (auto& part : *memory) parts.push_back(part.data());
  const Values values = make_values(Dtype::f32, shape.elements(), data, seed);
  reference::quantize(values.data(), Dtype::f32, shape, parsed, parts);
  return {parsed, shape, std::vector<const void*>(parts.begin(), parts.end()), memory};
}
inline Weight make_weight(const std::string& storage, const Shape& shape, Data data,
                          std::uint32_t seed = 1) {
  return samples::kept(storage + to_string(shape) + key_of(Dtype::f32, 0, data, seed),
                       [&] { return made_weight(storage, shape, data, seed); });
}

/// The unit roundoff of a dtype.
inline double unit(Dtype dtype) {
  return dtype == Dtype::f32 ? 0x1p-24 : dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11;
}

/// y[i, j] = sum_d x[i, d] w[j, d] + bias[j] in fp64, and sum_d |x w| for the bound.
struct Exact {
  std::vector<double> y, magnitude;
};
/// `transposed` gives the gradient: x is [m, rows] and y [m, columns].
inline Exact made_exact(const Values& x, std::int64_t m, const Weight& weight, const Values* bias,
                        bool transposed) {
  const std::int64_t rows = weight.shape()[0], columns = weight.shape()[1];
  const std::int64_t n = transposed ? columns : rows, depth = transposed ? rows : columns;
  std::vector<double> w(static_cast<std::size_t>(rows * columns)),
      in(static_cast<std::size_t>(m * depth));
  Values rounded{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, rows * columns))};
  reference::dequantize(weight, rounded.bytes.data(), x.dtype);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = rounded[static_cast<std::int64_t>(i)];
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = x[static_cast<std::int64_t>(i)];
  Exact result{std::vector<double>(static_cast<std::size_t>(m * n)),
               std::vector<double>(static_cast<std::size_t>(m * n))};
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = bias == nullptr ? 0 : (*bias)[j], magnitude = std::abs(sum);
      for (std::int64_t d = 0; d < depth; ++d) {
        const std::int64_t at = transposed ? d * columns + j : j * columns + d;
        const double product =
            in[static_cast<std::size_t>(i * depth + d)] * w[static_cast<std::size_t>(at)];
        sum += product;
        magnitude += std::abs(product);
      }
      result.y[static_cast<std::size_t>(i * n + j)] = sum;
      result.magnitude[static_cast<std::size_t>(i * n + j)] = magnitude;
    }
  return result;
}
inline std::string key_of(const Values& x, std::int64_t m, const Weight& weight,
                          const Values* bias) {
  std::string key = std::string(disk_name(x.dtype)) + std::to_string(m) +
                    samples::key_of(x.data(), x.bytes.size()) + samples::key_of(weight);
  if (bias != nullptr) key += samples::key_of(bias->data(), bias->bytes.size());
  return key;
}
inline const Exact& exact(const Values& x, std::int64_t m, const Weight& weight, const Values* bias,
                          bool transposed = false) {
  const std::string key = key_of(x, m, weight, bias) + (transposed ? "T" : "");
  return samples::kept(key, [&] { return made_exact(x, m, weight, bias, transposed); });
}

/// The bound of docs/numbers.md, with the smallest subnormal for what underflows, and `more` for
/// each element, if there is any.
inline void expect_within_bound(const Values& y, const Exact& exact, std::int64_t depth,
                                const std::string& what, const std::vector<double>& more = {}) {
  const double moved = y.dtype == Dtype::f32 ? 0 : unit(y.dtype);
  const double tiny = y.dtype == Dtype::f16 ? 0x1p-24 : 0x1p-133;
  for (std::size_t i = 0; i < exact.y.size(); ++i) {
    const double bound = unit(y.dtype) * std::abs(exact.y[i]) + (more.empty() ? 0 : more[i]) +
                         (static_cast<double>(depth + 8) * 0x1p-24 + moved) * exact.magnitude[i];
    const double got = y[static_cast<std::int64_t>(i)];
    if (y.dtype == Dtype::f16 && std::isinf(got) && std::abs(exact.y[i]) > 65000) continue;
    ASSERT_LE(std::abs(got - exact.y[i]), bound + tiny)
        << what << ", element " << i << ": " << got << " for " << exact.y[i];
  }
}

inline Values run_linear(const Kernels& kernels, const Values& x, std::int64_t m,
                         const Weight& weight, const Values* bias, Executor& executor) {
  Values y{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, m * weight.rows()))};
  linear_with(kernels, x.data(), m, x.dtype, weight, bias == nullptr ? nullptr : bias->data(),
              y.bytes.data(), executor);
  return y;
}
/// Two and three threads give the bytes that one gives.
inline void expect_same_on_threads(const Kernels& kernels, const Values& x, std::int64_t m,
                                   const Weight& weight) {
  const Values y = run_linear(kernels, x, m, weight, nullptr, inline_executor());
  for (const int threads : {2, 3}) {
    const auto pool = make_pool(threads);
    EXPECT_EQ(run_linear(kernels, x, m, weight, nullptr, *pool).bytes, y.bytes)
        << to_string(weight.storage()) << " " << m << " " << threads;
  }
}
inline Values run_gradient(const Kernels& kernels, const Values& g, std::int64_t m,
                           const Weight& weight, Executor& executor) {
  Values gx{g.dtype, std::vector<std::byte>(bytes_of(g.dtype, m * weight.row_elements()))};
  linear_grad_input_with(kernels, g.data(), m, g.dtype, weight, gx.bytes.data(), executor);
  return gx;
}

}  // namespace stowage::linear_test
