// SPDX-License-Identifier: Apache-2.0
// The one exception of the library, its codes, and the export macro.
#pragma once
#include <stdexcept>
#include <string>

#define STOWAGE_API __attribute__((visibility("default")))

namespace stowage {
inline namespace v0 {

enum class Code { invalid_argument, bad_file, io, unsupported, out_of_memory, cuda, out_of_range };

/// "invalid_argument", "bad_file", ...: how a code is written in messages that cross a language.
STOWAGE_API const char* to_string(Code code) noexcept;

/// Everything that the library throws. Messages read `where: what must hold, got what`; for files
/// they name the path, the tensor and the byte offset.
class STOWAGE_API Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ~Error() override;
  Code code() const noexcept { return code_; }

 private:
  Code code_;
};

}  // namespace v0
}  // namespace stowage
