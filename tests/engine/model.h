// SPDX-License-Identifier: Apache-2.0
// A file of weights of several storages, and whether a lease shows the right bytes of one.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "scratch.h"
#include "store/made_weight.h"
#include "stowage/engine.h"
#include "stowage/writer.h"

namespace stowage::test {

struct ModelSizes {
  int weights = 6;
  std::int64_t rows = 96, columns = 256;
  std::uint64_t shard_bytes = 0;
};

inline std::string weight_name(int i) { return "layer." + std::to_string(100 + i) + ".weight"; }

/// Weights of five storages in turn (plain casts too), a plain vector and an empty tensor.
inline std::string write_model(const Scratch& scratch, const ModelSizes& sizes = {}) {
  const char* const storages[] = {"f8_e4m3:row", "nf4", "int8:block32", "f8_e5m2",
                                  "nf4:block64:nested"};
  std::vector<Declaration> tensors = {{"norm", Dtype::f32, Shape{33}, "", 0},
                                      {"positions", Dtype::u8, Shape{7}, "", 0},
                                      {"empty", Dtype::f32, Shape{0, 4}, "", 0}};
  WriterOptions options;
  options.shard_bytes = sizes.shard_bytes;
  std::vector<Weight> weights;
  for (int i = 0; i < sizes.weights; ++i) {
    const Shape shape{sizes.rows + 8 * (i % 3), sizes.columns};
    weights.push_back(made_weight(parse_storage(storages[i % 5]), shape));
    for (Declaration& part : disk_layout(weight_name(i), weights.back().storage(), shape))
      tensors.push_back(std::move(part));
    options.weights.push_back({weight_name(i), weights.back().storage(), shape, {}, {}});
  }
  Writer writer(scratch.path("model.safetensors"), tensors, options);
  const std::vector<float> norm(33, 1.5f);
  writer.write("norm", std::as_bytes(std::span(norm)));
  writer.write("positions", std::as_bytes(std::span("seven..", 7)));
  writer.write("empty", {});
  for (int i = 0; i < sizes.weights; ++i)
    writer.write_weight(weight_name(i), weights[static_cast<std::size_t>(i)]);
  writer.finish();
  return scratch.path();
}

/// Every byte of every part, as the file's mapping has it.
inline bool same_bytes(const Weight& a, const Weight& b) {
  const Layout made = layout(a.storage(), a.shape());
  for (int i = 0; i < made.count; ++i) {
    const auto bytes = static_cast<std::size_t>(made.parts[static_cast<std::size_t>(i)].bytes);
    if (std::memcmp(a.part(i), b.part(i), bytes) != 0) return false;
  }
  return a.storage() == b.storage();
}

inline std::uint64_t largest(const Engine& engine) {
  std::uint64_t most = 0;
  for (WeightId id = 0; id < engine.size(); ++id) most = std::max(most, engine.bytes(id));
  return most;
}

/// The smallest budget of a file, and the bytes of everything in it.
struct Needs {
  std::uint64_t least, all = 0;
  explicit Needs(const File& file) {
    const Engine engine(file,
                        {.ram = std::uint64_t{1} << 40, .reads = Reads::mapped, .workers = 0});
    least = largest(engine);
    for (WeightId id = 0; id < engine.size(); ++id) all += engine.bytes(id);
  }
};

}  // namespace stowage::test
