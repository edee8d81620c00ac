// SPDX-License-Identifier: Apache-2.0
// Models of dialects for the table of bad files: tensors, and the configuration beside them.
#pragma once
#include "store/refusal_rows.h"

namespace stowage::test {

struct Piece {
  std::string name, dtype, shape;
  std::size_t bytes;
  std::string content = {};  // none: ones
};

inline std::string content(const std::vector<Piece>& pieces, const std::string& metadata = "") {
  std::string entries = metadata, data;
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    entries += (entries.empty() ? "" : ",") +
               tensor(piece.name, piece.dtype, piece.shape, at, at + piece.bytes);
    at += piece.bytes;
    data += piece.content.empty() ? std::string(piece.bytes, '\1') : piece.content;
  }
  return safetensors("{" + entries + "}", data);
}

// A model beside a config.json with this quantization_config.
inline Make configured(const std::string& config, const std::vector<Piece>& pieces,
                       const std::string& metadata = "") {
  return [=](const Scratch& s) {
    s.write("model.safetensors", content(pieces, metadata));
    if (!config.empty())
      s.write("config.json", R"({"rate": Infinity, "quantization_config": )" + config + "}");
  };
}

inline std::string words_of(std::initializer_list<std::uint32_t> words) {
  std::string made;
  for (const std::uint32_t word : words)
    for (int byte = 0; byte < 4; ++byte) made += static_cast<char>(word >> 8 * byte & 0xff);
  return made;
}

}  // namespace stowage::test
