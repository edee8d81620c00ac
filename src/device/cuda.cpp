// SPDX-License-Identifier: Apache-2.0
// The driver is found at run time: one build serves machines with and without it, and needs no
// toolkit.
#include "device/cuda.h"

#include <dlfcn.h>

#include "stowage/error.h"

namespace stowage::device {
namespace {

// The driver's interface. Where it changed, the version is part of a symbol's name, and old names
// stay: a driver that lacks one is refused by that name.
using Result = int;
using DevicePointer = unsigned long long;
using Context = void*;
constexpr Result kSuccess = 0, kOutOfMemory = 2, kPinnedAlready = 712;
constexpr unsigned kPortable = 1;

struct Driver {
  Result (*init)(unsigned);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*retain)(Context*, int);
  Result (*release)(int);
  Result (*push)(Context);
  Result (*pop)(Context*);
  Result (*allocate)(DevicePointer*, std::size_t);
  Result (*free)(DevicePointer);
  Result (*pin)(void*, std::size_t, unsigned);
  Result (*unpin)(void*);
  Result (*copy_in)(DevicePointer, const void*, std::size_t);

  void check(const std::string& what, Result result) const {
    if (result == kSuccess) return;
    const char* text = nullptr;
    get_error_string(result, &text);
    throw Error(result == kOutOfMemory ? Code::out_of_memory : Code::cuda,
                "cuda: " + what + " must succeed, got error " + std::to_string(result) +
                    (text != nullptr ? std::string(": ") + text : ""));
  }
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
  symbol("cuDevicePrimaryCtxRetain", driver.retain);
  symbol("cuDevicePrimaryCtxRelease_v2", driver.release);
  symbol("cuCtxPushCurrent_v2", driver.push);
  symbol("cuCtxPopCurrent_v2", driver.pop);
  symbol("cuMemAlloc_v2", driver.allocate);
  symbol("cuMemFree_v2", driver.free);
  symbol("cuMemHostRegister_v2", driver.pin);
  symbol("cuMemHostUnregister", driver.unpin);
  symbol("cuMemcpyHtoD_v2", driver.copy_in);
  return driver;  // never closed: a driver does not like to be
}

}  // namespace

class CudaCopy::Driven {
 public:
  Driven(int index, std::span<std::byte> from, const std::string& library)
      : driver_(load_driver(library)), from_(from) {
    driver_.check("cuInit", driver_.init(0));
    driver_.check("cuDeviceGet", driver_.device_get(&device_, index));
    driver_.check("cuDevicePrimaryCtxRetain", driver_.retain(&context_, device_));
    try {
      const Current current(*this);
      const std::string bytes = " of " + std::to_string(from.size()) + " bytes";
      const Result pinned = driver_.pin(from.data(), from.size(), kPortable);
      if (pinned != kPinnedAlready) driver_.check("cuMemHostRegister" + bytes, pinned);
      pinned_ = pinned == kSuccess;
      driver_.check("cuMemAlloc" + bytes, driver_.allocate(&to_, from.size()));
    } catch (...) {
      end();
      throw;
    }
  }
  Driven(const Driven&) = delete;
  Driven& operator=(const Driven&) = delete;
  ~Driven() { end(); }

  void run() {
    const Current current(*this);
    driver_.check("cuMemcpyHtoD of " + std::to_string(from_.size()) + " bytes",
                  driver_.copy_in(to_, from_.data(), from_.size()));
  }

 private:
  /// Makes the device's context the thread's for as long as it lives.
  class Current {
   public:
    explicit Current(const Driven& of) : driver_(of.driver_) { driver_.push(of.context_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      Context before = nullptr;
      driver_.pop(&before);
    }

   private:
    const Driver& driver_;
  };

  void end() noexcept {
    {
      const Current current(*this);
      if (to_ != 0) driver_.free(to_);
      if (pinned_) driver_.unpin(from_.data());
    }
    driver_.release(device_);
  }

  const Driver driver_;
  const std::span<std::byte> from_;
  int device_ = 0;
  Context context_ = nullptr;
  bool pinned_ = false;
  DevicePointer to_ = 0;
};

CudaCopy::CudaCopy(int index, std::span<std::byte> from, const std::string& library)
    : driven_(std::make_unique<Driven>(index, from, library)) {}
CudaCopy::~CudaCopy() = default;
void CudaCopy::run() { driven_->run(); }

}  // namespace stowage::device
