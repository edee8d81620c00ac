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
#include <utility>
#include <vector>

#include "stowage/weight.h"

namespace stowage::door {
using torch::stable::Tensor;

[[noreturn]] void fail(Code code, const std::string& message);

/// The boxed kernel of `op`, with our errors translated.
template <auto op>
struct Door;
template <class R, class... A, R (*op)(A...)>
struct Door<op> {
  static R call(A... args) {
    try {
      return op(std::forward<A>(args)...);
    } catch (const Error& e) {
      fail(e.code(), e.what());
    } catch (const std::bad_alloc&) {
      fail(Code::out_of_memory, "stowage: the system has no memory left");
    }
  }
};

/// As torch spells it ("bfloat16").
const char* dtype_text(Dtype dtype);
/// torch's number (as its C functions take it) of a dtype.
std::int32_t torch_dtype(Dtype dtype);

/// A tensor argument that was checked, and what ops ask of it, read once: it lies on the CPU, its
/// memory is there, and it is contiguous (copied if it was not). The tensor must outlive this.
class Argument {
 public:
  Argument(const char* where, std::string_view name, const Tensor& tensor);
  const void* data() const noexcept { return data_; }
  Dtype dtype() const noexcept { return dtype_; }  // unknown for types that no op of ours takes
  std::span<const std::int64_t> sizes() const noexcept { return sizes_; }
  std::int64_t elements() const noexcept;

 private:
  const void* data_ = nullptr;
  Dtype dtype_ = Dtype::unknown;
  std::span<const std::int64_t> sizes_;
  std::optional<Tensor> copy_;
};

/// New uninitialised CPU memory. Cheaper than the C++ wrappers, which go through the dispatcher.
Tensor empty(std::span<const std::int64_t> sizes, Dtype dtype);

/// A resting weight whose codes and scales were checked against layout(storage, shape): number,
/// dtypes, shapes, memory. The tensors must outlive this.
class Held {
 public:
  Held(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
       std::int64_t storage_key, const Shape& shape);
  const Weight& weight() const noexcept { return weight_; }

 private:
  std::array<std::optional<Argument>, kMaxParts> parts_;
  Weight weight_;
};
}  // namespace stowage::door
