// SPDX-License-Identifier: Apache-2.0
// What a model is made of: bytes by storage and by kind, each weight beside its size in bf16, and,
// with a plan, where each rests and what a pass takes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/plan.h"

namespace stowage {
inline namespace v0 {

/// A weight with its scales, or a tensor that is none.
struct ReportWeight {
  std::string name;
  std::string storage;  // "nf4:block64"; of a tensor that is no weight its dtype, "I64"
  Shape shape{};
  std::uint64_t bytes = 0;                              // at rest
  std::string compute{}, tier{};                        // "": not known
  std::optional<double> max_error{}, relative_error{};  // of the values it was made from
};
/// "embedding", "head", "matrix", "convolution", "vector" (norms, biases) or "other".
STOWAGE_API std::string kind_of(const ReportWeight& weight);
/// Two for each value; of a tensor that is no weight those that it has.
STOWAGE_API std::uint64_t bytes_in_bf16(const ReportWeight& weight);

struct Report {
  std::string model;
  std::vector<ReportWeight> weights{};
  std::vector<std::string> notes{};  // a line each
};
/// From headers alone, sorted by name. A file keeps no errors.
STOWAGE_API Report report_of(const File& file, std::string_view model);
/// Sets the tiers of weights that the plan names.
STOWAGE_API void place(Report& report, const Plan& plan);

/// Keys: docs/cli.md. Throws bad_file for what is no report.
STOWAGE_API std::string to_json(const Report& report);
STOWAGE_API Report report_from_json(std::string_view text, std::string_view where = "report");

}  // namespace v0
}  // namespace stowage
