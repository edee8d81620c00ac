// SPDX-License-Identifier: Apache-2.0
// The search goes from the surest source to the weakest: quant states, manifest, labels, scales,
// plain tensors. A tensor that a source has taken is not looked at again.
#include "store/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/formatted.h"
#include "store/label.h"
#include "store/quant_state.h"
#include "store/scale_shape.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

constexpr std::string_view kScale = "_scale";

class Search {
 public:
  explicit Search(const TensorSource& source) : source_(source) {}

  void quant_states();
  void manifest(const std::map<std::string, ManifestWeight>& said);
  void labels();
  void scaled();
  void plain();
  FoundWeights take() {
    for (auto& [name, info] : found_) made_.weights.push_back(std::move(info));
    return std::move(made_);
  }

 private:
  Place place(const TensorInfo& tensor) const {
    Place made{source_.paths[static_cast<std::size_t>(tensor.shard)], tensor.name, {}};
    if (!source_.in_memory) made.byte = tensor.offset;
    return made;
  }
  const TensorInfo* find(const std::string& name) const {
    return find_tensor(source_.tensors, name);
  }
  const TensorInfo& part(Refusal why, const TensorInfo& near, const Declaration& expected) const;
  void check_codes(const TensorInfo& state, const Declaration& expected) const;
  void check_map(const TensorInfo& map, Codes codes) const;
  void quant_state_weight(const TensorInfo& state, const std::string& name);
  void manifest_weight(const std::string& name, const ManifestWeight& said);
  bool is_scale(const TensorInfo& tensor) const;
  std::string scaled_otherwise(const TensorInfo& codes, bool scaled) const;
  WeightInfo& add(const std::string& name, const Storage& storage, const Shape& shape,
                  std::vector<std::string> parts, std::optional<Dtype> compute);

  const TensorSource& source_;
  std::set<std::string, std::less<>> taken_;
  std::map<std::string, WeightInfo> found_;
  FoundWeights made_;
};

std::string described(const TensorInfo& tensor) {
  return formatted("{} {} {}", in_quotes(tensor.name), tensor.dtype_name, to_string(tensor.shape));
}

// The tensor that must be there as declared; refusals stand at `near` where it is absent.
const TensorInfo& Search::part(Refusal why, const TensorInfo& near,
                               const Declaration& expected) const {
  const TensorInfo* const tensor = find(expected.name);
  const auto wanted = [&] {
    return formatted("{} {}", disk_name(expected.dtype), to_string(expected.shape));
  };
  if (tensor == nullptr) {
    refuse(why, place(near), formatted("no {} ({})", in_quotes(expected.name), wanted()));
  }
  if (tensor->dtype != expected.dtype || tensor->shape != expected.shape) {
    refuse(why, place(*tensor), formatted("{} for {}", described(*tensor), wanted()));
  }
  return *tensor;
}

WeightInfo& Search::add(const std::string& name, const Storage& storage, const Shape& shape,
                        std::vector<std::string> parts, std::optional<Dtype> compute) {
  taken_.insert(parts.begin(), parts.end());
  return found_.emplace(name, WeightInfo{name, storage, shape, std::move(parts), compute})
      .first->second;
}

void Search::quant_states() {
  std::map<std::string, const TensorInfo*> states;
  for (const TensorInfo& tensor : source_.tensors) {
    const std::size_t at = tensor.name.find(kQuantStatePrefix);
    if (at == std::string::npos) continue;
    const std::string name = tensor.name.substr(0, at);
    if (!states.emplace(name, &tensor).second) {
      refuse(Refusal::quant_state_count, place(tensor), "another for " + in_quotes(name));
    }
  }
  for (const auto& [name, tensor] : states) quant_state_weight(*tensor, name);
}

// Packed codes may be typed as any quant_storage of bitsandbytes: only their bytes count.
void Search::check_codes(const TensorInfo& state, const Declaration& expected) const {
  const TensorInfo* const codes = find(expected.name);
  if (codes == nullptr) {
    refuse(Refusal::quant_state_part, place(state), "no " + in_quotes(expected.name));
  }
  if (codes->bytes != static_cast<std::uint64_t>(expected.shape.elements())) {
    refuse(Refusal::quant_state_part, place(*codes),
           formatted("{} bytes for {}", codes->bytes, expected.shape.elements()));
  }
}

