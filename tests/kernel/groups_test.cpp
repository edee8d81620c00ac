// SPDX-License-Identifier: Apache-2.0
// Runs of short groups: kernels take several at a time, so each group stands beside others here
// whose scales call for another way. And scales of every type, in all their codes.
#include <bit>

#include "kernel/drivers.h"
#include "kernel/runs.h"
#include "samples.h"

namespace stowage::groups_test {
namespace {

using namespace stowage::samples;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Powers of two, others of few bits and of many, the smallest and the largest that tables take, and
// what makes results subnormal, infinite or NaN.
const float kScales[] = {1.0f,      0.37f,        0x1.8p3f,   -1.5f,       0.0f,
                         0x1p-100f, 0x1.ffp-101f, 0x1p-126f,  0x1p-140f,   0x1p100f,
                         -0.0f,     -kInf,        0x1.1p100f, 0x1.0001p0f, kNan,
                         -0.011f,   0x1.1p-3f,    kInf,       3e38f,       0x1.fffffep127f};

Bytes random_bytes(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

Bytes values_of(const Kernels& table, const Weight& weight, Range rows, Dtype out) {
  Bytes values(static_cast<std::size_t>((rows.end - rows.begin) * weight.row_elements()) *
               width(out));
  dequantize_with(table, weight, rows, values.data(), out, inline_executor());
  return values;
}

// Codes of every kind, NaN among them in some groups and not in others.
Bytes some_codes(const Storage& storage, std::size_t n) {
  Bytes codes = random_bytes(n, 5);
  if (trait(storage.codes).bits == 8)
    for (std::size_t i = 0; i < n; ++i)
      if (i / 64 % 2 == 0) codes[i] &= std::byte{0xBB};  // no exponent of all ones
  return codes;
}

STOWAGE_ON_EACH_ISA(Groups, StandBesideGroupsOfOtherScales) {
  constexpr std::int64_t kRows = 3, kColumns = 64 * 19;
  for (const char* format :
       {"f8_e4m3", "f8_e5m2", "int8", "f4_e2m1", "int4", "nf4", "fp4", "int3", "int6"})
    for (const int block : {16, 32, 64, 128}) {
      const bool by_table = std::string_view(format) == "nf4" || std::string_view(format) == "fp4";
      if (by_table && block < 64) continue;  // there are none
      const Storage storage = parse_storage(std::string(format) + ":block" + std::to_string(block));
      const auto bytes = static_cast<std::size_t>(kRows * kColumns) *
                         static_cast<std::size_t>(trait(storage.codes).bits) / 8;
      const Bytes codes = some_codes(storage, bytes);
      std::vector<float> scales;
      for (std::int64_t i = 0; i < kRows * kColumns / block; ++i)
        scales.push_back(kScales[static_cast<std::size_t>(i + i / 7) % std::size(kScales)]);
      const Weight weight(storage, {kRows, kColumns},
                          std::vector<const void*>{codes.data(), scales.data()});
      for (const Dtype out : kValueTypes)
        EXPECT_EQ(values_of(table, weight, {0, kRows}, out), reference_values(weight, out))
            << to_string(storage) << " to " << disk_name(out);
    }
}

// Scales and zeros of any bits, each of which may be no number.
STOWAGE_ON_EACH_ISA(Groups, HaveZerosThatAreNumbers) {
  const Shape shape{3, 64 * 19};
  for (const char* of : {"int4:block16%:zero_sum", "int4:block64%:zero_sum", "int4:row%:zero_sum",
                         "uint4:block16%:zero_rounded", "uint4:block32%:zero_rounded",
                         "uint4:block64%:zero_rounded", "uint4:block18%:zero_rounded"})
    for (const char* type : {"", ":bf16", ":f16"}) {
      std::string name(of);
      const Storage storage = parse_storage(name.replace(name.find('%'), 1, type));
      Parts parts(storage, shape);
      for (std::size_t i = 0; i < parts.bytes.size(); ++i)
        parts.bytes[i] = random_bytes(parts.bytes[i].size(), 7 + static_cast<unsigned>(i));
      const Weight weight = parts.weight(storage, shape);
      for (const Dtype out : kValueTypes)
        EXPECT_EQ(values_of(table, weight, {0, 3}, out), reference_values(weight, out))
            << name << " to " << disk_name(out);
    }
}

// A run may begin and end inside a group, at any element.
STOWAGE_ON_EACH_ISA(Groups, BeginAndEndAnywhere) {
  constexpr std::int64_t kAll = 64 * 5;
  for (const Codes codes : {Codes::f8_e4m3, Codes::int8, Codes::f4_e2m1, Codes::int4})
    for (const std::int64_t group : {16, 32}) {
      const Bytes all = random_bytes(static_cast<std::size_t>(kAll), 6);
      std::vector<float> scales;
      for (std::int64_t i = 0; i < kAll / group; ++i)
        scales.push_back(kScales[static_cast<std::size_t>(i) % 4]);
      const auto run = [&](std::int64_t first, std::int64_t n) {
        Bytes values(static_cast<std::size_t>(n) * 2);
        table.dequantize.to[static_cast<int>(codes)][value_index(Dtype::bf16)](
            {all.data(), first, scales.data(), group, n}, values.data());
        return values;
      };
      const Bytes whole = run(0, kAll);
      for (std::int64_t first = 0; first < 70; ++first)
        for (const std::int64_t n : {1L, 15L, 33L, 64L, 95L, kAll - first})
          ASSERT_EQ(run(first, n),
                    Bytes(whole.begin() + 2 * first, whole.begin() + 2 * (first + n)))
              << trait(codes).name << " group " << group << " first " << first << " n " << n;
    }
}

STOWAGE_ON_EACH_ISA(Groups, OfSuperblocksHaveAnyScales) {
  constexpr std::int64_t kRows = 4, kColumns = 256 * 9;
  for (const char* name : {"q4_k", "q6_k"}) {
    const Storage storage = parse_storage(name);
    const Layout made = layout(storage, {kRows, kColumns});
    const Bytes codes = random_bytes(static_cast<std::size_t>(made.parts[0].bytes), 7);
    const Bytes records = random_bytes(static_cast<std::size_t>(made.parts[1].bytes), 8);
    const Weight weight(storage, {kRows, kColumns},  // f16 numbers of every kind
                        std::vector<const void*>{codes.data(), records.data()});
    for (const Dtype out : kValueTypes)
      EXPECT_EQ(values_of(table, weight, {0, kRows}, out), reference_values(weight, out))
          << name << " to " << disk_name(out);
  }
}

/// Scales `from` to the last one of a weight of one row, as runs show them.
void expect_scales(const Kernels& table, const Weight& weight, std::int64_t group,
                   std::int64_t from) {
  const std::int64_t all = weight.shape().elements();
  const Runs runs(table, weight);
  std::int64_t at = from * group;
  runs.cover(at, all, [&](const stowage::Run& run) {
    for (std::int64_t i = 0; i < run.n; i += group) {
      const float got = run.scales[(run.first + i) / run.group];
      const float expected = reference::scale_at(weight, at + i);
      ASSERT_TRUE(std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(expected) ||
                  (std::isnan(got) && std::isnan(expected)))
          << to_string(weight.storage()) << ": " << got << " for " << expected;
    }
    at += run.n;
  });
  EXPECT_EQ(at, all);
}

STOWAGE_ON_EACH_ISA(Groups, ScalesOfEveryCode) {
  struct Form {
    const char* storage;
    std::int64_t group, bytes;  // of a scale
  };
  const Form forms[] = {
      {"f4_e2m1:block32:e8m0", 32, 1},      {"f4_e2m1:block16:e4m3", 16, 1},
      {"f4_e2m1:block16:e4m3_bf16", 16, 1}, {"f4_e2m1:block16:e4m3_quotient", 16, 1},
      {"int8:block32:f16", 32, 2},          {"int8:block32:bf16", 32, 2}};
  for (const Form& form : forms)
    for (const float outer : {1.0f, 0.013f, -3e-9f, 0x1p-126f, 3e35f}) {
      const std::int64_t count = form.bytes == 1 ? 256 : 65536;
      Bytes scales(static_cast<std::size_t>(count * form.bytes));
      for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t b = 0; b < form.bytes; ++b)
          scales[static_cast<std::size_t>(i * form.bytes + b)] = static_cast<std::byte>(i >> 8 * b);
      const Bytes codes(static_cast<std::size_t>(count * form.group));
      std::vector<const void*> parts{codes.data(), scales.data()};
      const Storage storage = parse_storage(form.storage);
      if (layout(storage, {1, count * form.group}).count == 3) parts.push_back(&outer);
      const Weight weight(storage, {1, count * form.group}, parts);
      for (const std::int64_t from : {0, 1, 3}) expect_scales(table, weight, form.group, from);
      if (parts.size() == 2) break;
    }
}

// Rows of each number of scales from one on, so that what is expanded ends everywhere.
STOWAGE_ON_EACH_ISA(Groups, OfRowsStandUnderNumbersOfTheirOwn) {
  constexpr float kOuters[] = {1.0f, 0.013f, -3e-9f, 0x1p-126f, 3e35f, 0.37f, 384.0f};
  for (const std::string type : {"e4m3", "e4m3_bf16", "e4m3_quotient"})
    for (std::int64_t across = 1; across < 20; ++across)
      for (const std::int64_t more : {0, 6}) {  // a short group
        const Shape shape{21, 16 * across + more};
        const Storage storage = parse_storage("f4_e2m1:block16:" + type + ":row");
        Parts parts(storage, shape);
        for (const std::size_t i : {0U, 1U})
          parts.bytes[i] = random_bytes(parts.bytes[i].size(), 9 + static_cast<unsigned>(i));
        for (std::size_t i = 0; i < 21; ++i)
          std::memcpy(parts.bytes[2].data() + i * sizeof(float),
                      &kOuters[(i + static_cast<std::size_t>(across)) % std::size(kOuters)],
                      sizeof(float));
        const Weight weight = parts.weight(storage, shape);
        for (const Dtype out : kValueTypes)
          EXPECT_EQ(values_of(table, weight, {0, 21}, out), reference_values(weight, out))
              << to_string(storage) << " " << to_string(shape) << " to " << disk_name(out);
        const Weight tail(storage, {1, shape[1]},
                          std::vector<const void*>{weight.part(0), weight.part(1), weight.part(2)});
        if (more == 0) expect_scales(table, tail, 16, across / 2);
      }
}

}  // namespace
}  // namespace stowage::groups_test
