// SPDX-License-Identifier: Apache-2.0
// errno as an Error.
#pragma once
#include <string>

namespace stowage {

/// Throws out_of_memory for ENOMEM, else io: "<where>: <what must hold>, got <errno's text>". Call
/// it before anything else can change errno.
[[noreturn]] void throw_errno(const std::string& where, const std::string& must_hold);

}  // namespace stowage
