// SPDX-License-Identifier: Apache-2.0
#include "stowage/file.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "store/made_weight.h"
#include "store/refusal_rows.h"
#include "stowage/quantize.h"
#include "stowage/writer.h"

namespace stowage::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A file of one weight, written by us.
std::string weight_file(const Scratch& folder, const char* storage_name, const Shape& shape,
                        const char* name = "m.safetensors") {
  const Storage storage = parse_storage(storage_name);
  WriterOptions options;
  options.weights = {{"w", storage, shape, {}, {}}};
  Writer writer(folder.path(name), disk_layout("w", storage, shape), options);
  writer.write_weight("w", made_weight(storage, shape));
  writer.finish();
  return folder.path(name);
}

std::string joined(const std::vector<std::string>& entries) {
  std::string text;
  for (const std::string& one : entries) text += (text.empty() ? "{" : ",") + one;
  return text + "}";
}

TEST(File, KnowsEveryDtypeOfSafetensors) {
  struct Known {
    const char* name;
    Dtype dtype;
    std::uint64_t bytes_of_8;
  };
  const Known all[] = {{"BOOL", Dtype::boolean, 8},    {"U8", Dtype::u8, 8},
                       {"I8", Dtype::i8, 8},           {"U16", Dtype::u16, 16},
                       {"I16", Dtype::i16, 16},        {"U32", Dtype::u32, 32},
                       {"I32", Dtype::i32, 32},        {"U64", Dtype::u64, 64},
                       {"I64", Dtype::i64, 64},        {"F8_E4M3", Dtype::f8_e4m3, 8},
                       {"F8_E5M2", Dtype::f8_e5m2, 8}, {"F8_E8M0", Dtype::f8_e8m0, 8},
                       {"F4", Dtype::f4, 4},           {"F16", Dtype::f16, 16},
                       {"BF16", Dtype::bf16, 16},      {"F32", Dtype::f32, 32},
                       {"F64", Dtype::f64, 64},        {"C64", Dtype::c64, 64},
                       {"F6_E2M3", Dtype::unknown, 6}, {"F8_E4M3FNUZ", Dtype::unknown, 8}};
  std::vector<std::string> entries;
  std::uint64_t end = 0;
  for (const Known& known : all) {
    entries.push_back(tensor(known.name, known.name, "[2,4]", end, end + known.bytes_of_8));
    end += known.bytes_of_8;
  }
  const Scratch folder;
  const File file = File::open(
      folder.write("m.safetensors", safetensors(joined(entries), std::string(end, 'x'))));
  for (const Known& known : all) {
    const TensorInfo* const found = file.find(known.name);
    ASSERT_NE(found, nullptr) << known.name;
    EXPECT_EQ(found->dtype, known.dtype) << known.name;
    EXPECT_EQ(found->dtype_name, known.name);
    EXPECT_EQ(found->bytes, known.bytes_of_8);
    EXPECT_EQ(found->shape, (Shape{2, 4}));
  }
}

TEST(File, FloatTensorsAreCastsOfThemselves) {
  const Scratch folder;
  const File file = File::open(folder.write(
      "m.safetensors",
      safetensors(joined({tensor("a", "F32", "[1]", 0, 4), tensor("b", "BF16", "[1]", 4, 6),
                          tensor("c", "F16", "[1]", 6, 8), tensor("d", "F8_E4M3", "[]", 8, 9),
                          tensor("e", "F8_E5M2", "[1]", 9, 10), tensor("f", "I8", "[1]", 10, 11),
                          tensor("g", "U8", "[1]", 11, 12), tensor("h", "F64", "[1]", 12, 20)}),
                  std::string(20, 'x'))));
  std::vector<std::string> storages;
  for (const WeightInfo& weight : file.weights()) storages.push_back(to_string(weight.storage));
  EXPECT_THAT(storages, ElementsAre("f32", "bf16", "f16", "f8_e4m3", "f8_e5m2"));
  EXPECT_EQ(file.find_weight("f"), nullptr);
  EXPECT_STOWAGE_ERROR(file.weight("f"), invalid_argument, "weight 'f': must be one of");
}

TEST(File, ScaledWeightsNeedNoManifest) {
  const Scratch folder;

  const auto storage_of = [&](const char* dtype, const char* scale, std::uint64_t scale_bytes) {
    const File file = File::open(folder.write(
        "m.safetensors",
        safetensors(joined({tensor("l.weight", dtype, "[4,8]", 0, 32),
                            tensor("l.weight_scale", "F32", scale, 32, 32 + scale_bytes)}),
                    std::string(32 + scale_bytes, 'x'))));
    EXPECT_EQ(file.weights().size(), 1U);
    EXPECT_THAT(file.weights()[0].parts, ElementsAre("l.weight", "l.weight_scale"));
    return to_string(file.weights()[0].storage);
  };
  EXPECT_EQ(storage_of("I8", "[4,1]", 16), "int8:row");
  EXPECT_EQ(storage_of("F8_E4M3", "[]", 4), "f8_e4m3:tensor");
  EXPECT_EQ(storage_of("F8_E5M2", "[1]", 4), "f8_e5m2:tensor");
  EXPECT_EQ(storage_of("I8", "[4,2]", 32), "int8:block4");
}

