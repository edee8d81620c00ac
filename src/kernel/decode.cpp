// SPDX-License-Identifier: Apache-2.0
#include "kernel/decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/convert.h"

namespace stowage {
namespace {

constexpr std::int64_t kPiece = 512;  // elements that are staged in the weight's own dtype

template <class T>
T from_double(double x) noexcept {
  if (std::isnan(x)) x = std::numeric_limits<double>::quiet_NaN();
  return static_cast<T>(x);
}
std::uint16_t bf16_from_double(double x) noexcept {
  return f32_to_bf16(f64_to_f32_odd(from_double<double>(x)));
}
std::uint16_t f16_from_double(double x) noexcept {
  return f32_to_f16(f64_to_f32_odd(from_double<double>(x)));
}

// Codes that choose among the run's 16 doubles. One portable loop: f64 weights are rare.
template <class T, T (*kNarrow)(double)>
void choose_doubles(const Run& run, void* out) noexcept {
  const auto* values = static_cast<const double*>(run.values);
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  T table[16];
  for (int k = 0; k < 16; ++k) table[k] = kNarrow(values[k]);
  auto* to = static_cast<char*>(out);
  for (std::int64_t i = run.first; i < run.first + run.n; ++i, to += sizeof(T)) {
    const unsigned pair = codes[i / 2];
    std::memcpy(to, &table[i % 2 == 0 ? pair >> 4 : pair & 15u], sizeof(T));
  }
}

DequantizeKernel choose_kernel(Dtype out) noexcept {
  switch (out) {
    case Dtype::f64:
      return &choose_doubles<double, &from_double<double>>;
    case Dtype::bf16:
      return &choose_doubles<std::uint16_t, &bf16_from_double>;
    case Dtype::f16:
      return &choose_doubles<std::uint16_t, &f16_from_double>;
    default:
      return &choose_doubles<float, &from_double<float>>;
  }
}

}  // namespace

Decode::Decode(const DequantizeKernels& kernels, const Descriptor& form, Dtype out) noexcept
    : out_bytes_(bits(out) / 8) {
  const auto kernel = [&](Codes codes, Dtype to) {
    return kernels.to[static_cast<int>(codes)][value_index(to)];
  };
  const Dtype own = form.rounds_to;
  first_ = kernel(codes_read(form), out);
  if (own == Dtype::f64) first_ = choose_kernel(out);
  if ((own == Dtype::bf16 || own == Dtype::f16) && own != out) {
    first_ = kernel(form.codes, own);
    then_ = kernel(cast_codes(own), out);
  }
}

void Decode::by_two(const Run& run, char* out) const noexcept {
  alignas(64) std::uint16_t own[kPiece];
  for (std::int64_t i = 0; i < run.n; i += kPiece) {
    const std::int64_t n = std::min(kPiece, run.n - i);
    first_(run.part(i, n), own);
    then_({own, 0, nullptr, 1, n, nullptr}, out + i * out_bytes_);
  }
}

}  // namespace stowage
