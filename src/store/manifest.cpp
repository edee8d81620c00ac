// SPDX-License-Identifier: Apache-2.0
#include "store/manifest.h"

#include <array>
#include <charconv>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/json.h"

namespace stowage {
namespace {

struct Compute {
  Dtype dtype;
  std::string_view name;
};
constexpr std::array<Compute, 4> kComputes{
    {{Dtype::f64, "f64"}, {Dtype::f32, "f32"}, {Dtype::bf16, "bf16"}, {Dtype::f16, "f16"}}};

class ManifestVisitor final : public JsonVisitor {
 public:
  explicit ManifestVisitor(const Place& place) : JsonVisitor(place) {}

  void open(JsonPath path, bool array) override;
  void leaf(JsonPath path, const JsonLeaf& value) override;
  void close(JsonPath path) override;
  Manifest take() { return std::move(manifest_); }

 private:
  struct Entry {
    std::optional<Storage> storage;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<Dtype> compute;
  };

  void weight_leaf(JsonPath path, const JsonLeaf& value);
  void finish_weight(const std::string& name);

  bool has_version_ = false;
  Entry entry_;
  Manifest manifest_;
};

void ManifestVisitor::open(JsonPath path, bool array) {
  if (path.empty()) return;
  const bool weights = path[0] == "weights";
  if (!weights && path[0] != "xxh3") {
    if (path[0] == "version" || path[0] == "set") refuse_type(path, "a bare value");
    refuse(Refusal::unknown_key, to_string(path));
  }
  const bool shape = weights && path.size() == 3 && path[2] == "shape";
  if (array != shape) refuse_type(path, shape ? "an array" : "an object");
  if (path.size() > (weights ? 2U : 1U) && !shape) refuse_type(path, "a bare value");
  if (weights && path.size() == 2) entry_ = {};
  if (shape) entry_.shape.emplace();
}

void ManifestVisitor::leaf(JsonPath path, const JsonLeaf& value) {
  if (path[0] == "version") {
    has_version_ = true;
    const std::uint64_t version = whole(path, value);
    if (version != 1) refuse(Refusal::manifest_version, std::to_string(version));
  } else if (path[0] == "set") {
    manifest_.set = text(path, value);
  } else if (path[0] == "weights") {
    weight_leaf(path, value);
  } else if (path[0] == "xxh3") {
    if (path.size() == 1) refuse_type(path, "an object");
    set_tensor(path[1]);
    const auto checksum = from_hex(text(path, value));
    if (!checksum) refuse(Refusal::manifest_value, "checksum " + in_quotes(value.text));
    manifest_.checksums.emplace(path[1], *checksum);
  } else {
    refuse(Refusal::unknown_key, to_string(path));
  }
}

void ManifestVisitor::weight_leaf(JsonPath path, const JsonLeaf& value) {
  if (path.size() < 3) refuse_type(path, "an object");
  set_tensor(path[1]);
  if (path[2] == "storage") {
    const std::string storage = text(path, value);
    try {
      entry_.storage = parse_storage(storage);
    } catch (const Error&) {
      refuse(Refusal::manifest_value, "storage " + in_quotes(storage));
    }
  } else if (path[2] == "compute") {
    entry_.compute = compute_from_name(text(path, value));
    if (!entry_.compute) refuse(Refusal::manifest_value, "compute " + in_quotes(value.text));
  } else if (path[2] != "shape") {
    refuse(Refusal::unknown_key, to_string(path));
  } else if (path.size() == 3) {
    refuse_type(path, "an array");
  } else {
    const auto size = checked_cast<std::int64_t>(whole(path, value));
    if (!size || entry_.shape->size() == Shape::kMaxRank) {
      refuse(Refusal::manifest_value, "a longer or larger shape");
    }
    entry_.shape->push_back(*size);
  }
}

void ManifestVisitor::close(JsonPath path) {
  if (path.empty() && !has_version_) refuse(Refusal::missing_key, "no 'version'");
  if (path.size() == 2 && path[0] == "weights") finish_weight(path[1]);
  set_tensor("");  // what follows is about another one
}

void ManifestVisitor::finish_weight(const std::string& name) {
  set_tensor(name);
  if (!entry_.storage) refuse(Refusal::missing_key, "no 'storage'");
  if (!entry_.shape) refuse(Refusal::missing_key, "no 'shape'");
  try {
    const Shape shape(*entry_.shape);
    (void)layout(*entry_.storage, shape);
    manifest_.weights.emplace(name, ManifestWeight{*entry_.storage, shape, entry_.compute});
  } catch (const Error& error) {
    refuse(Refusal::manifest_value, in_quotes(error.what()));
  }
}

std::string weight_text(const std::string& name, const ManifestWeight& weight) {
  std::string text = formatted(R"({}:{{"storage":"{}","shape":{})", json_string(name),
                               to_string(weight.storage), json_array(weight.shape.sizes()));
  if (weight.compute) text += formatted(R"(,"compute":"{}")", compute_name(*weight.compute));
  return text + "}";
}

}  // namespace

Manifest parse_manifest(const Place& place, std::string_view json) {
  ManifestVisitor visitor(place);
  walk_json(json, visitor);
  return visitor.take();
}

std::string manifest_text(const Manifest& manifest) {
  std::string text = R"({"version":1)";
  if (!manifest.set.empty()) text += formatted(R"(,"set":"{}")", manifest.set);
  text += R"(,"weights":{)";
  const char* comma = "";
  for (const auto& [name, weight] : manifest.weights) {
    text += std::exchange(comma, ",") + weight_text(name, weight);
  }
  text += R"(},"xxh3":{)";
  comma = "";
  for (const auto& [name, checksum] : manifest.checksums) {
    text += formatted(R"({}{}:"{}")", std::exchange(comma, ","), json_string(name), hex(checksum));
  }
  return text + "}}";
}

std::string hex(std::uint64_t value) { return formatted("{:016x}", value); }

std::optional<std::uint64_t> from_hex(std::string_view text) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, 16);
  if (text.size() != 16 || stop != end || error != std::errc{}) return std::nullopt;
  return value;
}

std::string compute_name(Dtype dtype) {
  for (const Compute& row : kComputes) {
    if (row.dtype == dtype) return std::string(row.name);
  }
  throw Error(Code::invalid_argument,
              "compute dtype: must be f64, f32, bf16 or f16, got " + std::string(disk_name(dtype)));
}

std::optional<Dtype> compute_from_name(std::string_view name) {
  for (const Compute& row : kComputes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace stowage
