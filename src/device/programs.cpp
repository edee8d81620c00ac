// SPDX-License-Identifier: Apache-2.0
#include "device/programs.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/checked.h"
#include "base/env.h"
#include "base/file.h"
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
void keep(const std::string& path, const std::string& code) noexcept try {
  std::filesystem::create_directories(folder_of(path));
  StagedFile file(path, kHash + code.size());
  const std::uint64_t hash = hash_of(code);
  file.write(0, std::as_bytes(std::span(&hash, 1)));
  file.write(kHash, std::as_bytes(std::span(code)));
  file.publish();
} catch (const std::exception&) {
}

Driver::Pointer pointer(const void* at) { return reinterpret_cast<Driver::Pointer>(at); }

constexpr unsigned kThreads = 256;        // of a block
constexpr std::int64_t kBlocksEach = 16;  // of a processor: enough to hide what each waits for
constexpr std::int64_t kShort = 1 << 29;  // elements whose places 32 bits count, and more

}  // namespace

std::string programs_folder() { return folder_of(env::links_path()) + "/cuda"; }

Programs::Programs(int index, const Where& where)
    : device_(index, where.driver),
      compiler_(where.compilers),
      architecture_(device_.architecture()),
      processors_(device_.processors()),
      folder_(where.folder) {}

Programs::Counts Programs::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string Programs::code_of(const std::string& text) {
  const std::string path =
      folder_.empty() ? std::string() : folder_ + "/" + key_of(text, compiler_, architecture_);
  if (!path.empty())
    if (std::optional<std::string> kept = read_kept(path)) {
      ++counts_.read;
      return *std::move(kept);
    }
  std::string code = compiler_.compile(text, architecture_).code;
  ++counts_.compiled;
  if (!path.empty()) keep(path, code);
  return code;
}

void* Programs::loaded(const std::string& text) {
  void*& module = modules_[text];
  if (module == nullptr) {
    const std::string code = code_of(text);
    device_.driver().check("cuModuleLoadData", device_.driver().load_module(&module, code.data()));
  }
  return module;
}

void* Programs::function(const cuda::Form& form, std::string_view kernel, bool short_index) {
  const std::lock_guard lock(mutex_);
  for (const Function& known : functions_)
    if (known.name == kernel && known.short_index == short_index && known.form == form)
      return known.handle;
  Function made{form, short_index, std::string(kernel), nullptr};
  void* const module = loaded(program_text(form, file_of_kernel(made.name), short_index));
  device_.driver().check("cuModuleGetFunction of " + made.name,
                         device_.driver().find_function(&made.handle, module, made.name.c_str()));
  functions_.push_back(made);
  return made.handle;
}

void CudaStream::launch(const cuda::Form& form, std::string_view kernel, std::int64_t threads,
                        std::int64_t elements, std::span<const void* const> arguments) {
  void* const function = programs_.function(form, kernel, elements < kShort);
  const std::int64_t blocks =
      std::min(ceil_div<std::int64_t>(threads, kThreads), programs_.processors() * kBlocksEach);
  std::vector<void*> given;
  for (const void* argument : arguments) given.push_back(const_cast<void*>(argument));
  const Driver& driver = programs_.device().driver();
  driver.check("cuLaunchKernel of " + std::string(kernel),
               driver.launch(function, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0,
                             stream_, given.data(), nullptr));
}
void CudaStream::clear(void* memory, std::size_t bytes) {
  if (bytes == 0) return;
  const Driver& driver = programs_.device().driver();
  driver.check("cuMemsetD8Async", driver.set_bytes(pointer(memory), 0, bytes, stream_));
}
void CudaStream::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const Driver& driver = programs_.device().driver();
  driver.check("cuMemcpyDtoDAsync", driver.copy(pointer(to), pointer(from), bytes, stream_));
}
std::uint32_t CudaStream::read_word(const void* from) {
  const Driver& driver = programs_.device().driver();
  std::uint32_t word = 0;
  driver.check("cuMemcpyDtoHAsync", driver.copy_out(&word, pointer(from), sizeof word, stream_));
  driver.check("cuStreamSynchronize", driver.wait(stream_));
  return word;
}

}  // namespace stowage::device
