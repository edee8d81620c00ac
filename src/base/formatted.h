// SPDX-License-Identifier: Apache-2.0
// Text from a pattern and arguments, checked when compiled. {fmt} itself is compiled in one file:
// as headers alone it costs every file that formats a line four seconds.
#pragma once

#if __has_include(<fmt/base.h>)
#include <fmt/base.h>  // {fmt} 11 and later
#else
#include <fmt/core.h>
#endif

#include <string>

namespace stowage {

std::string vformatted(fmt::string_view pattern, fmt::format_args arguments);

/// The pattern with its {} replaced by the arguments: numbers and strings.
template <class... Arguments>
std::string formatted(fmt::format_string<Arguments...> pattern, Arguments&&... arguments) {
  return vformatted(pattern, fmt::make_format_args(arguments...));
}

}  // namespace stowage
