// SPDX-License-Identifier: Apache-2.0
// NVRTC, which stands beside torch in its CUDA builds: the texts of kernels become code of a device
// on the machine that needs it.
#pragma once
#include <string>
#include <vector>

#include "kernel/cuda/form.cuh"

namespace stowage::device {

/// One compiled program.
struct Compiled {
  std::string code;  // cubin; PTX where the compiler does not know the device yet
  std::string log;
};

class Compiler {
 public:
  /// The first of these libraries that can be opened. Throws unsupported where none can.
  explicit Compiler(const std::vector<std::string>& libraries = default_libraries());

  /// By version, newest first, as the loader finds them.
  static std::vector<std::string> default_libraries();

  /// "13.0": part of what code depends on.
  const std::string& version() const noexcept { return version_; }
  /// Code for a device of this architecture (90 for 9.0), or PTX of it. Throws cuda with the
  /// compiler's log.
  Compiled compile(const std::string& text, int architecture, bool as_ptx = false) const;

 private:
  using Result = int;
  using Handle = void*;
  void check(const char* what, Result result) const;
  int nearest(int architecture) const;

  std::string version_;
  std::vector<int> known_;  // architectures, ascending
  const char* (*get_error_string_)(Result);
  Result (*get_version_)(int*, int*);
  Result (*count_archs_)(int*);
  Result (*get_archs_)(int*);
  Result (*create_)(Handle*, const char*, const char*, int, const char* const*, const char* const*);
  Result (*compile_)(Handle, int, const char* const*);
  Result (*destroy_)(Handle*);
  Result (*log_size_)(Handle, std::size_t*);
  Result (*log_)(Handle, char*);
  Result (*cubin_size_)(Handle, std::size_t*);
  Result (*cubin_)(Handle, char*);
  Result (*ptx_size_)(Handle, std::size_t*);
  Result (*ptx_)(Handle, char*);
};

/// How texts are compiled: nothing is fused, flushed or approximated.
std::vector<std::string> compiler_options(int architecture, bool as_ptx);

/// The text of the program that has a kernel, for a form: its constants, and the file that the
/// kernel stands in. `short_index`: places are counted in 32 bits.
std::string program_text(const cuda::Form& form, const std::string& file, bool short_index);
/// The file of src/kernel/cuda that a kernel stands in. Throws invalid_argument for none.
std::string file_of_kernel(const std::string& kernel);

}  // namespace stowage::device
