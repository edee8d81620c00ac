// SPDX-License-Identifier: Apache-2.0
// The engine alone: many small tensors beside one of the same bytes, cold and past the page cache,
// beside reads of the file by four threads; and two threads beside one on weights in memory.
// Usage: engine_bench [FOLDER [TENSORS [ROUNDS]]]. Figures are ratios of one run, rounds
// interleaved.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "stowage/engine.h"
#include "stowage/quantize.h"
#include "stowage/writer.h"

namespace stowage {
namespace {

constexpr std::uint64_t kSmall = 64 << 10;

double seconds(auto&& run) {
  const auto begun = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void write_tensors(const std::string& path, int count, std::uint64_t bytes) {
  std::vector<Declaration> tensors;
  for (int i = 0; i < count; ++i)
    tensors.push_back({"t" + std::to_string(1000000 + i), Dtype::u8,
                       Shape{static_cast<std::int64_t>(bytes)}, "", 0});
  Writer writer(path, tensors, {.metadata = {}, .weights = {}, .checksums = false});
  std::vector<std::byte> values(bytes);
  for (std::uint64_t k = 0; k < bytes; ++k)
    values[k] = static_cast<std::byte>(k * 2654435761u >> 13);
  for (const Declaration& tensor : tensors) writer.write(tensor.name, values);
  writer.finish();
}

void forget(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY);
  ::fdatasync(file);
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  ::close(file);
}

// All tensors in the order of the file, as a first pass over a model takes them.
double use_all(const std::string& path, std::uint64_t ram, bool backward) {
  forget(path);
  Engine engine(File::open(path), {.ram = ram, .reads = Reads::direct});
  std::vector<WeightId> order;
  for (WeightId id = 0; id < engine.size(); ++id) order.push_back(id);
  if (backward) std::ranges::reverse(order);
  engine.expect(order);
  return seconds([&] {
    for (const WeightId id : order) engine.acquire(id);
  });
}

// What the disk gives to four threads that read 1 MiB at a time into memory that is there.
double probe(const std::string& path) {
  constexpr std::size_t kPiece = 1 << 20;
  forget(path);
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECT);
  const std::uint64_t bytes = std::filesystem::file_size(path) / 4096 * 4096;
  void* const memory =
      ::mmap(nullptr, 4 * kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ::madvise(memory, 4 * kPiece, MADV_HUGEPAGE);
  std::memset(memory, 1, 4 * kPiece);
  std::atomic<std::uint64_t> next = 0;
  const auto reads = [&](std::size_t t) {
    for (std::uint64_t at; (at = next.fetch_add(kPiece)) < bytes;)
      if (::pread(file, static_cast<std::byte*>(memory) + t * kPiece,
                  std::min<std::uint64_t>(kPiece, bytes - at), static_cast<off_t>(at)) <= 0)
        throw std::runtime_error("pread");
  };
  const double took = seconds([&] {
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) threads.emplace_back(reads, t);
    for (std::thread& thread : threads) thread.join();
  });
  ::munmap(memory, 4 * kPiece);
  ::close(file);
  return took;
}

void bench_small(const std::string& folder, int count, int rounds) {
  const std::string small = folder + "/small.safetensors", big = folder + "/big.safetensors";
  const std::uint64_t all = static_cast<std::uint64_t>(count) * kSmall, margin = 1 << 20;
  write_tensors(small, count, kSmall);
  write_tensors(big, 1, all);
  std::vector<double> one, many, back, ring, disk;
  for (int round = 0; round < rounds; ++round) {
    one.push_back(use_all(big, all + margin, false));
    many.push_back(use_all(small, all + margin, false));
    back.push_back(use_all(small, all + margin, true));
    ring.push_back(use_all(small, all / 8, false));
    disk.push_back(probe(big));
  }
  const auto row = [&](const char* name, const std::vector<double>& took) {
    std::printf("%-44s %7.3f s  %5.2f GB/s  %5.2f of one big tensor\n", name, median(took),
                static_cast<double>(all) / median(took) / 1e9, median(took) / median(one));
  };
  row("one tensor", one);
  row("small tensors, all fit (limit 1.2)", many);
  row("small tensors, last one first", back);
  row("small tensors, room for an eighth", ring);
  row("four threads of pread, 1 MiB", disk);
}

/// Uses a second of so many threads, from the first one's start to the last one's end.
double rate(int threads, int passes, auto&& use) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> ready = 0;
  std::vector<std::thread> made;
  std::vector<Clock::time_point> begun(static_cast<std::size_t>(threads)), ended(begun);
  for (int t = 0; t < threads; ++t)
    made.emplace_back([&, t] {
      use();
      for (++ready; ready < threads;) std::this_thread::yield();
      begun[static_cast<std::size_t>(t)] = Clock::now();
      for (int pass = 0; pass < passes; ++pass) use();
      ended[static_cast<std::size_t>(t)] = Clock::now();
    });
  for (std::thread& thread : made) thread.join();
  const std::chrono::duration<double> took =
      *std::ranges::max_element(ended) - *std::ranges::min_element(begun);
  return threads * passes / took.count();
}

