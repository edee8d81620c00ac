// SPDX-License-Identifier: Apache-2.0
#include "stowage/writer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "scratch.h"
#include "store/made_weight.h"

namespace stowage {
namespace {

using test::Scratch;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Declaration declare(std::string name, Dtype dtype, Shape shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = shape, .dtype_name = {}};
}

// Tensors of several element sizes, filled with a letter each.
const std::vector<Declaration> kSome{
    declare("flags", Dtype::boolean, {3}), declare("b", Dtype::bf16, {2, 2}),
    declare("wide", Dtype::f64, {1}), declare("none", Dtype::f32, {0, 4}),
    declare("a", Dtype::bf16, {1, 3})};
const std::vector<std::size_t> kSizes{3, 8, 8, 0, 6};

std::string letters(std::size_t i) {
  return std::string(kSizes[i], static_cast<char>('p' + static_cast<int>(i)));
}

void write_some(const std::string& path, const WriterOptions& options = {}) {
  Writer writer(path, kSome, options);
  for (const std::size_t i : {4U, 2U, 0U, 3U, 1U}) {
    writer.write(kSome[i].name, bytes_of(letters(i)));
  }
  writer.finish();
}

TEST(Writer, WritesWhatFileReads) {
  const Scratch folder;
  write_some(folder.path("m.safetensors"), {.metadata = {{"model", "demo"}}, .weights = {}});
  const File file = File::open(folder.path("m.safetensors"));
  for (std::size_t i = 0; i < kSome.size(); ++i) {
    const TensorInfo* const tensor = file.find(kSome[i].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, kSome[i].dtype);
    EXPECT_EQ(tensor->shape, kSome[i].shape);
    EXPECT_EQ(text_of(file.bytes(*tensor)), letters(i));
    EXPECT_EQ(tensor->offset % static_cast<std::uint64_t>(bits(tensor->dtype) / 8), 0U);
  }
  EXPECT_EQ(file.metadata().at("model"), "demo");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.verify(), 5);
  EXPECT_THAT(folder.names(), ElementsAre("m.safetensors"));
}

TEST(Writer, DataBeginsAtACacheLine) {
  const Scratch folder;
  for (int extra = 0; extra < 70; ++extra) {
    const std::string path = folder.path("m.safetensors");
    write_some(path, {.metadata = {{"pad", std::string(static_cast<std::size_t>(extra), 'x')}},
                      .weights = {}});
    const File file = File::open(path);
    const TensorInfo* const first = file.find("wide");
    EXPECT_EQ(first->offset % 64, 0U) << extra;
    EXPECT_EQ(folder.read("m.safetensors")[8], '{');
  }
}

// Sizes of whole pages lead, by name; then big elements before small ones.
TEST(Writer, TensorsOfWholePagesBeginAtPages) {
  const Scratch folder;
  const std::string path = folder.path("m.safetensors");
  const std::vector<Declaration> tensors{
      declare("wide", Dtype::f64, {3}),         declare("z", Dtype::u8, {8192}),
      declare("bytes", Dtype::u8, {4097}),      declare("b", Dtype::f32, {1024, 20}),
      declare("nibbles", Dtype::f4, {8194}),    declare("none", Dtype::f32, {0}),
      declare("halves", Dtype::bf16, {2, 100}), declare("y", Dtype::bf16, {64, 32})};
  Writer writer(path, tensors);
  std::vector<std::string> contents;
  for (const Declaration& t : tensors) {
    contents.emplace_back(static_cast<std::size_t>(t.shape.elements() * bits(t.dtype) / 8),
                          static_cast<char>('a' + contents.size()));
    writer.write(t.name, bytes_of(contents.back()));
  }
  writer.finish();
  const File file = File::open(path);
  EXPECT_EQ(file.verify(), 8);
  std::vector<std::string> order;
  auto sorted = file.tensors();
  std::ranges::stable_sort(sorted, {}, [](const TensorInfo& t) {
    return std::pair(t.offset, t.bytes);  // what is empty lies where the next one begins
  });
  for (const TensorInfo& t : sorted) order.push_back(t.name);
  EXPECT_THAT(order, ElementsAre("b", "none", "y", "z", "wide", "halves", "bytes", "nibbles"));
  EXPECT_EQ(sorted[0].offset, 4096U);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& t = *file.find(tensors[i].name);
    EXPECT_EQ(text_of(file.bytes(t)), contents[i]) << t.name;
    EXPECT_EQ(t.offset % (t.bytes % 4096 == 0 ? 4096 : 1), 0U) << t.name;
    EXPECT_EQ(t.offset % static_cast<std::uint64_t>(std::max(bits(t.dtype) / 8, 1)), 0U) << t.name;
  }
}

