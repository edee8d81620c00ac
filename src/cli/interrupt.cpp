// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <signal.h>

#include "stowage/error.h"

namespace stowage::cli {
namespace {

volatile sig_atomic_t interrupted = 0;

void note(int) { interrupted = 1; }

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) sigaction(number, &action, nullptr);
}

void check_interrupt() {
  if (interrupted != 0) throw Error(Code::io, "interrupted; nothing was written");
}

}  // namespace stowage::cli
