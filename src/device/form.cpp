// SPDX-License-Identifier: Apache-2.0
#include "device/form.h"

#include <algorithm>
#include <numeric>

#include "format/convert.h"
#include "format/legal.h"
#include "format/torchao.h"

namespace stowage::device {
namespace {

// The names of both sides stand at the same places.
template <class To, class From>
constexpr To as(From from) noexcept {
  return static_cast<To>(static_cast<int>(from));
}
static_assert(as<cuda::Packing>(Packing::dense) == cuda::Packing::dense);
static_assert(as<cuda::Group>(Group::Kind::column) == cuda::Group::column);
static_assert(as<cuda::Scales>(ScaleCode::quotient) == cuda::Scales::quotient);
static_assert(as<cuda::Zeros>(Zero::rounded) == cuda::Zeros::rounded);
static_assert(as<cuda::Codec>(Codec::ggml) == cuda::Codec::ggml);

cuda::Number number_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::f64:
      return cuda::Number::f64;
    case Dtype::bf16:
      return cuda::Number::bf16;
    case Dtype::f16:
      return cuda::Number::f16;
    case Dtype::f8_e8m0:
      return cuda::Number::e8m0;
    default:
      return cuda::Number::f32;
  }
}

cuda::Element element_of(Codes codes) noexcept {
  switch (codes) {
    case Codes::f32:
      return cuda::Element::f32;
    case Codes::bf16:
      return cuda::Element::bf16;
    case Codes::f16:
      return cuda::Element::f16;
    case Codes::f8_e4m3:
      return cuda::Element::e4m3;
    case Codes::f8_e5m2:
      return cuda::Element::e5m2;
    case Codes::f4_e2m1:
      return cuda::Element::e2m1;
    case Codes::int8:
      return cuda::Element::int8;
    case Codes::nf4:
    case Codes::fp4:
      return cuda::Element::table;
    default:
      return cuda::Element::biased;
  }
}

// Values of a table, of torchao's in the type of its parts, and how numbers become their codes.
void put_table(const Storage& storage, const Descriptor& form, cuda::Form& to) {
  const auto values = trait(storage.codes).values;
  std::ranges::copy(values, to.values16);
  if (form.codec == Codec::torchao)
    torchao::with_type(storage.scaling.type, [&]<class D>(D) {
      for (std::size_t code = 0; code < values.size(); ++code)
        to.values16[code] = static_cast<float>(torchao::value<D>(code));
    });
  std::iota(std::begin(to.order), std::end(to.order), 0);
  std::ranges::stable_sort(to.order, {}, [&](int code) { return to.values16[code]; });
  for (std::size_t k = 0; k + 1 < values.size(); ++k)
    to.thresholds[k] = (to.values16[to.order[k]] + to.values16[to.order[k + 1]]) / 2.0f;
}

// Of tensor cores' tables: what is scaled afterwards.
void put_halves(std::span<const float> values, Dtype dtype, cuda::Form& to) {
  for (std::size_t code = 0; code < values.size(); ++code)
    to.halves[code] = dtype == Dtype::bf16 ? f32_to_bf16(values[code]) : f32_to_f16(values[code]);
}

}  // namespace

bool has_form(const Storage& storage) noexcept { return storage.scaling.type != ScaleType::f64; }

cuda::Form form_of(const Storage& storage, Dtype values) {
  const Descriptor form = describe(storage);
  const FormatTrait& format = trait(storage.codes);
  const CodeRange range = code_range(storage);
  cuda::Form made{};
  made.values = number_of(values);
  made.element = element_of(storage.codes);
  made.bits = format.bits;
  // Those of 16 bytes of codes, but at least eight; of dense ones, which lie across bytes, twice
  // what fills bytes.
  made.together = form.packing == Packing::dense ? 16 : std::max(8, 128 / format.bits);
  if (made.element == cuda::Element::biased) made.bias = -static_cast<int>(format.values[0]);
  made.packing = as<cuda::Packing>(form.packing);
  made.group = as<cuda::Group>(form.scale.group.kind);
  made.n = form.scale.group.n, made.m = form.scale.group.m;
  made.scales = as<cuda::Scales>(form.scale.code);
  made.number = number_of(form.codec == Codec::torchao ? form.rounds_to : form.scale.type);
  made.record = form.scale.record, made.inner = form.scale.inner;
  made.zeros = as<cuda::Zeros>(form.zero);
  made.outer_n = form.outer.group.n;
  made.factor = form.factor;
  made.transposed = form.transposed;
  made.codec = as<cuda::Codec>(form.codec);
  made.floors = form.powers == PowerRule::floor;
  made.least = range.least, made.most = range.most, made.divisor = range.divisor;
  made.largest = format.largest;
  if (made.element == cuda::Element::table) put_table(storage, form, made);
  if (format.values.size() == std::size(made.halves)) put_halves(format.values, values, made);
  return made;
}

std::array<std::uint32_t, 8> planes_of(const cuda::Form& form) noexcept {
  std::array<std::uint32_t, 8> made{};
  for (std::size_t code = 0; code < std::size(form.halves); ++code)
    for (const std::size_t upper : {0u, 1u})
      made[upper * 4 + code / 4] |= (form.halves[code] >> upper * 8 & 0xFFu) << code % 4 * 8;
  return made;
}

cuda::Weight weight_of(const Storage& storage, const Shape& shape, std::span<void* const> parts) {
  const auto from = [&](int dim) {
    std::int64_t each = 1;
    for (int i = dim; i < shape.rank(); ++i) each *= shape[i];
    return each;
  };
  cuda::Weight made{};
  made.codes = static_cast<std::uint8_t*>(parts[0]);
  std::ranges::copy(parts.subspan(1), made.parts);
  made.elements = shape.elements();
  made.row = shape.row_elements(), made.pair = from(2), made.rows = shape.rows();
  const int rank = shape.rank();
  made.lines = rank > 1 ? shape[rank - 2] : 1;
  made.columns = rank > 0 ? shape[rank - 1] : 1;
  made.under = stands_under_one(describe(storage)) ? scales_under_one(storage, shape) : 1;
  return made;
}

bool is_whole(const cuda::Form& form, const cuda::Weight& weight,
              std::initializer_list<const void*> arrays) {
  const auto aligned = [](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
  };
  const int span = std::min(form.together, 16);
  if (form.transposed || weight.row.n % form.together != 0) return false;
  if (!aligned(weight.codes) || !std::ranges::all_of(arrays, aligned)) return false;
  if (form.record != 0) return form.inner % span == 0 && weight.row.n % form.n == 0;
  switch (form.group) {
    case cuda::Group::row2:
      return weight.pair.n % form.together == 0;
    case cuda::Group::block2:
      return weight.columns.n % form.together == 0 && form.n % span == 0;
    case cuda::Group::flat:
    case cuda::Group::along:
      return form.n % span == 0;
    case cuda::Group::named:
    case cuda::Group::column:
      return false;
    default:
      return true;
  }
}

bool has_slabs(const cuda::Form& form) noexcept {
  constexpr int kSlab = 64, kTogether = 32;  // of codes of four bits, sixteen bytes have so many
  const bool in_groups = form.group == cuda::Group::flat || form.group == cuda::Group::along;
  return form.whole && form.together == kTogether && form.packing != cuda::Packing::dense &&
         in_groups && form.n % kSlab == 0 && form.record == 0 && form.zeros == cuda::Zeros::none &&
         form.codec != cuda::Codec::torchao;
}

}  // namespace stowage::device