void Search::check_map(const TensorInfo& map, Codes codes) const {
  const std::string bytes = source_.read(map);
  const std::span<const float> table = trait(codes).values;
  for (std::size_t i = 0; i < table.size(); ++i) {
    float value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    // Builds of bitsandbytes differ in the last bit of fp4's thirds; its decoders use the table.
    if (!(std::abs(value - table[i]) <= 1e-6F)) {
      Place where = place(map);
      if (where.byte) *where.byte += i * sizeof value;
      refuse(Refusal::quant_map, where, formatted("{} for {}", value, table[i]));
    }
  }
}

void Search::quant_state_weight(const TensorInfo& tensor, const std::string& name) {
  if (tensor.dtype != Dtype::u8 || tensor.bytes > kLongestText) {
    refuse(Refusal::quant_state_part, place(tensor), described(tensor) + " for a short U8 text");
  }
  const QuantState state = parse_quant_state(place(tensor), source_.read(tensor));
  const auto declared = disk_layout(name, state.storage, state.shape);
  const bool nested = state.storage.scaling.nested;
  const std::size_t state_at = nested ? 4 : 2;
  if (tensor.name != declared[state_at].name) {
    refuse(Refusal::quant_state_value, place(tensor),
           formatted("quant_type '{}'", trait(state.storage.codes).name));
  }
  check_codes(tensor, declared[0]);
  std::vector<std::string> parts{declared[0].name};
  for (std::size_t i = 1; i < state_at; ++i) {
    parts.push_back(part(Refusal::quant_state_part, tensor, declared[i]).name);
  }
  const TensorInfo& map = part(Refusal::quant_state_part, tensor, declared.back());
  check_map(map, state.storage.codes);
  if (!nested && find(name + ".nested_absmax") != nullptr) {
    refuse(Refusal::quant_state_part, place(tensor), "nested_absmax but no nested_offset");
  }
  taken_.insert({tensor.name, map.name});
  if (nested) parts.push_back(tensor.name);
  WeightInfo& made = add(name, state.storage, state.shape, std::move(parts), state.compute);
  made.nested_offset = state.nested_offset;
  made.beside.push_back(map.name);
  if (!nested) made.beside.push_back(tensor.name);
}

void Search::manifest(const std::map<std::string, ManifestWeight>& said) {
  for (const auto& [name, weight] : said) manifest_weight(name, weight);
}

void Search::manifest_weight(const std::string& name, const ManifestWeight& said) {
  const TensorInfo* const codes = find(name);
  if (codes == nullptr) {
    refuse(Refusal::manifest_part, {source_.paths[0], name, std::nullopt}, "no such tensor");
  }
  if (const auto known = found_.find(name); known != found_.end()) {
    WeightInfo& info = known->second;
    if (info.storage != said.storage || info.shape != said.shape) {
      refuse(Refusal::manifest_part, place(*codes),
             formatted("{} {} for {} {}", to_string(info.storage), to_string(info.shape),
                       to_string(said.storage), to_string(said.shape)));
    }
    info.compute = said.compute;
    return;
  }
  std::vector<std::string> parts;
  for (const Declaration& expected : disk_layout(name, said.storage, said.shape)) {
    parts.push_back(part(Refusal::manifest_part, *codes, expected).name);
  }
  if (has_quant_state(said.storage)) {
    refuse(Refusal::manifest_part, place(*codes), "a 4-bit weight without a quant_state");
  }
  add(name, said.storage, said.shape, std::move(parts), said.compute);
}

std::optional<Codes> codes_of(Dtype dtype) {
  for (const FormatTrait& format : formats()) {
    const Packing packing = describe({.codes = format.codes}).packing;
    if (format.disk == dtype && packing == Packing::whole) return format.codes;
  }
  return std::nullopt;
}

void Search::labels() {
  for (const TensorInfo& tensor : source_.tensors) {
    if (!tensor.name.ends_with(kLabel) || tensor.dtype != Dtype::u8) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kLabel.size());
    if (find(name) == nullptr) continue;  // a model may use the name itself
    if (tensor.bytes > kLongestText)
      refuse(Refusal::manifest_value, place(tensor), described(tensor) + " for a short U8 text");
    manifest_weight(name, parse_label(place(tensor), source_.read(tensor)));
    taken_.insert(tensor.name);
    found_.at(name).beside.push_back(tensor.name);
  }
}

