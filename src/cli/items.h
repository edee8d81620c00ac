// SPDX-License-Identifier: Apache-2.0
// What a model is made of, as pack and unpack see it: weights, and tensors that belong to none.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "stowage/file.h"
#include "stowage/writer.h"

namespace stowage::cli {

/// One weight, or one tensor that is no part of a weight.
struct Item {
  std::string name;
  Shape shape;
  const WeightInfo* weight = nullptr;  // null: `tensor` alone
  const TensorInfo* tensor = nullptr;  // of the codes
  std::uint64_t bytes = 0;             // of all its tensors in the file

  /// f64, f32, bf16 or f16 values, not at rest.
  bool is_plain_float() const noexcept;
  /// Quantized, or a cast to 8 bits.
  bool rests() const noexcept { return weight != nullptr && !is_plain_float(); }
};

/// Sorted by name; each tensor of the file is in exactly one.
std::vector<Item> items_of(const File& file);
/// ", dialect fp8" where the files are of a peer's, else "".
std::string dialect_text(const File& file);

/// The values of a plain float item in the file, or of a resting one dequantized to f32.
class ItemValues {
 public:
  ItemValues(const File& file, const Item& item);
  const void* data() const noexcept { return data_; }
  Dtype dtype() const noexcept { return dtype_; }

 private:
  std::vector<std::byte> buffer_;
  const void* data_;
  Dtype dtype_;
};

/// Declares a tensor as it stands in the file, and writes it.
Declaration declare_copy(const TensorInfo& tensor);
/// Gives the pages of a item back once it is done with.
void drop(const File& file, const Item& item);

/// Runs `body`; an Error of it gets the file and the name of the tensor in front.
template <class Body>
auto in_tensor(const File& file, const Item& item, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    file.check();  // a cause that lies deeper
    throw Error(error.code(), file.paths()[static_cast<std::size_t>(item.tensor->shard)] + ": " +
                                  item.name + ": " + error.what());
  }
}

}  // namespace stowage::cli
