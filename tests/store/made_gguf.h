// SPDX-License-Identifier: Apache-2.0
// Small GGUF files, and wrong ones.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace stowage::test {

template <class T>
std::string gguf_number(T value) {
  std::string made(sizeof value, '\0');
  std::memcpy(made.data(), &value, sizeof value);
  return made;
}
inline std::string gguf_text(const std::string& text) {
  return gguf_number<std::uint64_t>(text.size()) + text;
}
/// A key with the number of its type and the bytes of its value.
inline std::string gguf_key(const std::string& key, std::uint32_t type, const std::string& value) {
  return gguf_text(key) + gguf_number(type) + value;
}

struct GgufTensor {
  std::string name;
  std::vector<std::uint64_t> sizes;  // that of a row first
  std::uint32_t type = 0;            // F32
  std::uint64_t offset = 0;          // in the data
};
/// The bytes of a file with these keys, tensors, and bytes of data.
inline std::string gguf(const std::vector<std::string>& keys,
                        const std::vector<GgufTensor>& tensors, const std::string& data,
                        std::uint64_t alignment = 32) {
  std::string made = "GGUF" + gguf_number<std::uint32_t>(3) +
                     gguf_number<std::uint64_t>(tensors.size()) +
                     gguf_number<std::uint64_t>(keys.size());
  for (const std::string& key : keys) made += key;
  for (const GgufTensor& tensor : tensors) {
    made += gguf_text(tensor.name) + gguf_number(static_cast<std::uint32_t>(tensor.sizes.size()));
    for (const std::uint64_t size : tensor.sizes) made += gguf_number(size);
    made += gguf_number(tensor.type) + gguf_number(tensor.offset);
  }
  made.append((alignment - made.size() % alignment) % alignment, '\0');
  return made + data;
}

}  // namespace stowage::test
