// SPDX-License-Identifier: Apache-2.0
// What every op does with its arguments: check them before anything reads their memory, and turn
// our exceptions into texts that start with "[code] " (the only thing that survives the
// dispatcher).
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
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

/// The element type of a tensor; Dtype::unknown for types that no op of ours takes.
Dtype dtype_of(const Tensor& tensor);
/// As torch spells it ("bfloat16").
const char* dtype_text(Dtype dtype);
/// torch's number (as its C functions take it) of a dtype.
std::int32_t torch_dtype(Dtype dtype);
std::span<const std::int64_t> sizes_of(const Tensor& tensor);

/// A dense CPU tensor whose memory is there: contiguous (copied if it was not).
Tensor readable(const char* where, const char* name, const Tensor& tensor);
/// New uninitialised CPU memory. Cheaper than the C++ wrappers, which go through the dispatcher.
Tensor empty(std::span<const std::int64_t> sizes, Dtype dtype);

/// A resting weight together with the tensors that hold its bytes.
struct Held {
  std::vector<Tensor> tensors;
  Weight weight;
};
/// Checks codes and scales against layout(storage, shape): number, dtypes, shapes, memory.
Held hold(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
          std::int64_t storage_key, const Shape& shape);
}  // namespace stowage::door
