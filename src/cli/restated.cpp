// SPDX-License-Identifier: Apache-2.0
#include "cli/restated.h"

#include <cstring>
#include <utility>
#include <vector>

#include "format/convert.h"

namespace stowage::cli {
namespace {

// The weight whose codes it has, and parts of its own.
struct Owned {
  Weight from;
  std::vector<float> scales;
  std::vector<std::byte> zeros;
};

template <class T>
T value_at(const void* from, std::size_t i) {
  T value;  // at any address
  std::memcpy(&value, static_cast<const std::byte*>(from) + i * sizeof value, sizeof value);
  return value;
}

// 2^(byte - 127); 255 is NaN.
float power(std::uint8_t byte) {
  if (byte == 0) return float_of(0x00400000);
  return float_of(byte == 255 ? 0x7fc00000 : std::uint32_t{byte} << 23);
}

float scale_at(const Weight& weight, std::size_t i) {
  const void* const scales = weight.part(1);
  switch (weight.storage().scaling.type) {
    case ScaleType::bf16:
      return bf16_to_f32(value_at<std::uint16_t>(scales, i));
    case ScaleType::f16:
      return f16_to_f32(value_at<std::uint16_t>(scales, i));
    case ScaleType::e8m0:
      return power(value_at<std::uint8_t>(scales, i));
    default:
      return value_at<float>(scales, i);
  }
}

Weight assembled(const Storage& storage, std::shared_ptr<Owned> owned) {
  std::vector<const void*> parts{owned->from.part(0), owned->from.part(1)};
  if (!owned->scales.empty()) parts[1] = owned->scales.data();
  if (!owned->zeros.empty())
    parts.push_back(owned->zeros.data());
  else if (storage.scaling.zero != Zero::none)
    parts.push_back(owned->from.part(2));
  if (storage.scaling.actorder)
    parts.push_back(owned->from.part(owned->from.storage().scaling.zero != Zero::none ? 3 : 2));
  const Shape shape = owned->from.shape();
  return {storage, shape, parts, std::move(owned)};
}

}  // namespace

Weight restated(const Weight& weight, const Storage& storage) {
  if (storage == weight.storage()) return weight;
  const auto owned = std::make_shared<Owned>(Owned{weight, {}, {}});
  const Layout made = layout(storage, weight.shape());
  const auto count = static_cast<std::size_t>(made.parts[1].shape.elements());
  if (storage.scaling.type != weight.storage().scaling.type)
    for (std::size_t i = 0; i < count; ++i) owned->scales.push_back(scale_at(weight, i));
  if (storage.scaling.zero != weight.storage().scaling.zero) owned->zeros.resize(count);
  return assembled(storage, owned);
}

Weight with_rounded_scales(const Weight& weight) {
  const auto owned = std::make_shared<Owned>(Owned{weight, {}, {}});
  const Layout made = layout(weight.storage(), weight.shape());
  const auto count = static_cast<std::size_t>(made.parts[1].shape.elements());
  for (std::size_t i = 0; i < count; ++i)
    owned->scales.push_back(bf16_to_f32(f32_to_bf16(scale_at(weight, i))));
  return assembled(weight.storage(), owned);
}

}  // namespace stowage::cli
