// SPDX-License-Identifier: Apache-2.0
#include "store/quant_state.h"

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/json.h"
#include "store/manifest.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

constexpr std::uint64_t kNestedBlock = 256;

class StateVisitor final : public JsonVisitor {
 public:
  explicit StateVisitor(const Place& place) : JsonVisitor(place) {}

  void open(JsonPath path, bool array) override {
    if (path.empty()) return;
    if (path.size() > 1 || path[0] != "shape") refuse_type(path, "a bare value");
    if (!array) refuse_type(path, "an array");
    shape_.emplace();
  }
  void leaf(JsonPath path, const JsonLeaf& value) override;
  void close(JsonPath path) override {
    if (path.empty()) finish();
  }
  QuantState take() const { return state_; }

 private:
  void check_word(JsonPath path, const JsonLeaf& value, std::string_view expected) const {
    if (text(path, value) != expected) refuse_value(path, in_quotes(value.text));
  }
  [[noreturn]] void refuse_value(JsonPath path, const std::string& got) const {
    refuse(Refusal::quant_state_value, to_string(path) + ": " + got);
  }
  void add_size(JsonPath path, const JsonLeaf& value);
  void set_dtype(JsonPath path, const JsonLeaf& value);
  void finish();

  std::optional<std::string> quant_type_;
  std::optional<std::uint64_t> block_, nested_block_;
  std::optional<std::vector<std::int64_t>> shape_;
  std::optional<float> offset_;
  bool has_dtype_ = false, has_nested_dtype_ = false;
  QuantState state_;
};

void StateVisitor::leaf(JsonPath path, const JsonLeaf& value) {
  const std::string& key = path[0];
  if (key == "shape") {
    add_size(path, value);
  } else if (key == "quant_type") {
    quant_type_ = text(path, value);
  } else if (key == "blocksize") {
    block_ = whole(path, value);
  } else if (key == "dtype") {
    set_dtype(path, value);
  } else if (key == "nested_blocksize") {
    nested_block_ = whole(path, value);
    if (nested_block_ != kNestedBlock) refuse_value(path, std::to_string(*nested_block_));
  } else if (key == "nested_dtype") {
    check_word(path, value, "float32");
    has_nested_dtype_ = true;
  } else if (key == "nested_offset") {
    if (value.kind != JsonLeaf::Kind::number && value.kind != JsonLeaf::Kind::whole) {
      refuse_type(path, "a number");
    }
    if (!(std::abs(value.number) <= std::numeric_limits<float>::max())) {
      refuse_value(path, formatted("{}", value.number));
    }
    offset_ = static_cast<float>(value.number);
  } else {
    refuse(Refusal::unknown_key, in_quotes(key));
  }
}

void StateVisitor::add_size(JsonPath path, const JsonLeaf& value) {
  if (path.size() == 1) refuse_type(path, "an array");
  const auto size = checked_cast<std::int64_t>(whole(path, value));
  if (!size || shape_->size() == Shape::kMaxRank) refuse_value(path, "a longer or larger shape");
  shape_->push_back(*size);
}

void StateVisitor::set_dtype(JsonPath path, const JsonLeaf& value) {
  const std::string word = text(path, value);
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32, Dtype::f64}) {
    if (torch_name(dtype) == word) {
      state_.compute = dtype;
      has_dtype_ = true;
      return;
    }
  }
  refuse_value(path, in_quotes(word));
}

void StateVisitor::finish() {
  for (const auto& [there, key] : {std::pair{quant_type_.has_value(), "quant_type"},
                                   {block_.has_value(), "blocksize"},
                                   {has_dtype_, "dtype"},
                                   {shape_.has_value(), "shape"}}) {
    if (!there) refuse(Refusal::missing_key, "no " + in_quotes(key));
  }
  const int nested = nested_block_.has_value() + has_nested_dtype_ + offset_.has_value();
  if (nested != 0 && nested != 3) {
    refuse(Refusal::missing_key, "some of nested_blocksize, nested_dtype, nested_offset");
  }
  if (*quant_type_ != "nf4" && *quant_type_ != "fp4") {
    refuse(Refusal::quant_state_value, "quant_type " + in_quotes(*quant_type_));
  }
  const std::string storage =
      formatted("{}:block{}{}", *quant_type_, *block_, nested == 3 ? ":nested" : "");
  try {
    state_.storage = parse_storage(storage);
    state_.shape = Shape(*shape_);
    (void)layout(state_.storage, state_.shape);
  } catch (const Error&) {
    refuse(Refusal::quant_state_value,
           formatted("{} of shape {}", in_quotes(storage), json_array(*shape_)));
  }
  state_.nested_offset = offset_.value_or(0);
}

// The longest text of a double that came from a float: sign, 17 digits, point, exponent.
constexpr std::size_t kOffsetWidth = 24;

std::string state_text(const Storage& storage, const Shape& shape, Dtype compute,
                       const std::string& offset) {
  std::string text = formatted(
      R"({{"quant_type": "{}", "blocksize": {}, "dtype": "{}", "shape": {})",
      trait(storage.codes).name, storage.scaling.block, torch_name(compute), to_string(shape));
  if (storage.scaling.nested) {
    text += formatted(R"(, "nested_blocksize": {}, "nested_dtype": "float32", "nested_offset": {})",
                      kNestedBlock, offset);
  }
  return text + "}";
}

}  // namespace

QuantState parse_quant_state(const Place& place, std::string_view json) {
  StateVisitor visitor(place);
  walk_json(json, visitor);
  return visitor.take();
}

inline namespace v0 {

std::string quant_state(const Storage& storage, const Shape& shape, Dtype compute,
                        float nested_offset) {
  if (!has_quant_state(storage)) {
    throw Error(Code::invalid_argument,
                "quant_state: the storage must be nf4 or fp4 of the standard dialect, got " +
                    to_string(storage));
  }
  if (!std::isfinite(nested_offset)) {
    throw Error(Code::invalid_argument,
                "quant_state: the nested offset must be finite to be stored, got " +
                    std::to_string(nested_offset));
  }
  if (!is_value_dtype(compute)) {
    throw Error(Code::invalid_argument,
                formatted("quant_state: the compute dtype must be f64, f32, bf16 or f16, got {}",
                          disk_name(compute)));
  }
  std::string offset = formatted("{}", static_cast<double>(nested_offset));
  if (offset.find_first_of(".e") == std::string::npos) offset += ".0";  // a float, as Python has it
  std::string text = state_text(storage, shape, compute, offset);
  const std::size_t width =
      state_text(storage, shape, Dtype::bf16, std::string(kOffsetWidth, '0')).size();
  return text + std::string(width - text.size(), ' ');
}

}  // namespace v0
}  // namespace stowage
