// SPDX-License-Identifier: Apache-2.0
// Ctrl-C, SIGTERM and SIGHUP end a command between two tensors, so that everything unwinds and
// nothing half-written is left; then the process dies of that signal, as shells expect. A second
// one kills.
#pragma once

#include "stowage/error.h"

namespace stowage::cli {

struct Interrupted : Error {
  using Error::Error;
};

/// For commands that write; all others die at once, as by default. What is ignored (nohup) stays
/// so.
void catch_interrupts();
/// Throws Interrupted once a signal has come.
void check_interrupt();
/// Ends the process by the signal that came. Returns if none did.
void die_of_interrupt();

}  // namespace stowage::cli
