// SPDX-License-Identifier: Apache-2.0
// Two processes on one folder: neither notices how the other ends.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/model.h"

namespace stowage {
namespace {
using namespace test;

class Processes : public testing::TestWithParam<Reads> {
 protected:
  Scratch scratch_;
  std::string folder_ = write_model(scratch_, {.weights = 12});

  // Passes over all weights, right to the last byte.
  static bool passes(const std::string& folder, Reads reads, int count) {
    const File file = File::open(folder);
    Engine engine(file, {.ram = 2 * Needs(file).least, .reads = reads, .workers = 2});
    for (int pass = 0; pass < count; ++pass)
      for (int i = 0; i < 12; ++i)
        if (!same_bytes(engine.acquire(engine.find(weight_name(i)).value()).weight(),
                        file.weight(weight_name(i))))
          return false;
    return true;
  }
  pid_t start(int count) const {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(passes(folder_, GetParam(), count) ? 0 : 1);
    return child;
  }
};
INSTANTIATE_TEST_SUITE_P(Reads, Processes,
                         testing::Values(Reads::mapped, Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Processes, OneIsKilledAndTheOtherReadsOn) {
  for (int round = 0; round < 5; ++round) {
    const pid_t killed = start(1 << 30);
    const pid_t other = start(40);
    ::usleep(static_cast<useconds_t>(3000 * round));
    ::kill(killed, SIGKILL);
    EXPECT_TRUE(passes(folder_, GetParam(), 10));
    int status = 0;
    ::waitpid(killed, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    ::waitpid(other, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace stowage
