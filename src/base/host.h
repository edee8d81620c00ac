// SPDX-License-Identifier: Apache-2.0
// What the system lets this process have: memory, processor time, pages. Everything is looked up
// when it is asked for; what cannot be found out is 0 or empty.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stowage::host {

struct Memory {
  std::uint64_t all = 0, available = 0;
  std::uint64_t limit = 0;  // of the control groups that the process is in; 0: none
};
Memory memory();

/// CPUs' worth of time that its control groups let the process have; 0: no limit.
double processor_limit();
/// Bytes that it may lock in memory; the largest number: no limit.
std::uint64_t lockable();
/// "always", "madvise" or "never".
std::string huge_pages();
/// "AMD EPYC 7R13".
std::string cpu_name();
/// The names of all environment variables that begin so.
std::vector<std::string> variables(std::string_view prefix);
/// Whether files can be made in a folder.
bool is_writable(const std::string& folder);

// What files of the kernel say.
std::uint64_t bytes_of_limit(std::string_view text);                // "max\n", "1073741824\n"
double processors_of_limit(std::string_view text);                  // "max 100000", "150000 100000"
std::string chosen(std::string_view text);                          // "always [madvise] never"
std::string value_of(std::string_view text, std::string_view key);  // "key : value" of a line

}  // namespace stowage::host
