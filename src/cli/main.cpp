// SPDX-License-Identifier: Apache-2.0
// The program `stowage`: every failure becomes one line on stderr and an exit code.
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/text.h"
#include "stowage/error.h"

namespace {

int fail(int code, const std::string& message) {
  std::fprintf(stderr, "stowage: %s\n", stowage::printable(message).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace stowage::cli;
  try {
    return run(argc, argv);
  } catch (const UsageError& error) {
    return fail(kExitUsage, error.what());
  } catch (const Interrupted& interrupted) {
    fail(kExitFailure, interrupted.what());
    die_of_interrupt();
    return kExitFailure;
  } catch (const std::bad_alloc&) {
    return fail(kExitFailure, "memory: must suffice for the largest tensor, got no more");
  } catch (const std::exception& error) {
    return fail(kExitFailure, error.what());
  }
}