// Values through a scale that we cannot read would be wrong, so such tensors are only tensors.
TEST(File, ForeignScalesMakeNoWeight) {
  const Scratch folder;
  const auto has_weight = [&](const std::vector<std::string>& entries, std::size_t bytes) {
    const File file = File::open(
        folder.write("m.safetensors", safetensors(joined(entries), std::string(bytes, 'x'))));
    return file.find_weight("w") != nullptr;
  };
  const std::string w = tensor("w", "F8_E4M3", "[2]", 0, 2);
  EXPECT_TRUE(has_weight({w}, 2));
  EXPECT_FALSE(has_weight({w, tensor("w_scale", "BF16", "[1]", 2, 4)}, 4));
  EXPECT_FALSE(has_weight({w, tensor("w_scale_inv", "F32", "[1]", 2, 6)}, 6));
  EXPECT_FALSE(has_weight(
      {w, tensor("w_scale", "F32", "[1]", 2, 6), tensor("w_zero_point", "I8", "[1]", 6, 7)}, 7));
}

// The data of this file begins at an odd byte: parts are copied to where their type can be read.
TEST(File, PartsAreAlignedForTheirType) {
  const Scratch folder;
  std::string json = joined({tensor("a", "U8", "[1]", 0, 1), tensor("w", "I8", "[2,2]", 1, 5),
                             tensor("w_scale", "F32", "[2,1]", 5, 13)});
  while (json.size() % 4 != 0) json += ' ';
  const File file =
      File::open(folder.write("m.safetensors", safetensors(json, "-abcd\1\2\3\4\5\6\7\10")));
  const Weight weight = file.weight("w");
  EXPECT_EQ(weight.part(0), file.bytes(*file.find("w")).data());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(weight.part(1)) % 4, 0U);
  EXPECT_EQ(std::memcmp(weight.part(1), "\1\2\3\4\5\6\7\10", 8), 0);
}

TEST(File, AWeightKeepsTheMappingAlive) {
  const Scratch folder;
  Weight weight;
  {
    const File file = File::open(weight_file(folder, "nf4:nested", {4, 64}));
    weight = file.weight("w");
  }
  const Weight expected = made_weight(weight.storage(), weight.shape());
  EXPECT_EQ(std::memcmp(weight.part(0), expected.part(0), 128), 0);
  EXPECT_EQ(std::memcmp(weight.part(4), expected.part(4), sizeof(float)), 0);
}

TEST(File, OpensAFileAnIndexOrAFolder) {
  const Scratch folder;
  folder.write("model.safetensors.index.json", R"({"weight_map":{"a":"x/1.safetensors"}})");
  folder.write("x/1.safetensors", small_file());
  EXPECT_EQ(File::open(folder.path()).tensors().size(), 1U);
  EXPECT_EQ(File::open(folder.path("model.safetensors.index.json")).tensors().size(), 1U);
  EXPECT_EQ(File::open(folder.path("x")).tensors().size(), 1U);
  EXPECT_EQ(File::open(folder.path("x/1.safetensors")).tensors().size(), 1U);
  EXPECT_STOWAGE_ERROR(File::open(folder.path("y")), io, "No such file");
}

// Shards may be links (download caches make them so); what counts is that the index cannot climb.
TEST(File, FollowsLinksInTheFolder) {
  const Scratch folder;
  folder.write("blobs/1234", small_file());
  folder.write("m/model.safetensors.index.json", R"({"weight_map":{"a":"1.safetensors"}})");
  ASSERT_EQ(::symlink("../blobs/1234", folder.path("m/1.safetensors").c_str()), 0);
  EXPECT_EQ(File::open(folder.path("m")).tensors().size(), 1U);
}

TEST(File, RefusesWhatIsNoRegularFile) {
  const Scratch folder;
  ASSERT_EQ(::mkfifo(folder.path("m.safetensors").c_str(), 0600), 0);
  EXPECT_STOWAGE_ERROR(File::open(folder.path("m.safetensors")), bad_file, "regular file");
  EXPECT_STOWAGE_ERROR(File::open("/dev/null"), bad_file, "regular file");
  EXPECT_STOWAGE_ERROR(File::open(""), invalid_argument, "must not be empty");
  EXPECT_STOWAGE_ERROR(File::open(folder.path(std::string_view("m\0x", 3))), invalid_argument,
                       "zero byte");
}

