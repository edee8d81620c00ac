// SPDX-License-Identifier: Apache-2.0
// torchao's flattened state dicts, by the metadata of the header:
//   tensor_names      ["MODULE.weight", ...]
//   MODULE.weight     {"_type": "Int8Tensor", "_data": {"block_size": [1, 128], "dtype": ...},
//                      "_tensor_data_names": ["qdata", "scale", ...]}; _type Tensor is plain
//   MODULE._weight_qdata       I8 (Int8Tensor) or F8_E4M3 (Float8Tensor) [O, K]
//   MODULE._weight_scale       F32 or BF16 [O / a, K / b], block_size [a, b]
//   MODULE._weight_zero_point  I8, all zero
#include <algorithm>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"
#include "store/json_fields.h"
#include "store/manifest.h"

namespace stowage::dialects {
namespace torchao {
namespace {

using Json = nlohmann::json;
constexpr std::string_view kNames = "tensor_names";

// What the header says of a tensor.
struct Said {
  Place place;
  Json all;

  [[noreturn]] void refuse(const std::string& got) const {
    stowage::refuse(Refusal::dialect_config, place, got);
  }
  std::string type() const {
    const auto at = all.find("_type");
    if (at == all.end() || !at->is_string()) refuse("no _type");
    return at->get<std::string>();
  }
  const Json& data() const {
    const auto at = all.find("_data");
    if (at == all.end() || !at->is_object()) refuse("no _data");
    return *at;
  }
  // {"_type": "torch.dtype", "_data": "bfloat16"}
  std::optional<Dtype> compute() const {
    const auto at = data().find("dtype");
    if (at == data().end()) return std::nullopt;
    if (!at->is_object()) refuse("dtype " + in_quotes(at->dump()));
    const auto name = at->find("_data");
    if (name == at->end()) refuse("a dtype without _data");
    if (*name == "bfloat16") return Dtype::bf16;
    if (*name == "float16") return Dtype::f16;
    if (*name == "float32") return Dtype::f32;
    refuse("dtype " + in_quotes(name->dump()));
  }
  // Of codes [O, K]; blocks that hold whole rows, or everything, have names of their own.
  std::string scaling(const Shape& shape) const {
    const auto at = data().find("block_size");
    const bool legal = at != data().end() && at->is_array() && at->size() == 2 &&
                       (*at)[0].is_number_unsigned() && (*at)[1].is_number_unsigned();
    if (!legal || shape.rank() != 2) refuse("no block_size of two numbers for a matrix");
    const auto rows = (*at)[0].get<std::uint64_t>(), columns = (*at)[1].get<std::uint64_t>();
    const auto o = static_cast<std::uint64_t>(shape[0]), k = static_cast<std::uint64_t>(shape[1]);
    if (rows == 1 && columns == k) return "row";
    if (rows == o && columns == k) return "tensor";
    if (rows == 1) return formatted("block{}", columns);
    return formatted("block{}x{}", rows, columns);
  }
};

// "a.b.weight" and "qdata" -> "a.b._weight_qdata"
std::string tensor_name(const std::string& weight, std::string_view data) {
  const std::size_t dot = weight.rfind('.');
  const std::size_t last = dot == std::string::npos ? 0 : dot + 1;
  return formatted("{}_{}_{}", weight.substr(0, last), weight.substr(last), data);
}

void read_weight(Claims& claims, const std::string& name, const Said& said) {
  const std::string type = said.type();
  if (type == "Tensor") return;
  if (type != "Int8Tensor" && type != "Float8Tensor") said.refuse("_type " + in_quotes(type));
  ScaledCodes weight{.name = name};
  weight.codes = tensor_name(name, "qdata");
  weight.scale = tensor_name(name, "scale");
  const TensorInfo* const codes = claims.find(weight.codes);
  if (codes == nullptr) refuse(Refusal::dialect_part, said.place, "no " + in_quotes(weight.codes));
  const std::string storage =
      formatted("{}:{}", type == "Int8Tensor" ? "int8" : "f8_e4m3", said.scaling(codes->shape));
  try {
    weight.storage = parse_storage(storage);
  } catch (const Error&) {
    said.refuse("block_size of " + in_quotes(storage));
  }
  weight.compute = said.compute();
  WeightInfo& made = weight.add(claims, said.place);
  add_zeros(claims, made, tensor_name(name, "zero_point"));
}

std::string recognise(const TensorSource& source) {
  for (const auto* metadata : source.metadata)
    if (metadata->contains(std::string(kNames))) return formatted("metadata {}", in_quotes(kNames));
  return "";
}

// The metadata of one shard.
void read_shard(Claims& claims, const std::string& path,
                const std::map<std::string, std::string>& metadata) {
  const auto listed = metadata.find(std::string(kNames));
  if (listed == metadata.end()) return;
  const auto at = [&](std::string_view key) {
    return Place{formatted("{}: metadata {}", path, in_quotes(key)), "", {}};
  };
  const Json all = parse_document(formatted("{{\"names\": {}}}", listed->second), at(kNames));
  const Json& names = all.at("names");
  if (!names.is_array()) refuse(Refusal::dialect_config, at(kNames), "no list of names");
  for (const Json& name : names) {
    const auto text = name.is_string() ? metadata.find(name.get<std::string>()) : metadata.end();
    if (text == metadata.end())
      refuse(Refusal::dialect_config, at(kNames), "no metadata for " + in_quotes(name.dump()));
    const Place place = at(text->first);
    read_weight(claims, text->first, {place, parse_document(text->second, place)});
  }
}

void read(Claims& claims) {
  const TensorSource& source = claims.source();
  for (std::size_t i = 0; i < source.metadata.size(); ++i)
    read_shard(claims, source.paths[i], *source.metadata[i]);
  refuse_unscaled(claims, " in the metadata");
}

}  // namespace
}  // namespace torchao

const FileDialect kTorchao{"torchao", "torchao", torchao::recognise, torchao::read};

}  // namespace stowage::dialects
