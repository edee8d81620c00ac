// SPDX-License-Identifier: Apache-2.0
// Dot products: resting rows with a few vectors (decode and multiply in registers), and widened
// rows with them. A CodeReader says how codes are read; an instruction set that does it better
// specializes it in <instruction set>-inl.h, which is included before this file.
#pragma once
#include <type_traits>

#include "kernel/cpu/dequantize-inl.h"
#include "kernel/cpu/streams-inl.h"
#include "kernel/linear.h"

namespace stowage {
namespace {

/// Codes of 8 bits and more. Their scale multiplies the sum of a group: one product for many.
template <Codes kCodes>
struct CodeReader {
  static constexpr bool kScalesSum = true;
  explicit CodeReader(const float* /*values*/) {}
  void set_scale(float) {}
  F read(const std::uint8_t* codes) { return decode<kCodes>(codes); }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = decode<kCodes>(codes + v * kWidth * bits_of(kCodes) / 8);
  }
  /// What a sum of read values stands for, and whether one of them was none.
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }
};

/// Codes of 4 bits. The scale multiplies the table: values are those of dequantize, bit for bit.
template <Packing kPacking>
struct NibbleReader {
  static constexpr bool kScalesSum = false;
  explicit NibbleReader(const float* values) : values_(values) { set_scale(1.0f); }
  void set_scale(float scale) {
    set_table([=](F x) { return x * splat(scale); });
  }
  /// What codes read as, made of the values of the format.
  template <class Make>
  void set_table(Make make) {
    F made[16 / kWidth];
    for (int i = 0; i < 16 / kWidth; ++i) made[i] = make(Lanes::load_f32(values_ + i * kWidth));
    table_ = Lanes::load_table(made);
  }
  F read(const std::uint8_t* codes) {
    return as_float(Lanes::look_up(table_, Lanes::load_nibbles<kPacking>(codes)));
  }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth / 2);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }

 private:
  const float* values_;
  Lanes::Table16 table_;
};
template <Codes kCodes>
requires(is_four_bit(kCodes)) struct CodeReader<kCodes> : NibbleReader<packing_of(kCodes)> {
  using NibbleReader<packing_of(kCodes)>::NibbleReader;
};

/// Codes of 8 bits that stand for their distance from a zero.
template <Codes kCodes>
struct ZeroReader {
  explicit ZeroReader(const float* /*values*/) {}
  void set_scale(float /*scale*/, float zero) { zero_ = splat(zero); }
  F read(const std::uint8_t* codes) { return decode<kCodes>(codes) - zero_; }
  void read4(const std::uint8_t* codes, F (&w)[4]) {
    for (int v = 0; v < 4; ++v) w[v] = read(codes + v * kWidth * bits_of(kCodes) / 8);
  }
  F value(F sum) const { return sum; }
  bool met_nan() const { return false; }

 private:
  F zero_ = {};
};
/// Codes of 4 bits: the difference goes into the table too.
template <Codes kCodes>
requires(is_four_bit(kCodes)) struct ZeroReader<kCodes> : NibbleReader<packing_of(kCodes)> {
  using NibbleReader<packing_of(kCodes)>::NibbleReader;
  void set_scale(float scale, float zero) {
    this->set_table([=](F x) { return (x - splat(zero)) * splat(scale); });
  }
};

constexpr std::int64_t kCommonBlock = 64;  // of most 4-bit weights

/// Of vectors of 16 lanes, four rows of weight far apart are worth it where groups are as long.
constexpr std::int64_t kLongGroup = 512;

/// How many chains a sum has, since a multiply-add waits for the one before it: four, if it is
/// alone and no four rows of weight share a row of x.
constexpr int chains_of(int rows_of_x, bool in_streams) {
  return rows_of_x == 1 && !in_streams ? 4 : 2;
}

/// Sums of one row of weight with kM rows of x.
template <int kM, int kChains>
struct Sums {
  F of[kM][kChains] = {};

  void add(F w, int v, const float* x, std::int64_t x_stride) {
    for (int j = 0; j < kM; ++j)
      of[j][v % kChains] =
          Lanes::multiply_add(w, Lanes::load_f32(x + j * x_stride), of[j][v % kChains]);
  }
  void add_to(float* y, std::int64_t y_stride, float factor) const {
    F joined[4] = {};
    for (int j = 0; j < kM; ++j) {
      joined[j] = of[j][0] + of[j][1];
      if constexpr (kChains == 4) joined[j] += of[j][2] + of[j][3];
    }
    float sums[4];
    Lanes::sum4(joined, sums);
    for (int j = 0; j < kM; ++j) y[j * y_stride] += sums[j] * factor;
  }
};

