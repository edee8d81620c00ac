// SPDX-License-Identifier: Apache-2.0
// Which weight of a model rests where, and what a pass will then take: known from the headers of
// its files, before anything is read. Formulas: docs/planning.md.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stowage/crossover.h"
#include "stowage/file.h"

namespace stowage {
inline namespace v0 {

/// How fast a format is multiplied: bytes at rest per second where one row of x meets the weight,
/// and operations (2 N K rows) per second where many do.
struct FamilyRates {
  double read = 0, multiply = 0;
};
/// An accelerator: bytes per second over the link to it and out of its own memory, operations per
/// second. `assumed`: not measured here.
struct AcceleratorRates {
  double copy = 0, read = 0, multiply = 0;
  bool assumed = true;
};
/// What this machine moves and computes, in bytes per second.
struct Links {
  std::string key;  // of the machine: CPU, cores, memory, kernel
  double disk = 0;  // past the page cache
  double cached = 0, memcpy = 0;
  std::map<std::string, FamilyRates> linear{};             // by format: "nf4", "bf16", ...
  std::map<std::string, AcceleratorRates> accelerators{};  // by name: "cuda:0"
};
/// CPU, cores, memory and kernel of this machine, in words.
STOWAGE_API std::string machine_key();
/// The rates of this machine and of the disk that `path` (a file or a folder) lies on: from
/// links.json (docs/env.md), or measured now, for a few seconds, and kept there. `measured` says
/// which. `anew` measures in any case. Throws io.
STOWAGE_API Links links_of_this_machine(const std::string& path, bool anew = false,
                                        bool* measured = nullptr);
STOWAGE_API std::string to_json(const Links& links);
/// From how many rows of x on other ways to multiply are quicker on this machine, by the
/// instruction set in use: from links.json, or measured now, in less than a second, and kept there.
/// It is in force from then on. `measured` and `anew` as above. Throws io where it cannot be kept.
STOWAGE_API Crossover crossover_of_this_machine(bool anew = false, bool* measured = nullptr);
/// Puts one in force, and keeps it in links.json. Throws as use_crossover does, and io.
STOWAGE_API void keep_crossover(const Crossover& crossover);
/// Puts in force what links.json keeps for this machine, or what STOWAGE_CROSSOVER says instead;
/// false where neither says anything. Throws invalid_argument for what it cannot say.
STOWAGE_API bool use_kept_crossover();
STOWAGE_API std::string to_json(const Crossover& crossover);
STOWAGE_API Links links_from_json(std::string_view text);  // throws bad_file

struct PlanOptions {
  std::uint64_t ram = 0;  // the most bytes of the host's memory
  std::vector<std::pair<std::string, std::uint64_t>> accelerators{};  // by name, the most bytes
  std::optional<Storage> storage{};  // plan as if the weights that `pack` takes were in it
  std::int64_t rows = 1;             // of x in a pass: tokens
  std::uint64_t activations = 0;     // bytes beside the weights, where the work is
  bool works_on_cpu = true;          // a weight may be multiplied beside an accelerator
  std::vector<std::string> order{};  // of use, by name; what it does not name follows
  /// Uses per pass by glob; an embedding that is named is used whole.
  std::vector<std::pair<std::string, double>> uses{};
  /// Experts that a token takes in each layer; 0: as `config` says, else all.
  std::int64_t routed = 0;
  std::string config{};  // text of the model's config.json; of a file, that beside it
  /// How often each expert was used elsewhere, by layer; without, all of it are used alike.
  std::map<std::string, std::vector<double>> routing{};
};

/// A weight with its scales, or a plain tensor.
struct PlanUnit {
  std::string name;
  std::string storage;  // "nf4:block64"; of a tensor that is no weight its dtype, "I64"
  Shape shape{};
  std::uint64_t rest = 0;     // bytes at rest
  std::uint64_t bytes = 0;    // that it takes in memory, whole pages
  std::uint64_t scratch = 0;  // that it comes through, where a file has it in another order
  double uses = 1;            // per pass
  bool rests = false;         // a weight that was put to rest: it moves, however small
  double share = 1;           // of the rows of x, that it meets when it is used
  bool stack = false;         // [E, O, K]: a unit, or one for each matrix, "w[0]", "w[1]"
  /// Of a stack of which other processes have a part: the number of the first matrix that is here,
  /// and how many there are in all; 0: as many as here.
  std::int64_t first = 0, total = 0;
  std::uint64_t index_scratch = 0;  // of a stack: that one of its matrices comes through
  bool rows = false;                // only the rows that ids name are read
  /// In memory where it is used, always: plain and small, or spread over processes that gather or
  /// multiply it together.
  bool stays = false;
  std::string tier{}, work{};  // "disk", "ram" or an accelerator; "cpu" or an accelerator
  double seconds = 0;          // of work, per pass
  std::string why{};
};

/// Bytes in use when a unit's work begins.
struct PlanMoment {
  std::int64_t unit = 0;
  std::uint64_t ram = 0, accelerators = 0;
};

/// Bytes by tier; "disk->ram" and "ram->cuda:0" by link.
using BytesByName = std::map<std::string, std::uint64_t>;

struct Plan {
  std::string model, fingerprint, storage{};  // storage: what the weights were planned as, or ""
  Links links{};
  std::uint64_t ram = 0;
  std::vector<std::pair<std::string, std::uint64_t>> accelerators{};
  std::vector<PlanUnit> units{};  // in order of use
  BytesByName ring{}, tiles{};
  std::uint64_t scratch = 0;  // of ram, for weights that a file has in another order
  std::uint64_t activations = 0;
  std::int64_t rows = 1;
  double seconds = 0;  // of a pass, when passes repeat
  BytesByName peak{}, moved{};
  std::vector<PlanMoment> over_the_pass{};
};

/// One expert of a layer.
struct PlanExpert {
  double uses = 0;  // per pass
  std::uint64_t bytes = 0;
  std::string tier{};
};
/// The experts of one module, by their numbers.
struct PlanExperts {
  std::string name;
  std::vector<PlanExpert> experts;
};
/// Whether it names a weight of one of them: "experts.3.up.weight", or of a stack "experts.up[3]".
STOWAGE_API bool is_of_expert(std::string_view name);
STOWAGE_API std::vector<PlanExperts> experts_of(const Plan& plan);
/// Of the uses of experts in a pass the part that finds them in memory; none: there are no experts.
STOWAGE_API std::optional<double> hits_of(const Plan& plan);

/// Reads no tensor. Throws invalid_argument where no plan holds the limits, naming the three
/// largest terms and the number that would do; and for unknown names in `order`.
STOWAGE_API Plan make_plan(const File& file, const PlanOptions& options, const Links& links);
/// The same for units that a caller describes: name, storage, shape, rest, uses and rows. `bytes` 0
/// are those at rest in whole pages.
STOWAGE_API Plan make_plan(std::string_view model, std::vector<PlanUnit> units,
                           const PlanOptions& options, const Links& links);
/// The units of a file in the order of their names, as they rest or as `storage` would have them.
STOWAGE_API std::vector<PlanUnit> plan_units(const File& file,
                                             const std::optional<Storage>& storage = {});

/// Throws invalid_argument, naming the difference, unless the plan was made for these weights as
/// they rest.
STOWAGE_API void check_plan(const Plan& plan, const File& file);
STOWAGE_API void check_plan(const Plan& plan, std::string_view model,
                            const std::vector<PlanUnit>& units);

/// By layer, what stowage.Uses.save of Python wrote. Throws bad_file.
STOWAGE_API std::map<std::string, std::vector<double>> routing_from_json(
    std::string_view text, std::string_view where = "uses");

STOWAGE_API std::string to_json(const Plan& plan);
/// Throws bad_file: not a plan, of a later version, a key missing or of another type.
STOWAGE_API Plan plan_from_json(std::string_view text, std::string_view where = "plan");
STOWAGE_API std::string to_text(const Plan& plan);

/// What a pass really took; 0 and missing names: not measured.
struct PlanMeasured {
  double seconds = 0;
  BytesByName peak{}, moved{};
  std::optional<double> stall{};  // seconds of it that the work waited for weights
};
/// {"seconds", "peak": {tier: bytes}, "bytes": {link: bytes}, "stall"}; each may be left out, other
/// keys are left alone. Throws bad_file.
STOWAGE_API PlanMeasured measured_from_json(std::string_view text,
                                            std::string_view where = "measured");
/// "predicted 1.20 s, measured 1.31 s (+9 %)", and where that is off by more than 15 % what most
/// likely differs. Throws invalid_argument where no seconds were measured.
STOWAGE_API std::string compare(const Plan& plan, const PlanMeasured& measured);

}  // namespace v0
}  // namespace stowage