TEST(File, VerifyFindsAFlippedBitAndNamesTheTensor) {
  const Scratch folder;
  const std::string path = weight_file(folder, "int8:row", {4, 16});
  const File file = File::open(path);
  EXPECT_EQ(file.verify(), 2);
  std::string content = folder.read("m.safetensors");
  const std::uint64_t offset = file.find("w")->offset;
  content[offset + 3] = static_cast<char>(content[offset + 3] ^ 1);
  folder.write("m.safetensors", content);
  const std::string words =
      "tensor 'w': byte " + std::to_string(offset) + ": the bytes must match their XXH3 checksum";
  EXPECT_STOWAGE_ERROR(file.verify(), bad_file, words);
  EXPECT_STOWAGE_ERROR(File::open(path).verify(), bad_file, "[checksum]");
}

// What was cut after opening is an error of verify(), never a signal.
TEST(File, VerifySeesThatTheFileChangedItsSize) {
  const Scratch folder;
  const std::string path = weight_file(folder, "f32", {512, 64});
  const File file = File::open(path);
  const auto size = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, size - 4096);
  EXPECT_STOWAGE_ERROR(file.verify(), bad_file, "[size_changed]");
  EXPECT_STOWAGE_ERROR(File::open(path), bad_file, "[beyond_file]");
  std::filesystem::resize_file(path, size + 1);
  EXPECT_STOWAGE_ERROR(file.verify(), bad_file, "[size_changed]");
  EXPECT_STOWAGE_ERROR(File::open(path), bad_file, "[trailing_bytes]");
}

// Waits until the file system's clock has moved on: a write in the tick of the one before shows no
// change of time.
void write_later(const Scratch& folder, const std::string& content) {
  const auto time = [&] { return std::filesystem::last_write_time(folder.path("m.safetensors")); };
  for (const auto before = time(); time() == before;) {
    std::fstream(folder.path("m.safetensors"), std::ios::in | std::ios::out | std::ios::binary)
        << content;
  }
}

TEST(File, CheckSeesAWriteInPlace) {
  const Scratch folder;
  const File file = File::open(weight_file(folder, "int8:row", {64, 256}));
  file.check();
  write_later(folder, folder.read("m.safetensors"));  // the same bytes: nobody can know
  EXPECT_STOWAGE_ERROR(file.check(), bad_file,
                       folder.path("m.safetensors") +
                           ": the file must not be written while it is open, got a write at ");
  EXPECT_STOWAGE_ERROR(file.verify(), bad_file, "[file_changed]");
  File::open(folder.path()).check();
}

TEST(File, CheckSeesAFileThatWasCutShortOrGrew) {
  const Scratch folder;
  const std::string path = weight_file(folder, "int8:row", {64, 256});
  const File file = File::open(path);
  const auto size = std::filesystem::file_size(path);
  for (const auto now : {size - 1, size + 1, std::uintmax_t{0}}) {
    std::filesystem::resize_file(path, now);
    EXPECT_STOWAGE_ERROR(
        file.check(), bad_file,
        "got " + std::to_string(now) + " bytes for " + std::to_string(size) + " [size_changed]");
  }
}

TEST(File, CheckLooksAtEveryShard) {
  const Scratch folder;
  WriterOptions options;
  options.shard_bytes = 8;
  Writer writer(folder.path("m.safetensors"),
                {{"a", Dtype::f64, {1}, "", 0}, {"b", Dtype::f64, {1}, "", 0}}, options);
  for (const char* name : {"a", "b"}) {
    writer.write(name, std::as_bytes(std::span("12345678", 8)));
  }
  writer.finish();
  const File file = File::open(folder.path());
  file.check();
  std::filesystem::resize_file(file.paths()[1], 10);
  EXPECT_STOWAGE_ERROR(file.check(), bad_file, file.paths()[1]);
}

// The name is not the file: what is open stays as it was.
TEST(File, CheckAcceptsOtherNamesAndNone) {
  const Scratch folder;
  const std::string path = weight_file(folder, "int8:row", {64, 256});
  const File file = File::open(path);
  const std::string content = text_of(file.bytes(*file.find("w")));
  std::filesystem::rename(path, folder.path("elsewhere"));
  file.check();
  std::filesystem::rename(folder.write("other", "short"), path);
  file.check();
  std::filesystem::remove(folder.path("elsewhere"));
  file.check();
  EXPECT_EQ(text_of(file.bytes(*file.find("w"))), content);
  EXPECT_EQ(file.verify(), 2);
}

