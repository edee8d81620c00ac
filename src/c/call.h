// SPDX-License-Identifier: Apache-2.0
// How each function of the C interface runs: no exception leaves it, what was thrown becomes a
// status and the thread's last error, and arguments are refused by name.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <string>

#include "stowage.h"
#include "stowage/error.h"
#include "stowage/shape.h"

namespace stowage::c {

stowage_status fail(stowage_status status, const char* said) noexcept;
stowage_status fail(const Error& error) noexcept;

/// Runs body(function), which may throw; `function` begins the messages. Nothing here allocates.
template <class Body>
stowage_status call(const char* function, Body&& body) noexcept try {
  body(function);
  return STOWAGE_OK;
} catch (const Error& error) {
  return fail(error);
} catch (const std::bad_alloc&) {
  return fail(STOWAGE_OUT_OF_MEMORY, "memory: must have room for what was asked, got none");
} catch (const std::exception& error) {
  return fail(STOWAGE_DEFECT, error.what());
} catch (...) {
  return fail(STOWAGE_DEFECT, "unknown exception");
}

/// Throws invalid_argument: "<function>: <rule>, got ...".
[[noreturn]] void refuse(const char* function, const std::string& rule);
void not_null(const char* function, const char* name, const void* argument);

/// The index as one below `count`. Throws out_of_range.
std::size_t checked_index(const char* function, const char* name, std::int64_t index,
                          std::size_t count);
/// Throws invalid_argument for numbers that name no dtype, and, unless `or_unknown`, for -1.
Dtype checked_dtype(const char* function, const char* name, stowage_dtype dtype,
                    bool or_unknown = false);
stowage_dtype c_dtype(Dtype dtype) noexcept;
Shape checked_shape(const char* function, const std::int64_t* shape, std::int32_t rank);
/// A list of the caller. Throws invalid_argument for a negative count, and null with a positive
/// one.
template <class T>
std::span<T> checked_list(const char* function, const char* name, T* list, std::int64_t count) {
  if (count < 0)
    refuse(function,
           std::string(name) + " must not have a negative count, got " + std::to_string(count));
  if (count > 0) not_null(function, name, list);
  return {list, static_cast<std::size_t>(count)};
}

/// Fills as much of the caller's struct as it has, from the first version's `least` bytes on.
template <class Info>
void give(const char* function, const char* name, Info* out, std::size_t least, Info made) {
  not_null(function, name, out);
  const std::size_t size = out->size;
  if (size < least)
    refuse(function, std::string(name) + ".size must be at least " + std::to_string(least) +
                         ", got " + std::to_string(size));
  made.size = size;  // the caller's own
  std::memcpy(out, &made, std::min(size, sizeof made));
}

/// The caller's options, zeros where his version has none. Throws unsupported for fields of a later
/// version than this that are not 0.
template <class Options>
Options taken(const char* function, const Options* options, std::size_t least) {
  const std::size_t size = options->size;
  if (size < least)
    refuse(function, "options.size must be at least " + std::to_string(least) + ", got " +
                         std::to_string(size));
  const auto* const bytes = reinterpret_cast<const unsigned char*>(options);
  for (std::size_t i = sizeof(Options); i < size; ++i)
    if (bytes[i] != 0)
      throw Error(Code::unsupported, std::string(function) +
                                         ": options must have no fields that this version lacks, "
                                         "got byte " +
                                         std::to_string(i));
  Options made{};
  std::memcpy(&made, options, std::min(size, sizeof made));
  return made;
}

}  // namespace stowage::c
