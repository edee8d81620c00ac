// SPDX-License-Identifier: Apache-2.0
// EXPECT_STOWAGE_ERROR(statement, code, words): the statement throws stowage::Error with this code
// and a message that holds the words.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "stowage/error.h"

#define EXPECT_STOWAGE_ERROR(statement, expected_code, words)        \
  do {                                                               \
    try {                                                            \
      statement;                                                     \
      ADD_FAILURE() << #statement " did not throw";                  \
    } catch (const stowage::Error& error) {                          \
      EXPECT_STREQ(stowage::to_string(error.code()),                 \
                   stowage::to_string(stowage::Code::expected_code)) \
          << error.what();                                           \
      EXPECT_THAT(error.what(), testing::HasSubstr(words));          \
    }                                                                \
  } while (false)
