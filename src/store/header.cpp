// SPDX-License-Identifier: Apache-2.0
// Reading a header: each entry by itself as the walk meets it, then all of them together.
#include "store/header.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "store/json.h"

namespace stowage {
namespace {

class HeaderVisitor final : public JsonVisitor {
 public:
  HeaderVisitor(const std::string& path, std::uint64_t data_start, std::uint64_t data_bytes)
      : JsonVisitor({path, "", kHeaderPrefix}), data_start_(data_start), data_bytes_(data_bytes) {}

  void open(JsonPath path, bool array) override;
  void leaf(JsonPath path, const JsonLeaf& value) override;
  void close(JsonPath path) override {
    if (path.size() == 1 && path[0] != kMetadataKey) finish(path[0]);
    set_tensor("");  // what follows is about another one
  }
  Header take() { return std::move(header_); }

 private:
  struct Entry {
    std::optional<std::string> dtype;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::vector<std::uint64_t>> offsets;
  };

  void check_key(std::string_view key) const;
  void add_size(JsonPath path, std::uint64_t size);
  void finish(const std::string& name);
  Shape checked_shape() const;
  void check_bytes(const TensorInfo& tensor) const;

  std::uint64_t data_start_, data_bytes_;
  Entry entry_;
  Header header_;
};

void HeaderVisitor::check_key(std::string_view key) const {
  if (key != "dtype" && key != "shape" && key != "data_offsets") {
    refuse(Refusal::unknown_key, in_quotes(key));
  }
}

void HeaderVisitor::open(JsonPath path, bool array) {
  if (path.empty()) return;
  const bool metadata = path[0] == kMetadataKey;
  if (!metadata) set_tensor(path[0]);
  if (path.size() == 1 && array) refuse_type(path, "an object");
  if (path.size() == 1) {
    entry_ = {};
    return;
  }
  if (metadata) refuse_type(path, "a string");
  check_key(path[1]);
  if (path[1] == "dtype") refuse_type(path, "a string");
  if (path.size() > 2) refuse_type(path, "a whole number");
  if (!array) refuse_type(path, "an array");
  if (path[1] == "shape") entry_.shape.emplace();
  if (path[1] == "data_offsets") entry_.offsets.emplace();
}

void HeaderVisitor::leaf(JsonPath path, const JsonLeaf& value) {
  const bool metadata = path[0] == kMetadataKey;
  if (!metadata) set_tensor(path[0]);
  if (path.size() == 1) refuse_type(path, "an object");
  if (metadata) {
    header_.metadata.emplace(path[1], text(path, value));
    return;
  }
  check_key(path[1]);
  if (path[1] == "dtype") {
    entry_.dtype = text(path, value);
  } else if (path.size() == 2) {
    refuse_type(path, "an array");
  } else if (path[1] == "shape") {
    add_size(path, whole(path, value));
  } else if (entry_.offsets->size() == 2) {
    refuse(Refusal::offset_pair, "more than two numbers");
  } else {
    entry_.offsets->push_back(whole(path, value));
  }
}

void HeaderVisitor::add_size(JsonPath path, std::uint64_t size) {
  const auto fits = checked_cast<std::int64_t>(size);
  if (!fits) refuse(Refusal::shape_overflow, to_string(path) + " of " + std::to_string(size));
  if (entry_.shape->size() == Shape::kMaxRank) refuse(Refusal::rank, "more");
  entry_.shape->push_back(*fits);
}

Shape HeaderVisitor::checked_shape() const {
  try {
    return Shape(*entry_.shape);
  } catch (const Error& error) {
    refuse(Refusal::shape_overflow, in_quotes(error.what()));
  }
}

void HeaderVisitor::check_bytes(const TensorInfo& tensor) const {
  if (tensor.dtype == Dtype::unknown) return;  // its size is what its offsets say
  const auto bit_count = checked_mul<std::int64_t>(tensor.shape.elements(), bits(tensor.dtype));
  if (!bit_count) refuse(Refusal::shape_overflow, to_string(tensor.shape));
  if (*bit_count % 8 != 0) refuse(Refusal::partial_byte, std::to_string(*bit_count) + " bits");
  if (tensor.bytes == static_cast<std::uint64_t>(*bit_count / 8)) return;
  refuse(Refusal::byte_count, std::to_string(tensor.bytes) + " bytes for " + tensor.dtype_name +
                                  " " + to_string(tensor.shape));
}

void HeaderVisitor::finish(const std::string& tensor_name) {
  set_tensor(tensor_name);
  if (!entry_.dtype) refuse(Refusal::missing_key, "no 'dtype'");
  if (!entry_.shape) refuse(Refusal::missing_key, "no 'shape'");
  if (!entry_.offsets) refuse(Refusal::missing_key, "no 'data_offsets'");
  if (entry_.offsets->size() != 2) refuse(Refusal::offset_pair, "fewer than two numbers");
  const std::uint64_t begin = entry_.offsets->front(), end = entry_.offsets->back();
  if (begin > end) {
    refuse(Refusal::offset_pair, std::to_string(begin) + " and " + std::to_string(end));
  }
  if (end > data_bytes_) {
    refuse(Refusal::beyond_file,
           "end " + std::to_string(end) + " of " + std::to_string(data_bytes_) + " data bytes");
  }
  TensorInfo tensor{.name = tensor_name,
                    .dtype = dtype_from_disk_name(*entry_.dtype),
                    .dtype_name = *entry_.dtype,
                    .shape = checked_shape(),
                    .offset = data_start_ + begin,
                    .bytes = end - begin};
  check_bytes(tensor);
  header_.tensors.push_back(std::move(tensor));
}

// Every data byte belongs to exactly one tensor.
void check_cover(const std::string& path, std::vector<TensorInfo>& tensors, std::uint64_t begin,
                 std::uint64_t end) {
  std::ranges::sort(tensors, {}, [](const TensorInfo& t) {
    return std::tuple(t.offset, t.bytes, std::string_view(t.name));
  });
  for (const TensorInfo& tensor : tensors) {
    const Place place{path, tensor.name, tensor.offset};
    const std::string here = "a begin where the tensor before ends at " + std::to_string(begin);
    if (tensor.offset < begin) refuse(Refusal::overlap, place, here);
    if (tensor.offset > begin) refuse(Refusal::gap, place, here);
    begin += tensor.bytes;
  }
  if (begin != end) {
    refuse(Refusal::trailing_bytes, {path, "", begin}, std::to_string(end - begin) + " bytes more");
  }
}

}  // namespace

std::uint64_t check_header_length(const std::string& path, std::uint64_t length,
                                  std::uint64_t file_bytes) {
  const Place place{path, "", 0};
  if (length > kMaxHeader) {
    refuse(Refusal::header_too_long, place, std::to_string(length) + " bytes");
  }
  if (length > file_bytes - kHeaderPrefix) {
    refuse(Refusal::header_beyond_file, place,
           std::to_string(length) + " bytes in a file of " + std::to_string(file_bytes));
  }
  return length;
}

Header parse_header(const std::string& path, std::string_view json, std::uint64_t file_bytes) {
  if (json.empty() || json[0] != '{') {
    refuse(Refusal::header_start, {path, "", kHeaderPrefix},
           json.empty() ? "an empty header" : in_quotes(json.substr(0, 1)));
  }
  const std::uint64_t data_start = kHeaderPrefix + json.size();
  HeaderVisitor visitor(path, data_start, file_bytes - data_start);
  walk_json(json, visitor);
  Header header = visitor.take();
  header.data_start = data_start;
  check_cover(path, header.tensors, data_start, file_bytes);
  return header;
}

}  // namespace stowage
