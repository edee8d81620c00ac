// SPDX-License-Identifier: Apache-2.0
// Measures what a machine moves and multiplies, in some seconds: the best of a few runs each, since
// what disturbs a run only makes it slower.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/file_error.h"
#include "base/threads.h"
#include "device/cuda.h"
#include "kernel/scratch.h"
#include "plan/costs.h"
#include "plan/links.h"
#include "plan/pass.h"
#include "stowage/descriptor.h"
#include "stowage/quantize.h"

namespace stowage::planning {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kProbe = 64 * kMiB;  // of a file that is made, and of memory
constexpr std::uint64_t kMost = 512 * kMiB;  // read of a file
constexpr double kLongest = 1;               // seconds of one read
constexpr std::uint64_t kRead = kMiB;        // of one request, as the engine asks
constexpr int kReaders = 8;                  // as the engine has
constexpr int kRuns = 3;
constexpr std::int64_t kRows = 2048, kColumns = 4096, kMany = 64;
constexpr int kWeights = 8;  // in turn, so that a cache does not have the next

double best_of(int runs, const std::function<void(int)>& body) {
  double best = 1e9;
  for (int run = 0; run < runs; ++run) {
    const Clock::time_point begun = Clock::now();
    body(run);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begun).count());
  }
  return best;
}

/// Memory from the pool, all of it touched.
struct Buffer : Scratch {
  explicit Buffer(std::size_t bytes) : Scratch(bytes) { std::memset(memory(), 0, bytes); }
  std::byte* data() const noexcept { return static_cast<std::byte*>(memory()); }
};

double measure_memcpy() {
  const Buffer from(kProbe), to(kProbe);
  return static_cast<double>(kProbe) /
         best_of(kRuns, [&](int) { std::memcpy(to.data(), from.data(), kProbe); });
}

/// Weights of one storage over bytes that every format reads as plain numbers.
class Probe {
 public:
  Probe(const Storage& storage, Dtype dtype)
      : dtype_(dtype),
        parts_(layout(storage, {kRows, kColumns})),
        codes_(bytes(0) * kWeights),
        scales_(bytes(1) + kPage),
        x_(kMany * kColumns * 4),
        y_(kMany * kRows * 4) {
    for (std::size_t i = 0; i < bytes(0) * kWeights; ++i)
      codes_.data()[i] = static_cast<std::byte>(0x38 + i % 7);
    auto* const scale = reinterpret_cast<float*>(scales_.data());
    std::fill_n(scale, bytes(1) / sizeof(float), 0.01f);
    for (int i = 0; i < kWeights; ++i) {
      const void* parts[] = {codes_.data() + bytes(0) * static_cast<std::size_t>(i), scale};
      weights_.emplace_back(storage, Shape{kRows, kColumns},
                            std::span(parts, static_cast<std::size_t>(parts_.count)));
    }
  }

  FamilyRates rates() {
    const double one = best_of(kWeights, [&](int i) { multiply(i, 1); });
    const double many = best_of(kRuns, [&](int i) { multiply(i, kMany); });
    const double products = 2.0 * static_cast<double>(kRows * kColumns * kMany);
    return {static_cast<double>(parts_.bytes()) / one, products / many};
  }

 private:
  std::size_t bytes(int part) const {
    return part < parts_.count
               ? static_cast<std::size_t>(parts_.parts[static_cast<std::size_t>(part)].bytes)
               : 0;
  }
  void multiply(int weight, std::int64_t rows) {
    linear(x_.data(), rows, dtype_, weights_[static_cast<std::size_t>(weight)], nullptr, y_.data());
  }

  Dtype dtype_;
  Layout parts_;
  Buffer codes_, scales_, x_, y_;
  std::vector<Weight> weights_;
};

FamilyRates measure_family(const FormatTrait& format) {
  Storage storage{.codes = format.codes, .scaling = format.default_scaling};
  if (has_byte_codes(storage)) storage.scaling.kind = Scaling::Kind::row;
  Dtype dtype = Dtype::bf16;
  if (format.codes == Codes::f32) dtype = Dtype::f32;
  if (format.codes == Codes::f16) dtype = Dtype::f16;
  return Probe(storage, dtype).rates();
}

