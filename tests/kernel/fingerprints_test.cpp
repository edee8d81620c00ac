// SPDX-License-Identifier: Apache-2.0
#include "kernel/fingerprints.h"

#include <gtest/gtest.h>

#include <fstream>

#include "kernel/samples.h"

namespace stowage::samples {
namespace {

std::vector<std::string> golden_lines() {
  std::ifstream file(STOWAGE_FINGERPRINTS);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// A line that changed is a number that changed. A storage that is new has new lines:
// `make test-arm` says how the file is written.
STOWAGE_ON_EACH_ISA(Fingerprints, AreThoseOfEveryMachine) {
  const std::vector<std::string> wanted = golden_lines(), got = fingerprints(table);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], wanted[i]);
}

}  // namespace
}  // namespace stowage::samples
