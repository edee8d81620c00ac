// SPDX-License-Identifier: Apache-2.0
// What products in integers may err by beside others: x in fixed point, eight neighbors under one
// power of two (docs/numbers.md).
#pragma once
#include "kernel/linear_cases.h"
#include "kernel/linear_weight.h"

namespace stowage::linear_test {

/// The eight that shares an exponent with column c: neighbors; by words two fours, 16 apart.
inline std::int64_t eight_of(std::int64_t c, bool by_words) {
  return by_words ? c / 32 * 4 + c % 16 / 4 : c / 8;
}

/// sum over the eights of columns of (max |x| sum |w|), for each element of y.
inline std::vector<double> made_eights(const Values& x, std::int64_t m, const Weight& weight) {
  const std::int64_t n = weight.shape()[0], k = weight.shape()[1];
  const Codes codes = weight.storage().codes;
  const auto place = [&](std::int64_t row, std::int64_t c) {
    const bool by_words = codes == Codes::nf4 || codes == Codes::fp4;
    return static_cast<std::size_t>(row * (k / 8) + eight_of(c, by_words));
  };
  std::vector<float> w(static_cast<std::size_t>(n * k));
  reference::dequantize(weight, w.data(), Dtype::f32);
  std::vector<double> most(static_cast<std::size_t>(m * k / 8)), sums;
  for (std::int64_t d = 0; d < m * k; ++d) {
    double& of = most[place(d / k, d % k)];
    of = std::max(of, std::abs(x[d]));
  }
  for (std::int64_t j = 0; j < m; ++j)
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (std::int64_t d = 0; d < k; ++d)
        sum += most[place(j, d)] * std::abs(double{w[static_cast<std::size_t>(i * k + d)]});
      sums.push_back(sum);
    }
  return sums;
}
inline const std::vector<double>& eights(const Values& x, std::int64_t m, const Weight& weight) {
  return samples::kept("eights" + key_of(x, m, weight, nullptr),
                       [&] { return made_eights(x, m, weight); });
}

/// 2^-14 of them where such a product is in integers; else nothing.
inline std::vector<double> lost_in_integers(const Kernels& kernels, const Values& x, std::int64_t m,
                                            const Weight& weight) {
  const LinearWeight of(kernels, weight, "linear");
  const auto& arrange = kernels.linear.bytes.arrange[of.dot_bytes_kind()];
  if (x.dtype == Dtype::f32 || !of.has_dot_bytes(m)) return {};
  if (arrange[value_index(Dtype::f32)] != nullptr) return {};  // of fp8: in fp32
  std::vector<double> lost = eights(x, m, weight);
  for (double& each : lost) each *= 0x1p-14;
  return lost;
}

}  // namespace stowage::linear_test
