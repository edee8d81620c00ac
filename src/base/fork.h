// SPDX-License-Identifier: Apache-2.0
// What a forked child must know: the threads of its parent do not exist in it, and what they held
// at that moment stays locked for ever.
#pragma once
#include <cstdint>

namespace stowage {

/// Changes in the child of each fork: what was made under another number is the parent's.
std::uint64_t process_generation() noexcept;

}  // namespace stowage
