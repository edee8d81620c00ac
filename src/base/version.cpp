// SPDX-License-Identifier: Apache-2.0
// What this build is. Both texts come from CMake: version.txt and the git checkout.
#include "stowage/info.h"

namespace stowage {
inline namespace v0 {

const char* version() noexcept { return STOWAGE_VERSION; }
const char* commit() noexcept { return STOWAGE_COMMIT; }

}  // namespace v0
}  // namespace stowage
