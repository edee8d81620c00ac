// SPDX-License-Identifier: Apache-2.0
// The reference codec of nf4:torchao.
#include <algorithm>
#include <cmath>
#include <vector>

#include "format/reference.h"
#include "format/torchao.h"

namespace stowage::reference {
namespace {

using torchao::load;
using torchao::rounded;

// Element i in D: as it is, or as the plain cast to D makes it (f64: wider than all).
template <class D>
typename D::Work source_at(const void* values, Dtype dtype, ScaleType type, std::int64_t i) {
  const double x = read(values, dtype, i);
  if (type == ScaleType::f64) return static_cast<typename D::Work>(x);
  const Codes codes = type == ScaleType::bf16  ? Codes::bf16
                      : type == ScaleType::f16 ? Codes::f16
                                               : Codes::f32;
  return static_cast<typename D::Work>(round(codes, x));
}

template <class D>
void quantize_as(const void* values, Dtype dtype, std::int64_t n, const Storage& storage,
                 std::span<void* const> parts) {
  using Work = typename D::Work;
  const auto at = [&](std::int64_t i) {
    return source_at<D>(values, dtype, storage.scaling.type, i);
  };
  auto* codes = static_cast<std::uint8_t*>(parts[0]);
  std::vector<Work> absmax;
  for (std::int64_t first = 0; first < n; first += storage.scaling.block) {
    Work most = 0;
    for (std::int64_t i = first; i < first + storage.scaling.block; ++i)
      most = std::max(most, std::fabs(at(i)));
    for (std::int64_t i = first; i < first + storage.scaling.block; i += 2)
      codes[i / 2] = static_cast<std::uint8_t>(torchao::encode<D>(rounded<D>(at(i) / most)) << 4 |
                                               torchao::encode<D>(rounded<D>(at(i + 1) / most)));
    absmax.push_back(most);
  }
  torchao::nest<D>(absmax, storage.scaling.scaler_block, parts);
}

template <class D>
typename D::Work scale_of(const Weight& weight, std::int64_t i) noexcept {
  const Scaling& scaling = weight.storage().scaling;
  const std::int64_t block = i / scaling.block;
  return torchao::scale<D>(static_cast<const std::int8_t*>(weight.part(1))[block],
                           load<D>(weight.part(2), block / scaling.scaler_block),
                           load<D>(weight.part(3), 0));
}

}  // namespace

void quantize_torchao(const void* values, Dtype dtype, std::int64_t n, const Storage& storage,
                      std::span<void* const> parts) {
  torchao::with_type(storage.scaling.type,
                     [&]<class D>(D) { quantize_as<D>(values, dtype, n, storage, parts); });
}

double torchao_value_at(const Weight& weight, std::int64_t i) noexcept {
  return torchao::with_type(weight.storage().scaling.type, [&]<class D>(D) -> double {
    const unsigned pair = static_cast<const std::uint8_t*>(weight.part(0))[i / 2];
    const unsigned code = i % 2 == 0 ? pair >> 4 : pair & 15u;
    return static_cast<double>(rounded<D>(load<D>(weight.part(4), code) * scale_of<D>(weight, i)));
  });
}

float torchao_scale_at(const Weight& weight, std::int64_t i) noexcept {
  return torchao::with_type(weight.storage().scaling.type, [&]<class D>(D) -> float {
    return static_cast<float>(scale_of<D>(weight, i));
  });
}

}  // namespace stowage::reference
