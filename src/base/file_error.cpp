// SPDX-License-Identifier: Apache-2.0
#include "base/file_error.h"

#include <cerrno>
#include <system_error>

#include "stowage/error.h"

namespace stowage {

void throw_errno(const std::string& where, const std::string& must_hold) {
  const int number = errno;
  throw Error(number == ENOMEM ? Code::out_of_memory : Code::io,
              where + ": " + must_hold + ", got " + std::generic_category().message(number));
}

}  // namespace stowage
