// SPDX-License-Identifier: Apache-2.0
#include "store/dialects/scaled_codes.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/part_form.h"
#include "stowage/descriptor.h"

namespace stowage::dialects {
namespace {

const TensorInfo& codes_of(const Claims& claims, const ScaledCodes& weight, const Place& near) {
  const TensorInfo* const codes = claims.find(weight.codes);
  const Dtype wanted = weight.codes_in.value_or(trait(weight.storage.codes).disk);
  if (codes == nullptr)
    refuse(Refusal::dialect_part, near,
           formatted("no {} ({})", in_quotes(weight.codes), disk_name(wanted)));
  if (codes->dtype != wanted || codes->shape.rank() < 2)
    refuse(
        Refusal::dialect_part, claims.place(*codes),
        formatted("{} for {} with two dimensions or more", described(*codes), disk_name(wanted)));
  return *codes;
}

// What the scales of the file make of the storage.
ScaleType type_of(const Claims& claims, const ScaledCodes& weight, const TensorInfo& scale) {
  const ScaleType wanted = weight.storage.scaling.type;
  const bool exponents =
      scale.dtype == Dtype::f8_e8m0 || (scale.dtype == Dtype::u8 && weight.bytes_are_exponents);
  std::optional<ScaleType> found;
  if (exponents) found = ScaleType::e8m0;
  if (scale.dtype == Dtype::f32) found = wanted == ScaleType::absmax ? wanted : ScaleType::f32;
  if (scale.dtype == Dtype::bf16) found = ScaleType::bf16;
  if (scale.dtype == Dtype::f16) found = ScaleType::f16;
  if (scale.dtype == Dtype::f8_e4m3 && stand_under_one(wanted)) found = wanted;
  if (found && (wanted == ScaleType::f32 || wanted == *found)) return *found;
  const char* legal =
      weight.bytes_are_exponents ? "U8, F8_E8M0, F32, BF16 or F16" : "F32, BF16, F16 or F8_E8M0";
  if (wanted == ScaleType::e8m0) legal = "U8 or F8_E8M0";
  if (stand_under_one(wanted)) legal = "F8_E4M3";
  if (wanted == ScaleType::absmax) legal = "F32";
  refuse(Refusal::dialect_part, claims.place(scale),
         formatted("{} for scales of {}", described(scale), legal));
}

// The weight's: a row of the tensor is the bytes of a row.
Shape shape_of(const Claims& claims, const Storage& storage, const TensorInfo& codes) {
  std::vector<std::int64_t> sizes(codes.shape.sizes().begin(), codes.shape.sizes().end());
  const std::int64_t bytes = codes.dtype == Dtype::i32 ? 4 : 1;
  sizes.back() = size_of(claims, codes, codes.shape.rank() - 1, bytes * elements_of(storage, 1));
  return Shape(sizes);
}

// One number over all scales.
void check_outer(const Claims& claims, const TensorInfo& codes, const std::string& name) {
  const TensorInfo* const outer = claims.find(name);
  if (outer == nullptr)
    refuse(Refusal::dialect_part, claims.place(codes), formatted("no {} (F32)", in_quotes(name)));
  if (outer->dtype != Dtype::f32 || outer->shape.elements() != 1)
    refuse(Refusal::dialect_part, claims.place(*outer), described(*outer) + " for one F32");
}

// The shape that the storage asks for; one number may be [1] or [], and one a row [O].
bool fits(const Shape& scale, const Shape& wanted) {
  if (scale == wanted) return true;
  return scale.elements() == wanted.elements() && scale.rank() <= 1 &&
         (wanted.rank() == 0 || wanted[0] == wanted.elements());
}

// Of what stands for 0: codes in words of a form, or numbers of the type of the scales.
Dtype zeros_type(const Storage& storage, const PartForm& form) {
  if (storage.scaling.zero != Zero::code) return describe(storage).scale.type;
  return form.is_whole() ? Dtype::i8 : Dtype::i32;
}

}  // namespace

WeightInfo& ScaledCodes::add(Claims& claims, const Place& near) const {
  const TensorInfo& held = codes_of(claims, *this, near);
  const TensorInfo* const scales = claims.find(scale);
  if (scales == nullptr)
    refuse(Refusal::dialect_part, claims.place(held), "no " + in_quotes(scale));
  Storage made = storage;
  made.scaling.type = type_of(claims, *this, *scales);
  const Shape shape = logical ? *logical : shape_of(claims, made, held);
  std::optional<Shape> wanted;
  try {
    wanted = layout(made, shape).parts[1].shape;
  } catch (const Error& error) {
    refuse(Refusal::dialect_part, claims.place(held), in_quotes(error.what()));
  }
  PartForm form = scale_form;
  if (form.rounded && scales->dtype != Dtype::f32) form = {};
  const bool lies = form.is_whole() || form.rounded;
  const Shape in_file = lies ? *wanted : tensor_shape(form, *wanted);
  const bool one = wanted->rank() == 0 && scales->shape == number;
  if (lies ? !one && !fits(scales->shape, in_file) : scales->shape != in_file)
    refuse(Refusal::dialect_part, claims.place(*scales),
           formatted("{} for {}, {} of {}", described(*scales), to_string(in_file), to_string(made),
                     to_string(shape)));
  std::vector<std::string> parts{codes, scale};
  std::vector<PartForm> forms{codes_form, form};
  if (made.scaling.zero != Zero::none) {
    if (wanted->rank() < 2)
      refuse(Refusal::dialect_part, claims.place(held),
             formatted("{} with zero points in words of rows", to_string(made)));
    const bool whole = third_form.is_whole();
    claims.part(Refusal::dialect_part, held,
                {third,
                 zeros_type(made, third_form),
                 whole ? *wanted : tensor_shape(third_form, *wanted),
                 {}});
  } else if (stand_under_one(made.scaling.type)) {
    check_outer(claims, held, third);
  }
  if (layout(made, shape).count > 2) parts.push_back(third), forms.push_back(third_form);
  const QuantConfig* const config = claims.source().config;
  auto computes = compute;
  if (!computes && config != nullptr) computes = config->compute();
  WeightInfo& info = claims.add(name, made, shape, std::move(parts), computes);
  if (!std::ranges::all_of(forms, &PartForm::is_whole)) info.forms = forms;
  return info;
}

void ScaledCodes::write(Wording& wording, const WeightInfo& weight) const {
  const Layout made = layout(weight.storage, weight.shape);
  const auto shape_in_file = [&](const PartForm& form, const Shape& part) {
    if (part.elements() == 1 && part.rank() == 0) return number;
    return form.is_whole() || form.rounded ? part : tensor_shape(form, part);
  };
  const Dtype packed = codes_in.value_or(trait(weight.storage.codes).disk);
  Shape words = shape_in_file(codes_form, made.parts[0].shape);
  if (codes_form.is_whole() && bits(packed) > 8)
    words = Shape{words[0], words[1] * 8 / bits(packed)};
  wording.add_part(codes, packed, words, 0, codes_form);
  const Dtype type = describe(weight.storage).scale.type;
  wording.add_part(scale, type == Dtype::f8_e8m0 && bytes_are_exponents ? Dtype::u8 : type,
                   shape_in_file(scale_form, made.parts[1].shape), 1, scale_form);
  const bool zeros = weight.storage.scaling.zero != Zero::none;
  if (!zeros && !stand_under_one(weight.storage.scaling.type)) return;
  wording.add_part(third, zeros ? zeros_type(weight.storage, third_form) : Dtype::f32,
                   shape_in_file(third_form, made.parts[2].shape), 2, third_form);
}

std::int64_t size_of(const Claims& claims, const TensorInfo& tensor, int dim, std::int64_t times) {
  const auto size = checked_mul(tensor.shape[dim], times);
  if (!size)
    refuse(Refusal::dialect_part, claims.place(tensor),
           formatted("{}, {} times dimension {}", described(tensor), times, dim));
  return *size;
}

std::string_view module_of(std::string_view weight) {
  const std::size_t dot = weight.rfind('.');
  return dot == std::string_view::npos ? "" : weight.substr(0, dot);
}

void add_activation_scale(Claims& claims, WeightInfo& weight, std::string_view name) {
  const std::string path = formatted("{}.{}", module_of(weight.name), name);
  const TensorInfo* const tensor = claims.find(path);
  if (tensor == nullptr || claims.is_taken(path)) return;
  if (tensor->bytes > kLongestText || !is_value_dtype(tensor->dtype))
    refuse(Refusal::dialect_part, claims.place(*tensor),
           described(*tensor) + " for a scale of activations");
  claims.add_beside(weight, path);
}

void add_zeros(Claims& claims, WeightInfo& weight, const std::string& name) {
  const TensorInfo* const zeros = claims.find(name);
  if (zeros == nullptr) return;
  const std::string bytes = claims.read(*zeros);
  const auto at = std::ranges::find_if(bytes, [](char c) { return c != 0; });
  if (at != bytes.end()) {
    Place place = claims.place(*zeros);
    if (place.byte) *place.byte += static_cast<std::uint64_t>(at - bytes.begin());
    refuse(Refusal::dialect_part, place, "a zero point that is not 0");
  }
  claims.add_beside(weight, name);
}

void check_not_listed(const Claims& claims, const WeightInfo& weight, const char* key) {
  const QuantConfig* const config = claims.source().config;
  const std::string_view module = module_of(weight.name);
  if (config == nullptr || !config->lists(key, module)) return;
  refuse(Refusal::dialect_part, claims.place(*claims.find(weight.parts[0])),
         formatted("codes of a module that {} of {} names", key, config->place().path));
}

void refuse_unscaled(const Claims& claims, std::string_view suffix) {
  for (const TensorInfo& tensor : claims.tensors()) {
    const bool float8 = tensor.dtype == Dtype::f8_e4m3 || tensor.dtype == Dtype::f8_e5m2;
    if (!float8 || tensor.shape.rank() < 2 || claims.is_taken(tensor.name)) continue;
    refuse(Refusal::dialect_part, claims.place(tensor),
           formatted("no {}", in_quotes(tensor.name + std::string(suffix))));
  }
}

}  // namespace stowage::dialects
