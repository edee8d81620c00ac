// SPDX-License-Identifier: Apache-2.0
// Strict JSON reading for everything that comes from a file: a walk over one document that refuses
// bad syntax, bad UTF-8, repeated keys and deep nesting, and tells a visitor the rest.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "store/refusal.h"

namespace stowage {

/// The keys that lead to a value. The element of an array adds kElement.
using JsonPath = std::span<const std::string>;
inline constexpr std::string_view kElement = "[]";
std::string to_string(JsonPath path);

/// A value that is neither object nor array.
struct JsonLeaf {
  enum class Kind : std::uint8_t { string, whole, number, boolean, null } kind = Kind::null;
  std::string text{};       // string
  std::uint64_t whole = 0;  // whole: a number >= 0 without fraction or exponent
  double number = 0;        // whole and number
};

/// Says what a document may hold: each call refuses what the format does not know.
class JsonVisitor {
 public:
  explicit JsonVisitor(Place place) : place_(std::move(place)), start_(place_.byte.value_or(0)) {}
  virtual ~JsonVisitor() = default;
  virtual void open(JsonPath path, bool array) = 0;  // the root object comes with an empty path
  virtual void leaf(JsonPath path, const JsonLeaf& value) = 0;
  virtual void close(JsonPath path) = 0;

  [[noreturn]] void refuse(Refusal why, const std::string& got) const {
    stowage::refuse(why, place_, got);
  }

 protected:
  std::string text(JsonPath path, const JsonLeaf& value) const;  // refuses other types
  std::uint64_t whole(JsonPath path, const JsonLeaf& value) const;
  [[noreturn]] void refuse_type(JsonPath path, std::string_view expected) const;
  void set_tensor(std::string_view name) { place_.tensor = name; }
  const Place& place() const noexcept { return place_; }

 private:
  friend void walk_json(std::string_view text, JsonVisitor& visitor);
  Place place_;          // its byte is where the walk stands
  std::uint64_t start_;  // byte of the document's first character
};

/// Walks `text`, whose root must be an object.
void walk_json(std::string_view text, JsonVisitor& visitor);

/// A string as a JSON literal, quotes included. Throws invalid_argument for bad UTF-8.
std::string json_string(std::string_view text);
/// The array of those numbers, without spaces.
std::string json_array(std::span<const std::int64_t> numbers);

}  // namespace stowage
