// SPDX-License-Identifier: Apache-2.0
// The reference codec of ggml's superblocks: 256 neighbours of a row with one record of scales.
// The record of Q4_K, whose eight sub-blocks j of 32 have a scale s and an offset m of six bits:
//   bytes 0, 1   d, f16: s counts it       bytes 4 to 7    s[0..3]; 7..6: upper bits of s[4..7]
//   bytes 2, 3   e, f16: m counts it       bytes 8 to 11   m[0..3]; 7..6: upper bits of m[4..7]
//                                          bytes 12 to 15  3..0: s[4..7], 7..4: m[4..7]
// The record of Q6_K, whose sixteen sub-blocks j of 16 have a scale s of eight bits, with a sign:
//   bytes 0 to 15  s[0..15]                bytes 16, 17    d, f16: s counts it
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "format/reference.h"
#include "stowage/descriptor.h"

namespace stowage::reference {
namespace {

constexpr std::int64_t kBlock = 256, kInner = 32, kInner6 = 16, kRecord6 = 18;
constexpr std::size_t kSteps = 8, kSteps6 = 16;
constexpr float kMostStep = 63.0f, kMostCode = 15.0f, kMostHalf = 65504.0f;

using Record = std::array<std::uint8_t, 16>;

struct Counts {  // of a sub-block
  unsigned scale, offset;
};

Counts counts_of(const Record& record, std::size_t j) noexcept {
  if (j < 4) return {record[4 + j] & 63u, record[8 + j] & 63u};
  const unsigned low = record[8 + j], scale = record[j], offset = record[4 + j];
  return {(low & 15u) | (scale >> 6 << 4), low >> 4 | (offset >> 6 << 4)};
}

void put_counts(Record& record, std::size_t j, Counts counts) noexcept {
  const auto add = [&](std::size_t at, unsigned bits) {
    record[at] = static_cast<std::uint8_t>(record[at] | bits);
  };
  if (j < 4) {
    add(4 + j, counts.scale), add(8 + j, counts.offset);
    return;
  }
  add(8 + j, (counts.scale & 15u) | (counts.offset & 15u) << 4);
  add(j, counts.scale >> 4 << 6), add(4 + j, counts.offset >> 4 << 6);
}

float half_at(const std::uint8_t* record, std::int64_t at) noexcept {
  return static_cast<float>(read(record + at, Dtype::f16, 0));
}
void put_half(std::uint8_t* record, std::int64_t at, float number) noexcept {
  const auto bits = static_cast<std::uint16_t>(encode(Codes::f16, number));
  std::memcpy(record + at, &bits, sizeof bits);
}

// The f16 number that counts to `most` in so many steps: nearest; of subnormal ones the least that
// is no smaller.
float unit_for(float most, float steps, const Storage& storage) {
  const auto exact = static_cast<float>(double{most} / double{steps});
  if (!(exact <= kMostHalf))
    throw Error(Code::invalid_argument, "quantize: values must have finite scales in " +
                                            to_string(storage) + ", got infinity");
  if (exact >= 0x1p-14f) return static_cast<float>(round(Codes::f16, exact));
  return std::ceil(exact * 0x1p24f) * 0x1p-24f;
}

unsigned count_of(float number, float unit, float most) noexcept {
  if (unit == 0.0f) return 0;
  const auto quotient = static_cast<float>(double{number} / double{unit});
  return static_cast<unsigned>(std::nearbyint(std::min(quotient, most)));
}

// A superblock of `n` values, fewer at the end of a row; its record, and its codes by number.
void quantize_block(const std::vector<float>& x, const Storage& storage, Record& record,
                    std::uint8_t* codes) {
  std::array<float, kSteps> scale{}, offset{};
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t j = i / kInner;
    scale[j] = std::max(scale[j], x[i]);  // first how far the values go above 0 and below it
    offset[j] = std::max(offset[j], -x[i]);
  }
  for (std::size_t j = 0; j < kSteps; ++j) {
    const auto span = static_cast<float>(double{scale[j]} + double{offset[j]});
    scale[j] = static_cast<float>(double{span} / double{kMostCode});
  }
  const float d = unit_for(*std::ranges::max_element(scale), kMostStep, storage);
  const float e = unit_for(*std::ranges::max_element(offset), kMostStep, storage);
  record = {};
  put_half(record.data(), 0, d), put_half(record.data(), 2, e);
  std::array<float, kSteps> r{}, z{};
  for (std::size_t j = 0; j < kSteps; ++j) {
    const Counts counts{count_of(scale[j], d, kMostStep), count_of(offset[j], e, kMostStep)};
    put_counts(record, j, counts);
    const float s = d * static_cast<float>(counts.scale), m = e * static_cast<float>(counts.offset);
    r[j] = s == 0.0f ? 0.0f : 1.0f / s;
    z[j] = m * r[j];
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t j = i / kInner;
    const float product = x[i] * r[j];
    const auto moved = static_cast<float>(double{product} + double{z[j]});
    codes[i] = static_cast<std::uint8_t>(std::nearbyint(std::clamp(moved, 0.0f, kMostCode)));
  }
}

// The same of Q6_K, whose scales are those of int6, in 127 steps.
void quantize_block6(const std::vector<float>& x, const Storage& storage, std::uint8_t* record,
                     std::uint8_t* codes) {
  std::array<float, kSteps6> scale{};
  for (std::size_t i = 0; i < x.size(); ++i)
    scale[i / kInner6] = std::max(scale[i / kInner6], std::fabs(x[i]));
  for (float& s : scale) s = static_cast<float>(double{s} / 31.5);
  const float d = unit_for(*std::ranges::max_element(scale), 127.0f, storage);
  put_half(record, kSteps6, d);
  std::array<float, kSteps6> r{};
  for (std::size_t j = 0; j < kSteps6; ++j) {
    const unsigned count = count_of(scale[j], d, 127.0f);
    record[j] = static_cast<std::uint8_t>(count);
    const float s = d * static_cast<float>(count);
    r[j] = s == 0.0f ? 0.0f : 1.0f / s;
  }
  for (std::size_t i = 0; i < x.size(); ++i)
    codes[i] = static_cast<std::uint8_t>(
        std::nearbyint(std::clamp(x[i] * r[i / kInner6], -32.0f, 31.0f)) + 32);
}

}  // namespace