template <Codes kCodes>
constexpr std::int64_t bytes_for(std::int64_t elements) {
  return elements * bits_of(kCodes) / 8;
}

/// The last elements of a row, fewer than a vector: through a copy, so that nothing beyond the row
/// is read. Behind it the copy has codes of `zero`.
template <Codes kCodes, class SomeReader>
[[gnu::always_inline]] inline F read_tail(SomeReader& reader, const std::uint8_t* codes,
                                          std::int64_t n, std::int8_t zero) {
  std::uint8_t padded[bytes_for<kCodes>(kWidth)];
  __builtin_memset(padded, zero, sizeof padded);
  __builtin_memcpy(padded, codes, static_cast<std::size_t>(bytes_for<kCodes>(n)));
  return reader.read(padded);
}

/// The same, whose products are less by an offset.
template <Codes kCodes>
struct OffsetReader : NibbleReader<packing_of(kCodes)> {
  using NibbleReader<packing_of(kCodes)>::NibbleReader;
  void set_scale(float scale, float offset) {
    this->set_table([=](F x) { return x * splat(scale) - splat(offset); });
  }
};

/// The same, whose distances from a zero are rounded, and whose products are.
template <Codes kCodes>
struct RoundedZeroReader : NibbleReader<packing_of(kCodes)> {
  Dtype rounds = Dtype::unknown;
  using NibbleReader<packing_of(kCodes)>::NibbleReader;
  void set_scale(float scale, float zero) {
    this->set_table([=, this](F x) {
      return round_as(round_as(x - splat(zero), rounds) * splat(scale), rounds);
    });
  }
};

/// nf4 whose values are rounded to kOwn before they multiply (nf4:torchao).
template <Dtype kOwn>
struct RoundedReader : CodeReader<Codes::nf4> {
  explicit RoundedReader(const float* values) : CodeReader<Codes::nf4>(values) {}
  void set_scale(float scale) {
    set_table([=](F x) { return round_as<kOwn>(x * splat(scale)); });
  }
};
template <Codes kCodes, Dtype kOwn, Zero kZero>
struct ReaderFor {
  using Type = RoundedReader<kOwn>;
};
template <Codes kCodes>
struct ReaderFor<kCodes, Dtype::f32, Zero::none> {
  using Type = CodeReader<kCodes>;
};
template <Codes kCodes>
struct ReaderFor<kCodes, Dtype::f32, Zero::code> {
  using Type = ZeroReader<kCodes>;
};
template <Codes kCodes>
struct ReaderFor<kCodes, Dtype::f32, Zero::offset> {
  using Type = OffsetReader<kCodes>;
};
template <Codes kCodes>
struct ReaderFor<kCodes, Dtype::f32, Zero::rounded> {
  using Type = RoundedZeroReader<kCodes>;
};
/// What stands beside the scales of the groups still to come.
template <Zero kZero>
struct Beside {
  explicit Beside(const Run& /*run*/, std::int64_t /*g*/) {}
};
template <>
struct Beside<Zero::code> {
  const std::int8_t* next;
  Beside(const Run& run, std::int64_t g) : next(run.zeros + g) {}
};
template <>
struct Beside<Zero::offset> {
  const float* next;
  Beside(const Run& run, std::int64_t g) : next(run.offsets + g) {}
};
template <>
struct Beside<Zero::rounded> : Beside<Zero::offset> {
  using Beside<Zero::offset>::Beside;
};

/// A row of weight on its way: elements are added in the same order whether it is alone or not. All
/// inlined, so that tables and sums stay in registers.
template <Codes kCodes, Dtype kOwn, Zero kZero, int kM, int kChains, bool kNear = false>
struct DotRow {
  static constexpr std::int64_t kStep = 4 * kWidth;
  static constexpr float kOne = 1.0f;
  const DotTask& task;
  std::int64_t at, ahead;  // its place in task, and from a code to those that will be read soon
  const std::uint8_t* codes;
  const float* scales = &kOne;  // of the groups still to come
  [[no_unique_address]] Beside<kZero> beside;
  typename ReaderFor<kCodes, kOwn, kZero>::Type reader;
  Sums<kM, kChains> sums, group;  // all, and those of a group whose scale multiplies its sum

