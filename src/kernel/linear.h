// SPDX-License-Identifier: Apache-2.0
// The linear family: what an instruction set implements. Pointers and counts only.
#pragma once

namespace stowage {
struct LinearKernels {};
}  // namespace stowage
