// SPDX-License-Identifier: Apache-2.0
#define FMT_HEADER_ONLY  // defined here alone: this file holds the code of {fmt}
#include "base/formatted.h"

#include <fmt/format.h>

namespace stowage {

std::string vformatted(fmt::string_view pattern, fmt::format_args values) {
  return fmt::vformat(pattern, values);
}

}  // namespace stowage
