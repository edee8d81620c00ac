// SPDX-License-Identifier: Apache-2.0
// What arithmetic on codes gives, storage by storage, in a line each: the same on every machine.
// tests/golden/fingerprints.txt holds the lines; tools/test_arm compares them on another processor,
// without GoogleTest.
#pragma once
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "format/convert.h"
#include "kernel/drivers.h"
#include "storages.h"
#include "store/checksum.h"

namespace stowage::samples {

using Numbers = std::vector<std::byte>;

/// n numbers around 0 of `dtype`, exponents from -12 to 2 among them; of integer arithmetic alone.
inline Numbers fingerprint_values(Dtype dtype, std::int64_t n) {
  const auto width = static_cast<std::size_t>(bits(dtype) / 8);
  Numbers made(static_cast<std::size_t>(n) * width);
  std::uint64_t state = 1;
  const auto next = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int64_t>(state >> 40);  // 24 bits
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const auto sum = static_cast<float>(next() + next() - next() - next()) * 0x1p-24f;
    const float x = i % 16 == 0 ? std::ldexp(sum, static_cast<int>(next() % 15) - 12) : sum;
    const std::uint16_t half = dtype == Dtype::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
    std::memcpy(&made[i * width], dtype == Dtype::f32 ? static_cast<const void*>(&x) : &half,
                width);
  }
  return made;
}

/// A weight with its parts.
struct Kept {
  std::vector<Numbers> parts;
  Weight weight;
};
inline Kept quantized(const Kernels& kernels, const Storage& storage, const Shape& shape,
                      Dtype dtype) {
  const Layout layout = stowage::layout(storage, shape);
  std::vector<Numbers> parts;
  for (int i = 0; i < layout.count; ++i)
    parts.emplace_back(static_cast<std::size_t>(layout.parts[static_cast<std::size_t>(i)].bytes));
  std::vector<void*> to;
  for (Numbers& part : parts) to.push_back(part.data());
  const Numbers values = fingerprint_values(dtype, shape.elements());
  QuantizeOptions options;
  options.executor = &inline_executor();
  quantize_with(kernels, values.data(), dtype, shape, storage, to, options);
  const Weight weight(storage, shape, std::vector<const void*>(to.begin(), to.end()));
  return {std::move(parts), weight};
}

/// Of quantize, then of dequantize to fp32, bf16 and f16, then of linear_fixed, where there is one.
inline std::string fingerprint(const Kernels& kernels, const Storage& storage, const Shape& shape,
                               Dtype dtype) {
  constexpr std::int64_t kRowsOfX = 2;
  const Kept kept = quantized(kernels, storage, shape, dtype);
  Numbers codes;
  for (const Numbers& part : kept.parts) codes.insert(codes.end(), part.begin(), part.end());
  std::ostringstream line;
  line << to_string(storage) << ' ' << disk_name(dtype) << std::hex << ' ' << checksum_of(codes);
  for (const Dtype out : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    Numbers values(static_cast<std::size_t>(shape.elements() * bits(out) / 8));
    dequantize_with(kernels, kept.weight, {0, shape[0]}, values.data(), out, inline_executor());
    line << ' ' << checksum_of(values);
  }
  if (shape.rank() == 2) {
    const Numbers x = fingerprint_values(Dtype::f32, kRowsOfX * shape[1]);
    Numbers y(static_cast<std::size_t>(kRowsOfX * shape[0]) * sizeof(float));
    linear_fixed_with(kernels, reinterpret_cast<const float*>(x.data()), kRowsOfX, kept.weight,
                      nullptr, reinterpret_cast<float*>(y.data()), inline_executor());
    line << ' ' << checksum_of(y);
  }
  return line.str();
}

/// linear() by every way that this processor takes, against fp64: the largest error, in bounds of
/// docs/numbers.md for fp32.
inline double worst_product(const Kernels& kernels) {
  constexpr std::int64_t kRows = 12, kColumns = 5376;
  double worst = 0;
  for (const std::string& name : covering(product_features, is_of_matrices)) {
    const Storage storage = parse_storage(name);
    const Shape shape{kRows, kColumns};
    const Kept kept = quantized(kernels, storage, shape, Dtype::f32);
    const std::int64_t n = shape[0], k = shape[1];
    std::vector<float> w(static_cast<std::size_t>(n * k));
    dequantize_with(kernels, kept.weight, {0, n}, w.data(), Dtype::f32, inline_executor());
    for (const std::int64_t m : {1, 3, 6, 18}) {
      const Numbers bytes = fingerprint_values(Dtype::f32, m * k);
      const auto* x = reinterpret_cast<const float*>(bytes.data());
      std::vector<float> y(static_cast<std::size_t>(m * n));
      linear_with(kernels, x, m, Dtype::f32, kept.weight, nullptr, y.data(), inline_executor());
      for (std::int64_t j = 0; j < m; ++j)
        for (std::int64_t i = 0; i < n; ++i) {
          double sum = 0, size = 0;
          for (std::int64_t c = 0; c < k; ++c) {
            const double product = double{x[j * k + c]} * w[static_cast<std::size_t>(i * k + c)];
            sum += product, size += std::fabs(product);
          }
          const double bound = (static_cast<double>(k) + 9) * 0x1p-24 * size + 0x1p-133;
          worst = std::fmax(worst, std::fabs(y[static_cast<std::size_t>(j * n + i)] - sum) / bound);
        }
    }
  }
  return worst;
}

inline std::vector<std::string> fingerprints(const Kernels& kernels) {
  std::vector<std::string> lines;
  const auto add = [&](const std::vector<std::string>& names, const Shape& shape) {
    for (const std::string& name : names)
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
        lines.push_back(fingerprint(kernels, parse_storage(name), shape, dtype));
  };
  const auto is_of_stacks = [](const Storage& s) {
    return s.dialect == Dialect::standard && !is_of_matrices(s);
  };
  add(covering(codec_features, is_of_matrices), {12, 5376});  // all sizes of groups divide it
  add(covering(codec_features, is_of_stacks), {1, 1344, 192});
  return lines;
}

}  // namespace stowage::samples
