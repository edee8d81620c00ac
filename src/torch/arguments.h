// SPDX-License-Identifier: Apache-2.0
// What every op does with its arguments: check them before anything reads their memory, and turn
// our exceptions into texts that start with "[code] " (the only thing that survives the
// dispatcher).
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "stowage/engine.h"
#include "stowage/weight.h"

namespace stowage::door {
using torch::stable::Tensor;

[[noreturn]] void fail(Code code, const std::string& message);

/// A string argument, freed: torch's own conversion (2.13) makes two copies and frees one.
std::string take_text(StringHandle text);
/// Text as a tensor of bytes, for results: torch never frees one that is returned as a string.
Tensor text_bytes(const std::string& text);

/// How an argument comes from the dispatcher, and what the op gets.
template <class A>
struct Taken {
  using Given = A;
  static A&& from(std::remove_reference_t<A>& given) { return std::forward<A>(given); }
};
template <>
struct Taken<const std::string&> {
  using Given = StringHandle;
  static std::string from(StringHandle given) { return take_text(given); }
};

/// The boxed kernel of `op`, with our errors translated.
template <auto op>
struct Door;
template <class R, class... A, R (*op)(A...)>
struct Door<op> {
  static R call(typename Taken<A>::Given... args) {
    try {
      return op(Taken<A>::from(args)...);
    } catch (const Error& e) {
      fail(e.code(), e.what());
    } catch (const std::bad_alloc&) {
      fail(Code::out_of_memory, "stowage: the system has no memory left");
    }
  }
};

/// One reference to a tensor, given back at the end. TORCH_BOX makes a shared_ptr of it, which the
/// hot ops cannot afford.
class Owned {
 public:
  explicit Owned(AtenTensorHandle handle = nullptr) noexcept : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const noexcept { return handle_; }
  AtenTensorHandle release() noexcept { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

/// A Tensor argument of the dispatcher's stack, which must be taken exactly once.
Owned take_tensor(StableIValue value) noexcept;
/// A Tensor[] argument of at most kMaxParts tensors; `count` says how many there are.
struct TensorList {
  std::array<Owned, kMaxParts> tensors;
  std::size_t count = 0;
};
TensorList take_list(const char* where, StableIValue value);

/// As torch spells it ("bfloat16").
const char* dtype_text(Dtype dtype);
/// torch's number (as its C functions take it) of a dtype.
std::int32_t torch_dtype(Dtype dtype);

std::span<const std::int64_t> sizes_of(AtenTensorHandle tensor);

/// Sizes that are made up here. torch has no limit on the rank; few dimensions need no allocation.
class Sizes {
 public:
  explicit Sizes(std::size_t rank) : many_(rank > kFew ? rank : 0), rank_(rank) {}
  std::span<std::int64_t> span() noexcept {
    return {many_.empty() ? few_.data() : many_.data(), rank_};
  }

 private:
  static constexpr std::size_t kFew = 8;
  std::array<std::int64_t, kFew> few_;
  std::vector<std::int64_t> many_;
  std::size_t rank_;
};
/// "[2, 3]", of any rank.
std::string sizes_text(std::span<const std::int64_t> sizes);
/// Their product. Throws invalid_argument, naming `where`, when it does not fit 64 bits.
std::int64_t product(const char* where, std::span<const std::int64_t> sizes);

/// A tensor argument that was checked, and what ops ask of it, read once: it lies on the CPU, its
/// memory is there, and it is contiguous (copied if it was not). The tensor must outlive this.
class Argument {
 public:
  Argument(const char* where, std::string_view name, AtenTensorHandle tensor);
  const void* data() const noexcept { return data_; }
  Dtype dtype() const noexcept { return dtype_; }  // unknown for types that no op of ours takes
  std::span<const std::int64_t> sizes() const noexcept { return sizes_; }
  std::int64_t elements() const noexcept { return elements_; }

 private:
  const void* data_ = nullptr;
  Dtype dtype_ = Dtype::unknown;
  std::int64_t elements_ = 0;
  std::span<const std::int64_t> sizes_;
  std::optional<Tensor> copy_;
};

/// New uninitialised CPU memory. Cheaper than the C++ wrappers, which go through the dispatcher.
Owned empty(std::span<const std::int64_t> sizes, Dtype dtype);
/// A tensor for ops that are boxed by TORCH_BOX.
Tensor boxed(Owned tensor);
void* memory(const Owned& tensor);

/// How much of a weight an op reads: weights that rest on a disk come into memory whole, or only
/// the pages of those rows; `slices`: the op takes leases of its own.
enum class Reach : std::uint8_t { whole, rows, slices };

/// A resting weight whose codes and scales were checked against layout(storage, shape): number,
/// dtypes, shapes, memory. Where an engine holds the file that they are mapped from, the weight
/// has the engine's memory instead. The tensors must outlive this.
class Held {
 public:
  Held(const char* where, AtenTensorHandle codes, std::span<const Owned> scales,
       std::int64_t storage_key, const Shape& shape);
  Held(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
       std::int64_t storage_key, const Shape& shape, Reach reach = Reach::whole);
  const Weight& weight() const noexcept { return weight_; }

 private:
  void check(const char* where, std::span<const AtenTensorHandle> parts, std::int64_t storage_key,
             const Shape& shape, Reach reach);
  std::array<std::optional<Argument>, kMaxParts> parts_;
  std::optional<Lease> lease_;
  Weight weight_;
};
}  // namespace stowage::door
