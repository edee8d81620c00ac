// SPDX-License-Identifier: Apache-2.0
#include "cli/model_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "cli/text.h"

namespace stowage::cli {
namespace {

namespace fs = std::filesystem;

// What a model's folder keeps beside its weights: configuration, tokenizer, templates, code.
constexpr std::array<std::string_view, 6> kSideEndings{".json",  ".txt",      ".model",
                                                       ".jinja", ".tiktoken", ".py"};
constexpr std::string_view kConfig = "config.json";
// Of which nothing else is said than how weights are quantized: ModelOpt's, and AutoGPTQ's.
constexpr std::array<std::string_view, 2> kQuantized{"hf_quant_config.json",
                                                     "quantize_config.json"};

bool is_side_file(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename();
  return entry.is_regular_file() && !name.starts_with('.') && !name.ends_with(".index.json") &&
         std::ranges::find(kSideEndings, entry.path().extension()) != kSideEndings.end();
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file && !file.eof())
    throw Error(Code::io, path.string() + ": must be readable, got " + std::strerror(errno));
  return text;
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file)
    throw Error(Code::io, path.string() + ": must be writable, got " + std::strerror(errno));
}

// The first of `path` and its parents that does not exist.
std::string topmost_missing(fs::path path) {
  fs::path missing;
  for (path = fs::absolute(path).lexically_normal(); !fs::exists(path); path = path.parent_path())
    missing = path;
  return missing;
}

}  // namespace

Output::Output(std::string in, std::string out, bool force)
    : in_(std::move(in)), out_(std::move(out)) {
  try {
    if (out_.ends_with(".safetensors")) {
      weights_ = out_;
      if (fs::exists(out_) && !force)
        throw Error(Code::io, out_ + ": must not exist yet (--force replaces it)");
      return;
    }
    folder_ = true;
    if (fs::exists(out_) &&
        !(fs::is_directory(out_) && (fs::is_empty(out_) || FolderClaim::is_marked(out_))))
      throw Error(Code::io, out_ + ": must be a new or empty folder, or end in .safetensors");
    created_ = topmost_missing(out_);
    fs::create_directories(out_);
    claim_.emplace(out_);
    weights_ = (fs::path(out_) / "model.safetensors").string();
  } catch (const fs::filesystem_error& error) {
    throw Error(Code::io, out_ + ": must be writable, got " + error.code().message());
  }
}

Output::~Output() {
  if (committed_ || !folder_) return;
  std::error_code ignored;  // the failure that led here is the one to tell
  if (!created_.empty())
    fs::remove_all(created_, ignored);
  else
    for (const auto& entry : fs::directory_iterator(out_, ignored))
      fs::remove_all(entry.path(), ignored);
}

void Output::commit() noexcept {
  committed_ = true;
  if (claim_) claim_->finish();
}

std::string Output::config_path() const { return (fs::path(in_) / kConfig).string(); }

std::optional<std::string> Output::config() const {
  if (!fs::is_directory(in_) || !fs::exists(config_path())) return std::nullopt;
  return read_text(config_path());
}

void Output::copy_side_files(const SideFiles& side) const {
  if (!folder_) return;
  std::map<std::string, std::string> made = side.made;
  if (side.config && (side.says_quantized || config())) made[std::string(kConfig)] = *side.config;
  try {
    if (fs::is_directory(in_)) {
      for (const auto& entry : fs::directory_iterator(in_)) {
        const std::string name = entry.path().filename();
        const bool stale = side.says_quantized && std::ranges::count(kQuantized, name) != 0;
        if (!is_side_file(entry) || stale || made.contains(name)) continue;
        write_text(fs::path(out_) / name, read_text(entry.path()));
      }
    }
  } catch (const fs::filesystem_error& error) {
    throw Error(Code::io, in_ + ": must be readable, got " + error.code().message());
  }
  for (const auto& [name, text] : made) write_text(fs::path(out_) / name, text);
}

}  // namespace stowage::cli
