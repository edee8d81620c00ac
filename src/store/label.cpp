// SPDX-License-Identifier: Apache-2.0
#include "store/label.h"

#include <vector>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/json.h"
#include "store/quant_state.h"
#include "store/scale_shape.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

class LabelVisitor final : public JsonVisitor {
 public:
  explicit LabelVisitor(const Place& place) : JsonVisitor(place) {}

  void open(JsonPath path, bool array) override {
    if (path.empty()) return;
    if (path.size() > 1 || path[0] != "shape") refuse_type(path, "a bare value");
    if (!array) refuse_type(path, "an array");
    shape_.emplace();
  }
  void leaf(JsonPath path, const JsonLeaf& value) override {
    const std::string& key = path[0];
    if (key == "version") {
      version_ = whole(path, value);
      if (version_ != 1) refuse(Refusal::manifest_version, std::to_string(*version_));
    } else if (key == "storage") {
      storage_ = text(path, value);
    } else if (key != "shape") {
      refuse(Refusal::unknown_key, in_quotes(key));
    } else if (path.size() == 1) {
      refuse_type(path, "an array");
    } else {
      const auto size = checked_cast<std::int64_t>(whole(path, value));
      if (!size || shape_->size() == Shape::kMaxRank) {
        refuse(Refusal::manifest_value, "a longer or larger shape");
      }
      shape_->push_back(*size);
    }
  }
  void close(JsonPath path) override {
    if (!path.empty()) return;
    if (!version_) refuse(Refusal::missing_key, "no 'version'");
    if (!storage_) refuse(Refusal::missing_key, "no 'storage'");
    if (!shape_) refuse(Refusal::missing_key, "no 'shape'");
    try {
      made_ = {parse_storage(*storage_), Shape(*shape_), {}};
      (void)layout(made_.storage, made_.shape);
    } catch (const Error& error) {
      refuse(Refusal::manifest_value, in_quotes(error.what()));
    }
  }
  ManifestWeight take() const { return made_; }

 private:
  std::optional<std::uint64_t> version_;
  std::optional<std::string> storage_;
  std::optional<std::vector<std::int64_t>> shape_;
  ManifestWeight made_;
};

}  // namespace

ManifestWeight parse_label(const Place& place, std::string_view json) {
  LabelVisitor visitor(place);
  walk_json(json, visitor);
  return visitor.take();
}

inline namespace v0 {

std::string label(const Storage& storage, const Shape& shape) {
  (void)layout(storage, shape);
  return formatted(R"({{"version": 1, "storage": "{}", "shape": {}}})", to_string(storage),
                   to_string(shape));
}

bool needs_label(const Storage& storage, const Shape& shape) {
  const auto declared = disk_layout("w", storage, shape);
  if (has_quant_state(storage) || declared.size() == 1) return false;
  if (declared.size() != 2) return true;  // nf4:torchao: nothing has its shape
  const auto info = [](const Declaration& d) {
    return TensorInfo{.name = d.name, .dtype = d.dtype, .dtype_name = {}, .shape = d.shape};
  };
  try {
    return storage_from_scale(storage.codes, info(declared[0]), info(declared[1]), {}) != storage;
  } catch (const Error&) {
    return true;
  }
}

}  // namespace v0
}  // namespace stowage