/// Short rounds, of which some find both processors free: the best one counts.
struct Gain {
  const char* name;
  double one = 0, two = 0;  // uses a second

  void measure(int passes, auto&& use) {
    one = std::max(one, rate(1, passes, use));
    two = std::max(two, rate(2, passes, use));
  }
  void print(int uses) const {
    std::printf("%-40s %9.1f ns a use, two threads %4.2fx (limit 1.8)\n", name, 1e9 / one / uses,
                two / one);
  }
};

void bench_threads(const std::string& folder, int rounds) {
  constexpr int kWeights = 64;
  const Shape shape{128, 512};
  const std::string path = folder + "/weights.safetensors";
  const Storage storage = parse_storage("int8:row");
  WriterOptions options;
  std::vector<Declaration> tensors;
  for (int i = 0; i < kWeights; ++i) {
    const std::string name = "w" + std::to_string(100 + i);
    for (Declaration& part : disk_layout(name, storage, shape)) tensors.push_back(std::move(part));
    options.weights.push_back({name, storage, shape, {}, {}});
  }
  Writer writer(path, tensors, options);
  for (const Declaration& tensor : tensors) {
    std::uint64_t elements = 1;
    for (const std::int64_t d : tensor.shape.sizes()) elements *= static_cast<std::uint64_t>(d);
    const std::vector<std::byte> zeros(elements * static_cast<std::uint64_t>(bits(tensor.dtype)) /
                                       8);
    writer.write(tensor.name, zeros);
  }
  writer.finish();
  const File file = File::open(path);
  // Where not all fits, the last weight is never used: the rest stays, behind the lock.
  std::uint64_t all = 0;
  {
    const Engine sizes(file, {.ram = std::uint64_t{1} << 40, .reads = Reads::mapped});
    for (WeightId id = 0; id < sizes.size(); ++id) all += sizes.bytes(id);
  }
  Engine fits(file, {.ram = all, .reads = Reads::buffered});
  Engine tight(file, {.ram = all - 4096, .reads = Reads::buffered});
  const WeightId used = fits.size() - 1;
  const auto acquire = [&](Engine& engine) {
    for (WeightId id = 0; id < used; ++id) engine.acquire(id);
  };
  const auto multiply = [&](const Weight& weight) {
    thread_local float x[512], y[128];
    linear(x, 1, Dtype::f32, weight, nullptr, y, &inline_executor());
  };
  const Weight plain = file.weight("w100");
  const auto without = [&] {
    for (WeightId id = 0; id < used; ++id) multiply(plain);
  };
  const auto with = [&](Engine& engine) {
    for (WeightId id = 0; id < used; ++id) multiply(engine.acquire(id).weight());
  };
  for (int pass = 0; pass < 3; ++pass) acquire(fits), acquire(tight);
  Gain none{"linear 128x512 without an engine"}, bare{"acquire and release, all fits"},
      product{"linear 128x512, all fits"}, bare_tight{"acquire and release, not all fits"},
      product_tight{"linear 128x512, not all fits"};
  for (int round = 0; round < 20 * rounds; ++round) {
    none.measure(4, without);
    bare.measure(300, [&] { acquire(fits); });
    product.measure(4, [&] { with(fits); });
    bare_tight.measure(100, [&] { acquire(tight); });
    product_tight.measure(4, [&] { with(tight); });
  }
  for (const Gain* gain : {&none, &bare, &product, &bare_tight, &product_tight}) gain->print(used);
}

}  // namespace
}  // namespace stowage

int main(int count, char** arguments) {
  std::string folder = (count > 1 ? std::string(arguments[1]) : ".") + "/engine_bench_XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return std::perror(folder.c_str()), 1;
  const int rounds = count > 3 ? std::atoi(arguments[3]) : 5;
  try {
    stowage::bench_small(folder, count > 2 ? std::atoi(arguments[2]) : 20000, rounds);
    stowage::bench_threads(folder, rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::filesystem::remove_all(folder);
}
