// SPDX-License-Identifier: Apache-2.0
// links.json: {"stowage_links": 1, "machines": {"<key>": {"links": {..}, "disks": {"254:1":
// {..}}}}}.
#include "plan/links.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "base/env.h"
#include "base/file_error.h"
#include "kernel/crossover.h"
#include "stowage/info.h"

namespace stowage {
namespace planning {
namespace {

namespace fs = std::filesystem;

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown CPU";
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

using Json = nlohmann::ordered_json;

// "rows=8,words=3": other numbers are as in force.
Crossover crossover_said(const std::string& text) {
  Crossover made = crossover();
  std::istringstream pieces(text);
  for (std::string piece; std::getline(pieces, piece, ',');) {
    const std::size_t equals = piece.find('=');
    const auto field =
        std::ranges::find(kCrossoverFields, std::string_view(piece).substr(0, equals),
                          [](const CrossoverField& of) { return std::string_view(of.name); });
    const char *begin = piece.data() + std::min(equals + 1, piece.size()),
               *end = piece.data() + piece.size();
    std::int64_t number = 0;
    const auto [stopped, failed] = std::from_chars(begin, end, number);
    if (equals == std::string::npos || field == std::end(kCrossoverFields) ||
        failed != std::errc{} || stopped != end)
      throw Error(Code::invalid_argument,
                  "STOWAGE_CROSSOVER: must be built_in or names and numbers such as "
                  "rows=8,words=3, got '" +
                      text + "'");
    made.*field->value = number;
  }
  return made;
}

// The object under a key; an empty one takes the place of what another hand wrote there.
Json& object_at(Json& json, const std::string& key) {
  Json& found = json[key];
  if (!found.is_object()) found = Json::object();
  return found;
}

// What read() makes of fields; nothing where they are not there or not of their types.
template <class Read>
auto if_legible(Read read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::string disk_key(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) throw_errno(path, "must be there");
  return std::to_string(major(info.st_dev)) + ":" + std::to_string(minor(info.st_dev));
}

KeptLinks::KeptLinks(std::string path) : path_(std::move(path)) {
  std::ifstream in(path_, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  json_ = Json::parse(text, nullptr, false);
  const bool ours =
      json_.is_object() && json_.contains("stowage_links") && json_["stowage_links"] == 1;
  if (!ours) json_ = {{"stowage_links", 1}};
}

Json& KeptLinks::of(const std::string& key) { return object_at(object_at(json_, "machines"), key); }

std::optional<Links> KeptLinks::machine(const std::string& key) {
  const nlohmann::json entry(of(key));
  return if_legible([&] { return links_of(JsonFields(entry, "links.json").fields("links"), key); });
}
void KeptLinks::set_machine(const std::string& key, const Links& links) {
  of(key)["links"] = links_json(links);
}

std::optional<DiskRates> KeptLinks::disk(const std::string& key, const std::string& disk) {
  const nlohmann::json disks(object_at(of(key), "disks"));
  return if_legible([&] {
    const JsonFields rates = JsonFields(disks, "links.json").fields(disk.c_str());
    return DiskRates{rates.number("disk"), rates.number("cached")};
  });
}
void KeptLinks::set_disk(const std::string& key, const std::string& disk, const DiskRates& rates) {
  object_at(of(key), "disks")[disk] = {{"disk", rates.direct}, {"cached", rates.cached}};
}

std::optional<Crossover> KeptLinks::crossover(const std::string& key) {
  const nlohmann::json sets(object_at(of(key), "crossover"));
  if (sets.empty()) return std::nullopt;
  const std::string isa = instruction_set();
  return if_legible([&] {
    const JsonFields numbers = JsonFields(sets, "links.json").fields(isa.c_str());
    Crossover made = built_in_crossover();  // of what an earlier release did not measure
    for (const CrossoverField& field : kCrossoverFields)
      if (numbers.all().contains(field.name))
        made.*field.value = std::clamp(static_cast<std::int64_t>(numbers.whole(field.name)),
                                       std::int64_t{0}, field.most);
    return made;
  });
}
void KeptLinks::set_crossover(const std::string& key, const std::string& isa,
                              const Crossover& crossover) {
  object_at(of(key), "crossover")[isa] = crossover_json(crossover);
}

bool KeptLinks::keep() const {
  std::error_code failed;
  fs::create_directories(fs::path(path_).parent_path(), failed);
  const std::string temporary = path_ + "." + std::to_string(::getpid());
  const bool written =
      static_cast<bool>(std::ofstream(temporary, std::ios::binary) << json_.dump(1) << "\n"
                                                                   << std::flush);
  if (written) fs::rename(temporary, path_, failed);
  const bool kept = written && !failed;
  if (!kept) fs::remove(temporary, failed);
  return kept;
}

Json crossover_json(const Crossover& crossover) {
  Json json = Json::object();
  for (const CrossoverField& field : kCrossoverFields) json[field.name] = crossover.*field.value;
  return json;
}

Json links_json(const Links& links) {
  Json linear = Json::object(), accelerators = Json::object();
  for (const auto& [name, rates] : links.linear)
    linear[name] = {{"read", rates.read}, {"multiply", rates.multiply}};
  for (const auto& [name, rates] : links.accelerators)
    accelerators[name] = {{"copy", rates.copy},
                          {"read", rates.read},
                          {"multiply", rates.multiply},
                          {"assumed", rates.assumed}};
  return {{"disk", links.disk},
          {"cached", links.cached},
          {"memcpy", links.memcpy},
          {"linear", linear},
          {"accelerators", accelerators}};
}

Links links_of(const JsonFields& fields, std::string key) {
  Links links{.key = std::move(key)};
  links.disk = fields.number("disk");
  links.cached = fields.number("cached");
  links.memcpy = fields.number("memcpy");
  const JsonFields linear = fields.fields("linear"), accelerators = fields.fields("accelerators");
  for (const auto& [name, value] : linear.all().items()) {
    const JsonFields rates = linear.fields(name.c_str());
    links.linear[name] = {rates.number("read"), rates.number("multiply")};
  }
  for (const auto& [name, value] : accelerators.all().items()) {
    const JsonFields rates = accelerators.fields(name.c_str());
    links.accelerators[name] = {rates.number("copy"), rates.number("read"),
                                rates.number("multiply"), rates.flag("assumed")};
  }
  return links;
}

}  // namespace planning

inline namespace v0 {

std::string machine_key() {
  utsname system{};
  uname(&system);
  const auto pages = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES));
  const std::uint64_t bytes = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return planning::processor() + ", " + std::to_string(planning::cores()) + " cores, " +
         std::to_string(bytes >> 20) + " MiB, " + system.sysname + " " + system.release;
}

std::string to_json(const Links& links) {
  nlohmann::ordered_json json{{"key", links.key}};
  json.update(planning::links_json(links));
  return json.dump(1) + "\n";
}

Links links_from_json(std::string_view text) {
  const nlohmann::json document = parse_document(text, "links");
  const JsonFields fields(document, "links");
  return planning::links_of(fields, fields.text("key"));
}

Links links_of_this_machine(const std::string& path, bool anew, bool* measured) {
  const std::string file = env::links_path(), key = machine_key();
  const std::string disk = planning::disk_key(path);
  planning::KeptLinks kept(file);
  std::optional<Links> machine = anew ? std::nullopt : kept.machine(key);
  std::optional<planning::DiskRates> rates = anew ? std::nullopt : kept.disk(key, disk);
  if (measured != nullptr) *measured = !machine || !rates;
  if (!machine || !rates) {
    if (!machine) kept.set_machine(key, *(machine = planning::measure_machine()));
    kept.set_disk(key, disk, *(rates = planning::measure_disk(path)));
    kept.keep();
  }
  machine->key = key;
  machine->disk = rates->direct;
  machine->cached = rates->cached;
  return *machine;
}

std::string to_json(const Crossover& crossover) {
  return planning::crossover_json(crossover).dump(1) + "\n";
}

void keep_crossover(const Crossover& crossover) {
  use_crossover(crossover);
  planning::KeptLinks kept(env::links_path());
  kept.set_crossover(machine_key(), instruction_set(), crossover);
  if (!kept.keep())
    throw Error(Code::io, env::links_path() +
                              ": must be writable, so that what was measured is kept; it is in "
                              "force in this process alone");
}

Crossover crossover_of_this_machine(bool anew, bool* measured) {
  planning::KeptLinks kept(env::links_path());
  const std::optional<Crossover> known = anew ? std::nullopt : kept.crossover(machine_key());
  if (measured != nullptr) *measured = !known;
  if (known)
    use_crossover(*known);
  else
    keep_crossover(measure_crossover());
  return crossover();
}

bool use_kept_crossover() {
  const std::string said = env::crossover();
  const std::optional<Crossover> found =
      said == "built_in" ? built_in_crossover()
      : !said.empty()    ? planning::crossover_said(said)
                         : planning::KeptLinks(env::links_path()).crossover(machine_key());
  if (found) use_crossover(*found);
  return found.has_value();
}

}  // namespace v0
}  // namespace stowage
