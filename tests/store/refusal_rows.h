// SPDX-License-Identifier: Apache-2.0
// The table of bad files, in parts: one row for each way a file is refused says what lies in the
// folder and what the error must name. refusal_test.cpp opens them all.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "scratch.h"
#include "store/refusal.h"

namespace stowage::test {

using Make = std::function<void(const Scratch&)>;  // leaves something bad in the folder

struct Row {
  Refusal why;
  const char* label;
  Make make;
  std::vector<std::string> words;  // what the message holds beside path and rule: tensor, byte, ...
};

inline std::vector<Row>& all_rows() {
  static std::vector<Row> rows;
  return rows;
}
/// Adds rows to the table before main().
struct Rows {
  explicit Rows(std::vector<Row> rows) {
    for (Row& row : rows) all_rows().push_back(std::move(row));
  }
};

/// A folder whose model.safetensors has this content; or this header and so many data bytes.
inline Make file(std::string content) {
  return
      [content = std::move(content)](const Scratch& s) { s.write("model.safetensors", content); };
}
inline Make header(const std::string& json, std::size_t data_bytes = 0) {
  return file(safetensors(json, std::string(data_bytes, 'x')));
}
/// A header whose one tensor t has these fields.
inline std::string entry(const std::string& fields) { return "{\"t\":{" + fields + "}}"; }
inline std::string tensor(const std::string& name, const std::string& dtype,
                          const std::string& shape, std::uint64_t begin, std::uint64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}
/// One tensor a of two bytes.
inline std::string small_file() {
  return safetensors("{" + tensor("a", "U8", "[2]", 0, 2) + "}", "xx");
}
/// A length field and spaces, no header.
inline std::string length_only(std::uint64_t length, std::size_t padding = 8) {
  return std::string(reinterpret_cast<const char*>(&length), 8) + std::string(padding, ' ');
}

}  // namespace stowage::test
