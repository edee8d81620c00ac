// SPDX-License-Identifier: Apache-2.0
// Derives ranks and thresholds from the values of a 4-bit format.
#include "kernel/tables.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "format/legal.h"
#include "format/torchao.h"
#include "kernel/dequantize.h"

namespace stowage {
namespace {

// The largest number that takes the lower of two neighbouring values, if the nearest one wins, and
// of two as near the one whose code is even.
float last_of_lower(float below, float above, bool upper_wins) {
  const double middle = (double{below} + double{above}) / 2;
  const auto nearest = static_cast<float>(middle);
  const bool beyond = double{nearest} > middle || (double{nearest} == middle && upper_wins);
  return beyond ? std::nextafter(nearest, -HUGE_VALF) : nearest;
}

FourBitTables derive(const FormatTrait& format, bool scaled) {
  FourBitTables tables{};
  const std::span<const float> values = format.values;
  std::ranges::copy(values, tables.values);
  for (int i = 0; i < 16; ++i) tables.codes[i] = i;
  // Stable: of two equal values (FP4 writes zero as 0 and as 8) the lower code ranks first.
  std::stable_sort(std::begin(tables.codes), std::end(tables.codes),
                   [&](int a, int b) { return tables.values[a] < tables.values[b]; });
  const bool sign = scaled && std::signbit(tables.values[8]);
  if (sign)  // the negative ones, zero among them, come behind
    std::stable_partition(std::begin(tables.codes), std::end(tables.codes),
                          [](int code) { return code < 8; });
  for (int i = 0; i < 15; ++i) {
    const int lower = tables.codes[i], upper = tables.codes[i + 1];
    const float below = tables.values[lower], above = tables.values[upper];
    if (!scaled)
      tables.thresholds[i] = (below + above) / 2;  // bitsandbytes
    else if (sign && i >= 7)
      tables.thresholds[i] = HUGE_VALF;
    else
      tables.thresholds[i] = last_of_lower(below, above, lower % 2 != 0 && upper % 2 == 0);
  }
  tables.thresholds[15] = HUGE_VALF;
  return tables;
}

struct Thresholds {
  float of[16];
};

// The distances from a number to neighbouring values, rounded, are monotone in that number: one
// threshold between two values settles which is nearer, and halving finds it.
template <class D>
Thresholds derive_torchao() {
  Thresholds made{};
  for (std::size_t k = 0; k < 15; ++k) {
    double low = double{torchao::value<D>(k)}, high = double{torchao::value<D>(k + 1)};
    while (true) {
      const float middle = torchao::rounded<D>(static_cast<float>((low + high) / 2));
      if (double{middle} == low || double{middle} == high) break;
      (torchao::encode<D>(middle) <= k ? low : high) = double{middle};
    }
    made.of[k] = static_cast<float>(low);
  }
  made.of[15] = 2;
  return made;
}

}  // namespace

const float* torchao_thresholds(Dtype dtype) noexcept {
  static const Thresholds f32 = derive_torchao<torchao::F32>(),
                          bf16 = derive_torchao<torchao::Bf16>(),
                          f16 = derive_torchao<torchao::F16>();
  return (dtype == Dtype::bf16 ? bf16 : dtype == Dtype::f16 ? f16 : f32).of;
}

const FourBitTables& four_bit_tables(Codes codes) noexcept {
  static const auto tables = [] {
    std::array<FourBitTables, kCodesCount> made{};
    for (const FormatTrait& format : formats())
      if (format.values.size() == 16)
        made[static_cast<std::size_t>(format.codes)] =
            derive(format, form_row(format.codes, Dialect::standard)->codec != Codec::bitsandbytes);
    return made;
  }();
  return tables[static_cast<std::size_t>(codes)];
}

Codes cast_codes(Dtype dtype) noexcept {
  return dtype == Dtype::bf16 ? Codes::bf16 : dtype == Dtype::f16 ? Codes::f16 : Codes::f32;
}

int value_index(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f64:
      return 0;
    case Dtype::f32:
      return 1;
    case Dtype::bf16:
      return 2;
    case Dtype::f16:
      return 3;
    default:
      return -1;
  }
}

}  // namespace stowage
