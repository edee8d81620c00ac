// SPDX-License-Identifier: Apache-2.0
// Argument checks. Order: device, then rank, then sizes; freed memory last, since FSDP frees the
// storage of a gathered weight while its tensor lives on, and reading that ends the process.
#include "torch/arguments.h"

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "base/checked.h"

namespace stowage::door {
namespace {

struct Pair {
  Dtype ours;
  std::int32_t torch;
  const char* name;
};

// torch's numbers are asked for, not assumed: they are no part of its stable ABI.
const std::array<Pair, 9>& pairs() {
  static const std::array<Pair, 9> table = {{
      {Dtype::bf16, aoti_torch_dtype_bfloat16(), "bfloat16"},
      {Dtype::f32, aoti_torch_dtype_float32(), "float32"},
      {Dtype::u8, aoti_torch_dtype_uint8(), "uint8"},
      {Dtype::f16, aoti_torch_dtype_float16(), "float16"},
      {Dtype::f64, aoti_torch_dtype_float64(), "float64"},
      {Dtype::i64, aoti_torch_dtype_int64(), "int64"},
      {Dtype::i32, aoti_torch_dtype_int32(), "int32"},
      {Dtype::i8, aoti_torch_dtype_int8(), "int8"},
      {Dtype::boolean, aoti_torch_dtype_bool(), "bool"},
  }};
  return table;
}

Dtype dtype_of(AtenTensorHandle tensor) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  for (const Pair& pair : pairs()) {
    if (pair.torch == dtype) return pair.ours;
  }
  return Dtype::unknown;
}

bool on_cpu(AtenTensorHandle tensor) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  std::int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device));
  return device == cpu;
}

// Layers of a model often have one shape, and a layout costs as much as a small product.
const Layout& layout_of(std::int64_t key, const Storage& storage, const Shape& shape) {
  thread_local struct {
    std::int64_t key = -1;
    Shape shape;
    Layout layout;
  } last;
  if (last.key != key || last.shape != shape) {
    last.key = -1;
    last.layout = layout(storage, shape);
    last.shape = shape;
    last.key = key;
  }
  return last.layout;
}

void check_part(const char* where, const Part& part, const Argument& given) {
  const auto wanted = part.shape.sizes(), sizes = given.sizes();
  const auto rule = [&] {
    return std::string(where) + ": " + std::string(part.name) + " must be ";
  };
  if (given.dtype() != part.dtype) {
    fail(Code::invalid_argument,
         rule() + dtype_text(part.dtype) + ", got " + dtype_text(given.dtype()));
  }
  if (!std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end())) {
    fail(Code::invalid_argument, rule() + to_string(part.shape) + ", got " + sizes_text(sizes));
  }
}

}  // namespace

void fail(Code code, const std::string& message) {
  throw std::runtime_error("[" + std::string(to_string(code)) + "] " + message);
}

const char* dtype_text(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.name;
  }
  return "another dtype";
}

std::int32_t torch_dtype(Dtype dtype) {
  for (const Pair& pair : pairs()) {
    if (pair.ours == dtype) return pair.torch;
  }
  fail(Code::unsupported, "stowage: torch has no dtype " + std::string(disk_name(dtype)));
}

std::span<const std::int64_t> sizes_of(AtenTensorHandle tensor) {
  std::int64_t rank = 0;
  std::int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &rank));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  return {sizes, static_cast<std::size_t>(rank)};
}

std::string sizes_text(std::span<const std::int64_t> sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::int64_t product(const char* where, std::span<const std::int64_t> sizes) {
  std::int64_t n = 1;
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  for (const std::int64_t size : sizes) {
    const auto next = checked_mul(n, size);
    if (!next) {
      fail(Code::invalid_argument, std::string(where) +
                                       ": the number of elements must fit 64 bits, got shape " +
                                       sizes_text(sizes));
    }
    n = *next;
  }
  return n;
}

Owned take_tensor(StableIValue value) noexcept {
  return Owned(torch::stable::detail::to<AtenTensorHandle>(value));
}

TensorList take_list(const char* where, StableIValue value) {
  const auto list = torch::stable::detail::to<StableListHandle>(value);
  const std::unique_ptr<StableListOpaque, void (*)(StableListHandle)> end(
      list, [](StableListHandle l) { torch_delete_list(l); });
  TensorList out;
  TORCH_ERROR_CODE_CHECK(torch_list_size(list, &out.count));
  if (out.count > out.tensors.size()) {
    fail(Code::invalid_argument, std::string(where) + ": scales must be at most " +
                                     std::to_string(out.tensors.size()) + " tensors, got " +
                                     std::to_string(out.count));
  }
  for (std::size_t i = 0; i < out.count; ++i) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    out.tensors[i] = take_tensor(item);
  }
  return out;
}

namespace {

// Whether the storage reaches to the tensor's last element: FSDP, and others by resize_, free the
// storage of a tensor that lives on, or a part of it.
bool has_memory(AtenTensorHandle tensor, std::span<const std::int64_t> sizes, bool contiguous,
                std::int64_t elements) {
  if (elements == 0) return true;
  std::int64_t* strides = nullptr;
  std::int64_t bytes = 0, first = 0, last = elements - 1;
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor, &first));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  if (!contiguous) {  // its sizes and strides fitted a storage once: no product can overflow
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    last = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  }
  return last < bytes / static_cast<std::int64_t>(aoti_torch_dtype_element_size(dtype)) - first;
}

}  // namespace