void quantize_ggml(const void* values, Dtype dtype, const Shape& shape, const Storage& storage,
                   std::span<void* const> parts) {
  const bool is_q6 = describe(storage).scale.code == ScaleCode::q6_k;
  const std::int64_t row = shape.row_elements(), bytes = describe(storage).scale.record;
  std::array<std::uint8_t, kBlock> codes{};
  std::int64_t g = 0;
  for (std::int64_t begin = 0; begin < shape.elements(); begin += row)
    for (std::int64_t first = 0; first < row; first += kBlock, ++g) {
      std::vector<float> x;
      for (std::int64_t i = first; i < std::min(first + kBlock, row); ++i)
        x.push_back(static_cast<float>(read(values, dtype, begin + i)));
      auto* const kept = static_cast<std::uint8_t*>(parts[1]) + g * bytes;
      auto* const to = static_cast<std::uint8_t*>(parts[0]);
      if (is_q6) {
        quantize_block6(x, storage, kept, codes.data());
        for (std::size_t i = 0; i < x.size(); ++i)
          put_dense(to, 6, begin + first + static_cast<std::int64_t>(i), codes[i]);
        continue;
      }
      Record record;
      quantize_block(x, storage, record, codes.data());
      std::memcpy(kept, record.data(), record.size());
      for (std::size_t i = 0; i < x.size(); i += 2)
        to[(begin + first) / 2 + static_cast<std::int64_t>(i / 2)] =
            static_cast<std::uint8_t>(codes[i] | codes[i + 1] << 4);
    }
}

ScaleAndOffset scale_and_offset_at(const Weight& weight, std::int64_t i) noexcept {
  const std::int64_t g = scale_index(weight.storage(), weight.shape(), i);
  if (describe(weight.storage()).scale.code == ScaleCode::q6_k) {
    const auto* const kept = static_cast<const std::uint8_t*>(weight.part(1)) + g * kRecord6;
    const auto j = i % weight.row_elements() % kBlock / kInner6;
    return {half_at(kept, kSteps6) * static_cast<float>(static_cast<std::int8_t>(kept[j])), 0.0f};
  }
  Record record;
  std::memcpy(record.data(), static_cast<const char*>(weight.part(1)) + g * 16, record.size());
  const std::int64_t in_row = i % weight.row_elements();
  const Counts counts = counts_of(record, static_cast<std::size_t>(in_row % kBlock / kInner));
  return {half_at(record.data(), 0) * static_cast<float>(counts.scale),
          half_at(record.data(), 2) * static_cast<float>(counts.offset)};
}

}  // namespace stowage::reference