  DotRow(const DotTask& of, std::int64_t row, std::int64_t bytes_ahead)
      : task(of),
        at(row),
        ahead(bytes_ahead),
        beside(of.run, (of.run.first + row * of.row_stride) / of.run.group),
        reader(of.values) {
    const std::int64_t first = task.run.first + row * task.row_stride;
    codes = static_cast<const std::uint8_t*>(task.run.codes) + bytes_for<kCodes>(first);
    if (task.run.scales != nullptr) scales = task.run.scales + first / task.run.group;
    if constexpr (kZero == Zero::rounded) reader.rounds = task.run.rounds;
  }
  float factor() const { return reader.met_nan() ? __builtin_nanf("") : task.run.factor; }
  /// Whether groups of so many are taken several at a time: their scale multiplies sums, and a step
  /// has whole ones.
  static constexpr bool takes(int group) {
    return CodeReader<kCodes>::kScalesSum && kZero == Zero::none && group % kWidth == 0 &&
           kStep % group == 0;
  }
  /// Elements to the end of the group that the row begins in.
  std::int64_t first_group() const {
    if (task.run.scales == nullptr) return task.columns;
    return task.run.group - (task.run.first + at * task.row_stride) % task.run.group;
  }
  [[gnu::always_inline]] Sums<kM, kChains>& open() {
    return CodeReader<kCodes>::kScalesSum ? group : sums;
  }
  [[gnu::always_inline]] void begin_group() {
    if constexpr (CodeReader<kCodes>::kScalesSum) group = Sums<kM, kChains>{};
    if constexpr (kZero != Zero::none)
      reader.set_scale(*scales, *beside.next);
    else if constexpr (!CodeReader<kCodes>::kScalesSum)
      reader.set_scale(*scales);
  }
  [[gnu::always_inline]] void end_group() {
    if constexpr (CodeReader<kCodes>::kScalesSum)
      for (int j = 0; j < kM; ++j)
        for (int c = 0; c < kChains; ++c)
          sums.of[j][c] =
              Lanes::multiply_add(reader.value(group.of[j][c]), splat(*scales), sums.of[j][c]);
    ++scales;
    if constexpr (kZero != Zero::none) ++beside.next;
  }
  [[gnu::always_inline]] void ask(std::int64_t k) {
    for (std::int64_t b = 0; b < bytes_for<kCodes>(kStep); b += 64)
      ask_for_line<kNear>(codes + bytes_for<kCodes>(k) + ahead + b);
  }
  /// kStep elements from k on.
  [[gnu::always_inline]] void add4(std::int64_t k, const float* x) {
    ask(k);
    F w[4];
    reader.read4(codes + bytes_for<kCodes>(k), w);
    for (int v = 0; v < 4; ++v) open().add(w[v], v, x + k + v * kWidth, task.x_stride);
  }
  /// The same of groups that are short of it.
  template <int kGroup>
  [[gnu::always_inline]] void add_groups(std::int64_t k, const float* x) {
    constexpr int kEach = kGroup / kWidth;  // vectors of a group
    ask(k);
    F w[4];
    reader.read4(codes + bytes_for<kCodes>(k), w);
    for (int v = 0; v < 4; v += kEach, ++scales)
      for (int j = 0; j < kM; ++j) {
        const float* from = x + k + j * task.x_stride;
        F sum = w[v] * Lanes::load_f32(from + v * kWidth);
        for (int i = v + 1; i < v + kEach; ++i)
          sum = Lanes::multiply_add(w[i], Lanes::load_f32(from + i * kWidth), sum);
        F& to = sums.of[j][v / kEach % kChains];
        to = Lanes::multiply_add(reader.value(sum), splat(*scales), to);
      }
  }
  [[gnu::always_inline]] void add1(std::int64_t k, const float* x) {
    open().add(reader.read(codes + bytes_for<kCodes>(k)), 0, x + k, task.x_stride);
  }
  [[gnu::always_inline]] void add_tail(std::int64_t k, const float* x, std::int64_t n) {
    const std::uint8_t* from = codes + bytes_for<kCodes>(k);
    std::int8_t zero = 0;
    if constexpr (kZero == Zero::code) zero = *beside.next;
    open().add(read_tail<kCodes>(reader, from, n, zero), 0, x + k, task.x_stride);
  }
};