TEST(File, CheckKnowsOfLostPages) {
  const Scratch folder;
  const std::string path = weight_file(folder, "f32", {64, 256});
  const File file = File::open(path);
  const TensorInfo& w = *file.find("w");
  const auto time = std::filesystem::last_write_time(path);
  const std::string whole = folder.read("m.safetensors");
  std::filesystem::resize_file(path, w.offset + 4096);
  EXPECT_EQ(text_of(file.bytes(w)).substr(4096, 1), std::string(1, '\0'));
  EXPECT_STOWAGE_ERROR(file.check(), bad_file, "[size_changed]");
  write_later(folder, whole);
  std::filesystem::last_write_time(path, time);  // all is as it was, but for what we lost
  EXPECT_STOWAGE_ERROR(file.check(), bad_file, "cut short or could not be read while in use");
  EXPECT_STOWAGE_ERROR(file.weight("w"), bad_file, "cut short or could not be read while in use");
  File::open(path).check();
}

double processor_seconds() {  // of this thread
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

TEST(File, CheckIsCheap) {
  const Scratch folder;
  const File file = File::open(weight_file(folder, "f32", {64, 256}));
  double best = 1;  // of the processor's time, not of the clock's: the machine may be busy
  for (int i = 0; i < 50; ++i) {
    const double begun = processor_seconds();
    for (int k = 0; k < 100; ++k) file.check();
    best = std::min(best, (processor_seconds() - begun) / 100);
  }
  EXPECT_LT(best, 10e-6) << "it should be below 1 us where no sanitizer runs";
  RecordProperty("nanoseconds", static_cast<int>(best * 1e9));
}

// Another process cuts the file while we read it, again and again: what comes back is either every
// value or an error.
TEST(File, AReadDuringACutIsWholeOrAnError) {
  const Scratch folder;
  const Shape shape{512, 1024};
  const std::string path = weight_file(folder, "f32", shape);
  const std::string content = folder.read("m.safetensors");
  std::vector<float> expected(512 * 1024), values(512 * 1024);
  dequantize(File::open(path).weight("w"), {0, 512}, expected.data(), Dtype::f32);
  for (int round = 0; round < 20; ++round) {
    folder.write("m.safetensors", content);
    const File file = File::open(path);
    const Weight weight = file.weight("w");
    const pid_t child = ::fork();
    if (child == 0) {
      ::usleep(static_cast<useconds_t>(round * 150));
      ::_exit(::truncate(path.c_str(), 4096) == 0 ? 0 : 1);
    }
    std::string said;
    while (said.empty()) {
      std::ranges::fill(values, -1.0F);
      try {
        dequantize(weight, {0, 512}, values.data(), Dtype::f32);
        ASSERT_EQ(std::memcmp(values.data(), expected.data(), values.size() * sizeof(float)), 0);
      } catch (const Error& lost) {
        EXPECT_EQ(lost.code(), Code::bad_file);
        said = lost.what();
      }
    }
    EXPECT_THAT(said, HasSubstr(path + ": the file must stay whole"));
    EXPECT_STOWAGE_ERROR(file.verify(), bad_file, "[size_changed]");
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
}

TEST(File, AChecksumOfNoTensorIsRefused) {
  const Scratch folder;
  const File file = File::open(folder.write(
      "m.safetensors", safetensors(R"({"__metadata__":{"stowage":"{\"version\":1,\"xxh3\":)"
                                   R"({\"x\":\"0123456789abcdef\"}}"}})")));
  EXPECT_STOWAGE_ERROR(file.verify(), bad_file, "tensor 'x'");
}

// Resident pages of the range, in KiB, from the kernel's own list of mappings.
long resident_kib(const void* begin) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  while (std::getline(maps, line)) {
    std::uintptr_t from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &from, &to) == 2)
      inside = from <= address && address < to;
    if (long kib = 0; inside && std::sscanf(line.c_str(), "Rss: %ld kB", &kib) == 1) return kib;
  }
  return -1;
}

TEST(File, DropGivesPagesBackAndTheyComeAgain) {
  const Scratch folder;
  const File file = File::open(weight_file(folder, "f32", {1024, 1024}));
  const TensorInfo& w = *file.find("w");
  const std::string before = text_of(file.bytes(w));
  EXPECT_GE(resident_kib(file.bytes(w).data()), 4096);
  file.drop(w);
  EXPECT_LE(resident_kib(file.bytes(w).data()), 64);
  EXPECT_EQ(text_of(file.bytes(w)), before);
}

TEST(File, ManyThreadsShareOneFile) {
  const Scratch folder;
  const File file = File::open(weight_file(folder, "nf4:nested", {64, 512}));
  const Weight expected = made_weight(file.weights()[0].storage, file.weights()[0].shape);
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, copy = file] {
      for (int i = 0; i < 50; ++i) {
        const Weight weight = copy.weight("w");
        good += std::memcmp(weight.part(0), expected.part(0), 16384) == 0;
        if (i % 10 == 0) copy.drop(*copy.find("w"));
        if (i % 25 == 0) good += copy.verify() == 6 ? 0 : -1000;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 400);
}

}  // namespace
}  // namespace stowage::test
