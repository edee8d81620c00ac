// SPDX-License-Identifier: Apache-2.0
// The fields of a JSON document of ours: each must be there and of its type, keys that are not
// asked for are left alone.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "store/refusal.h"

namespace stowage {

/// Parses a document whose root is an object. Throws bad_file, also for repeated keys.
nlohmann::json parse_document(std::string_view text, std::string_view where);
/// The same of a text that begins at a byte of a file, for errors that say the byte.
nlohmann::json parse_document(std::string_view text, const Place& place);

/// An object of the document, and where it stands there.
class JsonFields {
 public:
  /// Throws bad_file unless `object` is one.
  JsonFields(const nlohmann::json& object, std::string where);

  std::string text(const char* key) const;
  std::uint64_t whole(const char* key) const;
  double number(const char* key) const;  // at least 0
  bool flag(const char* key) const;
  JsonFields fields(const char* key) const;
  const nlohmann::json& list(const char* key) const;
  std::map<std::string, std::uint64_t> wholes(const char* key) const;  // name to whole number
  const nlohmann::json& all() const noexcept { return object_; }
  const std::string& where() const noexcept { return where_; }
  [[noreturn]] void refuse(const std::string& key, const std::string& rule) const;

 private:
  const nlohmann::json& at(const char* key) const;
  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace stowage
