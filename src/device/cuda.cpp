// SPDX-License-Identifier: Apache-2.0
#include "device/cuda.h"

namespace stowage::device {

class CudaCopy::Driven {
 public:
  Driven(int index, std::span<std::byte> from, const std::string& library)
      : device_(index, library), from_(from) {
    const Device::Current current(device_);
    const Driver& driver = device_.driver();
    const std::string bytes = " of " + std::to_string(from.size()) + " bytes";
    const Driver::Result pinned = driver.pin(from.data(), from.size(), Driver::kPortable);
    if (pinned != Driver::kPinnedAlready) driver.check("cuMemHostRegister" + bytes, pinned);
    pinned_ = pinned == Driver::kSuccess;
    const Driver::Result allocated = driver.allocate(&to_, from.size());
    if (allocated != Driver::kSuccess && pinned_) driver.unpin(from.data());
    driver.check("cuMemAlloc" + bytes, allocated);
  }
  Driven(const Driven&) = delete;
  Driven& operator=(const Driven&) = delete;
  ~Driven() {
    if (device_.forked()) return;
    const Device::Current current(device_);
    device_.driver().free(to_);
    if (pinned_) device_.driver().unpin(from_.data());
  }

  void run() {
    const Device::Current current(device_);
    device_.driver().check("cuMemcpyHtoD of " + std::to_string(from_.size()) + " bytes",
                           device_.driver().copy_in(to_, from_.data(), from_.size()));
  }

 private:
  const Device device_;
  const std::span<std::byte> from_;
  bool pinned_ = false;
  Driver::Pointer to_ = 0;
};

CudaCopy::CudaCopy(int index, std::span<std::byte> from, const std::string& library)
    : driven_(std::make_unique<Driven>(index, from, library)) {}
CudaCopy::~CudaCopy() = default;
void CudaCopy::run() { driven_->run(); }

}  // namespace stowage::device
