// SPDX-License-Identifier: Apache-2.0
// `stowage inspect`: what a model is made of, and what it would weigh in other storages.

#include <array>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/formatted.h"
#include "cli/commands.h"
#include "cli/compare.h"
#include "cli/items.h"
#include "cli/text.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

// The storages that are offered, and which of them the table has room for.
constexpr std::array<const char*, 7> kOffers{"bf16",       "f8_e4m3",     "f8_e4m3:row",
                                             "int8:row",   "nf4:block64", "nf4:block64:nested",
                                             "fp4:block64"};
constexpr std::array<std::size_t, 4> kColumns{2, 3, 4, 5};
constexpr std::string_view kManifest = "stowage";  // metadata that the weights already show

// Bytes of a item in an offered storage; of its own where pack would not take it.
std::uint64_t cost(const Item& item, const Storage& storage) {
  const Policy policy{.rules = {}, .storage = storage};
  const bool floating = item.is_plain_float() || item.rests();
  if (!choose(policy, item.name, item.shape, floating).storage) return item.bytes;
  return static_cast<std::uint64_t>(layout(storage, item.shape).bytes());
}

bool is_taken(const Item& item) {
  const Policy policy{.rules = {}, .storage = Storage{}};
  return choose(policy, item.name, item.shape, item.is_plain_float() || item.rests())
      .storage.has_value();
}

std::vector<std::int64_t> sizes(const Shape& shape) {
  return {shape.sizes().begin(), shape.sizes().end()};
}

Json costs(const std::vector<Item>& all) {
  Json json = Json::object();
  for (const char* offer : kOffers) {
    std::uint64_t sum = 0;
    for (const Item& item : all) sum += cost(item, parse_storage(offer));
    json[offer] = sum;
  }
  return json;
}

Json tensor_json(const TensorInfo& tensor) {
  return {{"name", tensor.name},   {"dtype", tensor.dtype_name}, {"shape", sizes(tensor.shape)},
          {"bytes", tensor.bytes}, {"file", tensor.shard},       {"offset", tensor.offset}};
}

Json weight_json(const Item& item) {
  const WeightInfo& weight = *item.weight;
  Json json{{"name", weight.name},
            {"storage", to_string(weight.storage)},
            {"shape", sizes(weight.shape)},
            {"bytes", item.bytes},
            {"compute", weight.compute ? Json(value_dtype_name(*weight.compute)) : Json(nullptr)},
            {"parts", weight.parts}};
  json["would_cost"] = is_taken(item) ? costs({item}) : Json(nullptr);
  return json;
}

std::uint64_t total_bytes(const File& file) {
  std::uint64_t bytes = 0;
  for (const TensorInfo& tensor : file.tensors()) bytes += tensor.bytes;
  return bytes;
}

Json describe(const File& file, const std::vector<Item>& all) {
  Json metadata = Json::object(), tensors = Json::array(), weights = Json::array();
  for (const auto& [key, value] : file.metadata())
    if (key != kManifest) metadata[key] = value;
  for (const TensorInfo& tensor : file.tensors()) tensors.push_back(tensor_json(tensor));
  for (const Item& item : all)
    if (item.weight != nullptr) weights.push_back(weight_json(item));
  return {{"files", file.paths()},   {"dialect", file.dialect()}, {"metadata", metadata},
          {"tensors", tensors},      {"weights", weights},        {"bytes", total_bytes(file)},
          {"would_cost", costs(all)}};
}

std::string kind_of(const Item& item) {
  if (item.weight == nullptr) return item.tensor->dtype_name;
  return to_string(item.weight->storage);
}

std::string table(const std::vector<Item>& all) {
  std::vector<std::string> heading{"tensor", "storage", "shape", "bytes"};
  for (const std::size_t column : kColumns) heading.emplace_back(kOffers[column]);
  Table rows(std::move(heading), 3);
  for (const Item& item : all) {
    std::vector<std::string> row{printable(item.name), kind_of(item), to_string(item.shape),
                                 size_text(item.bytes)};
    for (const std::size_t column : kColumns)
      row.push_back(is_taken(item) ? size_text(cost(item, parse_storage(kOffers[column]))) : "-");
    rows.add(std::move(row));
  }
  return rows.text();
}

std::string summary(const File& file, const std::vector<Item>& all) {
  Table rows({"all tensors as", "bytes"}, 1);
  rows.add({"they are", size_text(total_bytes(file))});
  const Json offers = costs(all);
  for (const auto& [offer, bytes] : offers.items())
    rows.add({offer, size_text(bytes.get<std::uint64_t>())});
  return rows.text();
}

}  // namespace

void inspect(const InspectOptions& options) {
  if (!options.compare.empty()) return compare(options.model, options.compare, options.json);
  const File file = File::open(options.model);
  const std::vector<Item> all = items_of(file);
  if (options.json) {
    print(json_text(describe(file, all)));
    return;
  }
  print(formatted("{}: {} tensors in {} file{}{}\n\n{}\n{}", printable(options.model),
                  file.tensors().size(), file.paths().size(), file.paths().size() == 1 ? "" : "s",
                  dialect_text(file), table(all), summary(file, all)));
}

}  // namespace stowage::cli
