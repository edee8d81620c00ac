// SPDX-License-Identifier: Apache-2.0
// CUDA through its driver, found at run time: one build serves machines with and without it, and
// needs no toolkit. The primary context is the one that torch and the CUDA runtime use, so that
// their memory and streams can be handed over.
#include <dlfcn.h>

#include <array>
#include <mutex>

#include "stowage/device.h"

namespace stowage {
inline namespace v0 {
namespace {

// The driver's interface. Where it changed, the version is part of a symbol's name, and old names
// stay: a driver that lacks one is refused by that name.
using Result = int;
using DevicePointer = unsigned long long;
using Context = void*;
using DriverStream = void*;
using DriverEvent = void*;
constexpr Result kSuccess = 0, kOutOfMemory = 2, kNotReady = 600, kPinnedAlready = 712;
constexpr unsigned kNonBlocking = 1, kNoTiming = 2, kPortable = 1;

struct Driver {
  Result (*init)(unsigned);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*device_get_name)(char*, int, int);
  Result (*retain)(Context*, int);
  Result (*release)(int);
  Result (*push)(Context);
  Result (*pop)(Context*);
  Result (*allocate)(DevicePointer*, std::size_t);
  Result (*free)(DevicePointer);
  Result (*pin)(void*, std::size_t, unsigned);
  Result (*unpin)(void*);
  Result (*copy_in)(DevicePointer, const void*, std::size_t, DriverStream);
  Result (*stream_create)(DriverStream*, unsigned);
  Result (*stream_destroy)(DriverStream);
  Result (*stream_synchronize)(DriverStream);
  Result (*stream_wait)(DriverStream, DriverEvent, unsigned);
  Result (*event_create)(DriverEvent*, unsigned);
  Result (*event_destroy)(DriverEvent);
  Result (*event_record)(DriverEvent, DriverStream);
  Result (*event_query)(DriverEvent);
  Result (*event_synchronize)(DriverEvent);
};

Driver load_driver(const std::string& library) {
  void* const opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr)
    throw Error(Code::unsupported, "cuda: the driver must be there, got " + std::string(dlerror()));
  const auto symbol = [&]<class Function>(const char* name, Function*& found) {
    found = reinterpret_cast<Function*>(::dlsym(opened, name));
    if (found == nullptr)
      throw Error(Code::unsupported, "cuda: " + library + " must have " + name + ", got none");
  };
  Driver driver{};
  symbol("cuInit", driver.init);
  symbol("cuGetErrorString", driver.get_error_string);
  symbol("cuDeviceGet", driver.device_get);
  symbol("cuDeviceGetName", driver.device_get_name);
  symbol("cuDevicePrimaryCtxRetain", driver.retain);
  symbol("cuDevicePrimaryCtxRelease_v2", driver.release);
  symbol("cuCtxPushCurrent_v2", driver.push);
  symbol("cuCtxPopCurrent_v2", driver.pop);
  symbol("cuMemAlloc_v2", driver.allocate);
  symbol("cuMemFree_v2", driver.free);
  symbol("cuMemHostRegister_v2", driver.pin);
  symbol("cuMemHostUnregister", driver.unpin);
  symbol("cuMemcpyHtoDAsync_v2", driver.copy_in);
  symbol("cuStreamCreate", driver.stream_create);
  symbol("cuStreamDestroy_v2", driver.stream_destroy);
  symbol("cuStreamSynchronize", driver.stream_synchronize);
  symbol("cuStreamWaitEvent", driver.stream_wait);
  symbol("cuEventCreate", driver.event_create);
  symbol("cuEventDestroy_v2", driver.event_destroy);
  symbol("cuEventRecord", driver.event_record);
  symbol("cuEventQuery", driver.event_query);
  symbol("cuEventSynchronize", driver.event_synchronize);
  return driver;  // never closed: a driver does not like to be
}

class CudaDevice : public Device {
 public:
  CudaDevice(int index, const std::string& library) : driver_(load_driver(library)) {
    check("cuInit", driver_.init(0));
    check("cuDeviceGet", driver_.device_get(&device_, index));
    check("cuDevicePrimaryCtxRetain", driver_.retain(&context_, device_));
    try {
      const Current current(*this);
      check("cuStreamCreate", driver_.stream_create(&copies_, kNonBlocking));
      for (DriverEvent& event : events_)
        check("cuEventCreate", driver_.event_create(&event, kNoTiming));
    } catch (...) {
      end();
      throw;
    }
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  ~CudaDevice() override { end(); }

  std::string name() const override {
    std::array<char, 256> text{};
    check("cuDeviceGetName", driver_.device_get_name(text.data(), text.size() - 1, device_));
    return text.data();
  }

  void* allocate(std::uint64_t bytes) override {
    const Current current(*this);
    DevicePointer memory = 0;
    check("cuMemAlloc of " + std::to_string(bytes) + " bytes", driver_.allocate(&memory, bytes));
    return reinterpret_cast<void*>(memory);
  }

  void free(void* memory) noexcept override {
    const Current current(*this);
    driver_.free(reinterpret_cast<DevicePointer>(memory));
  }

  bool pin(void* memory, std::uint64_t bytes) override {
    const Current current(*this);
    const Result result = driver_.pin(memory, bytes, kPortable);
    if (result == kPinnedAlready) return false;
    check("cuMemHostRegister of " + std::to_string(bytes) + " bytes", result);
    return true;
  }

  void unpin(void* memory) noexcept override {
    const Current current(*this);
    driver_.unpin(memory);
  }

  Event copy_in(void* to, const void* from, std::uint64_t bytes,
                std::span<const Event> after) override {
    const Current current(*this);
    const std::scoped_lock lock(mutex_);
    for (const Event event : after) wait_locked(copies_, event);
    check("cuMemcpyHtoDAsync of " + std::to_string(bytes) + " bytes",
          driver_.copy_in(reinterpret_cast<DevicePointer>(to), from, bytes, copies_));
    return record_locked(copies_);
  }

  Event record(Stream stream) override {
    const Current current(*this);
    const std::scoped_lock lock(mutex_);
    return record_locked(stream);
  }

  void wait_on(Stream stream, Event event) override {
    const Current current(*this);
    const std::scoped_lock lock(mutex_);
    wait_locked(stream, event);
  }

  bool done(Event event) override {
    const Current current(*this);
    const std::scoped_lock lock(mutex_);
    if (is_past(event)) return true;
    const Result result = driver_.event_query(slot(event));
    if (result != kNotReady) check("cuEventQuery", result);
    return result == kSuccess;
  }

  void wait(Event event) override {
    const Current current(*this);
    DriverEvent waited = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      if (is_past(event)) return;
      waited = slot(event);
    }
    // Without the lock. Should the slot be taken again meanwhile, its next use is what is waited
    // for: longer than needed, never shorter.
    check("cuEventSynchronize", driver_.event_synchronize(waited));
  }

