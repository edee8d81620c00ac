// SPDX-License-Identifier: Apache-2.0
#include "store/quant_config.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/formatted.h"
#include "store/header.h"
#include "store/json_fields.h"

namespace stowage {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

// Past the string that begins at `at`, or npos.
std::size_t skip_string(std::string_view json, std::size_t at) {
  for (++at; at < json.size(); ++at) {
    if (json[at] == '\\')
      ++at;
    else if (json[at] == '"')
      return at + 1;
  }
  return std::string_view::npos;
}

// Past the value that begins at `at`: up to a comma or the end of what holds it.
std::size_t skip_value(std::string_view json, std::size_t at) {
  int depth = 0;
  while (at < json.size()) {
    const char c = json[at];
    if (c == '"') {
      at = skip_string(json, at);
      if (at == std::string_view::npos) return at;
      continue;
    }
    if (c == '{' || c == '[') ++depth;
    if ((c == ',' || c == '}' || c == ']') && depth == 0) return at;
    if (c == '}' || c == ']') --depth;
    ++at;
  }
  return std::string_view::npos;
}

std::optional<std::string> read_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return std::nullopt;
  std::ifstream in(path, std::ios::binary);
  std::string text;
  if (in && std::filesystem::file_size(path, error) > kMaxHeader)
    refuse(Refusal::header_too_long, {path, "", 0}, "a longer file");
  if (in) text.assign(std::istreambuf_iterator<char>(in), {});
  if (!in && !in.eof())
    throw Error(Code::io,
                path + ": must be readable, got " + std::generic_category().message(errno));
  return text;
}

// A text without escapes; "" for anything else.
std::string text_of(std::string_view json, std::string_view key) {
  const auto member = find_member(json, key);
  if (!member || member->size < 2 || json[member->begin] != '"') return "";
  return std::string(json.substr(member->begin + 1, member->size - 2));
}

std::optional<Dtype> compute_of(std::string_view json) {
  constexpr std::array<std::pair<std::string_view, Dtype>, 4> kNames{{{"\"bfloat16\"", Dtype::bf16},
                                                                      {"\"float16\"", Dtype::f16},
                                                                      {"\"float32\"", Dtype::f32},
                                                                      {"\"float64\"", Dtype::f64}}};
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto member = find_member(json, key);
    if (!member) continue;
    const std::string_view said = json.substr(member->begin, member->size);
    for (const auto& [name, dtype] : kNames)
      if (said == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace

std::optional<JsonMember> find_member(std::string_view json, std::string_view key) {
  constexpr auto kNone = std::string_view::npos;
  std::size_t at = json.find_first_not_of(kSpace);
  if (at == kNone || json[at] != '{') return std::nullopt;
  for (++at;; ++at) {
    at = json.find_first_not_of(kSpace, at);
    if (at == kNone || json[at] != '"') return std::nullopt;
    const std::size_t name = at + 1, name_end = skip_string(json, at);
    if (name_end == kNone) return std::nullopt;
    at = json.find_first_not_of(kSpace, name_end);
    if (at == kNone || json[at] != ':') return std::nullopt;
    const std::size_t begin = json.find_first_not_of(kSpace, at + 1);
    if (begin == kNone) return std::nullopt;
    at = skip_value(json, begin);
    const bool found = json.substr(name, name_end - 1 - name) == key;
    if (found) {
      const std::size_t end = json.find_last_not_of(kSpace, at == kNone ? at : at - 1) + 1;
      return JsonMember{begin, std::max(end, begin) - begin};
    }
    if (at == kNone || json[at] != ',') return std::nullopt;
  }
}

QuantConfig::QuantConfig(Place place, std::string_view object)
    : place_(std::move(place)), all_(parse_document(object, place_)) {}

std::optional<QuantConfig> QuantConfig::parse(const std::string& path, std::string_view text) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    const auto member = find_member(text, key);
    if (!member) continue;
    const std::string_view object = text.substr(member->begin, member->size);
    if (object == "null" || object == "{}") continue;
    QuantConfig made({path, "", member->begin}, object);
    made.compute_ = compute_of(text);
    made.expert_dtype_ = text_of(text, "expert_dtype");
    made.set_method();
    return made;
  }
  return std::nullopt;
}

void QuantConfig::set_method() {
  const auto said = text("quant_method");
  if (!said) refuse("no quant_method");
  method_ = *said;
}

// ModelOpt's own: {"producer": {"name": "modelopt", ...}, "quantization": {"quant_algo": "FP8"}}.
std::optional<QuantConfig> QuantConfig::in_folder(const std::string& folder) {
  const std::string path = folder + "/config.json", other = folder + "/hf_quant_config.json";
  const auto text = read_file(path);
  if (text) {
    auto made = parse(path, *text);
    if (made) return made;
  }
  const auto exported = read_file(other);
  if (!exported) return std::nullopt;
  const auto member = find_member(*exported, "quantization");
  if (!member) return std::nullopt;
  QuantConfig made({other, "", member->begin},
                   std::string_view(*exported).substr(member->begin, member->size));
  if (text) made.compute_ = compute_of(*text);
  made.method_ = "modelopt";
  return made;
}

void QuantConfig::refuse(const std::string& got) const {
  stowage::refuse(Refusal::dialect_config, place_, got);
}

std::optional<std::string> QuantConfig::text(const char* key) const {
  const auto at = all_.find(key);
  if (at == all_.end() || at->is_null()) return std::nullopt;
  if (!at->is_string()) refuse(formatted("{} {}", key, in_quotes(at->dump())));
  return at->get<std::string>();
}

std::vector<std::string> QuantConfig::texts(const char* key) const {
  const auto at = all_.find(key);
  std::vector<std::string> found;
  if (at == all_.end() || at->is_null()) return found;
  const bool legal =
      at->is_array() && std::ranges::all_of(*at, [](const auto& e) { return e.is_string(); });
  if (!legal) refuse(formatted("{} {}", key, in_quotes(at->dump())));
  for (const auto& element : *at) found.push_back(element.get<std::string>());
  return found;
}

bool QuantConfig::lists(const char* key, std::string_view module) const {
  return std::ranges::any_of(texts(key), [module](const std::string& listed) {
    return module == listed || module.starts_with(listed + ".") || module.ends_with("." + listed);
  });
}

}  // namespace stowage
