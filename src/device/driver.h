// SPDX-License-Identifier: Apache-2.0
// CUDA's driver: the calls that are used here, and devices by their primary context, which torch
// shares.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fork.h"

namespace stowage::device {

/// What dlopen() is asked for.
inline constexpr const char* kDriver = "libcuda.so.1";

/// The driver's interface. Where it changed, the version is part of a symbol's name, and old names
/// stay: a driver that lacks one is refused by that name.
struct Driver {
  using Result = int;
  using Pointer = unsigned long long;
  using Context = void*;
  static constexpr Result kSuccess = 0, kOutOfMemory = 2, kPinnedAlready = 712;
  static constexpr unsigned kPortable = 1;
  static constexpr int kProcessors = 16, kMajor = 75, kMinor = 76;  // attributes

  Result (*init)(unsigned);
  Result (*version)(int*);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(int*, int);
  Result (*device_attribute)(int*, int, int);
  Result (*retain)(Context*, int);
  Result (*release)(int);
  Result (*push)(Context);
  Result (*pop)(Context*);
  Result (*allocate)(Pointer*, std::size_t);
  Result (*free)(Pointer);
  Result (*pin)(void*, std::size_t, unsigned);
  Result (*unpin)(void*);
  Result (*copy_in)(Pointer, const void*, std::size_t);
  Result (*copy_out)(void*, Pointer, std::size_t, void*);  // on a stream, as the next ones
  Result (*copy)(Pointer, Pointer, std::size_t, void*);
  Result (*set_bytes)(Pointer, unsigned char, std::size_t, void*);
  Result (*wait)(void*);
  Result (*load_module)(void**, const void*);
  Result (*find_function)(void**, void*, const char*);
  Result (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**);

  /// Throws out_of_memory, or cuda with the driver's own words.
  void check(const std::string& what, Result result) const;
};

/// Throws unsupported where there is none.
Driver load_driver(const std::string& library = kDriver);

/// A device by its number, with its primary context.
class Device {
 public:
  /// Throws unsupported, cuda.
  Device(int index, const std::string& library = kDriver);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  const Driver& driver() const noexcept { return driver_; }
  /// Its compute capability, as 90 for 9.0.
  int architecture() const;
  int processors() const;

  /// Whether this is a child of the process that made it, where no driver works.
  bool forked() const noexcept { return process_ != process_generation(); }

  /// Makes the device's context the thread's for as long as it lives. Throws cuda, and unsupported
  /// in a forked child.
  class Current {
   public:
    explicit Current(const Device& of);
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      Driver::Context before = nullptr;
      driver_.pop(&before);
    }

   private:
    const Driver& driver_;
  };

 private:
  int attribute(int which) const;

  const Driver driver_;
  int device_ = 0;
  Driver::Context context_ = nullptr;
  const std::uint64_t process_ = process_generation();
};

}  // namespace stowage::device