 private:
  /// Makes the device's context the thread's for as long as it lives.
  class Current {
   public:
    explicit Current(const CudaDevice& device) : device_(device) {
      device.driver_.push(device.context_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      Context before = nullptr;
      device_.driver_.pop(&before);
    }

   private:
    const CudaDevice& device_;
  };

  static constexpr std::size_t kEvents = 1024;  // that may be open at a time

  void end() noexcept {
    {
      const Current current(*this);
      if (copies_ != nullptr) driver_.stream_synchronize(copies_);
      for (DriverEvent event : events_)
        if (event != nullptr) driver_.event_destroy(event);
      if (copies_ != nullptr) driver_.stream_destroy(copies_);
    }
    driver_.release(device_);
  }

  void check(const std::string& what, Result result) const {
    if (result == kSuccess) return;
    const char* text = nullptr;
    driver_.get_error_string(result, &text);
    throw Error(result == kOutOfMemory ? Code::out_of_memory : Code::cuda,
                "cuda: " + what + " must succeed, got error " + std::to_string(result) +
                    (text != nullptr ? std::string(": ") + text : ""));
  }

  DriverEvent slot(Event event) const { return events_[event % kEvents]; }
  /// Its slot was given to a later event, before which it was waited for.
  bool is_past(Event event) const { return event == 0 || event + kEvents <= last_; }

  void wait_locked(DriverStream stream, Event event) {
    if (!is_past(event)) check("cuStreamWaitEvent", driver_.stream_wait(stream, slot(event), 0));
  }

  Event record_locked(DriverStream stream) {
    const Event event = last_ + 1;
    if (event > kEvents) check("cuEventSynchronize", driver_.event_synchronize(slot(event)));
    check("cuEventRecord", driver_.event_record(slot(event), stream));
    return last_ = event;
  }

  const Driver driver_;
  int device_ = 0;
  Context context_ = nullptr;
  DriverStream copies_ = nullptr;
  std::array<DriverEvent, kEvents> events_{};
  std::mutex mutex_;
  Event last_ = 0;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(int index, const std::string& library) {
  return std::make_unique<CudaDevice>(index, library);
}

}  // namespace v0
}  // namespace stowage