Argument::Argument(const char* where, std::string_view name, AtenTensorHandle handle) {
  const auto refuse = [&](const char* rule) {
    fail(Code::invalid_argument, std::string(where) + ": " + std::string(name) + rule);
  };
  if (!on_cpu(handle)) refuse(" must be on the CPU like the other arguments, got another device");
  sizes_ = sizes_of(handle);
  dtype_ = dtype_of(handle);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &elements_));
  bool contiguous = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &contiguous));
  if (torch_get_const_data_ptr(handle, &data_) != 0) {
    refuse(
        " must have memory of its own, got a wrapper: what is kept from inside torch.func when "
        "that has ended is one, and x.clone() is none");
  }
  if (!has_memory(handle, sizes_, contiguous, elements_)) {
    refuse(" must have its memory, got a tensor whose storage was released");
  }
  // A view of a complex tensor's conjugate has memory that is not its value. Such a view steps over
  // the real parts; only one element alone can look contiguous.
  if (!contiguous || elements_ == 1) {
    AtenTensorHandle again = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &again));
    std::array<StableIValue, 1> stack{torch::stable::detail::from(Tensor(again))};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::resolve_neg", "", stack.data(), TORCH_ABI_VERSION));
    copy_ = torch::stable::contiguous(torch::stable::detail::to<Tensor>(stack[0]));
    data_ = copy_->const_data_ptr();
  }
}

namespace {

constexpr std::int64_t kManyElements = 1 << 18;

// Touching new memory page by page costs as much as quantizing into it; large pages cost a third.
// Advice, which the system may decline. Whole pages are asked for that it lies in: memory beside it
// is mostly that of the next tensor, and of others no bytes change.
void ask_for_large_pages(void* data, std::size_t bytes) noexcept {
  constexpr std::uintptr_t kLarge = 2 << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / kLarge * kLarge;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes + kLarge - 1) / kLarge * kLarge;
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

Owned empty(std::span<const std::int64_t> sizes, Dtype dtype) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  Sizes made_strides(sizes.size());
  const auto strides = made_strides.span();
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    const auto next = checked_mul(step, std::max<std::int64_t>(sizes[i], 1));
    if (!next) {
      fail(Code::invalid_argument,
           "stowage: the number of elements of a result must fit 64 bits, got shape " +
               sizes_text(sizes));
    }
    step = *next;
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                               strides.data(), torch_dtype(dtype), cpu, 0, &handle) != 0) {
    fail(Code::out_of_memory, "stowage: the system must have memory for a result of shape " +
                                  sizes_text(sizes) + ", " + std::string(disk_name(dtype)));
  }
  Owned made(handle);
  if (step >= kManyElements) {
    std::int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
    ask_for_large_pages(memory(made), static_cast<std::size_t>(bytes));
  }
  return made;
}

std::string take_text(StringHandle text) {
  const std::unique_ptr<StringOpaque, void (*)(StringHandle)> owned(
      text, [](StringHandle handle) { (void)torch_delete_string(handle); });
  const char* data = nullptr;
  std::size_t length = 0;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(text, &data));
  TORCH_ERROR_CODE_CHECK(torch_string_length(text, &length));
  return {data, length};
}

Tensor text_bytes(const std::string& text) {
  const auto count = static_cast<std::int64_t>(text.size());
  Owned made = empty({&count, 1}, Dtype::u8);
  std::ranges::copy(text, static_cast<char*>(memory(made)));
  return boxed(std::move(made));
}

Tensor boxed(Owned tensor) { return Tensor(tensor.release()); }

void* memory(const Owned& tensor) {
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor.get(), &data));
  return data;
}

Held::Held(const char* where, AtenTensorHandle codes, std::span<const Owned> scales,
           std::int64_t storage_key, const Shape& shape) {
  std::array<AtenTensorHandle, kMaxParts + 1> parts{codes};
  for (std::size_t i = 0; i < scales.size(); ++i) parts[i + 1] = scales[i].get();
  check(where, std::span(parts).first(scales.size() + 1), storage_key, shape, Reach::whole);
}

Held::Held(const char* where, const Tensor& codes, const std::vector<Tensor>& scales,
           std::int64_t storage_key, const Shape& shape, Reach reach) {
  std::vector<AtenTensorHandle> parts{codes.get()};
  for (const Tensor& scale : scales) parts.push_back(scale.get());
  check(where, parts, storage_key, shape, reach);
}

void Held::check(const char* where, std::span<const AtenTensorHandle> parts,
                 std::int64_t storage_key, const Shape& shape, Reach reach) {
  const Storage storage = storage_from_key(storage_key);
  const Layout& wanted = layout_of(storage_key, storage, shape);
  if (parts.size() != static_cast<std::size_t>(wanted.count)) {
    fail(Code::invalid_argument, std::string(where) + ": scales of " + to_string(storage) +
                                     " must be " + std::to_string(wanted.count - 1) +
                                     " tensors, got " + std::to_string(parts.size() - 1));
  }
  std::array<const void*, kMaxParts> pointers{};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts_[i].emplace(where, wanted.parts[i].name, parts[i]);
    check_part(where, wanted.parts[i], *parts_[i]);
    pointers[i] = parts_[i]->data();
  }
  if (reach != Reach::slices) {
    // Of few rows the mapping has the bytes, but for codes that are put in another order.
    const auto bytes = static_cast<std::uint64_t>(wanted.parts[0].bytes);
    if (auto lease = Engine::lease_at(pointers[0], reach == Reach::rows, bytes)) {
      lease_.emplace(std::move(*lease));
      for (const void*& pointer : pointers) pointer = lease_->at(pointer);
    }
  }
  weight_ = Weight(storage, shape, std::span(pointers).first(parts.size()));
}

}  // namespace stowage::door