bool Search::is_scale(const TensorInfo& tensor) const {
  return tensor.dtype == Dtype::f32 ||
         (source_.in_memory && (tensor.dtype == Dtype::bf16 || tensor.dtype == Dtype::f16));
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
std::string Search::scaled_otherwise(const TensorInfo& codes, bool scaled) const {
  constexpr std::array<std::string_view, 9> kWords{"scale", "zero",  "absmax", "amax",  "quant",
                                                   "scb",   "g_idx", "block",  "factor"};
  constexpr std::array<std::string_view, 8> kNames{"scale",  "scales", "scale_weight", "zero_point",
                                                   "qzeros", "zero",   "SCB",          "g_idx"};
  const std::string& name = codes.name;
  const std::size_t module = name.rfind('.') + 1;
  const std::string start = name.substr(0, module);
  auto at = std::ranges::lower_bound(source_.tensors, start, {}, &TensorInfo::name);
  for (; at != source_.tensors.end() && at->name.starts_with(start); ++at) {
    if (taken_.contains(at->name) || at->name == name) continue;
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

void Search::scaled() {
  std::vector<std::pair<const TensorInfo*, const TensorInfo*>> pairs;
  for (const TensorInfo& tensor : source_.tensors) {
    const auto codes = codes_of(tensor.dtype);
    if (!codes || !has_byte_codes({.codes = *codes}) || taken_.contains(tensor.name)) continue;
    const TensorInfo* const scale = find(tensor.name + std::string(kScale));
    if (scale == nullptr || !is_scale(*scale)) continue;
    pairs.emplace_back(&tensor, scale);
    taken_.insert(scale->name);  // of all, before anyone asks what else there is
  }
  for (const auto& [tensor, scale] : pairs) {
    if (std::string other = scaled_otherwise(*tensor, true); !other.empty()) {
      made_.unreadable.emplace(tensor->name, std::move(other));
      continue;
    }
    const Storage storage =
        storage_from_scale(*codes_of(tensor->dtype), *tensor, *scale, place(*scale));
    add(tensor->name, storage, tensor->shape, {tensor->name, scale->name}, std::nullopt);
  }
}

void Search::plain() {
  std::vector<const TensorInfo*> casts;  // those found here are no scales of others
  for (const TensorInfo& tensor : source_.tensors) {
    const auto codes = codes_of(tensor.dtype);
    if (!codes || taken_.contains(tensor.name) || made_.unreadable.contains(tensor.name)) continue;
    // An 8-bit tensor with a scale that we cannot read is no plain cast: its values would be wrong.
    std::string other = has_byte_codes({.codes = *codes}) ? scaled_otherwise(tensor, false) : "";
    if (!other.empty())
      made_.unreadable.emplace(tensor.name, std::move(other));
    else if (*codes != Codes::int8)
      casts.push_back(&tensor);
  }
  for (const TensorInfo* const tensor : casts)
    add(tensor->name, {.codes = *codes_of(tensor->dtype)}, tensor->shape, {tensor->name},
        std::nullopt);
}

}  // namespace

const TensorInfo* find_tensor(const std::vector<TensorInfo>& tensors, std::string_view name) {
  const auto at = std::ranges::lower_bound(tensors, name, {}, &TensorInfo::name);
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

FoundWeights find_weights(const TensorSource& source,
                          const std::map<std::string, ManifestWeight>& said) {
  Search search(source);
  search.quant_states();
  search.manifest(said);
  search.labels();
  search.scaled();
  search.plain();
  return search.take();
}

inline namespace v0 {

FoundWeights weights_among(const std::string& where, std::vector<TensorInfo> tensors,
                           const std::function<std::string(const TensorInfo&)>& read) {
  std::ranges::sort(tensors, {}, &TensorInfo::name);
  for (TensorInfo& tensor : tensors) tensor.shard = 0;
  return find_weights({{where}, tensors, read, true}, {});
}

}  // namespace v0

}  // namespace stowage
