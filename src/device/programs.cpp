// SPDX-License-Identifier: Apache-2.0
#include "device/programs.h"

#include <algorithm>

#include "base/checked.h"

namespace stowage::device {
namespace {

Driver::Pointer pointer(const void* at) { return reinterpret_cast<Driver::Pointer>(at); }

constexpr unsigned kThreads = 256;        // of a block
constexpr std::int64_t kBlocksEach = 16;  // of a processor: enough to hide what each waits for
constexpr std::int64_t kShort = 1 << 29;  // elements whose places 32 bits count, and more

}  // namespace

Programs::Programs(int index, const Where& where)
    : device_(index, where.driver),
      compiler_(where.compilers),
      architecture_(device_.architecture()),
      processors_(device_.processors()),
      kept_(where.folder) {}

Programs::Counts Programs::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void* Programs::loaded(const std::string& text) {
  void*& module = modules_[text];
  if (module == nullptr) {
    const auto [code, found, path] = kept_.get(text, compiler_, architecture_);
    ++(found ? counts_.read : counts_.compiled);
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
