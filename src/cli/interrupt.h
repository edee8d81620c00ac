// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and SIGTERM end a command between two tensors, so that everything unwinds and nothing
// half-written is left. A second one kills.
#pragma once

namespace stowage::cli {

void catch_interrupts();
/// Throws io once a signal has come.
void check_interrupt();

}  // namespace stowage::cli
