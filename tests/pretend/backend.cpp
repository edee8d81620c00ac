// SPDX-License-Identifier: Apache-2.0
// A device of torch whose memory is the host's: every operator that it lacks runs on the CPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"

namespace pretend {
namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local DeviceIndex here = 0;
thread_local std::array<std::int64_t, kDevices> stream_of{};
thread_local bool in_fallback = false;

std::size_t at(DeviceIndex device) { return static_cast<std::size_t>(device); }
Lane lane_of(DeviceIndex device) { return {device, stream_of.at(at(device))}; }
Lane lane_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

// --- memory --------------------------------------------------------------------------------------

struct Block {
  void* data;
  std::size_t bytes;
  int device;
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = new Block{memory().allocate(here, bytes), bytes, here};
    return {block->data, block, &free, Device(kType, here)};
  }
  static void free(void* context) {
    auto* const block = static_cast<Block*>(context);
    memory().release(block->device, block->data, block->bytes);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, 4096, std::max<std::size_t>(bytes, 1)) != 0) throw std::bad_alloc();
    memory().pin(data, bytes);
    return {data, data, &free, Device(c10::DeviceType::CPU)};
  }
  static void free(void* data) {
    memory().unpin(data);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// --- devices, streams, events
// ----------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device to) const override {
    const Device before = getDevice();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return {kType, here}; }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < kDevices, "pretend: devices must be below ", kDevices, ", got ", to);
    if (to.index() >= 0) here = to.index();
  }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.index() >= 0) here = to.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override {
    const auto index = device.index() < 0 ? here : device.index();
    return Stream(Stream::UNSAFE, Device(kType, index), stream_of.at(at(index)));
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(kType, device.index() < 0 ? here : device.index()), 0);
  }
  Stream getNewStream(Device device, int) const override {
    TORCH_CHECK(memory().streams, "pretend: streams are off");
    const auto index = device.index() < 0 ? here : device.index();
    return Stream(Stream::UNSAFE, Device(kType, index), memory().new_stream());
  }
  Stream exchangeStream(Stream to) const override {
    const Stream before = getStream(to.device());
    stream_of.at(at(to.device_index())) = to.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    TORCH_CHECK(memory().streams, "pretend: streams are off");
    if (*event == nullptr) *event = new Event;
    memory().record(*static_cast<Event*>(*event), lane_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) memory().block(*static_cast<Event*>(event), lane_of(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || memory().is_done(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) memory().wait(*static_cast<Event*>(event));
  }
  bool queryStream(const Stream& stream) const override {
    return memory().is_idle(lane_of(stream));
  }
  void synchronizeStream(const Stream& stream) const override { memory().wait(lane_of(stream)); }
  void synchronizeDevice(DeviceIndex device) const override { memory().wait_device(device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return here; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? here : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override { return memory().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = allocator.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// --- operators
// ---------------------------------------------------------------------------------------

/// Refuses a type that the device shall lack.
at::ScalarType known(at::ScalarType dtype) {
  const bool lacks = dtype == at::kDouble || c10::isFloat8Type(dtype) || c10::isComplexType(dtype);
  TORCH_CHECK_TYPE(!memory().lacks || !lacks, "pretend: the device has no ", dtype);
  return dtype;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   known(c10::dtype_or_default(dtype)), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           known(c10::dtype_or_default(dtype)));
}

/// The same memory as a tensor of the CPU that nobody else knows: work that waits must not end
/// tensors of Python, for which it would need its lock.
Tensor on_host(const Tensor& t) {
  const auto options = t.options().device(c10::kCPU).requires_grad(false).pinned_memory(false);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(
      const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), [](void*) {}, options);
}

std::size_t extent(const Tensor& t) {
  std::int64_t last = 0;
  if (t.numel() == 0) return 0;
  for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return static_cast<std::size_t>((last + 1) * t.element_size());
}

void touch(const Tensor& t, Lane lane, bool writes) {
  if (t.is_privateuseone()) memory().touch(lane, t.const_data_ptr(), extent(t), writes);
}

void count(const Tensor& from, const Tensor& to) {
  const std::lock_guard lock(memory().mutex);
  const auto bytes = static_cast<std::int64_t>(to.nbytes());
  auto& counters = memory().counters;
  if (from.is_cpu()) {
    counters.at(at(to.device().index())).in += bytes;
  } else if (to.is_cpu()) {
    counters.at(at(from.device().index())).out += bytes;
  } else if (from.device() != to.device()) {
    counters.at(at(to.device().index())).across += bytes;
  }
}

/// What one stream was given comes before what the other is given from now on.
void meet(Lane first, Lane second) {
  Event event;
  memory().record(event, first);
  memory().block(event, second);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::InferenceMode no_versions(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!from.is_cpu()) known(from.scalar_type());
  if (!to.is_cpu()) known(to.scalar_type());
  const auto index = (to.is_cpu() ? from : to).device().index();
  const Lane lane = lane_of(index);
  const bool between = !from.is_cpu() && !to.is_cpu() && from.device() != to.device();
  if (between) meet(lane_of(from.device().index()), lane);
  touch(from, lane, false);
  touch(to, lane, true);
  if (between) meet(lane, lane_of(from.device().index()));
  const Tensor source = on_host(from), target = on_host(to);
  if (!in_fallback) count(from, to);
  const bool waits = non_blocking && lane.second != 0 && !in_fallback &&
                     (!from.is_cpu() || memory().is_pinned(from.const_data_ptr()));
  const auto bytes = static_cast<std::size_t>(to.nbytes());
  if (!in_fallback && from.is_cpu() != to.is_cpu()) {
    memory().cross(lane, bytes, from.is_cpu(), !waits);
  } else if (!in_fallback) {
    memory().compute(lane, 2 * bytes);
  }
  if (waits) {
    memory().give(lane, [source, target] { target.copy_(source); },
                  {from.const_data_ptr(), to.const_data_ptr()});
  } else {
    if (lane.second != 0) memory().wait(lane);
    target.copy_(source);
  }
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size,
                     std::optional<c10::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(
      size, self.element_size(), static_cast<std::size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, std::int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_whole(Tensor& self, c10::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes()) / self.element_size();
  return set_storage(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor moved(const std::optional<Tensor>& t) { return t && t->defined() ? t->cpu() : Tensor(); }

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                   bool transposed, c10::IntArrayRef output_padding, std::int64_t groups) {
  const auto b = moved(bias);
  return at::convolution(x.cpu(), w.cpu(), b.defined() ? std::optional(b) : std::nullopt, stride,
                         padding, dilation, transposed, output_padding, groups)
      .to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& g, const Tensor& x, const Tensor& w, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, std::int64_t groups, std::array<bool, 3> mask) {
  auto [gx, gw, gb] =
      at::convolution_backward(g.cpu(), x.cpu(), w.cpu(), std::vector<std::int64_t>{g.size(1)},
                               stride, padding, dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& t) { return t.defined() ? t.to(g.device()) : t; };
  return {back(gx), back(gw), back(gb)};
}

struct InFallback {
  bool before = in_fallback;
  InFallback() { in_fallback = true; }
  ~InFallback() { in_fallback = before; }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<Device> device;
  for (const c10::IValue& given : torch::jit::last(*stack, op.schema().arguments().size())) {
    const auto check = [&](const Tensor& t) {
      if (!t.defined() || !t.is_privateuseone()) return;
      TORCH_CHECK(!device || *device == t.device(),
                  "Expected all tensors to be on the same device, but got ", *device, " and ",
                  t.device(), " in ", op.schema().operator_name());
      device = t.device();
    };
    if (given.isTensor()) check(given.toTensor());
    if (given.isTensorList()) {
      for (const Tensor& t : given.toTensorVector()) check(t);
    }
  }
  for (const c10::IValue& given : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (device && given.isTensor() && given.toTensor().defined()) {
      const Tensor& t = given.toTensor();
      TORCH_CHECK(!t.is_cpu() || t.dim() == 0 || op.schema().name() == "aten::index.Tensor",
                  "Expected all tensors to be on the same device, but got cpu and ", *device,
                  " in ", op.schema().operator_name());
    }
  }
  const c10::OptionalDeviceGuard guard(device);
  if (device && !in_fallback) {
    std::size_t bytes = 0;
    for (const c10::IValue& given : torch::jit::last(*stack, op.schema().arguments().size()))
      if (given.isTensor() && given.toTensor().defined()) bytes += given.toTensor().nbytes();
    memory().compute(lane_of(device->index()), bytes);
  }
  const InFallback inside;
  at::native::cpu_fallback(op, stack, false);
}

Hooks hooks;

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(pretend, m) {
  m.def("start() -> ()", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("counters(int device) -> int[]", [](std::int64_t device) {
    const std::lock_guard lock(memory().mutex);
    const Counters& c = memory().counters.at(static_cast<std::size_t>(device));
    return std::vector<std::int64_t>{c.held, c.peak, c.in, c.out, c.across};
  });
  m.def("pinned() -> int[]", [] {
    const auto [held, peak] = memory().pinned_bytes();
    return std::vector<std::int64_t>{held, peak};
  });
  m.def("races() -> str", [] { return memory().races(); });
  m.def("reset() -> ()", [] { memory().reset(); });
  m.def("times() -> float[]", [] {
    const auto times = memory().times();
    return std::vector<double>(times.begin(), times.end());
  });
  m.def("set_speeds(float[] of, int engines) -> ()",
        [](const std::vector<double>& of, std::int64_t engines) {
          const std::lock_guard lock(memory().mutex);
          memory().speeds = {of.at(0), of.at(1), of.at(2), of.at(3), static_cast<int>(engines)};
        });
  m.def("set_lazy(bool lazy) -> ()", [](bool lazy) { memory().lazy = lazy; });
  m.def("set_lacks(bool lacks) -> ()", [](bool lacks) { memory().lacks = lacks; });
  m.def("set_streams(bool on) -> ()", [](bool on) { memory().streams = on; });
}

}  // namespace pretend
