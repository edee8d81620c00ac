// SPDX-License-Identifier: Apache-2.0
// The names of the error codes, and the home of Error's type information.
#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

Error::~Error() = default;

const char* to_string(Code code) noexcept {
  switch (code) {
    case Code::invalid_argument:
      return "invalid_argument";
    case Code::bad_file:
      return "bad_file";
    case Code::io:
      return "io";
    case Code::unsupported:
      return "unsupported";
    case Code::out_of_memory:
      return "out_of_memory";
    case Code::cuda:
      return "cuda";
    case Code::out_of_range:
      return "out_of_range";
  }
  return "unknown";
}

}  // namespace v0
}  // namespace stowage
