// SPDX-License-Identifier: Apache-2.0
// A model as the files of a dialect: asked of its row, and read back before anything is written.
#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/wording.h"
#include "store/weights.h"

namespace stowage {
namespace dialects {
namespace {

// A dialect, and which of its forms.
struct Asked {
  const FileDialect* dialect = nullptr;
  std::string_view form;
};

Asked asked_for(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const std::string_view form = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  for (const FileDialect* const dialect : file_dialects())
    if (dialect->name == name && dialect->write != nullptr &&
        (form.empty() || std::ranges::count(dialect->forms, form) != 0))
      return {dialect, colon == std::string_view::npos ? "" : form};
  std::string all;
  for (const std::string& one : written_dialects()) all += (all.empty() ? "" : ", ") + one;
  throw Error(Code::invalid_argument,
              formatted("dialect: must be one of {}, got {}", all, in_quotes(text)));
}

// Whether it can hold the weight; its tensors are then added.
bool say(const FileDialect& dialect, Wording& wording, const WeightInfo& weight) {
  if (dialect.write == nullptr) return false;
  wording.next_weight();
  try {
    (void)layout(weight.storage, weight.shape);
  } catch (const Error&) {
    return false;
  }
  return dialect.write(wording, weight);
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// It, and those that hold its values too, the nearest first.
std::vector<Storage> same_values(const Storage& storage) {
  const auto narrow = {ScaleType::bf16, ScaleType::f16, ScaleType::e8m0};
  std::vector<Storage> found{storage};
  if (storage.scaling.zero > Zero::code) return found;
  if (std::ranges::count(narrow, storage.scaling.type) != 0) {
    found.push_back(storage);
    found.back().scaling.type = ScaleType::f32;
  }
  if (storage.codes != Codes::int4 || storage.scaling.zero != Zero::none) return found;
  for (std::size_t i = 0, count = found.size(); i < count; ++i) {
    found.push_back(found[i]);
    found.back().scaling.zero = Zero::code;
  }
  return found;
}

[[noreturn]] void refuse_weight(std::string_view dialect, const WeightInfo& weight) {
  const std::vector<std::string> others = dialects_of(weight);
  throw Error(Code::unsupported,
              formatted("{}: must rest in a storage that {} has, got {} {}; it is held by {}",
                        weight.name, dialect, to_string(weight.storage), to_string(weight.shape),
                        others.empty() ? "no dialect" : listed(others)));
}

// The tensors of the files as their reader will find them: without places.
class Draft {
 public:
  Draft(const DialectFiles& files, const DialectModel& model) {
    for (const auto& weight : files.weights) add_all(weight);
    add_all(files.markers);
    for (const Declaration& other : model.others) add(other, nullptr);
    std::ranges::sort(tensors_, {}, &TensorInfo::name);
    const auto quantization = files.config.find("quantization_config");
    if (quantization == files.config.end()) return;
    std::string text = "{";
    for (const auto& [key, value] : files.config)
      text += formatted("{}\"{}\":{}", text.size() == 1 ? "" : ",", key, value);
    config_ = QuantConfig::parse("config.json", text + "}");
  }
  FoundWeights read(const DialectFiles& files) const {
    const auto bytes = [this](const TensorInfo& tensor) {
      const auto at = texts_.find(tensor.name);
      return at == texts_.end() ? std::string(tensor.bytes, '\0') : *at->second;
    };
    return find_weights({.paths = {"the files to write"},
                         .tensors = tensors_,
                         .read = bytes,
                         .metadata = {&files.metadata},
                         .config = config_ ? &*config_ : nullptr});
  }

 private:
  void add_all(const std::vector<DialectTensor>& tensors) {
    for (const DialectTensor& tensor : tensors)
      add(tensor.declaration, tensor.from == DialectTensor::From::part ? nullptr : &tensor.text);
  }
  void add(const Declaration& declared, const std::string* text) {
    TensorInfo made{declared.name, declared.dtype, std::string(disk_name(declared.dtype)),
                    declared.shape};
    made.bytes = declared.dtype == Dtype::unknown
                     ? declared.bytes
                     : static_cast<std::uint64_t>(declared.shape.elements()) *
                           static_cast<std::uint64_t>(bits(declared.dtype)) / 8;
    if (!names_.insert(made.name).second)
      throw Error(Code::unsupported,
                  formatted("tensor {}: must be one tensor, two would have the name",
                            in_quotes(made.name)));
    if (text != nullptr) texts_.emplace(made.name, text);
    tensors_.push_back(std::move(made));
  }

  std::vector<TensorInfo> tensors_;
  std::set<std::string> names_;
  std::map<std::string, const std::string*> texts_;
  std::optional<QuantConfig> config_;
};

// A file that would be read as something else is not written.
void check_read(const FileDialect& dialect, const DialectFiles& files, const DialectModel& model) {
  FoundWeights found;
  try {
    found = Draft(files, model).read(files);
  } catch (const Error& error) {
    throw Error(Code::unsupported,
                formatted("dialect {}: cannot hold this model: {}", dialect.name, error.what()));
  }
  const auto unlike = [&](const WeightInfo& weight) {
    const auto at = std::ranges::find(found.weights, weight.name, &WeightInfo::name);
    return at == found.weights.end() || at->storage != weight.storage || at->shape != weight.shape;
  };
  const auto at = std::ranges::find_if(model.weights, unlike);
  if (at != model.weights.end()) refuse_weight(dialect.name, *at);
  if (found.dialect != dialect.name)
    throw Error(Code::unsupported,
                formatted("dialect {}: must be shown by its files, which show {}", dialect.name,
                          in_quotes(found.dialect)));
}

}  // namespace
}  // namespace dialects

inline namespace v0 {

std::vector<std::string> written_dialects() {
  std::vector<std::string> names;
  for (const dialects::FileDialect* const dialect : dialects::file_dialects()) {
    if (dialect->write == nullptr) continue;
    names.emplace_back(dialect->name);
    for (const std::string_view form : dialect->forms)
      names.push_back(formatted("{}:{}", dialect->name, form));
  }
  return names;
}

std::vector<std::string> dialects_of(const WeightInfo& weight) {
  const DialectModel model{{weight}};
  std::vector<std::string> names;
  for (const dialects::FileDialect* const dialect : dialects::file_dialects()) {
    dialects::Wording wording("", model);
    if (dialects::say(*dialect, wording, weight)) names.emplace_back(dialect->name);
  }
  return names;
}

std::optional<Storage> storage_in_dialect(std::string_view dialect, const WeightInfo& weight) {
  const dialects::Asked asked = dialects::asked_for(dialect);
  for (const Storage& storage : dialects::same_values(weight.storage)) {
    WeightInfo as = weight;
    as.storage = storage;
    const DialectModel model{{as}};
    dialects::Wording wording(asked.form, model);
    if (dialects::say(*asked.dialect, wording, as)) return storage;
  }
  return std::nullopt;
}

DialectFiles in_dialect(std::string_view dialect, const DialectModel& model) {
  const dialects::Asked asked = dialects::asked_for(dialect);
  dialects::Wording wording(asked.form, model);
  for (const WeightInfo& weight : model.weights)
    if (!dialects::say(*asked.dialect, wording, weight)) dialects::refuse_weight(dialect, weight);
  if (model.weights.empty())
    throw Error(Code::unsupported,
                formatted("dialect {}: must hold a weight that rests, got none", dialect));
  asked.dialect->finish(wording);
  DialectFiles files = wording.take();
  dialects::check_read(*asked.dialect, files, model);
  return files;
}

std::vector<std::byte> dialect_bytes(const DialectTensor& tensor, const Weight& weight,
                                     Dtype compute) {
  const auto copy = [](std::string_view text) {
    const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const Layout made = layout(weight.storage(), weight.shape());
  if (tensor.from == DialectTensor::From::text) return copy(tensor.text);
  if (tensor.from == DialectTensor::From::quant_state) {
    float offset = 0;
    if (weight.storage().scaling.nested)
      std::memcpy(&offset, weight.part(made.count - 1), sizeof offset);
    return copy(quant_state(weight.storage(), weight.shape(), compute, offset));
  }
  const Part& part = made.parts[static_cast<std::size_t>(tensor.part)];
  PartForm form = tensor.form;
  form.rounded = false;
  return tensor_of_part(form,
                        {static_cast<const std::byte*>(weight.part(tensor.part)),
                         static_cast<std::size_t>(part.bytes)},
                        part.shape);
}

}  // namespace v0
}  // namespace stowage
