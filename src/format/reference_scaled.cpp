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

struct Input {  // what is quantized, element by element
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

void check_finite(const Input& input, const Storage& storage, bool keep_nonfinite) {
  const bool exact = sees_exact_values(storage);
  const bool can_keep = can_keep_nonfinite(storage);
  if (keep_nonfinite && can_keep) return;
  for (std::int64_t i = 0; i < input.n; ++i) {
    const double x = exact ? input.exact(i) : input.single(i);
    if (std::isfinite(x)) continue;
    throw Error(Code::invalid_argument,
                "quantize: values must be finite" +
                    (can_keep ? std::string() : " in " + to_string(storage)) + ", got " +
                    std::to_string(input.exact(i)) + " at element " + std::to_string(i));
  }
}

void quantize_cast(const Input& input, Codes codes, void* out) noexcept {
  const auto width = static_cast<std::size_t>(trait(codes).bits / 8);
  if (trait(codes).disk == input.dtype) {  // its own type: nothing to round
    if (input.n != 0) std::memcpy(out, input.values, static_cast<std::size_t>(input.n) * width);
    return;
  }
  for (std::int64_t i = 0; i < input.n; ++i) {
    const std::uint32_t code = encode(codes, input.exact(i));
    std::memcpy(static_cast<char*>(out) + static_cast<std::size_t>(i) * width, &code, width);
  }
}

// The code nearest to a value over its scale.
std::uint8_t scaled_code(Codes codes, const CodeRange& range, float scaled) noexcept {
  const float clamped = std::clamp(scaled, range.least, range.most);
  return static_cast<std::uint8_t>(nearest_code(codes, clamped));
}

void put_code(const Storage& storage, void* codes, std::int64_t i, std::uint8_t code) {
  auto* bytes = static_cast<std::uint8_t*>(codes);
  const Packing packing = describe(storage).packing;
  if (packing == Packing::whole)
    bytes[i] = code;
  else if (packing == Packing::dense)
    put_dense(bytes, trait(storage.codes).bits, i, code);
  else if (i % 2 == 0)
    bytes[i / 2] = code;
  else
    bytes[i / 2] = static_cast<std::uint8_t>(bytes[i / 2] | code << 4);
}

// The exponent of the power of two that a scale is kept as.
int power_of(PowerRule rule, float amax, float scale, float largest) noexcept {
  if (rule == PowerRule::floor)
    return amax == 0.0f ? 0 : std::max(std::ilogb(amax) - std::ilogb(largest), -126);
  int exponent = 0;  // the least that is no smaller
  if (std::frexp(scale, &exponent) == 0.5f) --exponent;
  return exponent;
}

// The number over e4m3 scales, under which the largest of them is the largest of e4m3 (ModelOpt
// 0.47). The lower bound keeps each product, and its reciprocal, a normal number.
float outer_of(ScaleType type, float amax, float largest) noexcept {
  if (amax == 0.0f) return 1.0f;
  const double most = 448.0 * double{largest};
  if (type == ScaleType::e4m3_quotient)
    return static_cast<float>(std::min(most / double{amax}, 0x1p117));
  return static_cast<float>(std::max(double{amax} / most, 0x1p-117));
}

// An e4m3 scale under `outer`: from the least such number to the largest; 1 for nothing to scale.
double scale_under(ScaleType type, float outer, float amax, float largest) noexcept {
  const auto six = static_cast<float>(double{largest} * double{outer});
  auto exact = static_cast<float>(double{amax} / double{six});
  if (type == ScaleType::e4m3_quotient)
    exact = static_cast<float>(double{static_cast<float>(double{amax} * double{outer})} /
                               double{largest});
  return exact == 0.0f ? 1.0 : round(Codes::f8_e4m3, std::max(double{exact}, 0x1p-9));
}

[[noreturn]] void refuse_scale(const Storage& storage) {
  throw Error(Code::invalid_argument, "quantize: values must have finite scales in " +
                                          to_string(storage) + ", got infinity");
}

// Writes number g of those of the type of scales, and returns what it will be read as.
float keep_number(Codes as, double value, void* numbers, std::size_t g) {
  const std::uint32_t bits = encode(as, value);
  const auto width = static_cast<std::size_t>(trait(as).bits / 8);
  std::memcpy(static_cast<char*>(numbers) + g * width, &bits, width);
  return static_cast<float>(round(as, value));
}

// Writes the scale of group g as the storage has it, and returns what it will be read as.
float keep_scale(float scale, float amax, const Storage& storage, void* scales, std::size_t g) {
  switch (storage.scaling.type) {
    case ScaleType::bf16:
      return keep_number(Codes::bf16, scale, scales, g);
    case ScaleType::f16:
      if (scale > 65504.0f) refuse_scale(storage);
      return keep_number(
          Codes::f16, scale >= 0x1p-14f ? scale : std::ceil(scale * 0x1p24f) * 0x1p-24f, scales, g);
    case ScaleType::e8m0: {
      const int exponent =
          power_of(describe(storage).powers, amax, scale, trait(storage.codes).largest);
      static_cast<std::uint8_t*>(scales)[g] = static_cast<std::uint8_t>(exponent + 127);
      return std::ldexp(1.0f, exponent);
    }
    default:
      return static_cast<float*>(scales)[g] = scale;
  }
}

// Turns the amax of each group into its scale, as the parts have it.
void put_products(const Input& input, const Storage& storage, const Shape& shape,
                  std::span<float> scale, std::span<void* const> parts) {
  const ScaleType type = storage.scaling.type;
  const float largest = code_range(storage).divisor;
  const auto outers = static_cast<std::size_t>(layout(storage, shape).parts[2].shape.elements());
  std::vector<float> most(outers, 0.0f);
  std::vector<std::size_t> outer_of_group(scale.size(), 0);
  for (std::int64_t i = 0; i < input.n; ++i) {
    const auto at = static_cast<std::size_t>(outer_index(storage, shape, i));
    most[at] = std::max(most[at], std::fabs(input.single(i)));
    outer_of_group[static_cast<std::size_t>(scale_index(storage, shape, i))] = at;
  }
  for (float& outer : most) outer = outer_of(type, outer, largest);
  if (!most.empty()) std::memcpy(parts[2], most.data(), most.size() * sizeof(float));
  for (std::size_t g = 0; g < scale.size(); ++g) {
    const float outer = most[outer_of_group[g]];
    const double kept = scale_under(type, outer, scale[g], largest);
    static_cast<std::uint8_t*>(parts[1])[g] =
        static_cast<std::uint8_t>(encode(Codes::f8_e4m3, kept));
    scale[g] = number_under(type, kept, outer);
  }
}

// What a group from lo <= 0 on has beside its exact scale, as it is kept, and what values over the
// kept scale are moved by.
float keep_zero(float lo, float exact, float kept, const Storage& storage, void* zeros,
                std::size_t g) {
  const auto [least, most, divisor] = code_range(storage);
  const ScaleType type = storage.scaling.type;
  const Codes as = type == ScaleType::bf16  ? Codes::bf16
                   : type == ScaleType::f16 ? Codes::f16
                                            : Codes::f32;
  const auto below = static_cast<float>(double{lo} / double{exact});
  if (storage.scaling.zero == Zero::rounded)
    return keep_number(as, std::clamp(0.0f - below, least, most), zeros, g);
  if (storage.scaling.zero == Zero::sum) {
    const auto lowest = static_cast<float>(-double{least} * double{exact});
    const auto zero = static_cast<float>(double{lo} + double{lowest});
    if (std::fabs(zero) > trait(as).largest) refuse_scale(storage);
    return -keep_number(as, zero, zeros, g) * (1.0f / kept);
  }
  const float zero =
      std::nearbyint(std::clamp(static_cast<float>(double{least} - double{below}), least, most));
  static_cast<std::int8_t*>(zeros)[g] = static_cast<std::int8_t>(zero);
  return zero;
}

// Values from lo <= 0 to hi >= 0 take all codes (compressed-tensors).
void quantize_from_zero(const Input& input, const Storage& storage, const Shape& shape,
                        std::span<void* const> parts) {
  const auto count = static_cast<std::size_t>(layout(storage, shape).parts[1].shape.elements());
  std::vector<float> lo(count, 0.0f), hi(count, 0.0f), scale(count, 1.0f), moved_by(count, 0.0f);
  const auto at = [&](std::int64_t i) {
    return static_cast<std::size_t>(scale_index(storage, shape, i));
  };
  const CodeRange range = code_range(storage);
  for (std::int64_t i = 0; i < input.n; ++i) {
    lo[at(i)] = std::min(lo[at(i)], input.single(i));
    hi[at(i)] = std::max(hi[at(i)], input.single(i));
  }
  for (std::size_t g = 0; g < count; ++g) {
    const auto span = static_cast<float>(double{hi[g]} - double{lo[g]});
    if (!std::isfinite(span)) refuse_scale(storage);
    const float exact = scale_of(span, range.divisor);
    scale[g] = keep_scale(exact, span, storage, parts[1], g);
    moved_by[g] = keep_zero(lo[g], exact, scale[g], storage, parts[2], g);
  }
  for (std::int64_t i = 0; i < input.n; ++i) {
    const float product = input.single(i) * (1.0f / scale[at(i)]);
    const auto moved = static_cast<float>(double{product} + double{moved_by[at(i)]});
    put_code(storage, parts[0], i, scaled_code(storage.codes, range, moved));
  }
}

// bitsandbytes' int8_vectorwise_quant: codes of x times F (1 / amax), rounded twice as torch
// divides a number by a tensor, and amax beside them; 0 for a row of zeros. The lower bound keeps
// it finite.
void quantize_by_absmax(const Input& input, const Storage& storage, const Shape& shape,
                        std::span<void* const> parts) {
  const CodeRange range = code_range(storage);
  const auto row = [&](std::int64_t i) {
    return static_cast<std::size_t>(scale_index(storage, shape, i));
  };
  const std::span<float> absmax(
      static_cast<float*>(parts[1]),
      static_cast<std::size_t>(layout(storage, shape).parts[1].shape.elements()));
  std::ranges::fill(absmax, 0.0f);
  for (std::int64_t i = 0; i < input.n; ++i)
    absmax[row(i)] = std::max(absmax[row(i)], std::fabs(input.single(i)));
  for (float& most : absmax)
    if (most != 0.0f) most = std::max(most, std::ldexp(range.divisor, -126));
  for (std::int64_t i = 0; i < input.n; ++i) {
    const float most = absmax[row(i)];
    const auto inverse = static_cast<float>(1.0 / double{most});
    const float r =
        most == 0.0f ? 0.0f : static_cast<float>(double{range.divisor} * double{inverse});
    put_code(storage, parts[0], i,
             scaled_code(storage.codes, range, static_cast<float>(double{input.single(i)} * r)));
  }
}

void quantize_scaled(const Input& input, const Storage& storage, const Shape& shape,
                     std::span<void* const> parts) {
  if (storage.scaling.zero != Zero::none) return quantize_from_zero(input, storage, shape, parts);
  if (storage.scaling.type == ScaleType::absmax)
    return quantize_by_absmax(input, storage, shape, parts);
  const auto count = static_cast<std::size_t>(layout(storage, shape).parts[1].shape.elements());
  const auto at = [&](std::int64_t i) {
    return static_cast<std::size_t>(scale_index(storage, shape, i));
  };
  const Descriptor form = describe(storage);
  const CodeRange range = code_range(storage);
  std::vector<float> scale(count, 0.0f);  // first the amax of each group; some have no elements
  for (std::int64_t i = 0; i < input.n; ++i)
    scale[at(i)] = std::max(scale[at(i)], std::fabs(input.single(i)));
  if (stands_under_one(form))
    put_products(input, storage, shape, scale, parts);
  else
    for (std::size_t g = 0; g < count; ++g)
      scale[g] = keep_scale(scale_of(scale[g], range.divisor), scale[g], storage, parts[1], g);
  const bool divides = stands_under_one(form);
  for (std::int64_t i = 0; i < input.n; ++i) {
    const float s = scale[at(i)], x = input.single(i);
    put_code(storage, parts[0], place_of(storage, shape, i),
             scaled_code(form.codes, range, divides ? x / s : x * (1.0f / s)));
  }
}

float amax4(const Input& input, std::int64_t first, std::int64_t end) noexcept {
  float amax = 0.0f;
  for (std::int64_t i = first; i < end; ++i) {
    const float x = std::fabs(input.single(i));
    if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, x);
  }
  return amax;
}

