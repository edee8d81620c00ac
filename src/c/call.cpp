// SPDX-License-Identifier: Apache-2.0
#include "c/call.h"

#include <array>

#include "stowage/info.h"

namespace stowage::c {
namespace {

// Of each thread. An array, since to make or to destroy a string could fail.
thread_local std::array<char, 4096> last_error{};

static_assert(STOWAGE_INVALID_ARGUMENT == 1 + static_cast<int>(Code::invalid_argument));
static_assert(STOWAGE_BAD_FILE == 1 + static_cast<int>(Code::bad_file));
static_assert(STOWAGE_IO == 1 + static_cast<int>(Code::io));
static_assert(STOWAGE_UNSUPPORTED == 1 + static_cast<int>(Code::unsupported));
static_assert(STOWAGE_OUT_OF_MEMORY == 1 + static_cast<int>(Code::out_of_memory));
static_assert(STOWAGE_CUDA == 1 + static_cast<int>(Code::cuda));
static_assert(STOWAGE_OUT_OF_RANGE == 1 + static_cast<int>(Code::out_of_range));

static_assert(STOWAGE_BOOL == static_cast<int>(Dtype::boolean));
static_assert(STOWAGE_U8 == static_cast<int>(Dtype::u8));
static_assert(STOWAGE_I8 == static_cast<int>(Dtype::i8));
static_assert(STOWAGE_U16 == static_cast<int>(Dtype::u16));
static_assert(STOWAGE_I16 == static_cast<int>(Dtype::i16));
static_assert(STOWAGE_U32 == static_cast<int>(Dtype::u32));
static_assert(STOWAGE_I32 == static_cast<int>(Dtype::i32));
static_assert(STOWAGE_U64 == static_cast<int>(Dtype::u64));
static_assert(STOWAGE_I64 == static_cast<int>(Dtype::i64));
static_assert(STOWAGE_F8_E4M3 == static_cast<int>(Dtype::f8_e4m3));
static_assert(STOWAGE_F8_E5M2 == static_cast<int>(Dtype::f8_e5m2));
static_assert(STOWAGE_F8_E8M0 == static_cast<int>(Dtype::f8_e8m0));
static_assert(STOWAGE_F4 == static_cast<int>(Dtype::f4));
static_assert(STOWAGE_F16 == static_cast<int>(Dtype::f16));
static_assert(STOWAGE_BF16 == static_cast<int>(Dtype::bf16));
static_assert(STOWAGE_F32 == static_cast<int>(Dtype::f32));
static_assert(STOWAGE_F64 == static_cast<int>(Dtype::f64));
static_assert(STOWAGE_C64 == static_cast<int>(Dtype::c64));

}  // namespace

stowage_status fail(stowage_status status, const char* said) noexcept {
  std::size_t length = std::min(std::strlen(said), last_error.size() - 1);
  while (said[length] != 0 && (said[length] & 0xC0) == 0x80) --length;  // whole letters of UTF-8
  std::memcpy(last_error.data(), said, length);
  last_error[length] = 0;
  return status;
}

stowage_status fail(const Error& error) noexcept {
  return fail(1 + static_cast<stowage_status>(error.code()), error.what());
}

void refuse(const char* function, const std::string& rule) {
  throw Error(Code::invalid_argument, std::string(function) + ": " + rule);
}

void not_null(const char* function, const char* name, const void* argument) {
  if (argument == nullptr) refuse(function, std::string(name) + " must not be null");
}

std::size_t checked_index(const char* function, const char* name, std::int64_t index,
                          std::size_t count) {
  if (index < 0 || static_cast<std::uint64_t>(index) >= count)
    throw Error(Code::out_of_range, std::string(function) + ": " + name + " must lie in [0, " +
                                        std::to_string(count) + "), got " + std::to_string(index));
  return static_cast<std::size_t>(index);
}

Dtype checked_dtype(const char* function, const char* name, stowage_dtype dtype, bool or_unknown) {
  if (dtype == STOWAGE_UNKNOWN && or_unknown) return Dtype::unknown;
  if (dtype < 0 || dtype > STOWAGE_C64)
    refuse(function,
           std::string(name) + " must be one of stowage_dtype, got " + std::to_string(dtype));
  return static_cast<Dtype>(dtype);
}

stowage_dtype c_dtype(Dtype dtype) noexcept {
  return dtype == Dtype::unknown ? STOWAGE_UNKNOWN : static_cast<stowage_dtype>(dtype);
}

Shape checked_shape(const char* function, const std::int64_t* shape, std::int32_t rank) {
  return Shape(checked_list(function, "shape", shape, rank));
}

}  // namespace stowage::c

using namespace stowage::c;

const char* stowage_last_error() { return last_error.data(); }

const char* stowage_status_name(stowage_status status) {
  if (status == STOWAGE_OK) return "ok";
  if (status == STOWAGE_DEFECT) return "defect";
  return stowage::to_string(static_cast<stowage::Code>(status - 1));  // "unknown" beyond them
}

const char* stowage_version() { return stowage::version(); }
int32_t stowage_abi_version() { return STOWAGE_ABI_VERSION; }

stowage_status stowage_instruction_set(const char** name) {
  return call(__func__, [&](const char* here) {
    not_null(here, "name", name);
    static const std::string chosen = stowage::instruction_set();
    *name = chosen.c_str();
  });
}
