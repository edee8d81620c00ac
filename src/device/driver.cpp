// SPDX-License-Identifier: Apache-2.0
#include "device/driver.h"

#include "device/library.h"

namespace stowage::device {

void Driver::check(const std::string& what, Result result) const {
  if (result == kSuccess) return;
  const char* text = nullptr;
  get_error_string(result, &text);
  throw Error(result == kOutOfMemory ? Code::out_of_memory : Code::cuda,
              "cuda: " + what + " must succeed, got error " + std::to_string(result) +
                  (text != nullptr ? std::string(": ") + text : ""));
}

Driver load_driver(const std::string& library) {
  const Library opened("cuda: the driver", library);
  Driver driver{};
  opened.find("cuInit", driver.init);
  opened.find("cuDriverGetVersion", driver.version);
  opened.find("cuGetErrorString", driver.get_error_string);
  opened.find("cuDeviceGet", driver.device_get);
  opened.find("cuDeviceGetAttribute", driver.device_attribute);
  opened.find("cuDevicePrimaryCtxRetain", driver.retain);
  opened.find("cuDevicePrimaryCtxRelease_v2", driver.release);
  opened.find("cuCtxPushCurrent_v2", driver.push);
  opened.find("cuCtxPopCurrent_v2", driver.pop);
  opened.find("cuMemAlloc_v2", driver.allocate);
  opened.find("cuMemFree_v2", driver.free);
  opened.find("cuMemHostRegister_v2", driver.pin);
  opened.find("cuMemHostUnregister", driver.unpin);
  opened.find("cuMemcpyHtoD_v2", driver.copy_in);
  opened.find("cuMemcpyDtoHAsync_v2", driver.copy_out);
  opened.find("cuMemcpyDtoDAsync_v2", driver.copy);
  opened.find("cuMemsetD8Async", driver.set_bytes);
  opened.find("cuStreamSynchronize", driver.wait);
  opened.find("cuModuleLoadData", driver.load_module);
  opened.find("cuModuleGetFunction", driver.find_function);
  opened.find("cuLaunchKernel", driver.launch);
  return driver;
}

Device::Device(int index, const std::string& library) : driver_(load_driver(library)) {
  driver_.check("cuInit", driver_.init(0));
  driver_.check("cuDeviceGet", driver_.device_get(&device_, index));
  driver_.check("cuDevicePrimaryCtxRetain", driver_.retain(&context_, device_));
}
Device::~Device() {
  if (!forked()) driver_.release(device_);
}

Device::Current::Current(const Device& of) : driver_(of.driver_) {
  if (of.forked())
    throw Error(Code::unsupported,
                "cuda: a device must be used by the process that started it, got a forked child");
  driver_.check("cuCtxPushCurrent", driver_.push(of.context_));
}

int Device::attribute(int which) const {
  int value = 0;
  driver_.check("cuDeviceGetAttribute", driver_.device_attribute(&value, which, device_));
  return value;
}
int Device::architecture() const {
  return attribute(Driver::kMajor) * 10 + attribute(Driver::kMinor);
}
int Device::processors() const { return attribute(Driver::kProcessors); }

}  // namespace stowage::device
