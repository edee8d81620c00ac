// SPDX-License-Identifier: Apache-2.0
// Kernels of a CUDA device, each compiled when it is first needed and kept: in memory, and in a
// folder, where processes and later runs find it. And streams that run them.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/compiler.h"
#include "device/driver.h"
#include "device/kept_programs.h"
#include "device/ops.h"

namespace stowage::device {

/// The compiled programs of one device. Any number of threads may ask.
class Programs {
 public:
  struct Where {
    std::string driver = kDriver;
    std::vector<std::string> compilers = Compiler::default_libraries();
    std::string folder;  // of what is kept; "" keeps nothing
  };
  /// Throws unsupported where there is no driver or no compiler.
  Programs(int index, const Where& where);

  const Device& device() const noexcept { return device_; }
  const Compiler& compiler() const noexcept { return compiler_; }
  int architecture() const noexcept { return architecture_; }
  int processors() const noexcept { return processors_; }

  /// The driver's handle of a kernel. The context must be the thread's. Throws cuda.
  void* function(const cuda::Form& form, std::string_view kernel, bool short_index);
  /// How many programs were compiled here, and how many were read.
  struct Counts {
    int compiled = 0, read = 0;
  };
  Counts counts() const;

 private:
  void* loaded(const std::string& text);

  const Device device_;
  const Compiler compiler_;
  const int architecture_, processors_;
  const KeptPrograms kept_;
  mutable std::mutex mutex_;
  Counts counts_;
  struct Function {
    cuda::Form form;
    bool short_index;
    std::string name;
    void* handle;
  };
  std::vector<Function> functions_;       // a few for each form, of which a model has few
  std::map<std::string, void*> modules_;  // by their text
};

/// Launches on a stream of the driver (null: the default one), in the context of the device.
class CudaStream : public Stream {
 public:
  CudaStream(Programs& programs, void* stream)
      : programs_(programs), stream_(stream), current_(programs.device()) {}

  void launch(const cuda::Form& form, std::string_view kernel, std::int64_t threads,
              std::int64_t elements, std::span<const void* const> arguments) override;
  void clear(void* memory, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  /// Waits for all before, and reads a word of the device.
  std::uint32_t read_word(const void* from);

 private:
  Programs& programs_;
  void* stream_;
  Device::Current current_;
};

}  // namespace stowage::device
