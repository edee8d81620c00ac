// SPDX-License-Identifier: Apache-2.0
// bitsandbytes: 4-bit codes with a JSON quant state beside them, which says everything; a
// config.json of its quant_method adds nothing to it.
//   W                                       packed codes, of any type whose bytes they fill
//   W.absmax, W.quant_map                   one scale a block; the table of values
//   W.quant_state.bitsandbytes__nf4         the state (or __fp4), U8
//   W.nested_absmax, W.nested_quant_map     where the scales are codes themselves
#include <cmath>
#include <cstring>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/quant_state.h"

namespace stowage::dialects {
namespace bitsandbytes {
namespace {

// Packed codes may be typed as any quant_storage of bitsandbytes: only their bytes count.
void check_codes(const Claims& claims, const TensorInfo& state, const Declaration& expected) {
  const TensorInfo* const codes = claims.find(expected.name);
  if (codes == nullptr) {
    refuse(Refusal::quant_state_part, claims.place(state), "no " + in_quotes(expected.name));
  }
  if (codes->bytes != static_cast<std::uint64_t>(expected.shape.elements())) {
    refuse(Refusal::quant_state_part, claims.place(*codes),
           formatted("{} bytes for {}", codes->bytes, expected.shape.elements()));
  }
}

void check_map(const Claims& claims, const TensorInfo& map, Codes codes) {
  const std::string bytes = claims.read(map);
  const std::span<const float> table = trait(codes).values;
  for (std::size_t i = 0; i < table.size(); ++i) {
    float value = 0;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    // Builds of bitsandbytes differ in the last bit of fp4's thirds; its decoders use the table.
    if (!(std::abs(value - table[i]) <= 1e-6F)) {
      Place where = claims.place(map);
      if (where.byte) *where.byte += i * sizeof value;
      refuse(Refusal::quant_map, where, formatted("{} for {}", value, table[i]));
    }
  }
}

void read_quant_state(Claims& claims, const TensorInfo& tensor, const std::string& name) {
  if (tensor.dtype != Dtype::u8 || tensor.bytes > kLongestText) {
    refuse(Refusal::quant_state_part, claims.place(tensor),
           described(tensor) + " for a short U8 text");
  }
  const QuantState state = parse_quant_state(claims.place(tensor), claims.read(tensor));
  const auto declared = disk_layout(name, state.storage, state.shape);
  const bool nested = state.storage.scaling.nested;
  const std::size_t state_at = nested ? 4 : 2;
  if (tensor.name != declared[state_at].name) {
    refuse(Refusal::quant_state_value, claims.place(tensor),
           formatted("quant_type '{}'", trait(state.storage.codes).name));
  }
  check_codes(claims, tensor, declared[0]);
  std::vector<std::string> parts{declared[0].name};
  for (std::size_t i = 1; i < state_at; ++i) {
    parts.push_back(claims.part(Refusal::quant_state_part, tensor, declared[i]).name);
  }
  const TensorInfo& map = claims.part(Refusal::quant_state_part, tensor, declared.back());
  check_map(claims, map, state.storage.codes);
  if (!nested && claims.find(name + ".nested_absmax") != nullptr) {
    refuse(Refusal::quant_state_part, claims.place(tensor), "nested_absmax but no nested_offset");
  }
  if (nested) parts.push_back(tensor.name);
  WeightInfo& made = claims.add(name, state.storage, state.shape, std::move(parts), state.compute);
  made.nested_offset = state.nested_offset;
  claims.add_beside(made, map.name);
  if (!nested) claims.add_beside(made, tensor.name);
}

std::string recognise(const TensorSource& source) {
  for (const TensorInfo& tensor : source.tensors)
    if (tensor.name.find(kQuantStatePrefix) != std::string::npos)
      return formatted("tensor {}", in_quotes(tensor.name));
  return "";
}

// read_quant_states() has taken the 4-bit weights; 8-bit ones of other tools may be beside them.
void read(Claims& claims) { read_scaled(claims); }

}  // namespace
}  // namespace bitsandbytes

const FileDialect kBitsandbytes{"bitsandbytes", "bitsandbytes", bitsandbytes::recognise,
                                bitsandbytes::read};

void read_quant_states(Claims& claims) {
  std::map<std::string, const TensorInfo*> states;
  for (const TensorInfo& tensor : claims.tensors()) {
    const std::size_t at = tensor.name.find(kQuantStatePrefix);
    if (at == std::string::npos) continue;
    const std::string name = tensor.name.substr(0, at);
    if (!states.emplace(name, &tensor).second) {
      refuse(Refusal::quant_state_count, claims.place(tensor), "another for " + in_quotes(name));
    }
  }
  for (const auto& [name, tensor] : states) bitsandbytes::read_quant_state(claims, *tensor, name);
}

}  // namespace stowage::dialects
