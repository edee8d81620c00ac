// SPDX-License-Identifier: Apache-2.0
#include "store/shard_index.h"

#include <utility>

#include "base/formatted.h"
#include "store/json.h"

namespace stowage {
namespace {

bool stays_inside(std::string_view path) {
  if (path.find('\0') != std::string_view::npos || path.find('\\') != std::string_view::npos) {
    return false;
  }
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t slash = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, slash - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = slash + 1;
  }
  return true;
}

class IndexVisitor final : public JsonVisitor {
 public:
  explicit IndexVisitor(const std::string& path) : JsonVisitor({path, "", 0}) {}

  void open(JsonPath path, bool array) override {
    if (path.empty()) return;
    check_key(path[0]);
    if (path.size() == 1 && array) refuse_type(path, "an object");
    if (path[0] == "weight_map" && path.size() > 1) refuse_type(path, "a string");
    has_map_ = has_map_ || path[0] == "weight_map";
  }
  void leaf(JsonPath path, const JsonLeaf& value) override {
    check_key(path[0]);
    if (path.size() == 1) refuse_type(path, "an object");
    if (path[0] == "metadata") {  // whatever the writer found worth telling; only our id is ours
      if (path.size() == 2 && path[1] == kSetKey) index_.set = text(path, value);
      return;
    }
    set_tensor(path[1]);
    std::string shard = text(path, value);
    if (!stays_inside(shard)) refuse(Refusal::shard_name, in_quotes(shard));
    index_.shard_of.emplace(path[1], std::move(shard));
  }
  void close(JsonPath path) override {
    set_tensor("");
    if (path.empty() && !has_map_) refuse(Refusal::missing_key, "no 'weight_map'");
  }
  ShardIndex take() { return std::move(index_); }

 private:
  void check_key(std::string_view key) const {
    if (key != "metadata" && key != "weight_map") refuse(Refusal::unknown_key, in_quotes(key));
  }

  bool has_map_ = false;
  ShardIndex index_;
};

}  // namespace

ShardIndex parse_shard_index(const std::string& path, std::string_view json) {
  IndexVisitor visitor(path);
  walk_json(json, visitor);
  return visitor.take();
}

std::string shard_index_text(const ShardIndex& index, std::uint64_t total_bytes) {
  std::string text = "{\n  \"metadata\": {\n";
  if (!index.set.empty()) text += formatted("    \"{}\": \"{}\",\n", kSetKey, index.set);
  text += formatted("    \"total_size\": {}\n  }},\n  \"weight_map\": {{", total_bytes);
  const char* comma = "\n";
  for (const auto& [tensor, shard] : index.shard_of) {
    text += formatted("{}    {}: {}", std::exchange(comma, ",\n"), json_string(tensor),
                      json_string(shard));
  }
  return text + "\n  }\n}\n";
}

}  // namespace stowage
