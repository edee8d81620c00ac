// SPDX-License-Identifier: Apache-2.0
// The walk: nlohmann's SAX parser (no recursion, UTF-8 checked) over characters that count
// themselves, so that every refusal knows its byte.
#include "store/json.h"

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "stowage/error.h"

namespace stowage {
namespace {

constexpr std::size_t kMaxDepth = 16;

// Characters that count how many of them were taken.
struct Cursor {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  std::uint64_t* count;
  reference operator*() const { return *at; }
  Cursor& operator++() {
    ++at, ++*count;
    return *this;
  }
  Cursor operator++(int) { return std::exchange(*this, ++Cursor(*this)); }
  bool operator==(const Cursor& other) const { return at == other.at; }
};

// "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ... ; last
// read: ..." without the parser's own frame and the raw bytes at its end.
std::string reason(std::string_view what) {
  const std::size_t begin = what.find("] ");
  what.remove_prefix(begin == std::string_view::npos ? 0 : begin + 2);
  return in_quotes(what.substr(0, what.find("; last read")));
}

class Walk final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Walk(JsonVisitor& visitor, std::optional<std::uint64_t>& byte, std::uint64_t start)
      : visitor_(visitor), byte_(byte), start_(start) {}
  std::uint64_t* count() { return &count_; }

  bool null() override { return leaf({}); }
  bool boolean(bool) override { return leaf({.kind = JsonLeaf::Kind::boolean}); }
  bool number_integer(number_integer_t value) override {
    return leaf({.kind = JsonLeaf::Kind::number, .number = static_cast<double>(value)});
  }
  bool number_unsigned(number_unsigned_t value) override {
    return leaf({JsonLeaf::Kind::whole, {}, value, static_cast<double>(value)});
  }
  bool number_float(number_float_t value, const string_t&) override {
    return leaf({.kind = JsonLeaf::Kind::number, .number = value});
  }
  bool string(string_t& value) override {
    return leaf({.kind = JsonLeaf::Kind::string, .text = std::move(value)});
  }
  bool binary(binary_t&) override { return false; }  // not in JSON text
  bool start_object(std::size_t) override { return open(false); }
  bool start_array(std::size_t) override { return open(true); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    here();
    if (!frames_.back().seen.insert(value).second) {
      visitor_.refuse(Refusal::duplicate_key, in_quotes(value) + " again");
    }
    path_.back() = std::move(value);
    return true;
  }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::json::exception& error) override {
    here();
    const std::string_view what = error.what();
    const bool utf8 = what.find("UTF-8") != std::string_view::npos;
    visitor_.refuse(utf8 ? Refusal::json_utf8 : Refusal::json_syntax, reason(what));
  }

 private:
  struct Frame {
    bool array;
    std::unordered_set<std::string> seen;
  };

  void here() { byte_ = start_ + count_; }
  JsonPath path() const { return path_; }

  bool open(bool array) {
    here();
    if (frames_.empty() && array) visitor_.refuse(Refusal::json_syntax, "an array");
    if (frames_.size() == kMaxDepth) visitor_.refuse(Refusal::json_depth, "a deeper value");
    visitor_.open(path(), array);
    frames_.push_back({array, {}});
    path_.emplace_back(array ? kElement : std::string_view());
    return true;
  }
  bool close() {
    here();
    frames_.pop_back();
    path_.pop_back();
    visitor_.close(path());
    return true;
  }
  bool leaf(const JsonLeaf& value) {
    here();
    if (frames_.empty()) visitor_.refuse(Refusal::json_syntax, "a bare value");
    visitor_.leaf(path(), value);
    return true;
  }

  JsonVisitor& visitor_;
  std::optional<std::uint64_t>& byte_;
  std::uint64_t start_, count_ = 0;
  std::vector<Frame> frames_;
  std::vector<std::string> path_;
};

}  // namespace

std::string to_string(JsonPath path) {
  std::string text;
  for (const std::string& key : path) text += (text.empty() ? "" : ".") + key;
  return in_quotes(text);
}

std::string JsonVisitor::text(JsonPath path, const JsonLeaf& value) const {
  if (value.kind != JsonLeaf::Kind::string) refuse_type(path, "a string");
  return value.text;
}

std::uint64_t JsonVisitor::whole(JsonPath path, const JsonLeaf& value) const {
  if (value.kind != JsonLeaf::Kind::whole) refuse_type(path, "a whole number of at most 64 bits");
  return value.whole;
}

void JsonVisitor::refuse_type(JsonPath path, std::string_view expected) const {
  refuse(Refusal::wrong_type, to_string(path) + " that is not " + std::string(expected));
}

void walk_json(std::string_view text, JsonVisitor& visitor) {
  // The parser takes a zero byte for the end of its input, whatever follows.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    visitor.place_.byte = visitor.start_ + zero;
    visitor.refuse(Refusal::json_syntax, "a zero byte");
  }
  Walk walk(visitor, visitor.place_.byte, visitor.start_);
  const Cursor begin{text.data(), walk.count()};
  const Cursor end{text.data() + text.size(), walk.count()};
  nlohmann::json::sax_parse(begin, end, &walk);
}

std::string json_string(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(Code::invalid_argument, in_quotes(text) + ": must be valid UTF-8, got other bytes");
  }
}

std::string json_array(std::span<const std::int64_t> numbers) {
  std::string text;
  for (const std::int64_t number : numbers) {
    if (!text.empty()) text += ',';
    text += std::to_string(number);
  }
  return "[" + text + "]";
}

}  // namespace stowage
