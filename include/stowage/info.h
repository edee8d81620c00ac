// SPDX-License-Identifier: Apache-2.0
// What this build is and what it runs on.
#pragma once
#include <string>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

STOWAGE_API const char* version() noexcept;  // "0.1.0"
STOWAGE_API const char* commit() noexcept;   // git commit, "unknown" outside a checkout
/// The instruction set in use: scalar, neon, avx2, avx512, avx512bf16, amx (chosen once;
/// STOWAGE_FORCE_ISA overrides and is checked against the CPU: throws unsupported or
/// invalid_argument).
STOWAGE_API std::string instruction_set();
/// Whether oneDNN, and torch by it, multiplies bf16 in tiles of the CPU (AMX): it has them, and
/// ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) does not forbid them.
STOWAGE_API bool onednn_uses_amx();
STOWAGE_API int thread_count();  // of default_executor()

}  // namespace v0
}  // namespace stowage
