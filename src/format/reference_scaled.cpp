// SPDX-License-Identifier: Apache-2.0
// The reference codec, second half: quantize, for plain casts, scaled 8-bit codes and the 4-bit
// codes of bitsandbytes (backends/default/ops.py, 0.50).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "format/dynamic_map.h"
#include "format/legal.h"
#include "format/reference.h"
#include "stowage/descriptor.h"

namespace stowage::reference {
namespace {

constexpr float kTiny4 = 1e-38f;  // the least divisor of a 4-bit block

struct Source {  // what is quantized, element by element
  const void* values;
  Dtype dtype;
  std::int64_t n;
  double exact(std::int64_t i) const noexcept { return read(values, dtype, i); }
  float single(std::int64_t i) const noexcept { return static_cast<float>(exact(i)); }
};

struct Order4 {  // the values of a 4-bit format, ascending
  std::array<std::uint8_t, 16> code;
  std::array<float, 15> threshold;
};

Order4 make_order4(Codes codes) {
  const auto values = trait(codes).values;
  Order4 order{};
  std::iota(order.code.begin(), order.code.end(), std::uint8_t{0});
  std::ranges::stable_sort(order.code, {}, [&](std::uint8_t c) { return values[c]; });
  for (std::size_t k = 0; k < order.threshold.size(); ++k)
    order.threshold[k] = (values[order.code[k]] + values[order.code[k + 1]]) / 2.0f;
  return order;
}

const Order4& order4(Codes codes) noexcept {  // of a format of 16 values
  static const auto orders = [] {
    std::array<Order4, kCodesCount> made{};
    for (const FormatTrait& format : formats())
      if (format.values.size() == 16)
        made[static_cast<std::size_t>(format.codes)] = make_order4(format.codes);
    return made;
  }();
  return orders[static_cast<std::size_t>(codes)];
}

void check_finite(const Source& source, const Storage& storage, bool keep_nonfinite) {
  const bool exact = sees_exact_values(storage);
  const bool can_keep = can_keep_nonfinite(storage);
  if (keep_nonfinite && can_keep) return;
  for (std::int64_t i = 0; i < source.n; ++i) {
    const double x = exact ? source.exact(i) : source.single(i);
    if (std::isfinite(x)) continue;
    throw Error(Code::invalid_argument,
                "quantize: values must be finite" +
                    (can_keep ? std::string() : " in " + to_string(storage)) + ", got " +
                    std::to_string(source.exact(i)) + " at element " + std::to_string(i));
  }
}

void quantize_cast(const Source& source, Codes codes, void* out) noexcept {
  const auto width = static_cast<std::size_t>(trait(codes).bits / 8);
  if (trait(codes).disk == source.dtype) {  // its own type: nothing to round
    if (source.n != 0) std::memcpy(out, source.values, static_cast<std::size_t>(source.n) * width);
    return;
  }
  for (std::int64_t i = 0; i < source.n; ++i) {
    const std::uint32_t code = encode(codes, source.exact(i));
    std::memcpy(static_cast<char*>(out) + static_cast<std::size_t>(i) * width, &code, width);
  }
}

std::uint8_t encode8(Codes codes, float scaled) noexcept {
  const float largest = trait(codes).largest;
  const float clamped = std::clamp(scaled, -largest, largest);
  if (codes == Codes::int8)
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::nearbyint(clamped)));
  return static_cast<std::uint8_t>(encode(codes, clamped));
}

// One group under one scale: elements [first, first + count).
void quantize_group(const Source& source, Codes codes, std::int64_t first, std::int64_t count,
                    std::uint8_t* out, float* scale) noexcept {
  float amax = 0.0f;
  for (std::int64_t i = first; i < first + count; ++i)
    amax = std::max(amax, std::fabs(source.single(i)));
  *scale = scale_of(amax, trait(codes).largest);
  const float inverse = 1.0f / *scale;
  for (std::int64_t i = first; i < first + count; ++i)
    out[i] = encode8(codes, source.single(i) * inverse);
}

