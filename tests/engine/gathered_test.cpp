// SPDX-License-Identifier: Apache-2.0
// Stacks of matrices that a file has one by one: each index of one comes from the tensors of its
// matrices, and who touches it without a lease finds the same.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine/model.h"
#include "expect_error.h"

namespace stowage {
namespace {
using namespace test;

constexpr std::int64_t kExperts = 6, kMatrixRows = 128, kMatrixColumns = 256;
constexpr const char *kUpper = "up", *kUpmost = "gate";

// How a matrix rests, and a stack of these that lie alone or in pairs under one another.
struct MatrixKind {
  const char *matrix, *alone, *pairs;
};
const MatrixKind kMatrixKinds[] = {
    {"bf16", "bf16", "bf16"},
    {"int8:row", "int8:row2", "int8:row2"},
    {"f8_e4m3:tensor", "f8_e4m3:row", "f8_e4m3:row2"},
    {"f8_e4m3:block128x128", "f8_e4m3:block128x128", "f8_e4m3:block128x128"},
    {"nf4", "nf4", "nf4"},
    {"mxfp4", "mxfp4", "mxfp4"},
    {"int4:block64:f16:zero", "int4:block64:f16:zero", "int4:block64:f16:zero"}};

std::string matrix_name(std::size_t kind, std::int64_t expert, const char* which) {
  return "layer." + std::to_string(kind) + "." + std::to_string(expert) + "." + which;
}

// Matrices whose bytes differ from one to the next.
Weight numbered(const Storage& storage, const Shape& shape, int number) {
  const Weight made = made_weight(storage, shape);
  const Layout parts = layout(storage, shape);
  for (int i = 0; i < parts.count; ++i) {
    auto* const bytes = static_cast<std::uint8_t*>(const_cast<void*>(made.part(i)));
    for (std::int64_t k = 0; k < parts.parts[static_cast<std::size_t>(i)].bytes; ++k)
      bytes[k] = static_cast<std::uint8_t>(bytes[k] ^ (number * 37 + k / 256));
  }
  return made;
}

struct PublishedModel {
  Scratch scratch;
  std::vector<StackInfo> stacks;
  std::vector<std::vector<Weight>> weights;  // of each stack: of each index, the upper first

  PublishedModel() {
    std::vector<Declaration> tensors;
    WriterOptions options;
    options.shard_bytes = 200 << 10;  // an expert may lie in two
    std::vector<Weight> all;
    for (std::size_t kind = 0; kind < std::size(kMatrixKinds); ++kind) {
      const Storage storage = parse_storage(kMatrixKinds[kind].matrix);
      for (const bool pairs : {false, true}) {
        StackInfo stack{
            .name = "layer." + std::to_string(kind) + (pairs ? ".pairs" : ".alone"),
            .storage = parse_storage(pairs ? kMatrixKinds[kind].pairs : kMatrixKinds[kind].alone),
            .shape = {kExperts, pairs ? 2 * kMatrixRows : kMatrixRows, kMatrixColumns},
            .matrices = {}};
        weights.emplace_back();
        for (std::int64_t e = 0; e < kExperts; ++e) {
          auto& names = stack.matrices.emplace_back();
          for (const char* which : pairs ? std::vector{kUpmost, kUpper} : std::vector{"down"}) {
            names.push_back(matrix_name(kind, e, which));
            const Shape shape{kMatrixRows, kMatrixColumns};
            all.push_back(numbered(storage, shape, static_cast<int>(all.size())));
            weights.back().push_back(all.back());
            for (Declaration& part : disk_layout(names.back(), storage, shape))
              tensors.push_back(std::move(part));
            options.weights.push_back({names.back(), storage, shape, {}, {}});
          }
        }
        stacks.push_back(std::move(stack));
      }
    }
    Writer writer(scratch.path("model.safetensors"), tensors, options);
    for (std::size_t i = 0; i < all.size(); ++i)
      writer.write_weight(options.weights[i].name, all[i]);
    writer.finish();
  }

