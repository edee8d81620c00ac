// SPDX-License-Identifier: Apache-2.0
// The subcommands: what each is asked for, and the function that does it. They print to stdout and
// throw; main() turns exceptions into one line on stderr and the exit code.
#pragma once
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "store/policy.h"
#include "stowage/plan.h"

namespace stowage::cli {

inline constexpr int kExitOk = 0, kExitFailure = 1, kExitUsage = 2;

/// What was asked makes no sense, whatever the files hold: exit code 2.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InspectOptions {
  std::string model;
  bool json = false;
  std::vector<Storage> compare;  // none: what the model is made of
};
void inspect(const InspectOptions& options);

struct PackOptions {
  std::string in, out;
  Policy policy;
  std::optional<Dtype> compute;  // f32, bf16 or f16
  bool for_bitsandbytes = false;
  std::string dialect;  // of convert: what OUT is written in; "": files of ours
  bool keep_nonfinite = false;
  bool allow_unmatched = false;  // of rules and skips
  bool force = false;
  std::uint64_t shard_bytes = 0;
  bool json = false;
};
void pack(const PackOptions& options);

/// The same, but into the files of a dialect: what rests stays as it is unless a storage is asked
/// for.
void convert(const PackOptions& options);

struct UnpackOptions {
  std::string in, out;
  std::optional<Dtype> compute;  // f64, f32, bf16 or f16; else what each weight computes in
  bool force = false;
  std::uint64_t shard_bytes = 0;
  bool json = false;
};
void unpack(const UnpackOptions& options);

struct PlanCommand {
  std::string model;
  PlanOptions options;
  bool json = false;
  std::string out, html;  // files for the JSON and for the page; "" for none
};
void plan(const PlanCommand& command);

struct ReportCommand {
  std::string model;
  std::string plan, measured;  // files; "" for none
  std::string html;            // a file for the page
  bool json = false;
};
void report(const ReportCommand& command);

struct VerifyOptions {
  std::string model;
  bool json = false;
};
void verify(const VerifyOptions& options);

struct DoctorOptions {
  std::string model;  // "" for none
  bool json = false;
};
void doctor(const DoctorOptions& options);

struct CompileOptions {
  std::vector<std::string> storages;
  std::vector<int> architectures;
  std::vector<int> rows;  // of x, in products; none: all that kernels multiply
  std::string dtype = "bf16";
  std::string compiler, to;  // a library and a folder; "" for those that are found and used
  bool ptx = false, json = false;
};
void compile(const CompileOptions& options);

/// Parses the arguments and runs what they ask for. Throws UsageError, stowage::Error.
int run(int argc, const char* const* argv);

}  // namespace stowage::cli
