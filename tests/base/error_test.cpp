// SPDX-License-Identifier: Apache-2.0
#include "stowage/error.h"

#include <gtest/gtest.h>

#include <string>

namespace stowage {
namespace {

TEST(Error, CarriesCodeAndMessage) {
  try {
    throw Error(Code::bad_file, "m.safetensors: header must end, got byte 9");
  } catch (const std::runtime_error& caught) {
    EXPECT_STREQ(caught.what(), "m.safetensors: header must end, got byte 9");
    EXPECT_EQ(dynamic_cast<const Error&>(caught).code(), Code::bad_file);
  }
}

TEST(Error, EveryCodeHasItsName) {
  EXPECT_STREQ(to_string(Code::invalid_argument), "invalid_argument");
  EXPECT_STREQ(to_string(Code::bad_file), "bad_file");
  EXPECT_STREQ(to_string(Code::io), "io");
  EXPECT_STREQ(to_string(Code::unsupported), "unsupported");
  EXPECT_STREQ(to_string(Code::out_of_memory), "out_of_memory");
  EXPECT_STREQ(to_string(Code::cuda), "cuda");
  EXPECT_STREQ(to_string(Code::out_of_range), "out_of_range");
}

}  // namespace
}  // namespace stowage
