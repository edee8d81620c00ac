// SPDX-License-Identifier: Apache-2.0
// Which tensors of a file a weight is: names as bitsandbytes (4-bit) and compressed-tensors (8-bit
// with scales) spell them, so that their readers need not know us. Nobody else has a file form of
// nf4:torchao: its parts are named as the peer's attributes, and only the manifest says what they
// are.
#include <array>
#include <string>
#include <string_view>

#include "store/quant_state.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

struct Suffix {
  std::string_view part, suffix;
};
constexpr std::array<Suffix, 9> kSuffixes{{{"codes", ""},
                                           {"scale", "_scale"},
                                           {"absmax", ".absmax"},
                                           {"nested_absmax", ".nested_absmax"},
                                           {"nested_map", ".nested_quant_map"},
                                           {"quantized_scalers", ".quantized_scalers"},
                                           {"quantization_factor", ".quantization_factor"},
                                           {"scaler_mean", ".scaler_mean"},
                                           {"nf4", ".nf4"}}};

std::string_view suffix_of(std::string_view part) {
  for (const Suffix& row : kSuffixes) {
    if (row.part == part) return row.suffix;
  }
  return {};
}

Declaration declare(std::string name, Dtype dtype, const Shape& shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = shape, .dtype_name = {}};
}

}  // namespace

inline namespace v0 {

std::vector<Declaration> disk_layout(std::string_view name, const Storage& storage,
                                     const Shape& shape) {
  const Layout parts = layout(storage, shape);
  const FormatTrait& format = trait(storage.codes);
  const std::string base(name);
  std::vector<Declaration> made;
  for (int i = 0; i < parts.count; ++i) {
    const Part& part = parts.parts[static_cast<std::size_t>(i)];
    if (part.name == "nested_offset") continue;  // a number in the quant state
    const bool is_codes = part.name == "codes";
    made.push_back(declare(base + std::string(suffix_of(part.name)),
                           is_codes && format.bits != 4 ? format.disk : part.dtype, part.shape));
  }
  if (!has_quant_state(storage)) return made;
  const auto state_bytes =
      static_cast<std::int64_t>(quant_state(storage, shape, Dtype::bf16).size());
  made.push_back(declare(base + std::string(kQuantStatePrefix) + std::string(format.name),
                         Dtype::u8, {state_bytes}));
  made.push_back(declare(base + ".quant_map", Dtype::f32, {16}));
  return made;
}

}  // namespace v0
}  // namespace stowage
