// SPDX-License-Identifier: Apache-2.0
// A stream whose device is the host.
#pragma once
#include <cstring>

#include "device/host_kernels.h"
#include "device/ops.h"

namespace stowage {

class HostStream : public device::Stream {
 public:
  // Sanitizers take long over lanes that wait for each other: of all cases they see every so many.
#if defined(__SANITIZE_THREAD__)
  static constexpr std::size_t kEvery = 60;
#elif defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kEvery = 7;
#else
  static constexpr std::size_t kEvery = 1;
#endif

  explicit HostStream(unsigned threads_of_a_block = 64) : threads(threads_of_a_block) {}
  void launch(const cuda::Form& form, std::string_view kernel, std::int64_t /*threads*/,
              std::int64_t /*elements*/, std::span<const void* const> arguments) override {
    cuda::on_host::run_kernel(form, kernel, arguments.data(), 2, threads);
  }
  void clear(void* memory, std::size_t bytes) override {
    if (bytes != 0) std::memset(memory, 0, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
  const unsigned threads;
};

}  // namespace stowage