/// Elements k to k + n of all rows, each with its scale.
template <class... Rows>
[[gnu::always_inline]] inline void add_group(const float* x, std::int64_t k, std::int64_t n,
                                             Rows&... rows) {
  constexpr std::int64_t kStep = 4 * kWidth;
  std::int64_t i = 0;  // from 0, so that the length of the common block unrolls the loop
  (rows.begin_group(), ...);
  for (; i + kStep <= n; i += kStep) (rows.add4(k + i, x), ...);
  for (; i + kWidth <= n; i += kWidth) (rows.add1(k + i, x), ...);
  if (i < n) (rows.add_tail(k + i, x, n - i), ...);
  (rows.end_group(), ...);
}

/// Rows of weight whose groups end at the same columns, with kM rows of x.
template <class... Rows>
[[gnu::always_inline]] inline void dot_together(const DotTask& task, const float* x, float* y,
                                                std::int64_t group, Rows... rows) {
  const auto short_groups = [&]<int kGroup>(std::int64_t k) {  // where they end
    constexpr std::int64_t kStep = 4 * kWidth;
    if constexpr ((Rows::takes(kGroup) && ...))
      for (; group == kGroup && task.run.group == kGroup && k + kStep <= task.columns; k += kStep)
        (rows.template add_groups<kGroup>(k, x), ...);
    return k;
  };
  for (std::int64_t k = 0; k < task.columns;) {
    k = short_groups.template operator()<32>(k);
    k = short_groups.template operator()<16>(k);
    if (k == task.columns) break;
    // The common block, with its length known to the compiler.
    for (; group == kCommonBlock && k + kCommonBlock <= task.columns; k += kCommonBlock) {
      add_group(x, k, kCommonBlock, rows...);
      group = task.run.group;
    }
    if (k == task.columns) break;
    const std::int64_t n = group < task.columns - k ? group : task.columns - k;
    add_group(x, k, n, rows...);
    k += n;
    group = task.run.group;
  }
  (rows.sums.add_to(y + rows.at, task.y_stride, rows.factor()), ...);
}

/// Rows of weight share what is read of one row of x, if sums and two tables of 4-bit values fit
/// the registers: two neighbors, or four that lie a quarter of all rows apart.
template <Codes kCodes, int kM>
constexpr bool kTogether = kM == 1 && (kWidth == 16 || CodeReader<kCodes>::kScalesSum);

template <Codes kCodes, Dtype kOwn, Zero kZero, int kM>
void dot_rows(const DotTask& task, std::int64_t j) {
  constexpr bool kAlways = kWidth == 8;  // in streams
  using Row = DotRow<kCodes, kOwn, kZero, kM, chains_of(kM, kAlways)>;
  const float* x = task.x + j * task.x_stride;
  float* y = task.y + j * task.y_stride;
  std::int64_t i = 0;
  const bool aligned = task.run.scales == nullptr || task.row_stride % task.run.group == 0 ||
                       task.run.group % task.row_stride == 0;
  if constexpr (kTogether<kCodes, kM> &&
                (kAlways || (kWidth == 16 && bits_of(kCodes) == 8 && kZero == Zero::none))) {
    const bool is_long = kAlways || task.run.scales == nullptr || task.run.group >= kLongGroup;
    const std::int64_t apart = aligned && is_long ? task.rows / kStreams : 0;
    const auto in_streams = [&]<bool kNear>() {
      using InStreams = DotRow<kCodes, kOwn, kZero, kM, chains_of(kM, true), kNear>;
      for (; i < apart; ++i) {
        const std::int64_t ahead = bytes_ahead<kNear>(i, apart, bytes_for<kCodes>(task.row_stride),
                                                      bytes_for<kCodes>(task.columns));
        const auto row = [&](std::int64_t n) { return InStreams(task, i + n * apart, ahead); };
        dot_together(task, x, y, row(0).first_group(), row(0), row(1), row(2), row(3));
      }
    };
    if constexpr (kHasNear)
      if (task.near) in_streams.template operator()<true>();
    in_streams.template operator()<false>();
    i *= kStreams;
  }
  if constexpr (kTogether<kCodes, kM> && !kAlways) {
    for (; aligned && i + 2 <= task.rows; i += 2) {
      const Row row(task, i, task.ahead);
      dot_together(task, x, y, row.first_group(), row, Row(task, i + 1, task.ahead));
    }
  }
  for (; i < task.rows; ++i) {
    const Row row(task, i, task.ahead);
    dot_together(task, x, y, row.first_group(), row);
  }
}

