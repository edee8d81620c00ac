// SPDX-License-Identifier: Apache-2.0
// The texts that programs for devices are compiled of, which the library carries.
#pragma once
#include <span>

namespace stowage::device {

struct Text {
  const char* name;  // as it is included
  const char* text;
};
std::span<const Text> texts() noexcept;

}  // namespace stowage::device
