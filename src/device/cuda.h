// SPDX-License-Identifier: Apache-2.0
// The link to a CUDA device, for plans: how long bytes take to cross it.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "device/driver.h"

namespace stowage::device {

/// Copies the same host memory, pinned meanwhile, into memory of a CUDA device, through the driver
/// that the machine has and the device's primary context, which torch shares.
class CudaCopy {
 public:
  /// The device of that number. `library` is what dlopen() is asked for. Throws unsupported where
  /// there is no driver, out_of_memory, cuda with the driver's own words.
  CudaCopy(int index, std::span<std::byte> from, const std::string& library = kDriver);
  ~CudaCopy();

  void run();  // returns when the bytes are there; throws cuda

 private:
  class Driven;
  std::unique_ptr<Driven> driven_;
};

}  // namespace stowage::device