// The link of a CUDA device. What it computes is assumed: this library has no kernels for it.
void measure_accelerators(Links& links) {
  try {
    for (int i = 0; i < kMostAccelerators; ++i) {
      const Buffer from(kProbe);
      device::CudaCopy copy(i, {from.data(), kProbe});
      const double seconds = best_of(kRuns, [&](int) { copy.run(); });
      const std::string name = "cuda:" + std::to_string(i);
      AcceleratorRates rates = rates_of(links, name);
      rates.copy = static_cast<double>(kProbe) / seconds;
      links.accelerators[name] = rates;
    }
  } catch (const Error&) {  // no driver, or no device of that number
  }
}

/// A descriptor that is closed.
class Opened {
 public:
  explicit Opened(int descriptor) : descriptor_(descriptor) {}
  Opened(Opened&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Opened& operator=(Opened&&) = delete;
  ~Opened() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

// Bytes per second of several readers, up to `most` bytes or a second; 0 where nothing comes. They
// read into as much memory as a ring has: a few MiB would stay in the CPU's cache, and be faster.
double read_rate(int descriptor, std::uint64_t most) {
  std::atomic<std::uint64_t> next = 0, came = 0;
  const Buffer memory(kProbe);
  const Clock::time_point begun = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
  const auto read = [&] {
    for (std::uint64_t at; (at = next.fetch_add(kRead)) + kRead <= most && elapsed() < kLongest;) {
      std::byte* const to = memory.data() + at % kProbe;
      const ssize_t got = ::pread(descriptor, to, kRead, static_cast<off_t>(at));
      if (got <= 0) return;
      came += static_cast<std::uint64_t>(got);
    }
  };
  struct Readers : std::vector<std::thread> {
    ~Readers() {
      for (std::thread& reader : *this) reader.join();
    }
  };
  {
    Readers readers;
    readers.reserve(kReaders);
    for (int i = 0; i < kReaders; ++i) readers.push_back(start_thread(read));
  }
  return static_cast<double>(came) / elapsed();
}

// The largest model file there, if one is worth reading.
std::string largest_file(const fs::path& path) {
  std::error_code failed;
  std::string found;
  std::uint64_t most = kProbe;
  const auto look = [&](const fs::path& file) {
    const std::uint64_t bytes = fs::file_size(file, failed);
    if (failed || bytes < most || file.extension() != ".safetensors") return;
    most = bytes;
    found = file.string();
  };
  const fs::path folder = fs::is_directory(path, failed) ? path : path.parent_path();
  look(path);
  if (found.empty())
    for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, failed))
      look(entry.path());
  return found;
}

// A file without a name in the folder, or where temporary files go: written through to its disk.
Opened make_file(const fs::path& path) {
  std::error_code failed;
  fs::path folder = fs::is_directory(path, failed) ? path : path.parent_path();
  if (folder.empty()) folder = ".";
  Opened made(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (made.get() < 0) {
    const fs::path elsewhere = fs::temp_directory_path();
    Opened other(::open(elsewhere.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (other.get() < 0) throw_errno(folder.string(), "must take a temporary file");
    return make_file(elsewhere);
  }
  const Buffer memory(kRead);
  std::fill_n(memory.data(), kRead, std::byte{0x5a});
  for (std::uint64_t at = 0; at < kProbe; at += kRead)
    if (::pwrite(made.get(), memory.data(), kRead, static_cast<off_t>(at)) !=
        static_cast<ssize_t>(kRead))
      throw_errno(folder.string(), "must have room for 64 MiB");
  ::fdatasync(made.get());
  return made;
}

}  // namespace

DiskRates measure_disk(const std::string& path) {
  const std::string file = largest_file(path);
  const Opened plain =
      file.empty() ? make_file(path) : Opened(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (plain.get() < 0) throw_errno(file, "must be readable");
  struct stat info {};
  ::fstat(plain.get(), &info);
  const std::uint64_t bytes = std::min(kMost, static_cast<std::uint64_t>(info.st_size));
  const std::string again = "/proc/self/fd/" + std::to_string(plain.get());
  const Opened direct(::open(again.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  const double past = direct.get() < 0 ? 0 : read_rate(direct.get(), bytes);
  read_rate(plain.get(), kProbe);  // into the cache
  const double cached = read_rate(plain.get(), kProbe);
  return {past > 0 ? past : cached, cached};
}

Links measure_machine() {
  Links links{.key = machine_key()};
  links.memcpy = measure_memcpy();
  for (const FormatTrait& format : formats())
    links.linear[std::string(format.name)] = measure_family(format);
  measure_accelerators(links);
  return links;
}

}  // namespace stowage::planning