// A page ahead of little data would double the file.
TEST(Writer, LittleDataIsNotPaddedToAPage) {
  const Scratch folder;
  const std::string path = folder.path("m.safetensors");
  const auto write = [&](std::int64_t bytes) {
    Writer writer(path, {declare("pages", Dtype::u8, {4096}), declare("wide", Dtype::f64, {1}),
                         declare("rest", Dtype::u8, {bytes - 4104})});
    writer.write("pages", bytes_of(std::string(4096, 'p')));
    writer.write("wide", bytes_of("12345678"));
    writer.write("rest", bytes_of(std::string(static_cast<std::size_t>(bytes - 4104), 'r')));
    writer.finish();
    return File::open(path);
  };
  const File little = write(65535), enough = write(65536);
  EXPECT_LT(little.find("wide")->offset, 1024U);  // as ever: big elements first
  EXPECT_EQ(little.find("pages")->offset, little.find("wide")->offset + 8);
  EXPECT_EQ(enough.find("pages")->offset, 4096U);
}

TEST(Writer, TheSameInputGivesTheSameBytesInAnyOrder) {
  const Scratch folder;
  write_some(folder.path("1.safetensors"));
  std::vector<Declaration> reversed(kSome.rbegin(), kSome.rend());
  Writer writer(folder.path("2.safetensors"), reversed);
  for (std::size_t i = 0; i < kSome.size(); ++i) {
    writer.write(kSome[i].name, bytes_of(letters(i)));
  }
  writer.finish();
  EXPECT_EQ(folder.read("1.safetensors"), folder.read("2.safetensors"));
}

TEST(Writer, RefusesWhatWasNotDeclared) {
  const Scratch folder;
  Writer writer(folder.path("m.safetensors"), kSome);
  EXPECT_STOWAGE_ERROR(writer.write("stranger", {}), invalid_argument,
                       "tensor 'stranger': must be declared");
  EXPECT_STOWAGE_ERROR(writer.write("b", bytes_of("short")), invalid_argument,
                       "must have 8 bytes, got 5");
  writer.write("b", bytes_of("12345678"));
  EXPECT_STOWAGE_ERROR(writer.write("b", bytes_of("12345678")), invalid_argument, "twice");
  EXPECT_STOWAGE_ERROR(writer.finish(), invalid_argument, "tensor 'a': must be written");
  for (const std::size_t i : {0U, 2U, 3U, 4U}) writer.write(kSome[i].name, bytes_of(letters(i)));
  writer.finish();
  EXPECT_STOWAGE_ERROR(writer.finish(), invalid_argument, "finished once");
  EXPECT_STOWAGE_ERROR(writer.write("b", bytes_of("12345678")), invalid_argument, "before finish");
}