/// Four rows of x at a time: they stay in the L1 cache, and codes are decoded again for the next
/// four, which costs less than keeping them would.
template <Codes kCodes, Dtype kOwn, Zero kZero>
[[gnu::always_inline]] inline void dot_vectors(const DotTask& task) {
  std::int64_t j = 0;
  for (; j + 4 <= task.m; j += 4) dot_rows<kCodes, kOwn, kZero, 4>(task, j);
  if (j + 3 == task.m) dot_rows<kCodes, kOwn, kZero, 3>(task, j);
  if (j + 2 == task.m) dot_rows<kCodes, kOwn, kZero, 2>(task, j);
  if (j + 1 == task.m) dot_rows<kCodes, kOwn, kZero, 1>(task, j);
}

template <Codes kCodes, Dtype kOwn = Dtype::f32>
void dot(const DotTask& task) noexcept {
  if constexpr (may_have_zeros(kCodes))
    if (task.run.zeros != nullptr) return dot_vectors<kCodes, kOwn, Zero::code>(task);
  if constexpr (may_be_rounded(kCodes))
    if (task.run.rounds != Dtype::unknown) return dot_vectors<kCodes, kOwn, Zero::rounded>(task);
  if constexpr (may_have_offsets(kCodes))
    if (task.run.offsets != nullptr) return dot_vectors<kCodes, kOwn, Zero::offset>(task);
  dot_vectors<kCodes, kOwn, Zero::none>(task);
}

constexpr int kMostVectors = 6;  // rows of x, with kDotsRows of w: sums fit the registers
constexpr int kDotsRows = kWidth == 16 ? 4 : 2;

/// kRows rows of w with kVectors rows of x. Each sum has chains as Sums does.
template <int kRows, int kVectors>
void dots_block(const DotsTask& task, std::int64_t row, std::int64_t vector) {
  constexpr int kChains = kVectors == 1 ? 4 : kVectors <= 3 ? 2 : 1;
  const float* w = task.w + row * task.w_stride;
  const float* x = task.x + vector * task.x_stride;
  // The first vectors fetch what is read next, as much for each row; the others find it there.
  const std::int64_t of_row = vector == 0 ? task.next_bytes / task.rows : 0;
  const std::int64_t each = of_row * kRows * kWidth / task.columns;
  const char* next = task.next + row * of_row;
  F sums[kChains][kVectors][kRows] = {};
  const auto add_products = [&](std::int64_t k, int chain) __attribute__((always_inline)) {
    __builtin_prefetch(next, 0, 2);
    next += each;
    F weights[kRows];
    for (int r = 0; r < kRows; ++r) weights[r] = Lanes::load_f32(w + r * task.w_stride + k);
    for (int v = 0; v < kVectors; ++v) {
      const F values = Lanes::load_f32(x + v * task.x_stride + k);
      for (int r = 0; r < kRows; ++r)
        sums[chain][v][r] = Lanes::multiply_add(weights[r], values, sums[chain][v][r]);
    }
  };
  std::int64_t k = 0;
  for (; k + kChains * kWidth <= task.columns; k += kChains * kWidth)
    for (int chain = 0; chain < kChains; ++chain) add_products(k + chain * kWidth, chain);
  for (; k < task.columns; k += kWidth) add_products(k, 0);
  for (int v = 0; v < kVectors; ++v) {
    F of_vector[4] = {};
    for (int r = 0; r < kRows; ++r)
      for (int chain = 0; chain < kChains; ++chain) of_vector[r] += sums[chain][v][r];
    float totals[4];
    Lanes::sum4(of_vector, totals);
    for (int r = 0; r < kRows; ++r) task.y[(vector + v) * task.y_stride + row + r] += totals[r];
  }
}

template <int kVectors>
void dots_rows(const DotsTask& task, std::int64_t vector) {
  std::int64_t row = 0;
  for (; row + kDotsRows <= task.rows; row += kDotsRows)
    dots_block<kDotsRows, kVectors>(task, row, vector);
  for (; row < task.rows; ++row) dots_block<1, kVectors>(task, row, vector);
}

void dots(const DotsTask& task) noexcept {
  constexpr decltype(&dots_rows<1>) kParts[kMostVectors] = {
      &dots_rows<1>, &dots_rows<2>, &dots_rows<3>, &dots_rows<4>, &dots_rows<5>, &dots_rows<6>};
  std::int64_t vector = 0;
  for (std::int64_t parts = (task.m + kMostVectors - 1) / kMostVectors; parts > 0; --parts) {
    const std::int64_t count = (task.m - vector + parts - 1) / parts;  // parts alike
    kParts[count - 1](task, vector);
    vector += count;
  }
}

}  // namespace
}  // namespace stowage
