// SPDX-License-Identifier: Apache-2.0
#include "store/model_path.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "store/refusal.h"
#include "stowage/error.h"

namespace stowage {
namespace {

using Names = std::vector<std::string>;

Names visible_names(const std::string& folder) {
  Names names = names_in(folder);
  std::erase_if(names, [](const std::string& name) { return name.starts_with('.'); });
  std::ranges::sort(names);
  return names;
}

Names ending_in(const Names& names, std::string_view ending) {
  Names found;
  std::ranges::copy_if(names, std::back_inserter(found),
                       [&](const std::string& name) { return name.ends_with(ending); });
  return found;
}

// Of the names that end so, the one to open: "model" + ending before others; "" for none.
std::string choose(const std::string& folder, const Names& names, std::string_view ending) {
  const Names found = ending_in(names, ending);
  const std::string usual = "model" + std::string(ending);
  if (std::ranges::find(found, usual) != found.end()) return usual;
  if (found.size() < 2) return found.empty() ? "" : found[0];
  std::string list;
  for (const std::string& name : found) list += (list.empty() ? "" : ", ") + in_quotes(name);
  refuse(Refusal::folder_ambiguous, {folder, "", {}}, list);
}

// How many shards there are by the name of one, as "model-00002-of-00005.safetensors"; else 1.
int shards_of(std::string_view name) {
  const std::size_t of = name.rfind("-of-");
  if (of == name.npos || !name.ends_with(kFileEnding)) return 1;
  name.remove_suffix(kFileEnding.size());
  const std::string_view digits = name.substr(of + 4);
  int count = 1;
  const char* const end = digits.data() + digits.size();
  const auto [last, error] = std::from_chars(digits.data(), end, count);
  return error == std::errc() && last == end ? count : 1;
}

}  // namespace

ModelPath find_model(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return {path, path.ends_with(kIndexEnding)};
  const Names names = visible_names(path);
  const std::string prefix = path.ends_with('/') ? path : path + "/";
  const std::string index = choose(path, names, kIndexEnding);
  if (!index.empty()) {
    // The same stem twice is two models; other files beside an index are its shards or strangers.
    const std::string whole =
        index.substr(0, index.size() - kIndexEnding.size()) + std::string(kFileEnding);
    if (std::ranges::find(names, whole) != names.end()) {
      refuse(Refusal::folder_ambiguous, {path, "", {}}, in_quotes(index) + ", " + in_quotes(whole));
    }
    return {prefix + index, true};
  }
  std::string file = choose(path, names, kFileEnding);
  if (file.empty()) file = choose(path, names, kGgufEnding);
  if (file.empty()) refuse(Refusal::folder_empty, {path, "", {}}, "none");
  if (shards_of(file) != 1) refuse(Refusal::index_missing, {path, "", {}}, in_quotes(file));
  return {prefix + file, false};
}

}  // namespace stowage
