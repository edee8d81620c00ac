// SPDX-License-Identifier: Apache-2.0
#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  stowage::fuzz::dialect({data, size});
  return 0;
}