// A whole block multiplies by the reciprocal; the short last one divides, and stores its clamped
// absmax. Returns the absmax.
float quantize_block4(const Input& input, Codes codes, std::int64_t first, std::int64_t block,
                      std::uint8_t* nibbles) noexcept {
  const std::int64_t end = std::min(first + block, input.n);
  const float amax = amax4(input, first, end);
  const float divisor = amax < kTiny4 ? kTiny4 : amax;  // NaN stays
  const bool whole = end - first == block;
  const float inverse = 1.0f / divisor;
  for (std::int64_t i = first; i < end; ++i) {
    const float v = whole ? input.single(i) * inverse : input.single(i) / divisor;
    nibbles[i] = encode4(codes, v > 1.0f ? 1.0f : v < -1.0f ? -1.0f : v);
  }
  return whole ? amax : divisor;
}

// The code of a block scale's distance from the mean, as a part of the largest: u is first rounded
// to one of 65,536 steps, which takes the nearest value of the map, and the lower of two as near.
std::uint8_t nested_code(float u) noexcept {
  const auto step = static_cast<int>((u + 1.0f) * 0.5f * 65535.0f + 0.5f);
  const float at = -1.0f + 2.0f * static_cast<float>(step) / 65535.0f;
  const auto& map = dynamic_map();
  std::size_t code = 255;
  while (code > 0 && 0.5f * (map[code - 1] + map[code]) >= at) --code;
  return static_cast<std::uint8_t>(code);
}

