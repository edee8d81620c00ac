// SPDX-License-Identifier: Apache-2.0
// What no manifest, state or configuration tells: 8-bit codes whose scale beside them shows by its
// shape how they are scaled, plain casts, and 8-bit codes that are scaled in a way not known here.
#include <algorithm>
#include <array>
#include <utility>

#include "store/dialects/dialects.h"
#include "store/scale_shape.h"
#include "stowage/descriptor.h"

namespace stowage::dialects {
namespace scaled {
namespace {

constexpr std::string_view kScale = "_scale";

std::optional<Codes> codes_of(Dtype dtype) {
  for (const FormatTrait& format : formats()) {
    const Packing packing = describe({.codes = format.codes}).packing;
    if (format.disk == dtype && packing == Packing::whole) return format.codes;
  }
  return std::nullopt;
}

bool is_scale(const Claims& claims, const TensorInfo& tensor) {
  return tensor.dtype == Dtype::f32 ||
         (claims.source().in_memory && (tensor.dtype == Dtype::bf16 || tensor.dtype == Dtype::f16));
}

bool has_word(std::string_view name, std::span<const std::string_view> words) {
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(), [](char c) {
    return 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return std::ranges::any_of(
      words, [&](std::string_view word) { return lower.find(word) != std::string::npos; });
}

// The tensor beside codes that says of their scale what is not known here; "" for none. Its name
// begins with theirs, or stands in their module: there, beside codes that have a scale of ours,
// only what peers call scales of weights counts; input_scale and the like are those of activations.
std::string scaled_otherwise(const Claims& claims, const TensorInfo& codes, bool scaled) {
  constexpr std::array<std::string_view, 9> kWords{"scale", "zero",  "absmax", "amax",  "quant",
                                                   "scb",   "g_idx", "block",  "factor"};
  constexpr std::array<std::string_view, 8> kNames{"scale",  "scales", "scale_weight", "zero_point",
                                                   "qzeros", "zero",   "SCB",          "g_idx"};
  const std::string& name = codes.name;
  const std::size_t module = name.rfind('.') + 1;
  const std::string start = name.substr(0, module);
  auto at = std::ranges::lower_bound(claims.tensors(), start, {}, &TensorInfo::name);
  for (; at != claims.tensors().end() && at->name.starts_with(start); ++at) {
    if (claims.is_taken(at->name) || at->name == name) continue;
    const std::string_view rest = std::string_view(at->name).substr(module);
    const bool own = at->name.starts_with(name) &&
                     (at->name[name.size()] == '_' || at->name[name.size()] == '.');
    const bool sibling = rest.find('.') == std::string_view::npos;
    const bool counts = scaled ? sibling && std::ranges::find(kNames, rest) != kNames.end()
                               : sibling && has_word(rest, kWords);
    if (counts || (own && has_word(std::string_view(at->name).substr(name.size()), kWords)))
      return at->name;
  }
  return "";
}
}  // namespace
}  // namespace scaled

void read_scaled(Claims& claims) {
  std::vector<std::pair<const TensorInfo*, const TensorInfo*>> pairs;
  for (const TensorInfo& tensor : claims.tensors()) {
    const auto codes = scaled::codes_of(tensor.dtype);
    if (!codes || !has_byte_codes({.codes = *codes}) || claims.is_taken(tensor.name)) continue;
    const TensorInfo* const scale = claims.find(tensor.name + std::string(scaled::kScale));
    if (scale == nullptr || !scaled::is_scale(claims, *scale)) continue;
    pairs.emplace_back(&tensor, scale);
    claims.take(scale->name);  // of all, before anyone asks what else there is
  }
  for (const auto& [tensor, scale] : pairs) {
    if (std::string other = scaled::scaled_otherwise(claims, *tensor, true); !other.empty()) {
      claims.add_unreadable(tensor->name, std::move(other));
      continue;
    }
    const Storage storage =
        storage_from_scale(*scaled::codes_of(tensor->dtype), *tensor, *scale, claims.place(*scale));
    claims.add(tensor->name, storage, tensor->shape, {tensor->name, scale->name}, std::nullopt);
  }
}

void read_plain(Claims& claims) {
  std::vector<const TensorInfo*> casts;  // those found here are no scales of others
  for (const TensorInfo& tensor : claims.tensors()) {
    const auto codes = scaled::codes_of(tensor.dtype);
    if (!codes || claims.is_taken(tensor.name) || claims.is_unreadable(tensor.name)) continue;
    // An 8-bit tensor with a scale that we cannot read is no plain cast: its values would be wrong.
    std::string other =
        has_byte_codes({.codes = *codes}) ? scaled::scaled_otherwise(claims, tensor, false) : "";
    if (!other.empty())
      claims.add_unreadable(tensor.name, std::move(other));
    else if (*codes != Codes::int8)
      casts.push_back(&tensor);
  }
  for (const TensorInfo* const tensor : casts)
    claims.add(tensor->name, {.codes = *scaled::codes_of(tensor->dtype)}, tensor->shape,
               {tensor->name}, std::nullopt);
}

}  // namespace stowage::dialects
