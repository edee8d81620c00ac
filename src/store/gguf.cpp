// SPDX-License-Identifier: Apache-2.0
#include "store/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/json.h"

namespace stowage {
namespace {

constexpr std::uint64_t kDefaultAlignment = 32, kMostAlignment = std::uint64_t{1} << 20;
constexpr int kMostDepth = 4;  // of arrays in arrays; no writer makes any
constexpr const char* kAlignment = "general.alignment";

// Values of keys.
enum class ValueType : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  text,
  array,
  u64,
  i64,
  f64
};
constexpr std::array<std::uint64_t, 13> kBytesOf{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

// Types of tensors: so many bytes for so many elements of a row.
struct TensorType {
  std::uint32_t id;
  std::string_view name;
  std::int64_t elements, bytes;
  Dtype dtype = Dtype::unknown;
};
constexpr std::array kTensorTypes{
    TensorType{0, "F32", 1, 4, Dtype::f32},
    TensorType{1, "F16", 1, 2, Dtype::f16},
    TensorType{2, "Q4_0", 32, 18},
    TensorType{3, "Q4_1", 32, 20},
    TensorType{6, "Q5_0", 32, 22},
    TensorType{7, "Q5_1", 32, 24},
    TensorType{8, "Q8_0", 32, 34},
    TensorType{9, "Q8_1", 32, 40},
    TensorType{10, "Q2_K", 256, 84},
    TensorType{11, "Q3_K", 256, 110},
    TensorType{12, "Q4_K", 256, 144},
    TensorType{13, "Q5_K", 256, 176},
    TensorType{14, "Q6_K", 256, 210},
    TensorType{15, "Q8_K", 256, 292},
    TensorType{16, "IQ2_XXS", 256, 66},
    TensorType{17, "IQ2_XS", 256, 74},
    TensorType{18, "IQ3_XXS", 256, 98},
    TensorType{19, "IQ1_S", 256, 50},
    TensorType{20, "IQ4_NL", 32, 18},
    TensorType{21, "IQ3_S", 256, 110},
    TensorType{22, "IQ2_S", 256, 82},
    TensorType{23, "IQ4_XS", 256, 136},
    TensorType{24, "I8", 1, 1, Dtype::i8},
    TensorType{25, "I16", 1, 2, Dtype::i16},
    TensorType{26, "I32", 1, 4, Dtype::i32},
    TensorType{27, "I64", 1, 8, Dtype::i64},
    TensorType{28, "F64", 1, 8, Dtype::f64},
    TensorType{29, "IQ1_M", 256, 56},
    TensorType{30, "BF16", 1, 2, Dtype::bf16},
    TensorType{34, "TQ1_0", 256, 54},
    TensorType{35, "TQ2_0", 256, 66},
    TensorType{39, "MXFP4", 32, 17},
    TensorType{40, "NVFP4", 64, 36},
    TensorType{41, "Q1_0", 128, 18},
};

class GgufCursor {
 public:
  GgufCursor(const std::string& path, std::span<const std::byte> bytes)
      : path_(path), bytes_(bytes) {}

  std::uint64_t at() const noexcept { return at_; }
  Place place() const { return {path_, "", at_}; }

  std::span<const std::byte> take(std::uint64_t bytes) {
    if (bytes > bytes_.size() - at_)
      refuse(Refusal::gguf_frame, place(),
             formatted("{} bytes where {} are left", bytes, bytes_.size() - at_));
    const auto taken = bytes_.subspan(at_, bytes);
    at_ += bytes;
    return taken;
  }
  template <class T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string string() {
    const Place here = place();
    const auto bytes = take(number<std::uint64_t>());
    std::string made(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    try {
      json_string(made);
    } catch (const Error&) {
      refuse(Refusal::json_utf8, here, in_quotes(made));
    }
    return made;
  }
  void skip_string() { take(number<std::uint64_t>()); }

 private:
  const std::string& path_;
  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;
};

ValueType value_type(GgufCursor& cursor) {
  const Place place = cursor.place();
  const auto id = cursor.number<std::uint32_t>();
  if (id >= kBytesOf.size()) refuse(Refusal::gguf_type, place, formatted("type {} of a value", id));
  return static_cast<ValueType>(id);
}

void skip_array(GgufCursor& cursor, int depth) {
  if (depth > kMostDepth)
    refuse(Refusal::json_depth, cursor.place(), formatted("{} arrays in arrays", depth));
  const ValueType type = value_type(cursor);
  const auto count = cursor.number<std::uint64_t>();
  const std::uint64_t each = kBytesOf[static_cast<std::size_t>(type)];
  if (each > 0) {
    const auto all = checked_mul(count, each);
    cursor.take(all.value_or(std::numeric_limits<std::uint64_t>::max()));
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) {  // each takes bytes, of which there are so many
    if (type == ValueType::text)
      cursor.skip_string();
    else
      skip_array(cursor, depth + 1);
  }
}

// Nothing for an array.
std::optional<std::string> value_of(GgufCursor& cursor) {
  using enum ValueType;
  switch (value_type(cursor)) {
    case u8:
      return std::to_string(cursor.number<std::uint8_t>());
    case i8:
      return std::to_string(cursor.number<std::int8_t>());
    case u16:
      return std::to_string(cursor.number<std::uint16_t>());
    case i16:
      return std::to_string(cursor.number<std::int16_t>());
    case u32:
      return std::to_string(cursor.number<std::uint32_t>());
    case i32:
      return std::to_string(cursor.number<std::int32_t>());
    case f32:
      return formatted("{}", cursor.number<float>());
    case boolean:
      return cursor.number<std::uint8_t>() != 0 ? "true" : "false";
    case text:
      return cursor.string();
    case array:
      break;
    case u64:
      return std::to_string(cursor.number<std::uint64_t>());
    case i64:
      return std::to_string(cursor.number<std::int64_t>());
    case f64:
      return formatted("{}", cursor.number<double>());
  }
  skip_array(cursor, 1);
  return std::nullopt;
}

std::uint64_t alignment_of(const GgufCursor& cursor, const Header& header) {
  const auto said = header.metadata.find(kAlignment);
  if (said == header.metadata.end()) return kDefaultAlignment;
  for (std::uint64_t power = 1; power <= kMostAlignment; power *= 2)
    if (said->second == std::to_string(power)) return power;
  refuse(Refusal::gguf_alignment, cursor.place(), in_quotes(said->second));
}

Shape shape_of(GgufCursor& cursor, const Place& place) {
  const auto rank = cursor.number<std::uint32_t>();
  if (rank > Shape::kMaxRank) refuse(Refusal::rank, place, std::to_string(rank));
  std::vector<std::int64_t> sizes(rank);
  for (std::int64_t& size : sizes) {
    const auto said = cursor.number<std::uint64_t>();
    const auto fits = checked_cast<std::int64_t>(said);
    if (!fits) refuse(Refusal::shape_overflow, place, std::to_string(said));
    size = *fits;
  }
  std::ranges::reverse(sizes);
  try {
    return Shape(sizes);
  } catch (const Error& error) {
    refuse(Refusal::shape_overflow, place, in_quotes(error.what()));
  }
}

// `offset` and `bytes` as the header says them: from the start of the data.
TensorInfo tensor_at(GgufCursor& cursor) {
  Place place = cursor.place();
  TensorInfo tensor;
  tensor.name = cursor.string();
  place.tensor = tensor.name;
  tensor.shape = shape_of(cursor, place);
  const auto id = cursor.number<std::uint32_t>();
  const auto type = std::ranges::find(kTensorTypes, id, &TensorType::id);
  if (type == kTensorTypes.end())
    refuse(Refusal::gguf_type, place, formatted("type {} of a tensor", id));
  tensor.dtype = type->dtype;
  tensor.dtype_name = type->name;
  const int rank = tensor.shape.rank();
  const std::int64_t row = rank == 0 ? 1 : tensor.shape[rank - 1];
  if (row % type->elements != 0)
    refuse(Refusal::gguf_block, place,
           formatted("{} {} of blocks of {}", type->name, to_string(tensor.shape), type->elements));
  const auto bytes = checked_mul(tensor.shape.elements() / type->elements, type->bytes);
  if (!bytes) refuse(Refusal::shape_overflow, place, to_string(tensor.shape));
  tensor.bytes = static_cast<std::uint64_t>(*bytes);
  tensor.offset = cursor.number<std::uint64_t>();
  return tensor;
}

std::uint64_t aligned(std::uint64_t offset, std::uint64_t to) { return ceil_div(offset, to) * to; }

// Tensors follow each other, as far apart as their alignment asks.
void place_all(const std::string& path, Header& header, std::uint64_t begin, std::uint64_t end,
               std::uint64_t alignment) {
  std::ranges::stable_sort(header.tensors, {},
                           [](const TensorInfo& t) { return std::pair(t.offset, t.bytes); });
  std::uint64_t next = 0;
  for (TensorInfo& tensor : header.tensors) {
    const Place place{path, tensor.name, begin + tensor.offset};
    const std::string here = formatted("{} in the data for {}", tensor.offset, next);
    if (tensor.offset < next) refuse(Refusal::overlap, {path, tensor.name, {}}, here);
    if (tensor.offset > next) refuse(Refusal::gap, {path, tensor.name, {}}, here);
    if (tensor.bytes > end - begin - tensor.offset)
      refuse(Refusal::beyond_file, place, formatted("{} bytes in a file of {}", tensor.bytes, end));
    next = std::min(aligned(tensor.offset + tensor.bytes, alignment), end - begin);
    tensor.offset += begin;
  }
  if (begin + next != end)
    refuse(Refusal::trailing_bytes, {path, "", begin + next},
           formatted("{} bytes more", end - begin - next));
}

}  // namespace

bool is_gguf(std::span<const std::byte> bytes) noexcept {
  return bytes.size() >= kGgufMagic.size() &&
         std::memcmp(bytes.data(), kGgufMagic.data(), kGgufMagic.size()) == 0;
}

Header parse_gguf(const std::string& path, std::span<const std::byte> bytes,
                  std::uint64_t file_bytes) {
  GgufCursor cursor(path, bytes);
  cursor.take(kGgufMagic.size());
  const Place place = cursor.place();
  const auto version = cursor.number<std::uint32_t>();
  if (version != 2 && version != 3) refuse(Refusal::gguf_version, place, std::to_string(version));
  const auto tensors = cursor.number<std::uint64_t>(), keys = cursor.number<std::uint64_t>();
  Header header;
  header.is_gguf = true;
  std::set<std::string> seen;
  for (std::uint64_t i = 0; i < keys; ++i) {
    const Place here = cursor.place();
    const std::string key = cursor.string();
    if (!seen.insert(key).second) refuse(Refusal::duplicate_key, here, in_quotes(key));
    if (auto value = value_of(cursor)) header.metadata.emplace(key, std::move(*value));
  }
  std::set<std::string> names;
  for (std::uint64_t i = 0; i < tensors; ++i) {
    const Place here = cursor.place();
    header.tensors.push_back(tensor_at(cursor));
    const std::string& name = header.tensors.back().name;
    if (!names.insert(name).second) refuse(Refusal::duplicate_key, here, in_quotes(name));
  }
  const std::uint64_t alignment = alignment_of(cursor, header);
  header.data_start = std::min(aligned(cursor.at(), alignment), file_bytes);
  place_all(path, header, header.data_start, file_bytes, alignment);
  return header;
}

}  // namespace stowage