// The parts of nested block scales: their mean, and 256 at a time under the largest distance from
// it.
void nest(const std::vector<float>& absmax, std::span<void* const> parts) noexcept {
  const double sum = std::accumulate(absmax.begin(), absmax.end(), 0.0);
  const float mean =
      absmax.empty() ? 0.0f : static_cast<float>(sum / static_cast<double>(absmax.size()));
  std::memcpy(parts[4], &mean, sizeof mean);
  std::memcpy(parts[3], dynamic_map().data(), sizeof(float) * 256);
  for (std::size_t i = 0; i < absmax.size(); ++i) {
    const std::size_t begin = i / kNestedBlock * kNestedBlock;
    const std::size_t end = std::min<std::size_t>(begin + kNestedBlock, absmax.size());
    float largest = 0.0f;
    for (std::size_t k = begin; k < end; ++k)
      largest = std::max(largest, std::fabs(absmax[k] - mean));
    static_cast<float*>(parts[2])[i / kNestedBlock] = largest;
    const float inverse = 1.0f / largest;
    const float u = (absmax[i] - mean) * inverse;
    static_cast<std::uint8_t*>(parts[1])[i] =
        largest == 0.0f ? std::uint8_t{0} : nested_code(std::min(std::max(u, -1.0f), 1.0f));
  }
}

