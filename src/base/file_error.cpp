// SPDX-License-Identifier: Apache-2.0
#include "base/file_error.h"

#include <cerrno>
#include <system_error>

#include "base/file.h"
#include "stowage/error.h"

namespace stowage {

void throw_errno(const std::string& where, const std::string& must_hold) {
  const int number = errno;
  throw Error(number == ENOMEM ? Code::out_of_memory : Code::io,
              where + ": " + must_hold + ", got " + std::generic_category().message(number));
}

void check_path(const std::string& path) {
  if (path.empty()) throw Error(Code::invalid_argument, "path: must not be empty, got \"\"");
  if (const std::size_t zero = path.find('\0'); zero != std::string::npos) {
    throw Error(Code::invalid_argument, path.substr(0, zero) +
                                            ": a path must not hold a zero byte, "
                                            "got one at " +
                                            std::to_string(zero));
  }
}

}  // namespace stowage