TEST(Writer, RefusesDeclarationsThatNoFileCanHold) {
  const Scratch folder;
  const auto make = [&](std::vector<Declaration> tensors, const std::string& name = "m.safetensors",
                        const WriterOptions& options = {}) {
    Writer(folder.path(name), std::move(tensors), options);
  };
  const Declaration good = declare("t", Dtype::u8, {1});
  EXPECT_STOWAGE_ERROR(make({good, good}), invalid_argument, "'t': must be declared once");
  EXPECT_STOWAGE_ERROR(make({declare("", Dtype::u8, {1})}), invalid_argument, "not be empty");
  EXPECT_STOWAGE_ERROR(make({declare("__metadata__", Dtype::u8, {1})}), invalid_argument, "taken");
  EXPECT_STOWAGE_ERROR(make({declare("\xff", Dtype::u8, {1})}), invalid_argument, "UTF-8");
  EXPECT_STOWAGE_ERROR(make({declare("t", Dtype::f4, {3})}), invalid_argument, "whole bytes");
  EXPECT_STOWAGE_ERROR(make({declare("t", Dtype::unknown, {3})}), invalid_argument, "a name");
  EXPECT_STOWAGE_ERROR(make({good}, std::string("m\0.safetensors", 14)), invalid_argument, "zero");
  EXPECT_STOWAGE_ERROR(make({good}, "model.bin"), invalid_argument, "end in .safetensors");
  EXPECT_STOWAGE_ERROR(make({good}, "no/such/m.safetensors"), io, "No such file");
  EXPECT_STOWAGE_ERROR(make({declare("t", Dtype::u8, {std::int64_t{1} << 50})}), io, "space");
  WriterOptions options;
  options.weights = {{"t", parse_storage("int8"), {1}, {}, {}}};
  EXPECT_STOWAGE_ERROR(make({declare("t", Dtype::i8, {1})}, "m.safetensors", options),
                       invalid_argument, "'t_scale': weight 't' as int8:row must have it declared");
  EXPECT_TRUE(folder.names().empty());
  std::filesystem::create_directory(folder.path("m.safetensors"));
  EXPECT_STOWAGE_ERROR(make({good}), io, "got a folder of that name");
}

