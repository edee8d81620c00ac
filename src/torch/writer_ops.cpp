// SPDX-License-Identifier: Apache-2.0
// Ops on files that are written, and the names and types that a weight has in them.
#include "stowage/writer.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "stowage/dialect.h"
#include "stowage/quantization_config.h"
#include "torch/arguments.h"
#include "torch/handles.h"

namespace stowage::door {
namespace {
using nlohmann::json;

Handles<Writer>& writers() {
  static Handles<Writer> made("writer");
  return made;
}

Shape shape_of(const json& sizes) {
  for (const json& size : sizes) {  // the JSON library would cut a fraction off
    if (!size.is_number_integer()) {
      fail(Code::invalid_argument, "stowage::writer_open: sizes must be whole, got " + size.dump());
    }
  }
  return Shape(sizes.get<std::vector<std::int64_t>>());
}

Declaration declaration_of(const json& tensor) {
  Declaration made;
  made.name = tensor.at("name").get<std::string>();
  const auto dtype = tensor.at("dtype").get<std::string>();
  made.dtype = dtype_from_disk_name(dtype);
  made.shape = shape_of(tensor.at("shape"));
  if (made.dtype == Dtype::unknown) {  // kept as bytes, under the name it came with
    made.dtype_name = dtype;
    made.bytes = tensor.at("bytes").get<std::uint64_t>();
  }
  return made;
}

WeightInfo weight_of(const json& weight) {
  WeightInfo made;
  made.name = weight.at("name").get<std::string>();
  made.storage = parse_storage(weight.at("storage").get<std::string>());
  made.shape = shape_of(weight.at("shape"));
  made.parts = weight.at("parts").get<std::vector<std::string>>();
  const json compute = weight.value("compute", json());
  if (compute.is_string()) made.compute = dtype_from_disk_name(compute.get<std::string>());
  return made;
}

// Headers may be of any bytes, which JSON does not have.
std::string octets_of_hex(const std::string& digits) {
  std::string made;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    unsigned char byte = 0;
    const char* const begin = digits.data() + i;
    const char* const end = begin + std::min<std::size_t>(2, digits.size() - i);
    const auto [at, error] = std::from_chars(begin, end, byte, 16);
    if (error != std::errc{} || at != begin + 2)
      fail(Code::invalid_argument,
           "stowage::writer_open: a header must be pairs of hexadecimal "
           "digits, got another at " +
               std::to_string(i));
    made += static_cast<char>(byte);
  }
  return made;
}

WriterOptions writer_options_of(const json& declaration) {
  WriterOptions made;
  made.metadata = declaration.value("metadata", made.metadata);
  for (const json& weight : declaration.value("weights", json::array())) {
    made.weights.push_back(weight_of(weight));
  }
  made.shard_bytes = declaration.value("shard_bytes", made.shard_bytes);
  made.checksums = declaration.value("checksums", made.checksums);
  made.index = declaration.value("index", made.index);
  made.manifest = declaration.value("manifest", made.manifest);
  for (const json& form : declaration.value("like", json::array()))
    made.like.push_back({form.at("name").get<std::string>(),
                         octets_of_hex(form.at("header").get<std::string>()),
                         form.at("bytes").get<std::uint64_t>()});
  return made;
}

// {"tensors": [{name, dtype, shape[, bytes]}], "metadata": {..}, "shard_bytes": 0, "checksums":
// true,
//  "weights": [{name, storage, shape, parts[, compute]}],
//  "like": [{name, header in hexadecimal digits, bytes}], "index": "..", "manifest": true}; only
//  "tensors" must be there.
std::int64_t writer_open(const std::string& path, const std::string& text) {
  std::vector<Declaration> tensors;
  WriterOptions options;
  try {
    const json declaration = json::parse(text);
    for (const json& tensor : declaration.at("tensors")) tensors.push_back(declaration_of(tensor));
    options = writer_options_of(declaration);
  } catch (const json::exception& e) {
    fail(Code::invalid_argument, std::string("stowage::writer_open: the declaration must be JSON "
                                             "of the documented form, got: ") +
                                     e.what());
  }
  return writers().add(std::make_shared<Writer>(path, std::move(tensors), options));
}

void writer_write(std::int64_t handle, const std::string& name, const Tensor& given) {
  constexpr const char* kWhere = "stowage::writer_write";
  const auto writer = writers().get(kWhere, handle);
  const Argument bytes(kWhere, "bytes", given.get());
  const auto size = static_cast<std::size_t>(bytes.elements()) * given.element_size();
  writer->write(name, {static_cast<const std::byte*>(bytes.data()), size});
}

void writer_finish(std::int64_t handle) {
  writers().take("stowage::writer_finish", handle)->finish();
}

void writer_discard(std::int64_t handle) { writers().take("stowage::writer_discard", handle); }

// [{name, dtype, shape, and where its bytes come from: "part" (its place in the layout), "text" or
//  "values"}]. `compute` and `nested_offset` are what a quant state says.
Tensor storage_on_disk(const std::string& name, std::int64_t key,
                       const std::vector<std::int64_t>& sizes, const std::string& compute,
                       double nested_offset) {
  const Storage storage = storage_from_key(key);
  const Shape shape(sizes);
  const auto declared = disk_layout(name, storage, shape);
  const Layout made = layout(storage, shape);
  std::size_t parts = 0;  // but the nested offset, which is a number in the quant state
  while (parts < static_cast<std::size_t>(made.count) && made.parts[parts].name != "nested_offset")
    ++parts;
  json out = json::array();
  for (const Declaration& d : declared) {
    json one = {{"name", d.name}, {"dtype", disk_name(d.dtype)}, {"shape", d.shape.sizes()}};
    if (out.size() < parts) {
      one["part"] = out.size();
    } else if (out.size() == parts) {
      one["text"] = quant_state(storage, shape, dtype_from_disk_name(compute),
                                static_cast<float>(nested_offset));
    } else {
      const auto values = trait(storage.codes).values;
      one["values"] = std::vector<double>(values.begin(), values.end());
    }
    out.push_back(std::move(one));
  }
  return text_bytes(out.dump());
}

// {name, text, needed}
Tensor storage_label(const std::string& name, std::int64_t key,
                     const std::vector<std::int64_t>& sizes) {
  const Storage storage = storage_from_key(key);
  const Shape shape(sizes);
  return text_bytes(json({{"name", name + ".stowage"},
                          {"text", label(storage, shape)},
                          {"needed", needs_label(storage, shape)}})
                        .dump());
}

// Of [{name, storage, shape, parts}]; no bytes where nothing need be said.
Tensor quantization_config_op(const std::string& text) {
  std::vector<WeightInfo> weights;
  try {
    for (const json& weight : json::parse(text)) weights.push_back(weight_of(weight));
  } catch (const json::exception& e) {
    fail(Code::invalid_argument, std::string("stowage::quantization_config: weights must be JSON "
                                             "of the documented form, got: ") +
                                     e.what());
  }
  return text_bytes(quantization_config(weights));
}

json dialect_json(const DialectTensor& tensor) {
  using From = DialectTensor::From;
  const Declaration& d = tensor.declaration;
  json made{{"name", d.name}, {"dtype", disk_name(d.dtype)}, {"shape", d.shape.sizes()}};
  if (tensor.from == From::part) {
    made["part"] = tensor.part;
    made["form"] = form_key(tensor.form);
  } else if (tensor.from == From::text) {  // of any bytes, which JSON does not have
    made["octets"] = json::array();
    for (const char byte : tensor.text) made["octets"].push_back(static_cast<unsigned char>(byte));
  }
  return made;
}

// Of {"weights": [{name, storage, shape, parts, compute}], "others": [{name, dtype, shape}]}:
// {"weights": [[{name, dtype, shape, and "part" with "form", or "octets", or neither: the quant
// state}]], "markers": [..], "metadata": {..}, "config": {key: JSON}, "files": {name: text}}.
Tensor dialect_files(const std::string& dialect, const std::string& text) {
  DialectModel model;
  try {
    const json given = json::parse(text);
    for (const json& weight : given.at("weights")) model.weights.push_back(weight_of(weight));
    for (const json& other : given.at("others")) model.others.push_back(declaration_of(other));
  } catch (const json::exception& e) {
    fail(Code::invalid_argument, std::string("stowage::dialect_files: the model must be JSON of "
                                             "the documented form, got: ") +
                                     e.what());
  }
  const DialectFiles files = in_dialect(dialect, model);
  json weights = json::array(), markers = json::array();
  for (const auto& weight : files.weights) {
    json& tensors = weights.emplace_back(json::array());
    for (const DialectTensor& tensor : weight) tensors.push_back(dialect_json(tensor));
  }
  for (const DialectTensor& marker : files.markers) markers.push_back(dialect_json(marker));
  return text_bytes(json({{"weights", std::move(weights)},
                          {"markers", std::move(markers)},
                          {"metadata", files.metadata},
                          {"config", files.config},
                          {"files", files.files}})
                        .dump());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CPU, m) {
  m.impl("writer_write", TORCH_BOX(&Door<&writer_write>::call));
}
STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("storage_on_disk", TORCH_BOX(&Door<&storage_on_disk>::call));
  m.impl("quantization_config", TORCH_BOX(&Door<&quantization_config_op>::call));
  m.impl("dialect_files", TORCH_BOX(&Door<&dialect_files>::call));
  m.impl("storage_label", TORCH_BOX(&Door<&storage_label>::call));
  m.impl("writer_open", TORCH_BOX(&Door<&writer_open>::call));
  m.impl("writer_finish", TORCH_BOX(&Door<&writer_finish>::call));
  m.impl("writer_discard", TORCH_BOX(&Door<&writer_discard>::call));
}
}  // namespace stowage::door
