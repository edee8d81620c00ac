// SPDX-License-Identifier: Apache-2.0
// links.json: {"stowage_links": 1, "machines": {"<key>": {"links": {..}, "disks": {"254:1":
// {..}}}}}.
#include "engine/links.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/env.h"
#include "base/file_error.h"

namespace stowage {
namespace engine {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

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

// What was kept; nothing where the file is missing, broken or of another version.
Json kept(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  Json json = Json::parse(text, nullptr, false);
  const bool ours = json.is_object() && json.value("stowage_links", 0) == 1 &&
                    json.contains("machines") && json["machines"].is_object();
  return ours ? json : Json{{"stowage_links", 1}, {"machines", Json::object()}};
}

// A folder that cannot be written only means that the next plan measures again.
void keep(const std::string& path, const Json& json) {
  std::error_code failed;
  fs::create_directories(fs::path(path).parent_path(), failed);
  const std::string temporary = path + "." + std::to_string(::getpid());
  std::ofstream(temporary, std::ios::binary) << json.dump(1) << "\n";
  fs::rename(temporary, path, failed);
  if (failed) fs::remove(temporary, failed);
}

Links from_kept(const Json& machine, const Json& disk, const std::string& key) {
  Links links = links_of({nlohmann::json(machine.at("links")), "links.json"}, key);
  links.disk = disk.at("disk").get<double>();
  links.cached = disk.at("cached").get<double>();
  return links;
}

}  // namespace

std::string disk_key(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) throw_errno(path, "must be there");
  return std::to_string(major(info.st_dev)) + ":" + std::to_string(minor(info.st_dev));
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

Links links_of(const Fields& fields, std::string key) {
  Links links{.key = std::move(key)};
  links.disk = fields.number("disk");
  links.cached = fields.number("cached");
  links.memcpy = fields.number("memcpy");
  const Fields linear = fields.fields("linear"), accelerators = fields.fields("accelerators");
  for (const auto& [name, value] : linear.all().items()) {
    const Fields rates = linear.fields(name.c_str());
    links.linear[name] = {rates.number("read"), rates.number("multiply")};
  }
  for (const auto& [name, value] : accelerators.all().items()) {
    const Fields rates = accelerators.fields(name.c_str());
    links.accelerators[name] = {rates.number("copy"), rates.number("read"),
                                rates.number("multiply"), rates.flag("assumed")};
  }
  return links;
}

}  // namespace engine

inline namespace v0 {

std::string machine_key() {
  utsname system{};
  uname(&system);
  const auto pages = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES));
  const std::uint64_t bytes = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return engine::processor() + ", " + std::to_string(engine::cores()) + " cores, " +
         std::to_string(bytes >> 20) + " MiB, " + system.sysname + " " + system.release;
}

std::string to_json(const Links& links) {
  engine::Json json{{"key", links.key}};
  json.update(engine::links_json(links));
  return json.dump(1) + "\n";
}

Links links_from_json(std::string_view text) {
  const nlohmann::json document = engine::parse_document(text, "links");
  const engine::Fields fields(document, "links");
  return engine::links_of(fields, fields.text("key"));
}

Links links_of_this_machine(const std::string& path, bool anew, bool* measured) {
  using engine::Json;
  const std::string file = env::links_path(), key = machine_key();
  const std::string disk = engine::disk_key(path);
  Json all = engine::kept(file);
  Json& machine = all["machines"][key];
  const bool has_machine = !anew && machine.is_object() && machine.contains("links");
  const bool has_disk = !anew && machine.contains("disks") && machine["disks"].contains(disk);
  if (measured != nullptr) *measured = !has_machine || !has_disk;
  try {
    if (has_machine && has_disk) return engine::from_kept(machine, machine["disks"][disk], key);
  } catch (const std::exception&) {  // written by another hand: measured anew
    if (measured != nullptr) *measured = true;
  }
  if (!has_machine) machine["links"] = engine::links_json(engine::measure_machine());
  const auto [direct, cached] = engine::measure_disk(path);
  machine["disks"][disk] = {{"disk", direct}, {"cached", cached}};
  engine::keep(file, all);
  return engine::from_kept(machine, machine["disks"][disk], key);
}

}  // namespace v0
}  // namespace stowage
