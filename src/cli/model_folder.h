// SPDX-License-Identifier: Apache-2.0
// Where a command writes: one file, or a folder with the weights and the small files that a model
// needs beside them. What is not committed is taken away again.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "cli/folder_claim.h"

namespace stowage::cli {

/// What OUT gets instead of a copy.
struct SideFiles {
  std::optional<std::string> config{};        // of config.json
  std::map<std::string, std::string> made{};  // further files by their names
  bool says_quantized = false;  // those of IN that only say how its weights are quantized stay away
};

class Output {
 public:
  /// `out` ends in .safetensors: a file, new unless `force`. Otherwise a folder: new,
  /// empty, or with what a command left that was killed. Throws io.
  Output(std::string in, std::string out, bool force);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// For Writer; its folder exists.
  const std::string& weights_path() const noexcept { return weights_; }
  bool is_folder() const noexcept { return folder_; }
  /// The text of the model's config.json, where IN is a folder that has one.
  std::optional<std::string> config() const;
  std::string config_path() const;
  /// Copies configuration and tokenizer files from IN to OUT, where both are folders, and writes
  /// what is made; a config.json is made anew where IN has none.
  void copy_side_files(const SideFiles& side) const;
  void commit() noexcept;

 private:
  std::string in_, out_, weights_, created_;  // created_: the topmost new folder
  bool folder_ = false, committed_ = false;
  std::optional<FolderClaim> claim_;
};

}  // namespace stowage::cli