TEST(Writer, ADestroyedWriterLeavesNothing) {
  const Scratch folder;
  {
    Writer writer(folder.path("m.safetensors"), kSome);
    writer.write("b", bytes_of("12345678"));
    Writer moved = std::move(writer);
    EXPECT_FALSE(std::filesystem::exists(folder.path("m.safetensors")));
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(Writer, ReadersOfTheOldFileKeepIt) {
  const Scratch folder;
  const std::string path = folder.path("m.safetensors");
  write_some(path);
  const File old = File::open(path);
  Writer writer(path, {declare("b", Dtype::u8, {1})});
  writer.write("b", bytes_of("!"));
  writer.finish();
  EXPECT_EQ(text_of(old.bytes(*old.find("b"))), letters(1));
  EXPECT_EQ(old.verify(), 5);
  EXPECT_EQ(File::open(path).tensors().size(), 1U);
}

TEST(Writer, WhoOpensWhileWeReplaceSeesOneOrTheOther) {
  const Scratch folder;
  const std::string path = folder.path("m.safetensors");
  write_some(path);
  std::atomic<bool> stop{false};
  std::atomic<int> opened{0};
  std::thread reader([&] {
    while (!stop) opened += File::open(path).verify() == 5 ? 1 : -1000;
  });
  for (int i = 0; i < 20; ++i) write_some(path);
  stop = true;
  reader.join();
  EXPECT_GT(opened, 0);
  EXPECT_EQ(folder.names().size(), 1U);
}

TEST(Writer, UnknownDtypesKeepTheirBytes) {
  const Scratch folder;
  const std::string path = folder.path("m.safetensors");
  Writer writer(
      path,
      {{.name = "t", .dtype = Dtype::unknown, .shape = {5}, .dtype_name = "F6_E2M3", .bytes = 4}});
  writer.write("t", bytes_of("6666"));
  writer.finish();
  const File file = File::open(path);
  EXPECT_EQ(file.find("t")->dtype_name, "F6_E2M3");
  EXPECT_EQ(text_of(file.bytes(*file.find("t"))), "6666");
  EXPECT_TRUE(file.weights().empty());
}

TEST(Writer, SplitsIntoShardsWithAnIndex) {
  const Scratch folder;
  write_some(folder.path("m.safetensors"), {.metadata = {}, .weights = {}, .shard_bytes = 12});
  EXPECT_THAT(folder.names(),
              UnorderedElementsAre("m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors",
                                   "m-00003-of-00003.safetensors", "m.safetensors.index.json"));
  const File file = File::open(folder.path());
  EXPECT_EQ(file.paths().size(), 3U);
  EXPECT_EQ(file.tensors().size(), 5U);
  EXPECT_EQ(file.verify(), 5);
  EXPECT_EQ(text_of(file.bytes(*file.find("a"))), letters(4));
}

TEST(Writer, OneFormReplacesTheOther) {
  const Scratch folder;
  const std::string path = folder.path("model.safetensors");
  write_some(path, {.metadata = {}, .weights = {}, .shard_bytes = 12});
  write_some(path);
  EXPECT_EQ(File::open(folder.path()).paths().size(), 1U);
  write_some(path, {.metadata = {}, .weights = {}, .shard_bytes = 12});
  EXPECT_EQ(File::open(folder.path()).paths().size(), 3U);
}

TEST(Writer, AWeightStaysInOneShard) {
  const Scratch folder;
  std::vector<Declaration> tensors;
  WriterOptions options{.metadata = {}, .weights = {}, .shard_bytes = 300};
  for (const char* name : {"x", "y", "z"}) {
    options.weights.push_back({name, parse_storage("nf4"), {8, 64}, {}, Dtype::f16});
    for (auto& part : disk_layout(name, parse_storage("nf4"), {8, 64})) tensors.push_back(part);
  }
  // Codes of all weights first: the parts of a weight do not follow each other.
  std::ranges::stable_sort(tensors, {}, [](const Declaration& t) { return t.name.size(); });
  const Weight weight = test::made_weight(parse_storage("nf4"), {8, 64});
  Writer writer(folder.path("m.safetensors"), tensors, options);
  for (const char* name : {"x", "y", "z"}) writer.write_weight(name, weight);
  writer.finish();
  const File all = File::open(folder.path());
  EXPECT_EQ(all.paths().size(), 3U);
  for (const std::string& path : all.paths()) {
    const File one = File::open(path);
    ASSERT_EQ(one.weights().size(), 1U);
    EXPECT_EQ(one.weights()[0].compute, Dtype::f16);
    EXPECT_EQ(to_string(one.weights()[0].storage), "nf4:block64");
  }
}

// Every storage that this version has: a weight comes back part by part.
TEST(Writer, WeightsComeBackInEveryStorage) {
  const Shape shape{6, 96};
  for (const char* name :
       {"f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "f8_e4m3:tensor", "f8_e4m3:row",
        "f8_e5m2:block40", "int8:tensor", "int8:row", "int8:row2", "int8:block32", "nf4",
        "nf4:block128", "nf4:nested", "fp4", "fp4:block32:nested"}) {
    SCOPED_TRACE(name);
    const Scratch folder;
    const Storage storage = parse_storage(name);
    const Weight weight = test::made_weight(storage, shape);
    const WriterOptions options{.metadata = {}, .weights = {{"w", storage, shape, {}, Dtype::f32}}};
    Writer writer(folder.path("m.safetensors"), disk_layout("w", storage, shape), options);
    writer.write_weight("w", weight);
    writer.finish();
    const File file = File::open(folder.path());
    ASSERT_EQ(file.weights().size(), 1U);
    EXPECT_EQ(file.weights()[0].storage, storage);
    EXPECT_EQ(file.weights()[0].shape, shape);
    EXPECT_EQ(file.weights()[0].compute, Dtype::f32);
    const Weight back = file.weight("w");
    const Layout made = layout(storage, shape);
    for (int i = 0; i < made.count; ++i) {
      const auto bytes = static_cast<std::size_t>(made.parts[static_cast<std::size_t>(i)].bytes);
      EXPECT_EQ(std::memcmp(back.part(i), weight.part(i), bytes), 0) << "part " << i;
    }
  }
}

}  // namespace
}  // namespace stowage
