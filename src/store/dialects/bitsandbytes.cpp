// SPDX-License-Identifier: Apache-2.0
// bitsandbytes: 4-bit codes with a JSON quant state beside them, which says everything; a
// config.json of its quant_method adds nothing to it. And codes of 8 bits, which it alone shows:
//   MODULE.weight, MODULE.SCB               I8 [O, K]; F32 [O], the largest magnitude of each row
//   MODULE.weight_format                    U8 [], 0: rows as they are; older files have none
//   W                                       packed codes, of any type whose bytes they fill
//   W.absmax, W.quant_map                   one scale a block; the table of values
//   W.quant_state.bitsandbytes__nf4         the state (or __fp4), U8
//   W.nested_absmax, W.nested_quant_map     where the scales are codes themselves
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"
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

constexpr std::string_view kWeight = ".weight", kAbsmax = ".SCB", kFormat = ".weight_format";

Storage int8_storage() {
  return {.codes = Codes::int8, .scaling = {.kind = Scaling::Kind::row, .type = ScaleType::absmax}};
}

bool loads_int8(const QuantConfig& config) {
  const auto says = [&](const char* key) {
    const auto at = config.all().find(key);
    if (at != config.all().end() && !at->is_boolean())
      config.refuse(formatted("{} {}", key, at->dump()));
    return at != config.all().end() && at->get<bool>();
  };
  const bool is_8 = says("_load_in_8bit") || says("load_in_8bit");
  if (is_8 && (says("_load_in_4bit") || says("load_in_4bit")))
    config.refuse("load_in_8bit and load_in_4bit");
  return is_8;
}

// Other numbers are orders that a GPU of old wanted.
void add_format(Claims& claims, WeightInfo& weight, const std::string& name) {
  const TensorInfo* const format = claims.find(name);
  if (format == nullptr) return;
  if (format->dtype != Dtype::u8 || format->bytes != 1)
    refuse(Refusal::dialect_part, claims.place(*format), described(*format) + " for one U8");
  if (const char order = claims.read(*format)[0]; order != 0)
    refuse(Refusal::dialect_part, claims.place(*format),
           formatted("weight_format {} for 0, codes in rows", int{order}));
  claims.add_beside(weight, name);
}

void read_int8(Claims& claims) {
  for (const TensorInfo& absmax : claims.tensors()) {
    if (!absmax.name.ends_with(kAbsmax) || claims.is_taken(absmax.name)) continue;
    const std::string module = absmax.name.substr(0, absmax.name.size() - kAbsmax.size());
    const std::string name = module + std::string(kWeight);
    const ScaledCodes weight{
        .name = name, .codes = name, .scale = absmax.name, .storage = int8_storage()};
    WeightInfo& made = weight.add(claims, claims.place(absmax));
    add_format(claims, made, module + std::string(kFormat));
    check_not_listed(claims, made, "llm_int8_skip_modules");
  }
  for (const TensorInfo& codes : claims.tensors())
    if (codes.dtype == Dtype::i8 && codes.shape.rank() == 2 && codes.name.ends_with(kWeight) &&
        !claims.is_taken(codes.name))
      refuse(Refusal::dialect_part, claims.place(codes),
             formatted("no {}", in_quotes(std::string(module_of(codes.name)).append(kAbsmax))));
}

void write_int8(Wording& wording, const WeightInfo& weight) {
  const Shape& shape = weight.shape;
  const std::string module(module_of(weight.name));
  wording.add_part(weight.name, Dtype::i8, shape, 0);
  wording.add_part(module + std::string(kAbsmax), Dtype::f32, {shape[0]}, 1);
  wording.add_text(module + std::string(kFormat), Dtype::u8, {}, std::string(1, '\0'));
}

bool write(Wording& wording, const WeightInfo& weight) {
  if (weight.storage == int8_storage() && weight.shape.rank() == 2 &&
      weight.name.ends_with(kWeight)) {
    write_int8(wording, weight);
    return true;
  }
  if (!has_quant_state(weight.storage) || weight.shape.rank() != 2) return false;
  if (!weight.name.ends_with(kWeight)) return false;
  const std::vector<Declaration> declared = disk_layout(weight.name, weight.storage, weight.shape);
  const std::size_t state = declared.size() - 2;
  for (std::size_t i = 0; i < state; ++i)
    wording.add_part(declared[i].name, declared[i].dtype, declared[i].shape, static_cast<int>(i));
  const Dtype compute = weight.compute.value_or(Dtype::bf16);
  wording.add_quant_state(declared[state].name, declared[state].dtype, declared[state].shape,
                          quant_state(weight.storage, weight.shape, compute));
  const std::span<const float> map = trait(weight.storage.codes).values;
  wording.add_text(declared.back().name, declared.back().dtype, declared.back().shape,
                   bytes_of_numbers(std::vector<float>(map.begin(), map.end())));
  return true;
}

// Its config names one type for all. transformers skips every module whose path starts or ends with
// a listed name.
void finish(Wording& wording) {
  const WeightInfo& first = wording.weights().front();
  const bool is_8 = first.storage == int8_storage();
  wording.check_same(is_8 ? "load_in_8bit" : "bnb_4bit_quant_type",
                     [](const Storage& storage) { return std::string(trait(storage.codes).name); });
  const std::vector<std::string> skipped = wording.plain_modules();
  for (const WeightInfo& weight : wording.weights()) {
    const std::string_view module = module_of(weight.name);
    for (const std::string& name : skipped)
      if (module.ends_with(name) || module.starts_with(name + "."))
        throw Error(Code::unsupported,
                    formatted("dialect bitsandbytes: llm_int8_skip_modules cannot name '{}' "
                              "without '{}', which is packed",
                              name, module));
  }
  const Dtype compute = is_8 ? Dtype::f32 : first.compute.value_or(Dtype::bf16);
  wording.set_config(
      {{"_load_in_4bit", !is_8},
       {"_load_in_8bit", is_8},
       {"bnb_4bit_compute_dtype", torch_name(compute)},
       {"bnb_4bit_quant_storage", "uint8"},
       {"bnb_4bit_quant_type", is_8 ? "fp4" : std::string(trait(first.storage.codes).name)},
       {"bnb_4bit_use_double_quant",
        std::ranges::any_of(wording.weights(),
                            [](const auto& one) { return one.storage.scaling.nested; })},
       {"llm_int8_enable_fp32_cpu_offload", false},
       {"llm_int8_has_fp16_weight", false},
       {"llm_int8_skip_modules", skipped},
       {"llm_int8_threshold", 6.0},
       {"load_in_4bit", !is_8},
       {"load_in_8bit", is_8},
       {"quant_method", "bitsandbytes"}});
}

std::string recognise(const TensorSource& source) {
  for (const TensorInfo& tensor : source.tensors)
    if (tensor.name.find(kQuantStatePrefix) != std::string::npos)
      return formatted("tensor {}", in_quotes(tensor.name));
  return "";
}

// read_quant_states() has taken the 4-bit weights; 8-bit ones of other tools may be beside them.
void read(Claims& claims) {
  const QuantConfig* const config = claims.source().config;
  if (config != nullptr && loads_int8(*config)) read_int8(claims);
  read_scaled(claims);
}

}  // namespace
}  // namespace bitsandbytes

const FileDialect kBitsandbytes{"bitsandbytes",     "bitsandbytes",      bitsandbytes::recognise,
                                bitsandbytes::read, bitsandbytes::write, bitsandbytes::finish};

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
