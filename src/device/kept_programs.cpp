// SPDX-License-Identifier: Apache-2.0
#include "device/kept_programs.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>

#include "base/env.h"
#include "base/file.h"
#include "device/form.h"
#include "device/ops.h"
#include "device/texts.h"

namespace stowage::device {
namespace {

// What a program is, in 32 digits: the texts it is made of, and what they are compiled with.
std::string key_of(const std::string& text, const Compiler& compiler, int architecture) {
  static const std::string all = [] {
    std::string made;
    for (const Text& header : texts()) made += std::string(header.name) + header.text;
    return made;
  }();
  std::string said = all + text + compiler.version();
  for (const std::string& option : compiler_options(architecture, false)) said += option;
  const XXH128_hash_t hash = XXH3_128bits(said.data(), said.size());
  std::array<char, 40> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits.data();
}

// What is kept begins with its own hash, so that a damaged file is compiled anew.
constexpr std::size_t kHash = sizeof(std::uint64_t);
std::uint64_t hash_of(std::string_view code) { return XXH3_64bits(code.data(), code.size()); }

std::optional<std::string> read_kept(const std::string& path) noexcept try {
  const MappedFile file(path);
  if (file.size() < kHash) return std::nullopt;
  std::string code(file.size() - kHash, '\0');
  std::uint64_t hash = 0;
  file.read(0, std::as_writable_bytes(std::span(&hash, 1)));
  file.read(kHash, std::as_writable_bytes(std::span(code)));
  if (hash != hash_of(code)) return std::nullopt;
  return code;
} catch (const std::exception&) {
  return std::nullopt;
}
// A folder that cannot be written to keeps nothing: the program is compiled again next time.
bool keep(const std::string& path, const std::string& code) noexcept try {
  std::filesystem::create_directories(folder_of(path));
  StagedFile file(path, kHash + code.size());
  const std::uint64_t hash = hash_of(code);
  file.write(0, std::as_bytes(std::span(&hash, 1)));
  file.write(kHash, std::as_bytes(std::span(code)));
  file.publish();
  return true;
} catch (const std::exception&) {
  return false;
}

}  // namespace

std::string programs_folder() { return folder_of(env::links_path()) + "/cuda"; }

KeptPrograms::Program KeptPrograms::get(const std::string& text, const Compiler& compiler,
                                        int architecture) const {
  if (folder_.empty()) return {compiler.compile(text, architecture).code, false, ""};
  const std::string path = folder_ + "/" + key_of(text, compiler, architecture);
  if (std::optional<std::string> kept = read_kept(path)) return {*std::move(kept), true, path};
  Program made{compiler.compile(text, architecture).code, false, path};
  if (!keep(path, made.code)) made.path.clear();
  return made;
}

std::vector<Ahead> programs_ahead(const Storage& storage, Dtype values, int architecture,
                                  std::span<const int> x_rows) {
  cuda::Form form = form_of(storage, values);
  form.whole = true;
  std::vector<Ahead> made;
  for (const char* file : {"dequantize.cuh", "quantize.cuh"})
    made.push_back({file, 0, false, false, program_text(form, file, true)});
  if (values == Dtype::f64 || is_cast(storage)) return made;
  form.slabs = has_slabs(form);
  const auto add = [&](const char* file) {
    if (x_rows.empty() || std::ranges::find(x_rows, form.x_rows) != x_rows.end())
      made.push_back({file, form.x_rows, form.many, form.groups, program_text(form, file, true)});
  };
  for (form.x_rows = 1; form.x_rows <= kMostTogether; ++form.x_rows) {
    add("linear.cuh");
    if (on_tensor_cores(form, {architecture, 1})) add("linear_tiles.cuh");
  }
  form.many = true, form.x_rows = kMostTogether;
  const bool on_tiles = on_tensor_cores(form, {architecture, 1});
  if (on_tiles) add("linear_tiles.cuh");
  if (form.transposed) return made;
  form.groups = true;
  if (!on_tiles) form.x_rows = kFusedRows, add("linear.cuh");
  if (on_tiles)
    for (const int rows : kTileRows) form.x_rows = rows, add("linear_tiles.cuh");
  return made;
}

}  // namespace stowage::device
