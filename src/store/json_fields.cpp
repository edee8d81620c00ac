// SPDX-License-Identifier: Apache-2.0
#include "store/json_fields.h"

#include <cmath>

#include "store/json.h"
#include "stowage/error.h"

namespace stowage {
namespace {

// The walk refuses what is no JSON, repeated keys and deep nesting; the fields are looked up after.
class Anything : public JsonVisitor {
 public:
  using JsonVisitor::JsonVisitor;
  void open(JsonPath, bool) override {}
  void leaf(JsonPath, const JsonLeaf&) override {}
  void close(JsonPath) override {}
};

}  // namespace

nlohmann::json parse_document(std::string_view text, std::string_view where) {
  return parse_document(text, Place{std::string(where), "", std::nullopt});
}

nlohmann::json parse_document(std::string_view text, const Place& place) {
  Anything visitor(place);
  walk_json(text, visitor);
  return nlohmann::json::parse(text);
}

JsonFields::JsonFields(const nlohmann::json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object())
    throw Error(Code::bad_file, where_ + ": must be an object, got " + object.type_name());
}

void JsonFields::refuse(const std::string& key, const std::string& rule) const {
  throw Error(Code::bad_file, where_ + ": key '" + key + "' " + rule);
}

const nlohmann::json& JsonFields::at(const char* key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) refuse(key, "must be there, is not");
  return *found;
}

std::string JsonFields::text(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_string()) refuse(key, std::string("must be text, got ") + value.type_name());
  return value.get<std::string>();
}

std::uint64_t JsonFields::whole(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_number_unsigned()) refuse(key, "must be a whole number, got " + value.dump());
  return value.get<std::uint64_t>();
}

double JsonFields::number(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_number() || !(value.get<double>() >= 0) || !std::isfinite(value.get<double>()))
    refuse(key, "must be a number of at least 0, got " + value.dump());
  return value.get<double>();
}

bool JsonFields::flag(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_boolean()) refuse(key, "must be true or false, got " + value.dump());
  return value.get<bool>();
}

JsonFields JsonFields::fields(const char* key) const {
  return {at(key), where_ + ": '" + key + "'"};
}

const nlohmann::json& JsonFields::list(const char* key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_array()) refuse(key, std::string("must be a list, got ") + value.type_name());
  return value;
}

std::map<std::string, std::uint64_t> JsonFields::wholes(const char* key) const {
  const JsonFields inner = fields(key);
  std::map<std::string, std::uint64_t> found;
  for (const auto& [name, value] : inner.all().items()) found[name] = inner.whole(name.c_str());
  return found;
}

}  // namespace stowage
