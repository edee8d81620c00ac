// SPDX-License-Identifier: Apache-2.0
#include "cli/items.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "stowage/descriptor.h"
#include "stowage/quantize.h"

namespace stowage::cli {

bool Item::is_plain_float() const noexcept {
  return weight != nullptr ? is_value_cast(weight->storage.codes) : is_value_dtype(tensor->dtype);
}

std::vector<Item> items_of(const File& file) {
  std::vector<Item> found;
  // Markers say what this file is, and would say it of any file that they are copied to.
  std::set<std::string, std::less<>> taken(file.markers().begin(), file.markers().end());
  for (const WeightInfo& weight : file.weights()) {
    Item item{weight.name, weight.shape, &weight, file.find(weight.parts.front()), 0};
    std::set<std::string> names(weight.parts.begin(), weight.parts.end());
    names.insert(weight.beside.begin(), weight.beside.end());
    for (const std::string& name : names)
      if (const TensorInfo* tensor = file.find(name)) item.bytes += tensor->bytes;
    taken.insert(names.begin(), names.end());
    found.push_back(item);
  }
  for (const TensorInfo& tensor : file.tensors())
    if (!taken.contains(tensor.name))
      found.push_back({tensor.name, tensor.shape, nullptr, &tensor, tensor.bytes});
  std::ranges::sort(found, {}, &Item::name);
  return found;
}

std::string dialect_text(const File& file) {
  return file.dialect().empty() ? "" : ", dialect " + file.dialect();
}

ItemValues::ItemValues(const File& file, const Item& item) {
  if (item.is_plain_float()) {
    const auto bytes = file.bytes(*item.tensor);
    data_ = bytes.data();
    dtype_ = item.tensor->dtype;
    const auto width = static_cast<std::size_t>(bits(dtype_)) / 8;
    if (reinterpret_cast<std::uintptr_t>(data_) % width == 0) return;
    buffer_.assign(bytes.begin(), bytes.end());  // a file may put it at an odd offset
  } else {
    const Weight weight = file.weight(item.name);
    dtype_ = Dtype::f32;
    buffer_.resize(static_cast<std::size_t>(item.shape.elements()) * sizeof(float));
    dequantize(weight, {0, weight.rows()}, buffer_.data(), dtype_);
  }
  data_ = buffer_.data();
}

Declaration declare_copy(const TensorInfo& tensor) {
  const bool named = tensor.dtype == Dtype::unknown;
  return {tensor.name, tensor.dtype, tensor.shape, named ? tensor.dtype_name : "",
          named ? tensor.bytes : 0};
}

void drop(const File& file, const Item& item) {
  file.drop(*item.tensor);
  if (item.weight == nullptr) return;
  for (const std::string& part : item.weight->parts)
    if (const TensorInfo* tensor = file.find(part)) file.drop(*tensor);
}

}  // namespace stowage::cli
