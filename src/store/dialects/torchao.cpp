// SPDX-License-Identifier: Apache-2.0
// torchao's flattened state dicts, by the metadata of the header:
//   tensor_names      ["MODULE.weight", ...]
//   MODULE.weight     {"_type": "Int8Tensor", "_data": {"block_size": [1, 128], "dtype": ...},
//                      "_tensor_data_names": ["qdata", "scale", ...]}; _type Tensor is plain
//   MODULE._weight_qdata       I8 (Int8Tensor) or F8_E4M3 (Float8Tensor) [O, K]; of
//                              IntxUnpackedToInt8Tensor with target_dtype int4 I8, -8 to 7; of
//                              Int4Tensor I8 [O, K / 2], such codes by two, the first in the low
//                              half
//   MODULE._weight_scale       F32, BF16 or F16 [O / a, K / b], block_size [a, b]; of Int4Tensor
//                              BF16 or F16 [K / b, O]
//   MODULE._weight_zero_point  I8 of the same shape; all zero, but of Intx any; of Int4Tensor of
//   the
//                              type of the scales, added to products
#include <algorithm>
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"
#include "store/json_fields.h"
#include "store/manifest.h"

namespace stowage::dialects {
namespace torchao {
namespace {

using Json = nlohmann::json;
const Shape kOneScale{1, 1};  // of a whole tensor
constexpr std::string_view kNames = "tensor_names";
// Codes of four bits, which rest 8 more than they are, in a byte each.
constexpr PartForm kUnpacked{.in_file = 8, .in_part = 4, .word = 8, .bias = 256 - 8};
// Two in a byte, likewise more; and numbers of groups, those of a group of all rows together.
constexpr PartForm kPacked{.in_file = 4, .in_part = 4, .word = 8, .bias = 8};
constexpr PartForm kTurned{.in_file = 16, .in_part = 16, .word = 16, .transposed = true};

// A class of tensors, and what of the storages is one.
struct Class {
  std::string_view type, config;  // names in the header and in config.json
  Codes codes;
  std::string_view text;  // in the string of a storage
  Zero zero = Zero::none;
};
constexpr std::array<Class, 4> kClasses{
    {{"Int8Tensor", "Int8WeightOnlyConfig", Codes::int8, "int8"},
     {"Float8Tensor", "Float8WeightOnlyConfig", Codes::f8_e4m3, "f8_e4m3"},
     {"IntxUnpackedToInt8Tensor", "IntxWeightOnlyConfig", Codes::int4, "int4", Zero::code},
     {"Int4Tensor", "Int4WeightOnlyConfig", Codes::int4, "int4", Zero::sum}}};

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
  // {"_type": "torch.dtype", "_data": "bfloat16"}: the name; nothing where the key is absent.
  std::optional<Json> dtype(const char* key) const {
    const auto at = data().find(key);
    if (at == data().end()) return std::nullopt;
    if (!at->is_object()) refuse(formatted("{} {}", key, in_quotes(at->dump())));
    const auto name = at->find("_data");
    if (name == at->end()) refuse(formatted("a {} without _data", key));
    return *name;
  }
  std::optional<Dtype> compute(const char* key) const {
    const std::optional<Json> name = dtype(key);
    if (!name) return std::nullopt;
    if (*name == "bfloat16") return Dtype::bf16;
    if (*name == "float16") return Dtype::f16;
    if (*name == "float32") return Dtype::f32;
    refuse(formatted("{} {}", key, in_quotes(name->dump())));
  }
  // Of codes by two.
  void check_shape(const Shape& shape) const {
    const auto at = data().find("shape");
    const std::vector<std::int64_t> sizes(shape.sizes().begin(), shape.sizes().end());
    if (at == data().end()) refuse("no shape");
    if (*at != Json(sizes))
      refuse(formatted("shape {} for {}", in_quotes(at->dump()), to_string(shape)));
  }
  // Of integers of fewer bits than a byte.
  void check_target() const {
    const std::optional<Json> name = dtype("target_dtype");
    if (!name) refuse("no target_dtype");
    if (*name != "int4") refuse("target_dtype " + in_quotes(name->dump()));
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

// Where codes of four bits and what stands for 0 are.
void set_forms(ScaledCodes& weight, Zero zero) {
  if (zero == Zero::none) return;
  weight.codes_in = Dtype::i8;
  weight.codes_form = zero == Zero::sum ? kPacked : kUnpacked;
  weight.third = tensor_name(weight.name, "zero_point");
  if (zero == Zero::sum) weight.scale_form = weight.third_form = kTurned;
}

// Of the codes of a matrix.
Shape shape_of(const Claims& claims, const TensorInfo& codes, Zero zero) {
  if (zero != Zero::sum || codes.shape.rank() != 2) return codes.shape;
  return {codes.shape[0], size_of(claims, codes, 1, 2)};
}

// Numbers of groups are turned as those of 16 bits are.
void check_turned(const Claims& claims, const std::string& scale) {
  const TensorInfo* const tensor = claims.find(scale);
  if (tensor == nullptr || tensor->dtype == Dtype::bf16 || tensor->dtype == Dtype::f16) return;
  refuse(Refusal::dialect_part, claims.place(*tensor),
         described(*tensor) + " for scales of BF16 or F16");
}

void read_weight(Claims& claims, const std::string& name, const Said& said) {
  const std::string type = said.type();
  if (type == "Tensor") return;
  const auto made_of = std::ranges::find(kClasses, type, &Class::type);
  if (made_of == kClasses.end()) said.refuse("_type " + in_quotes(type));
  ScaledCodes weight{.name = name};
  weight.codes = tensor_name(name, "qdata");
  weight.scale = tensor_name(name, "scale");
  weight.number = kOneScale;
  const TensorInfo* const codes = claims.find(weight.codes);
  if (codes == nullptr) refuse(Refusal::dialect_part, said.place, "no " + in_quotes(weight.codes));
  const Zero zero = made_of->zero;
  const Shape shape = shape_of(claims, *codes, zero);
  if (zero == Zero::code) said.check_target();
  if (zero == Zero::sum) said.check_shape(shape), check_turned(claims, weight.scale);
  const std::string storage = formatted("{}:{}{}", made_of->text, said.scaling(shape),
                                        zero == Zero::sum    ? ":zero_sum"
                                        : zero == Zero::code ? ":zero"
                                                             : "");
  try {
    weight.storage = parse_storage(storage);
  } catch (const Error&) {
    said.refuse("block_size of " + in_quotes(storage));
  }
  weight.compute = said.compute(zero == Zero::sum ? "activation_dtype" : "dtype");
  if (zero != Zero::none) {
    set_forms(weight, zero);
    weight.logical = shape;
    weight.add(claims, said.place);
    return;
  }
  WeightInfo& made = weight.add(claims, said.place);
  add_zeros(claims, made, tensor_name(name, "zero_point"));
}

// The block that shares a scale, as read_weight() tells the scaling of it.
std::vector<std::int64_t> block_size(const WeightInfo& weight) {
  const Scaling& scaling = weight.storage.scaling;
  if (scaling.kind == Scaling::Kind::tensor) return {weight.shape[0], weight.shape[1]};
  if (scaling.kind == Scaling::Kind::row) return {1, weight.shape[1]};
  return {1, scaling.block};
}

const Class* class_of(const Storage& storage) {
  const auto at = std::ranges::find_if(kClasses, [&](const Class& made_of) {
    return made_of.codes == storage.codes && made_of.zero == storage.scaling.zero;
  });
  return at == kClasses.end() ? nullptr : &*at;
}

bool has_scaling(const Class& made_of, const Scaling& scaling) {
  const bool zeros = made_of.zero != Zero::none;
  const bool numbers = (scaling.type == ScaleType::f32 && made_of.zero != Zero::sum) ||
                       scaling.type == ScaleType::bf16 || (scaling.type == ScaleType::f16 && zeros);
  if (scaling.actorder) return false;
  if (scaling.kind == Scaling::Kind::tensor) return numbers && !zeros;
  if (scaling.kind == Scaling::Kind::block) return numbers && made_of.codes != Codes::f8_e4m3;
  return numbers && scaling.kind == Scaling::Kind::row;
}

bool write(Wording& wording, const WeightInfo& weight) {
  const Class* const made_of = class_of(weight.storage);
  if (made_of == nullptr || !has_scaling(*made_of, weight.storage.scaling)) return false;
  if (weight.shape.rank() != 2 || weight.shape[1] % block_size(weight)[1] != 0) return false;
  ScaledCodes made{.name = weight.name};
  made.codes = tensor_name(weight.name, "qdata");
  made.scale = tensor_name(weight.name, "scale");
  made.number = kOneScale;
  set_forms(made, made_of->zero);
  made.write(wording, weight);
  if (weight.storage.codes != Codes::int8) return true;
  const Layout parts = layout(weight.storage, weight.shape);
  const Shape shape = parts.parts[1].shape.rank() == 0 ? made.number : parts.parts[1].shape;
  wording.add_text(tensor_name(weight.name, "zero_point"), Dtype::i8, shape,
                   std::string(static_cast<std::size_t>(shape.elements()), '\0'));
  return true;
}

Wording::Json torch_dtype(std::string_view name) {
  return {{"_type", "torch.dtype"}, {"_data", name}};
}

Wording::Json said_of(const WeightInfo& weight) {
  using Made = Wording::Json;
  const Codes codes = weight.storage.codes;
  const Made dtype = torch_dtype(torch_name(weight.compute.value_or(Dtype::bf16)));
  Made data{{"act_quant_kwargs", nullptr}, {"block_size", block_size(weight)}};
  Made names{"zero_point", "qdata", "scale"};
  if (weight.storage.scaling.zero == Zero::sum) {
    const auto sizes = weight.shape.sizes();
    data = {{"activation_dtype", dtype},
            {"block_size", block_size(weight)},
            {"shape", std::vector(sizes.begin(), sizes.end())}};
    return {{"_type", class_of(weight.storage)->type},
            {"_data", data},
            {"_tensor_data_names", {"qdata", "scale", "zero_point"}}};
  }
  if (codes == Codes::int4) {
    data = {{"target_dtype", torch_dtype("int4")}, {"block_size", block_size(weight)}};
    names = {"qdata", "scale", "zero_point"};
  } else if (codes == Codes::int8) {
    data["reduce_range"] = false;
  } else {
    data["mm_config"] = nullptr,
    data["kernel_preference"] = {{"_type", "KernelPreference"}, {"_data", "AUTO"}};
    names = {"qdata", "scale"};
  }
  data["dtype"] = dtype;
  if (codes == Codes::int4) data["activation_quantization"] = nullptr;
  return {
      {"_type", class_of(weight.storage)->type}, {"_data", data}, {"_tensor_data_names", names}};
}

Wording::Json intx_config(const Wording::Json& granularity) {
  const auto choice = [](const char* type, const char* value) {
    return Wording::Json{{"_type", type}, {"_data", value}};
  };
  return {{"weight_dtype", torch_dtype("int4")},
          {"granularity", granularity},
          {"mapping_type", choice("MappingType", "ASYMMETRIC")},
          {"scale_dtype", nullptr},
          {"intx_packing_format", choice("IntxPackingFormat", "UNPACKED_TO_INT8")},
          {"intx_choose_qparams_algorithm", choice("IntxChooseQParamsAlgorithm", "AFFINE")}};
}

Wording::Json int4_config(const WeightInfo& weight) {
  return {{"group_size", block_size(weight)[1]},
          {"set_inductor_config", true},
          {"int4_packing_format", {{"_type", "Int4PackingFormat"}, {"_data", "PLAIN"}}},
          {"int4_choose_qparams_algorithm",
           {{"_type", "Int4ChooseQParamsAlgorithm"}, {"_data", "TINYGEMM"}}},
          {"int4_tile_packed_ntile", 8}};
}

// The names of all tensors, and what each is. config.json says of modules what transformers makes
// of plain ones; what files hold is said by their header.
void finish(Wording& wording) {
  wording.check_same("config", [](const Storage& storage) { return to_string(storage); });
  Wording::Json names = Wording::Json::array();
  for (const WeightInfo& weight : wording.weights()) {
    names.push_back(weight.name);
    wording.set_metadata(weight.name, said_of(weight));
  }
  for (const Declaration& other : wording.model().others) {
    names.push_back(other.name);
    wording.set_metadata(other.name, {{"_type", "Tensor"}});
  }
  wording.set_metadata(std::string(kNames), names);
  const Storage& storage = wording.weights().front().storage;
  const Scaling& scaling = storage.scaling;
  const auto typed = [](const char* type, Wording::Json data) {
    return Wording::Json{{"_type", type}, {"_version", 1}, {"_data", std::move(data)}};
  };
  Wording::Json granularity = typed("PerRow", {{"dim", -1}});
  if (storage.codes == Codes::int4) granularity = typed("PerAxis", {{"axis", 0}});
  if (scaling.kind == Scaling::Kind::tensor)
    granularity = typed("PerTensor", Wording::Json::object());
  if (scaling.kind == Scaling::Kind::block)
    granularity = typed("PerGroup", {{"group_size", scaling.block}});
  Wording::Json data{{"granularity", granularity}, {"set_inductor_config", true}};
  if (scaling.zero == Zero::sum)
    data = int4_config(wording.weights().front());
  else if (storage.codes == Codes::int4)
    data = intx_config(granularity);
  else if (storage.codes == Codes::int8)
    data["group_size"] = nullptr;
  else
    data["weight_dtype"] = torch_dtype("float8_e4m3fn");
  wording.set_config(
      {{"quant_method", "torchao"},
       {"quant_type",
        {{"default", {{"_type", class_of(storage)->config}, {"_version", 2}, {"_data", data}}}}},
       {"modules_to_not_convert", wording.plain_modules()},
       {"include_input_output_embeddings", false},
       {"untie_embedding_weights", false}});
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

const FileDialect kTorchao{"torchao",     "torchao",      torchao::recognise,
                           torchao::read, torchao::write, torchao::finish};

}  // namespace stowage::dialects
