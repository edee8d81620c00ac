// SPDX-License-Identifier: Apache-2.0
// Rates of a made-up machine, and models of which only the sizes exist.
#pragma once
#include <string>
#include <vector>

#include "scratch.h"
#include "stowage/plan.h"
#include "stowage/report.h"

namespace stowage::test {

inline Links made_links() {
  Links links{.key = "a machine of 4 cores", .disk = 2e9, .cached = 6e9, .memcpy = 10e9};
  for (const char* family : {"f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "int8", "nf4", "fp4"})
    links.linear[family] = {8e9, 200e9};
  links.accelerators["cuda:0"] = {12e9, 400e9, 30e12, false};
  return links;
}

inline PlanUnit unit(const std::string& name, const Shape& shape, const char* storage = "bf16") {
  return {.name = name,
          .storage = storage,
          .shape = shape,
          .rest = static_cast<std::uint64_t>(layout(parse_storage(storage), shape).bytes())};
}

/// An embedding, layers of seven matrices, a norm each, and a head.
inline std::vector<PlanUnit> language_model(int layers, std::int64_t width, std::int64_t words,
                                            const char* storage = "bf16") {
  std::vector<PlanUnit> units{unit("model.embed_tokens.weight", {words, width})};
  units.back().rows = true;
  for (int i = 0; i < layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
      units.push_back(unit(layer + "self_attn." + name + ".weight", {width, width}, storage));
    for (const char* name : {"gate_proj", "up_proj"})
      units.push_back(unit(layer + "mlp." + name + ".weight", {3 * width, width}, storage));
    units.push_back(unit(layer + "mlp.down_proj.weight", {width, 3 * width}, storage));
    units.push_back(unit(layer + "norm.weight", {width}));
  }
  units.push_back(unit("lm_head.weight", {words, width}));
  return units;
}

inline constexpr std::int64_t kWidth = 512, kInner = 256;

inline std::string layer_name(int layer) { return "model.layers." + std::to_string(layer); }

/// A mixture as published: tensors of each expert, beside attention.
inline std::vector<PlanUnit> mixture(int layers, int experts) {
  std::vector<PlanUnit> units;
  for (int l = 0; l < layers; ++l) {
    units.push_back(unit(layer_name(l) + ".self_attn.q_proj.weight", {kWidth, kWidth}));
    for (int e = 0; e < experts; ++e) {
      const std::string of = layer_name(l) + ".mlp.experts." + std::to_string(e) + ".";
      for (const char* name : {"gate_proj", "up_proj"})
        units.push_back(unit(of + name + ".weight", {kInner, kWidth}));
      units.push_back(unit(of + "down_proj.weight", {kWidth, kInner}));
    }
  }
  return units;
}

/// The same with all experts of a layer in two stacks.
inline std::vector<PlanUnit> mixture_of_stacks(int layers, std::int64_t experts,
                                               const char* storage = "bf16") {
  std::vector<PlanUnit> units;
  for (int l = 0; l < layers; ++l) {
    const std::string of = layer_name(l);
    units.push_back(unit(of + ".self_attn.q_proj.weight", {kWidth, kWidth}));
    for (const auto& [name, shape] :
         {std::pair(".mlp.experts.gate_up_proj", Shape({experts, 2 * kInner, kWidth})),
          {".mlp.experts.down_proj", Shape({experts, kWidth, kInner})}}) {
      units.push_back(unit(of + name, shape, storage));
      units.back().stack = true;
    }
  }
  return units;
}

/// A weight of each kind, in a model whose name HTML must escape.
inline Report made_report() {
  Report report{.model = "a<b>"};
  report.weights = {
      {.name = "embed_tokens.weight", .storage = "bf16", .shape = {64, 32}, .bytes = 4096},
      {.name = "layers.0.weight", .storage = "nf4:block64", .shape = {64, 64}, .bytes = 2304},
      {.name = "lm_head.weight", .storage = "int8:row", .shape = {64, 32}, .bytes = 2304},
      {.name = "norm.weight", .storage = "f32", .shape = {64}, .bytes = 256},
      {.name = "patch.weight", .storage = "f16", .shape = {8, 3, 4, 4}, .bytes = 768},
      {.name = "steps", .storage = "I64", .shape = {1}, .bytes = 8}};
  return report;
}

/// The header of a file whose tensors nobody reads: the file is as long as they would be, with
/// nothing written.
inline std::string write_headers(const Scratch& scratch, const std::vector<PlanUnit>& units) {
  std::string json = "{";
  std::uint64_t at = 0;
  for (const PlanUnit& one : units) {
    json += (json.size() > 1 ? ",\"" : "\"") + one.name + "\":{\"dtype\":\"BF16\",\"shape\":[";
    for (int d = 0; d < one.shape.rank(); ++d)
      json += (d > 0 ? "," : "") + std::to_string(one.shape[d]);
    json +=
        "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(at + one.rest) + "]}";
    at += one.rest;
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  const std::string path = scratch.write("model.safetensors", safetensors(json));
  std::filesystem::resize_file(path, 8 + json.size() + at);
  return path;
}

}  // namespace stowage::test