void quantize4(const Input& input, const Storage& storage, std::span<void* const> parts) {
  const std::int64_t block = storage.scaling.block;
  std::vector<std::uint8_t> nibbles(static_cast<std::size_t>(input.n + input.n % 2),
                                    encode4(storage.codes, 0.0f));
  std::vector<float> absmax;
  for (std::int64_t first = 0; first < input.n; first += block)
    absmax.push_back(quantize_block4(input, storage.codes, first, block, nibbles.data()));
  auto* packed = static_cast<std::uint8_t*>(parts[0]);
  for (std::size_t i = 0; i < nibbles.size(); i += 2)
    packed[i / 2] = static_cast<std::uint8_t>(nibbles[i] << 4 | nibbles[i + 1]);
  if (!storage.scaling.nested) {
    std::ranges::copy(absmax, static_cast<float*>(parts[1]));
    return;
  }
  nest(absmax, parts);
}

}  // namespace

void put_dense(std::uint8_t* codes, int width, std::int64_t i, unsigned code) noexcept {
  for (int bit = 0; bit < width; ++bit) {
    const std::int64_t at = i * width + bit;
    const unsigned one = 1u << (at % 8), set = code >> bit & 1u;
    codes[at / 8] = static_cast<std::uint8_t>((codes[at / 8] & ~one) | set << (at % 8));
  }
}

// The quotient of two fp32 numbers in double, rounded to fp32, is that of fp32.
float scale_of(float amax, float divisor) noexcept {
  if (amax == 0.0f) return 1.0f;
  return static_cast<float>(std::max(double{amax} / double{divisor}, 0x1p-126));
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
  check_quantizable(storage);
  const Layout made = layout(storage, shape);
  if (parts.size() != static_cast<std::size_t>(made.count))
    throw Error(Code::invalid_argument, "quantize: " + to_string(storage) + " must have " +
                                            std::to_string(made.count) + " parts, got " +
                                            std::to_string(parts.size()));
  const Input input{values, dtype, shape.elements()};
  check_finite(input, storage, keep_nonfinite);
  switch (describe(storage).codec) {
    case Codec::cast:
      return quantize_cast(input, storage.codes, parts[0]);
    case Codec::amax:
      return quantize_scaled(input, storage, shape, parts);
    case Codec::bitsandbytes:
      return quantize4(input, storage, parts);
    case Codec::ggml:
      return quantize_ggml(values, dtype, shape, storage, parts);
    case Codec::torchao:
      return quantize_torchao(values, dtype, input.n, storage, parts);
  }
}

}  // namespace stowage::reference
