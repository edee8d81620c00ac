// SPDX-License-Identifier: Apache-2.0
// The rates of a machine: measured, kept in a file, and as JSON.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "store/json_fields.h"
#include "stowage/plan.h"

namespace stowage::planning {

nlohmann::ordered_json links_json(const Links& links);  // without the key
nlohmann::ordered_json crossover_json(const Crossover& crossover);
Links links_of(const JsonFields& fields, std::string key);

/// The disk that a file or folder lies on, "254:1".
std::string disk_key(const std::string& path);

struct DiskRates {
  double direct, cached;  // bytes per second, past the page cache and out of it
};

/// What a links.json keeps, by machine and disk. A file that is missing, broken or of another
/// version keeps nothing, and what another hand wrote into it in another form is as if missing.
class KeptLinks {
 public:
  explicit KeptLinks(std::string path);
  std::optional<Links> machine(const std::string& key);
  std::optional<DiskRates> disk(const std::string& key, const std::string& disk);
  /// That of the instruction set in use, which is not asked for where nothing is kept.
  std::optional<Crossover> crossover(const std::string& key);
  void set_crossover(const std::string& key, const std::string& isa, const Crossover& crossover);
  void set_machine(const std::string& key, const Links& links);
  void set_disk(const std::string& key, const std::string& disk, const DiskRates& rates);
  /// Writes it, and tells whether: where a folder cannot be written, the next plan measures again.
  bool keep() const;

 private:
  nlohmann::ordered_json& of(const std::string& key);
  std::string path_;
  nlohmann::ordered_json json_;
};

/// Bytes per second out of the files at `path` (or one that is made there for a moment), past the
/// page cache and out of it.
DiskRates measure_disk(const std::string& path);
/// All that does not depend on a disk.
Links measure_machine();

}  // namespace stowage::planning