void quantize_scaled(const Source& source, const Storage& storage, const Shape& shape, void* codes,
                     void* scales) noexcept {
  const std::int64_t group = group_elements(storage, shape);
  const bool blocks = describe(storage).scale.group.kind == Group::Kind::along;
  const std::int64_t line = blocks ? shape.row_elements() : source.n;  // groups restart here
  auto* out = static_cast<std::uint8_t*>(codes);
  auto* scale = static_cast<float*>(scales);
  if (source.n == 0) {  // groups without elements still have their scale
    std::fill_n(scale, layout(storage, shape).parts[1].shape.elements(), 1.0f);
    return;
  }
  for (std::int64_t start = 0; start < source.n; start += line)
    for (std::int64_t i = start; i < start + line; i += group)
      quantize_group(source, storage.codes, i, std::min(group, start + line - i), out, scale++);
}

float amax4(const Source& source, std::int64_t first, std::int64_t end) noexcept {
  float amax = 0.0f;
  for (std::int64_t i = first; i < end; ++i) {
    const float x = std::fabs(source.single(i));
    if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, x);
  }
  return amax;
}

// A whole block multiplies by the reciprocal; the short last one divides, and stores its clamped
// absmax. Returns the absmax.
float quantize_block4(const Source& source, Codes codes, std::int64_t first, std::int64_t block,
                      std::uint8_t* nibbles) noexcept {
  const std::int64_t end = std::min(first + block, source.n);
  const float amax = amax4(source, first, end);
  const float divisor = amax < kTiny4 ? kTiny4 : amax;  // NaN stays
  const bool whole = end - first == block;
  const float inverse = 1.0f / divisor;
  for (std::int64_t i = first; i < end; ++i) {
    const float v = whole ? source.single(i) * inverse : source.single(i) / divisor;
    nibbles[i] = encode4(codes, v > 1.0f ? 1.0f : v < -1.0f ? -1.0f : v);
  }
  return whole ? amax : divisor;
}

void quantize4(const Source& source, const Storage& storage, std::span<void* const> parts) {
  const std::int64_t block = storage.scaling.block;
  std::vector<std::uint8_t> nibbles(static_cast<std::size_t>(source.n + source.n % 2),
                                    encode4(storage.codes, 0.0f));
  std::vector<float> absmax;
  for (std::int64_t first = 0; first < source.n; first += block)
    absmax.push_back(quantize_block4(source, storage.codes, first, block, nibbles.data()));
  auto* packed = static_cast<std::uint8_t*>(parts[0]);
  for (std::size_t i = 0; i < nibbles.size(); i += 2)
    packed[i / 2] = static_cast<std::uint8_t>(nibbles[i] << 4 | nibbles[i + 1]);
  if (!storage.scaling.nested) {
    std::ranges::copy(absmax, static_cast<float*>(parts[1]));
    return;
  }
  nest_scales(absmax, static_cast<std::uint8_t*>(parts[1]), static_cast<float*>(parts[2]),
              static_cast<float*>(parts[4]));
  std::ranges::copy(dynamic_map(), static_cast<float*>(parts[3]));
}

}  // namespace

float scale_of(float amax, float largest) noexcept {
  if (amax == 0.0f) return 1.0f;
  return std::max(amax / largest, 0x1p-126f);
}

std::uint8_t encode4(Codes codes, float x) noexcept {
  const Order4& order = order4(codes);
  const auto below = std::ranges::count_if(order.threshold, [x](float t) { return !(t >= x); });
  return order.code[static_cast<std::size_t>(below)];
}

std::span<const float> thresholds4(Codes codes) noexcept { return order4(codes).threshold; }

void quantize(const void* values, Dtype dtype, const Shape& shape, const Storage& given,
              std::span<void* const> parts, bool keep_nonfinite) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "quantize: values must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  const Storage storage = storage_for_values(given, dtype);
  const Layout made = layout(storage, shape);
  if (parts.size() != static_cast<std::size_t>(made.count))
    throw Error(Code::invalid_argument, "quantize: " + to_string(storage) + " must have " +
                                            std::to_string(made.count) + " parts, got " +
                                            std::to_string(parts.size()));
  const Source source{values, dtype, shape.elements()};
  check_finite(source, storage, keep_nonfinite);
  switch (describe(storage).codec) {
    case Codec::cast:
      return quantize_cast(source, storage.codes, parts[0]);
    case Codec::amax:
      return quantize_scaled(source, storage, shape, parts[0], parts[1]);
    case Codec::bitsandbytes:
      return quantize4(source, storage, parts);
    case Codec::torchao:
      return quantize_torchao(values, dtype, source.n, storage, parts);
  }
}

}  // namespace stowage::reference
