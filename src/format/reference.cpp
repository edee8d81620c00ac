// SPDX-License-Identifier: Apache-2.0
// The reference codec, first half: reading values, plain casts, dequantize.
#include "format/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "base/checked.h"
#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage::reference {
namespace {

template <class T>
T element(const void* values, std::int64_t i) noexcept {
  T value;
  std::memcpy(&value, static_cast<const char*>(values) + i * static_cast<std::int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <class T>
void store(void* values, std::int64_t i, T value) noexcept {
  std::memcpy(static_cast<char*>(values) + i * static_cast<std::int64_t>(sizeof(T)), &value,
              sizeof(T));
}

struct Precision {   // of the formats that are no list of values
  int mantissa;      // stored bits
  int min_exponent;  // of normal numbers
};

Precision precision(Codes codes) noexcept {
  switch (codes) {
    case Codes::bf16:
      return {7, -126};
    case Codes::f16:
      return {10, -14};
    default:
      return {23, -126};
  }
}

// Exponent and mantissa fields of a representable value: `value / ulp` counts mantissa steps, and a
// normal number has its hidden bit in that count.
std::uint32_t fields(Codes codes, double magnitude) noexcept {
  const auto [mantissa, min_exponent] = precision(codes);
  if (magnitude == 0) return 0;
  const int exponent = std::max(std::ilogb(magnitude), min_exponent);
  const auto steps = static_cast<std::uint32_t>(std::ldexp(magnitude, mantissa - exponent));
  return (static_cast<std::uint32_t>(exponent - min_exponent) << mantissa) + steps;
}

std::uint32_t sign_bit(Codes codes, double x) noexcept {
  return std::signbit(x) ? std::uint32_t{1} << (trait(codes).bits - 1) : 0;
}

// The finite values of a format, ascending; of two zeros the negative one comes first.
struct Ordered {
  std::vector<double> values;
  std::vector<std::uint32_t> codes;
};
Ordered make_ordered(const FormatTrait& format) {
  Ordered made;
  for (std::uint32_t code = 0; code < format.values.size(); ++code)
    if (std::isfinite(format.values[code])) made.codes.push_back(code);
  std::ranges::sort(made.codes, {}, [&](std::uint32_t code) {
    const float value = format.values[code];
    return std::tuple(value, !std::signbit(value), code);
  });
  for (const std::uint32_t code : made.codes) made.values.push_back(double{format.values[code]});
  return made;
}
const Ordered& ordered(Codes codes) {
  static const auto all = [] {
    std::array<Ordered, kCodesCount> made;
    for (const FormatTrait& format : formats())
      made[static_cast<std::size_t>(format.codes)] = make_ordered(format);
    return made;
  }();
  return all[static_cast<std::size_t>(codes)];
}

// The last code before the sign's that `is` holds of.
template <class Is>
std::optional<std::uint32_t> special(Codes codes, Is is) noexcept {
  const auto values = trait(codes).values;
  for (std::size_t code = values.size() / 2; code-- > 0;)
    if (is(values[code])) return static_cast<std::uint32_t>(code);
  return std::nullopt;
}

std::uint32_t encode_nonfinite(Codes codes, double x) noexcept {
  const bool nan = std::isnan(x);
  switch (codes) {
    case Codes::bf16:
      return sign_bit(codes, x) | (nan ? 0x7fc0u : 0x7f80u);
    case Codes::f16:
      return sign_bit(codes, x) | (nan ? 0x7e00u : 0x7c00u);
    case Codes::f32:
      return sign_bit(codes, x) | (nan ? 0x7fc00000u : 0x7f800000u);
    default:
      break;
  }
  const auto infinity = special(codes, [](float value) { return std::isinf(value); });
  const auto not_a_number = special(codes, [](float value) { return std::isnan(value); });
  return sign_bit(codes, x) | (nan || !infinity ? *not_a_number : *infinity);
}

// What 16 bits stand for: a sign, an exponent, and a mantissa as long as the precision says.
double value_of(Codes codes, std::uint32_t bits) noexcept {
  const auto [mantissa, min_exponent] = precision(codes);
  const std::uint32_t steps = bits & ((1u << mantissa) - 1);
  const int exponent = static_cast<int>((bits & 0x7fffu) >> mantissa), last = 0x7fff >> mantissa;
  double magnitude = 0;
  if (exponent == last)
    magnitude = steps == 0 ? HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  else if (exponent == 0)
    magnitude = std::ldexp(steps, min_exponent - mantissa);
  else
    magnitude = std::ldexp(steps + (1u << mantissa), min_exponent + exponent - 1 - mantissa);
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

// Rounded to nearest even, as if numbers had no largest; x is finite.
double nearest(Codes codes, double x) noexcept {
  if (x == 0) return x;
  const auto [mantissa, min_exponent] = precision(codes);
  const int step = std::max(std::ilogb(x), min_exponent) - mantissa;  // exponent of one unit
  return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}

// Bit by bit, the lowest first.
std::size_t dense_code(const void* codes, int width, std::int64_t i) noexcept {
  std::size_t code = 0;
  for (int bit = 0; bit < width; ++bit) {
    const std::int64_t at = i * width + bit;
    const unsigned byte = element<std::uint8_t>(codes, at / 8);
    code |= std::size_t{byte >> (at % 8) & 1u} << bit;
  }
  return code;
}

float table_value(const Weight& weight, std::int64_t i) noexcept {
  const FormatTrait& format = trait(weight.storage().codes);
  const void* codes = weight.part(0);
  switch (format.codes) {
    case Codes::f32:
      return element<float>(codes, i);
    case Codes::bf16:
    case Codes::f16:
      return static_cast<float>(value_of(format.codes, element<std::uint16_t>(codes, i)));
    default:
      break;
  }
  const Packing packing = describe(weight.storage()).packing;
  if (packing == Packing::whole) return format.values[element<std::uint8_t>(codes, i)];
  const std::int64_t at = place_of(weight.storage(), weight.shape(), i);
  if (packing == Packing::dense) return format.values[dense_code(codes, format.bits, at)];
  const unsigned pair = element<std::uint8_t>(codes, at / 2);
  const bool high = (at % 2 == 0) == (packing == Packing::high_first);
  return format.values[high ? pair >> 4 : pair & 15u];
}

// The cast to numbers of such scales.
Codes cast_of(ScaleType type) noexcept {
  return type == ScaleType::bf16 ? Codes::bf16 : type == ScaleType::f16 ? Codes::f16 : Codes::f32;
}

// Number i of scales, or of what is of their type.
float number_of(ScaleType type, const void* numbers, std::int64_t i) noexcept {
  if (type == ScaleType::f32) return element<float>(numbers, i);
  return static_cast<float>(value_of(cast_of(type), element<std::uint16_t>(numbers, i)));
}

}  // namespace

std::int64_t place_of(const Storage& storage, const Shape& shape, std::int64_t i) {
  if (!storage.scaling.transposed) return i;
  const std::int64_t rows = shape[1], columns = shape[2];
  const std::int64_t matrix = i / (rows * columns), row = i / columns % rows, column = i % columns;
  return (matrix * columns + column) * rows + row;
}

std::int64_t scale_index(const Storage& storage, const Shape& shape, std::int64_t element) {
  const std::int64_t i = place_of(storage, shape, element);
  const Group kind = describe(storage).scale.group;
  const std::int64_t group = group_elements(storage, shape), row = shape.row_elements();
  if (kind.kind == Group::Kind::block2) {
    const std::int64_t rows = shape[shape.rank() - 2], columns = shape[shape.rank() - 1];
    const std::int64_t line = i / columns, matrix = line / rows;
    return (matrix * ceil_div<std::int64_t>(rows, kind.m) + line % rows / kind.m) *
               ceil_div(columns, group) +
           i % columns / group;
  }
  if (kind.kind == Group::Kind::column) return i / row % (shape[0] / kind.n) * row + i % row;
  if (kind.kind == Group::Kind::along) return i / row * ceil_div(row, group) + i % row / group;
  return i / group;
}

double read(const void* values, Dtype dtype, std::int64_t i) noexcept {
  switch (dtype) {
    case Dtype::f64:
      return element<double>(values, i);
    case Dtype::bf16:
      return value_of(Codes::bf16, element<std::uint16_t>(values, i));
    case Dtype::f16:
      return value_of(Codes::f16, element<std::uint16_t>(values, i));
    default:
      return element<float>(values, i);
  }
}

std::uint32_t nearest_code(Codes codes, double x) noexcept {
  const auto& [values, of] = ordered(codes);
  const auto from = std::ranges::lower_bound(values, x);
  auto at = static_cast<std::size_t>(from - values.begin());
  if (at == values.size()) --at;
  if (at != 0 && x < values[at]) {
    const double middle = (values[at - 1] + values[at]) / 2;
    const bool even = of[at] % 2 == 0 && of[at - 1] % 2 != 0;
    if (x < middle || (x == middle && !even)) --at;
  }
  // Two zeros stand side by side, and take what has their sign.
  if (values[at] == 0 && std::signbit(values[at]) != std::signbit(x))
    for (const std::size_t other : {at - 1, at + 1})
      if (other < values.size() && values[other] == 0) return of[other];
  return of[at];
}

double round(Codes codes, double x) noexcept {
  const double largest = trait(codes).largest;
  if (const auto values = trait(codes).values; !values.empty())
    return values[nearest_code(codes, x)];
  return nearest(codes, std::clamp(x, -largest, largest));
}

double narrow(Codes codes, double x) noexcept {
  if (!std::isfinite(x)) return x;
  const double rounded = nearest(codes, x);
  return std::fabs(rounded) > trait(codes).largest ? std::copysign(HUGE_VAL, x) : rounded;
}

std::uint32_t encode(Codes codes, double x) noexcept {
  if (!std::isfinite(x)) return encode_nonfinite(codes, x);
  if (!trait(codes).values.empty()) return nearest_code(codes, x);
  return sign_bit(codes, x) | fields(codes, std::fabs(round(codes, x)));
}

std::int64_t outer_index(const Storage& storage, const Shape& shape, std::int64_t i) {
  if (storage.scaling.outer == Scaling::Kind::none) return 0;
  const std::int64_t row = i / shape.row_elements();
  if (storage.scaling.outer == Scaling::Kind::row) return row;
  return row * shape[1] + i % shape.row_elements() / (shape.row_elements() / shape[1]);
}

float number_under(ScaleType type, double scale, double outer) noexcept {
  if (type == ScaleType::e4m3_quotient) return static_cast<float>(scale / outer);
  if (type == ScaleType::e4m3_bf16)
    return static_cast<float>(round(Codes::bf16, scale * round(Codes::bf16, outer)));
  return static_cast<float>(scale * outer);
}

std::int64_t scale_index(const Weight& weight, std::int64_t i) {
  if (!weight.storage().scaling.actorder) return scale_index(weight.storage(), weight.shape(), i);
  const std::int64_t columns = weight.shape()[1], k = i % columns;
  const void* const groups = weight.part(weight.storage().scaling.zero != Zero::none ? 3 : 2);
  return i / columns * ceil_div<std::int64_t>(columns, weight.storage().scaling.block) +
         element<std::int32_t>(groups, k);
}

float scale_at(const Weight& weight, std::int64_t i) noexcept {
  const Scaling& scaling = weight.storage().scaling;
  if (scaling.kind == Scaling::Kind::none) return 1.0f;
  if (describe(weight.storage()).codec == Codec::torchao) return torchao_scale_at(weight, i);
  if (describe(weight.storage()).codec == Codec::ggml) return scale_and_offset_at(weight, i).scale;
  const std::int64_t index = scale_index(weight, i);
  if (scaling.type == ScaleType::e8m0) {
    const int exponent = element<std::uint8_t>(weight.part(1), index);
    return exponent == 255 ? std::numeric_limits<float>::quiet_NaN()
                           : std::ldexp(1.0f, exponent - 127);
  }
  if (stand_under_one(scaling.type)) {
    const float scale = trait(Codes::f8_e4m3).values[element<std::uint8_t>(weight.part(1), index)];
    const std::int64_t over = outer_index(weight.storage(), weight.shape(), i);
    return number_under(scaling.type, scale, element<float>(weight.part(2), over));
  }
  if (scaling.type == ScaleType::bf16 || scaling.type == ScaleType::f16)
    return number_of(scaling.type, weight.part(1), index);
  if (!scaling.nested) return element<float>(weight.part(1), index);
  std::array<float, 256> map;
  std::memcpy(map.data(), weight.part(3), sizeof map);
  // Each operation of two fp32 numbers in double and rounded to fp32 is that of fp32.
  const double product = double{map[element<std::uint8_t>(weight.part(1), index)]} *
                         double{element<float>(weight.part(2), index / kNestedBlock)};
  return static_cast<float>(double{static_cast<float>(product)} +
                            double{element<float>(weight.part(4), 0)});
}

float zero_at(const Weight& weight, std::int64_t i) noexcept {
  const Scaling& scaling = weight.storage().scaling;
  if (scaling.zero == Zero::none) return 0.0f;
  const std::int64_t index = scale_index(weight, i);
  if (scaling.zero != Zero::code) return number_of(scaling.type, weight.part(2), index);
  return static_cast<float>(element<std::int8_t>(weight.part(2), index));
}

float offset_at(const Weight& weight, std::int64_t i) noexcept {
  return describe(weight.storage()).codec == Codec::ggml ? scale_and_offset_at(weight, i).offset
                                                         : 0.0f;
}

float value_at(const Weight& weight, std::int64_t i) noexcept {
  if (describe(weight.storage()).codec == Codec::torchao)
    return static_cast<float>(torchao_value_at(weight, i));
  const Scaling& scaling = weight.storage().scaling;
  if (scaling.zero == Zero::sum) {
    const double product = double{table_value(weight, i)} * double{scale_at(weight, i)};
    return static_cast<float>(double{static_cast<float>(product)} + double{zero_at(weight, i)});
  }
  if (scaling.zero == Zero::rounded) {  // each exact in double, and so rounded once
    const Codes as = cast_of(scaling.type);
    const double code = table_value(weight, i);
    const double distance = narrow(as, code - double{zero_at(weight, i)});
    return static_cast<float>(narrow(as, distance * double{scale_at(weight, i)}));
  }
  const float distance = table_value(weight, i) - zero_at(weight, i);  // exact
  const float product = distance * scale_at(weight, i);
  if (weight.storage().scaling.type == ScaleType::absmax)
    return product * static_cast<float>(1.0 / double{trait(weight.storage().codes).largest});
  return product - offset_at(weight, i);
}

void dequantize(const Weight& weight, void* out, Dtype dtype) {
  const std::int64_t n = weight.shape().elements();
  if (trait(weight.storage().codes).disk == dtype) {  // a plain cast in its own type
    if (n != 0) std::memcpy(out, weight.part(0), static_cast<std::size_t>(n * bits(dtype) / 8));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    // Which NaN a product gives depends on the machine; which one is stored must not.
    const double computed = describe(weight.storage()).codec == Codec::torchao
                                ? torchao_value_at(weight, i)
                                : double{value_at(weight, i)};
    const double value = std::isnan(computed) ? std::numeric_limits<double>::quiet_NaN() : computed;
    switch (dtype) {
      case Dtype::f64:
        store<double>(out, i, value);
        break;
      case Dtype::bf16:
        store(out, i, static_cast<std::uint16_t>(encode(Codes::bf16, narrow(Codes::bf16, value))));
        break;
      case Dtype::f16:
        store(out, i, static_cast<std::uint16_t>(encode(Codes::f16, narrow(Codes::f16, value))));
        break;
      default:
        store(out, i, static_cast<float>(value));
        break;
    }
  }
}

}  // namespace stowage::reference
