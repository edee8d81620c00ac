// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <signal.h>

namespace stowage::cli {
namespace {

volatile sig_atomic_t interrupted = 0;  // the signal's number

void note(int number) { interrupted = number; }

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);
  }
}

void check_interrupt() {
  if (interrupted != 0) throw Interrupted(Code::io, "interrupted; nothing was written");
}

void die_of_interrupt() {
  if (interrupted == 0) return;
  signal(interrupted, SIG_DFL);
  raise(interrupted);
}

}  // namespace stowage::cli
