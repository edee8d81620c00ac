// SPDX-License-Identifier: Apache-2.0
// What a path means: a file, an index, or a folder that holds one model.
#pragma once
#include <string>

namespace stowage {

inline constexpr std::string_view kFileEnding = ".safetensors";
inline constexpr std::string_view kIndexEnding = ".safetensors.index.json";
inline constexpr std::string_view kGgufEnding = ".gguf";

struct ModelPath {
  std::string path;
  bool is_index = false;
};
/// In a folder: `model.safetensors.index.json` or `model.safetensors`, else the only index, else
/// the only *.safetensors; without any of these the only *.gguf. Hidden files do not count. Throws
/// io; bad_file naming the candidates where the folder holds none or more than one, or one shard of
/// many without their index, as a writer leaves it that was killed.
ModelPath find_model(const std::string& path);

}  // namespace stowage