  // The bytes that index `e` of a stack has of part `i`, one after the other.
  std::vector<std::byte> expected(std::size_t stack, std::int64_t e, int i,
                                  std::size_t bytes) const {
    std::vector<std::byte> all;
    const auto each = weights[stack].size() / kExperts;
    for (std::size_t k = 0; k < each; ++k) {
      const Weight& matrix = weights[stack][static_cast<std::size_t>(e) * each + k];
      const Part part = layout(matrix.storage(), matrix.shape()).parts[static_cast<std::size_t>(i)];
      const auto* const from = static_cast<const std::byte*>(matrix.part(i));
      do {  // a number of a matrix is there for each row
        all.insert(all.end(), from, from + part.bytes);
      } while (part.shape.rank() == 0 && all.size() < (k + 1) * bytes / each);
    }
    return all;
  }

  void expect_index(const Weight& found, std::size_t stack, std::int64_t at, std::int64_t e) const {
    const Layout made = layout(found.storage(), found.shape());
    for (int i = 0; i < made.count; ++i) {
      const auto bytes = static_cast<std::size_t>(made.parts[static_cast<std::size_t>(i)].bytes /
                                                  found.shape()[0]);
      const std::vector<std::byte> wanted = expected(stack, e, i, bytes);
      ASSERT_EQ(wanted.size(), bytes) << stacks[stack].name;
      const auto* const from = static_cast<const std::byte*>(found.part(i));
      EXPECT_EQ(std::memcmp(from + static_cast<std::size_t>(at) * bytes, wanted.data(), bytes), 0)
          << stacks[stack].name << " " << e << " " << i;
    }
  }
};

class Gathered : public testing::TestWithParam<Reads> {
 protected:
  PublishedModel model_;
  File file_ = File::open(model_.scratch.path()).with_stacks(model_.stacks);
};
INSTANTIATE_TEST_SUITE_P(Reads, Gathered, testing::Values(Reads::buffered, Reads::direct),
                         [](const auto& given) { return std::string(to_string(given.param)); });

TEST_P(Gathered, AreFoundByWhoeverTouchesThem) {
  for (std::size_t s = 0; s < model_.stacks.size(); ++s) {
    const StackInfo& info = model_.stacks[s];
    const Weight stack = file_.stack(info.name);
    EXPECT_EQ(stack.storage(), info.storage);
    for (std::int64_t e = kExperts; e-- > 0;) model_.expect_index(stack, s, e, e);
  }
}

TEST_P(Gathered, ComeByTheirIndices) {
  const auto least = [&] {
    const Engine sizes(file_, {.ram = std::uint64_t{1} << 40, .reads = GetParam(), .workers = 0});
    return largest(sizes) + sizes.scratch();
  }();
  for (const int workers : {0, 3}) {
    Engine engine(file_, {.ram = 2 * least, .reads = GetParam(), .workers = workers});
    for (int turn = 0; turn < 2; ++turn)
      for (std::size_t s = 0; s < model_.stacks.size(); ++s) {
        const SliceIds slices = engine.slices(engine.find(model_.stacks[s].name).value());
        ASSERT_EQ(slices.count, kExperts);
        std::vector<WeightId> wanted;
        for (const WeightId e : {4, 1, 5}) wanted.push_back(slices.first + e);
        engine.want(wanted);
        for (const WeightId e : {4, 1, 5}) {
          const Lease lease = engine.acquire(slices.first + e);
          EXPECT_EQ(lease.weight().rows(), 1);
          model_.expect_index(lease.weight(), s, 0, e);
        }
      }
    EXPECT_EQ(engine.report().borrowed, 0u);
    EXPECT_LE(engine.report().peak, 2 * least);
  }
}

// Scratch is for one or two at a time: the others follow.
TEST_P(Gathered, AreAllReadWhereTheyAreForeseen) {
  Engine engine(file_, {.ram = 64 << 20, .reads = GetParam(), .workers = 2});
  std::vector<std::uint64_t> uses(static_cast<std::size_t>(engine.size()));
  std::uint64_t count = 0;
  for (const StackInfo& info : model_.stacks) {
    const SliceIds slices = engine.slices(engine.find(info.name).value());
    for (WeightId e = 0; e < slices.count; e += 2, ++count)
      uses[static_cast<std::size_t>(slices.first + e)] = 3;
  }
  engine.foresee(uses);
  for (int i = 0; engine.report().ahead < count && i < 5000; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(engine.report().ahead, count);
  for (std::size_t s = 0; s < model_.stacks.size(); ++s) {
    const SliceIds slices = engine.slices(engine.find(model_.stacks[s].name).value());
    model_.expect_index(engine.acquire(slices.first + 4).weight(), s, 0, 4);
  }
  EXPECT_EQ(engine.report().misses, 0u);
}

TEST_P(Gathered, AreFoundByAddress) {
  const Engine engine(file_, {.ram = 4 << 20, .reads = GetParam(), .workers = 0});
  const StackInfo& info = model_.stacks[3];
  const Weight stack = file_.stack(info.name);
  const std::uint64_t each = 2 * kMatrixRows * kMatrixColumns;
  const auto* const codes = static_cast<const std::byte*>(stack.part(0));
  const auto one = Engine::lease_at(codes + 2 * each, true, each);
  ASSERT_TRUE(one);
  EXPECT_NE(one->at(codes + 2 * each), codes + 2 * each);
  EXPECT_EQ(std::memcmp(one->at(codes + 2 * each), model_.expected(3, 2, 0, each).data(), each), 0);
  EXPECT_EQ(engine.report().misses, 1u);
  EXPECT_FALSE(engine.find(matrix_name(0, 0, kUpper)).has_value());  // it is in a stack
}

TEST(GatheredRefused, NameWhatDoesNotFit) {
  const PublishedModel model;
  const File file = File::open(model.scratch.path());
  const auto refused = [&](auto&& change, const char* text) {
    StackInfo info = model.stacks[1];
    change(info);
    EXPECT_STOWAGE_ERROR((void)file.with_stacks({info}), invalid_argument, text);
  };
  refused([](StackInfo& of) { of.matrices.pop_back(); },
          "must have matrices for each of 6 indices, got 5");
  refused([](StackInfo& of) { of.matrices[2][0] = "nowhere"; },
          "must be of weights of the file, got 'nowhere'");
  refused([](StackInfo& of) { of.matrices[2].pop_back(); },
          "matrices must fill index 2, have 128 rows");
  refused([](StackInfo& of) { of.storage = parse_storage("nf4"); },
          "rests as nf4:block64, which is not made of bf16");
  refused(
      [](StackInfo& of) {
        of.shape = {kExperts, 2 * kMatrixRows, 128};
      },
      "must be a matrix of 128 columns");
  refused([](StackInfo& of) { of.name = of.matrices[0][0]; },
          "must have a name that nothing else in the file has");
  EXPECT_STOWAGE_ERROR((void)file.with_stacks({model.stacks[1], model.stacks[1]}), invalid_argument,
                       "must have a name that nothing else in the file has");
  const File stacked = file.with_stacks({model.stacks[0]});
  EngineOptions cut{.ram = std::uint64_t{1} << 30, .reads = Reads::buffered};
  cut.by_rows = {{model.stacks[0].matrices[0][0], 1}};
  EXPECT_STOWAGE_ERROR(Engine(stacked, cut), invalid_argument, "must come by rows in one way");
  EngineOptions mapped{.ram = std::uint64_t{1} << 30, .reads = Reads::mapped};
  EXPECT_STOWAGE_ERROR(Engine(stacked, mapped), invalid_argument,
                       ".safetensors has in another order");
  StackInfo other = model.stacks[2];  // int8:row
  other.storage = parse_storage("int8:row2:bf16");
  EXPECT_STOWAGE_ERROR((void)file.with_stacks({other}), invalid_argument, "scale must be BF16");
  EXPECT_STOWAGE_ERROR((void)file.stack("anything"), invalid_argument,
                       "must be one of the file's stacks");
}

}  // namespace
}  // namespace stowage
