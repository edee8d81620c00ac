// SPDX-License-Identifier: Apache-2.0
// Rows of a weight as Runs. Where groups are flat over the matrix, rows may begin in the middle of
// a group, or of a byte.
#include "kernel/linear_weight.h"
#include "kernel/tables.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "kernel/stream.h"

namespace stowage {
namespace {

// Whether a sum of products is multiplied by the one scale of a run as well as each of them.
bool scales_sums(const Run& run) noexcept {
  if (run.scales == nullptr || run.zeros != nullptr || run.named != nullptr) return false;
  if (run.offsets != nullptr || run.factor != 1.0f) return false;
  const std::int64_t group = run.first / run.group;
  return run.first + run.n <= (group + 1) * run.group && std::isnormal(run.scales[group]);
}

constexpr std::int64_t kLine = 64;

// So many bytes are on their way to the L2 cache. Those that are not there are harmless.
void ask_for(const char* from, std::int64_t bytes) noexcept {
  for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
}
// The first of so many are, from where the processor goes on by itself; more would hold up what is
// read now.
void ask_for_first(const char* from, std::int64_t bytes) noexcept {
  constexpr std::int64_t kLines = 8;
  ask_for(from, std::min(bytes, kLines * kLine));
}

// Zeros that are taken off codes, as what is taken off products; no product is rounded.
struct TakenOffProducts {
  float offsets[kExpandedScales];
  Run of(Run run) noexcept {
    const std::int64_t groups = ceil_div(run.first + run.n, run.group);
    for (std::int64_t g = 0; g < groups; ++g) offsets[g] = run.scales[g] * run.offsets[g];
    run.offsets = offsets;
    return run;
  }
};

}  // namespace

void LinearWeight::widen(std::int64_t row, std::int64_t k, std::int64_t n,
                         float* out) const noexcept {
  const std::int64_t begin = row * columns_ + k;
  runs_.cover(begin, begin + n, [&](const Run& run) {
    to_f32_(run, out);
    out += run.n;
  });
}

void LinearWeight::widen_rows(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                              float* out, std::int64_t stride) const noexcept {
  if (n == columns_ && n == stride) return widen(row, 0, count * n, out);
  for (std::int64_t i = 0; i < count; ++i, out += stride) {
    widen(row + i, k, n, out);
    std::fill(out + n, out + stride, 0.0f);
  }
}

void LinearWeight::widen_bf16(std::int64_t row, std::int64_t k, std::int64_t n,
                              std::uint16_t* out) const noexcept {
  const std::int64_t begin = row * columns_ + k;
  runs_.cover(begin, begin + n, [&](const Run& run) {
    to_bf16_(run, out);
    out += run.n;
  });
}

// The codes `ahead` bytes further are on their way meanwhile, some at a time: a product that asked
// for them would have them all come at once.
void LinearWeight::widen_asking(const Run& run, std::int64_t ahead,
                                std::uint16_t* out) const noexcept {
  constexpr std::int64_t kPiece = 2048;
  for (std::int64_t begin = 0; begin < run.n; begin += kPiece) {
    const std::int64_t some = std::min(kPiece, run.n - begin);
    const char* from = static_cast<const char*>(run.codes) + bytes_of_codes(run.first + begin);
    if (near_)
      fetch_ahead(from + ahead, bytes_of_codes(some));
    else
      ask_for(from + ahead, bytes_of_codes(some));
    to_bf16_(run.part(begin, some), out + begin);
  }
}

template <class MayScale>
void LinearWeight::widen_some_bf16(std::int64_t row, std::int64_t count, std::int64_t k,
                                   std::int64_t n, std::uint16_t* out, std::int64_t stride,
                                   std::int64_t length, const Asked& asked, float* scales,
                                   MayScale&& may_scale) const noexcept {
  for (std::int64_t i = 0; i < count; ++i, out += stride) {
    const std::int64_t begin = (row + i) * columns_ + k;
    if (!asked.whole) ask_for_first(codes_at(row + i, k) + asked.ahead, bytes_of_codes(n));
    std::uint16_t* to = out;
    scales[i] = 1.0f;
    runs_.cover(begin, begin + n, [&](Run run) {
      if (may_scale(run) && scales_sums(run)) {
        scales[i] = run.scales[run.first / run.group];
        run.scales = nullptr;
      }
      if (asked.whole)
        widen_asking(run, asked.ahead, to);
      else
        to_bf16_(run, to);
      to += run.n;
    });
    std::fill(out + n, out + length, std::uint16_t{0});
  }
}

void LinearWeight::widen_pairs(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                               std::uint16_t* out, std::int64_t stride,
                               float* scales) const noexcept {
  const Asked asked{bytes_of_codes(count * columns_), !runs_.unpacks()};
  widen_some_bf16(row, count, k, n, out, stride, stride, asked, scales,
                  [&](const Run& run) { return in_pairs_ && run.n == n; });
}

void LinearWeight::widen_matrix(std::int64_t row, std::int64_t count, std::int64_t k,
                                std::int64_t n, std::uint16_t* out, std::int64_t stride,
                                std::int64_t length, std::int64_t ahead,
                                float* scales) const noexcept {
  const Asked asked{ahead, near_ && !runs_.unpacks()};
  widen_some_bf16(row, count, k, n, out, stride, length, asked, scales,
                  [&](const Run&) { return by_rows_; });
  for (std::int64_t i = count; i < ceil_div(count, kMatrixTile) * kMatrixTile; ++i)
    std::fill_n(out + i * stride, length, std::uint16_t{0});
}

void LinearWeight::dot(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                       const Vectors& to) const noexcept {
  // So many bytes of the stretches that are read one after the other are on their way: two rows of
  // 4096 8-bit codes.
  constexpr std::int64_t kAhead = 8192;
  const std::int64_t stretch = std::max<std::int64_t>(1, n * bits_ / 8);
  const std::int64_t ahead = runs_.unpacks() ? 0  // numbers that were just made
                             : n == columns_ ? kAhead
                                             : ceil_div(kAhead, stretch) * (columns_ * bits_ / 8);
  const std::int64_t most = runs_.unpacks() && n != columns_ ? 1 : dot_rows_;
  for (std::int64_t done = 0; done < count; done += most) {
    const std::int64_t some = std::min(most, count - done);
    const std::int64_t begin = (row + done) * columns_ + k;
    const float* x = to.x;
    runs_.cover(begin, begin + (some - 1) * columns_ + n, [&](const Run& run) {
      const auto* values = static_cast<const float*>(run.values);
      const std::int64_t columns = some == 1 ? run.n : n;  // a long row may come in pieces
      dot_({run, some, columns_, columns, ahead, values, x, to.x_stride, to.m, to.y + done,
            to.y_stride, near_});
      x += run.n;
    });
  }
}

template <class Body>
void LinearWeight::for_each_run(const Rows& rows, std::int64_t most, Body&& body,
                                std::int64_t done) const noexcept {
  for (; done < rows.count; done += most) {
    const std::int64_t some = std::min(most, rows.count - done);
    const std::int64_t begin = (rows.first + done) * columns_ + rows.k;
    const std::int64_t end = begin + (some - 1) * columns_ + rows.n;
    std::int64_t column = 0;
    runs_.cover_as_they_lie(begin, end, [&](const Run& run) {
      body(run, Stretch{done, some, column, some == 1 ? run.n : rows.n});
      column += run.n;
    });
  }
}

// A processor follows streams by itself when they are long. Of fewer bits, which take longer
// to multiply than to read, scales are better read as they lie.
template <class Body>
std::int64_t LinearWeight::for_streams(const Rows& rows, std::int64_t most,
                                       Body&& body) const noexcept {
  const std::int64_t apart = rows.count / kStreams, each = most / kStreams;
  if (bits_ <= 4 || each == 0 || apart <= each || !runs_.expands_in_streams(columns_)) return 0;
  const std::int64_t first = rows.first * columns_;
  for (std::int64_t begin = 0; begin < apart; begin += each) {
    const std::int64_t some = std::min(each, apart - begin), from = first + begin * columns_;
    const Streams streams{begin, begin + some, apart, from, (apart - some) * columns_};
    runs_.cover_streams(from, apart * columns_, some * columns_, [&](Run run) {
      run.first = first;
      body(run, Stretch{0, apart * kStreams, 0, columns_, streams});
    });
  }
  return apart * kStreams;
}

template <class Body>
void LinearWeight::for_each_line(const Rows& rows, Body&& body) const noexcept {
  for (std::int64_t done = 0; done < rows.count;) {
    const std::int64_t left = lines_ - (rows.first + done) % lines_;
    const std::int64_t some = std::min(rows.count - done, left);
    const std::int64_t begin = (rows.first + done) * columns_ + rows.k;
    std::int64_t column = 0;
    runs_.cover_as_they_lie(begin, begin + rows.n, [&](const Run& run) {  // its first row
      body(run, Stretch{done, some, column, run.n});
      column += run.n;
    });
    done += some;
  }
}

void LinearWeight::dot_bf16(std::int64_t row, std::int64_t count, const Bf16Vectors& to, float* y,
                            std::int64_t y_stride) const noexcept {
  const float* const table = four_bit_tables(runs_.form().codes).values;
  const Rows all{row, count, 0, columns_};
  for_each_run(all, dot_bf16_rows_, [&](const Run& run, const Stretch& of) {
    const auto* values = run.values == nullptr ? table : static_cast<const float*>(run.values);
    Bf16DotTask task{run,  of.some,     columns_, columns_,    values,
                     to.x, to.x_stride, to.m,     y + of.done, y_stride};
    task.near = near_, task.rounds = to.rounds;
    dot_bf16_(task);
  });
}

void LinearWeight::dot_float8(std::int64_t row, std::int64_t count, const Bf16Vectors& to, float* y,
                              std::int64_t y_stride) const noexcept {
  const auto rows = [&](const Run& run, const Stretch& of) {
    dot_float8_({run, of.some, columns_, of.columns, nullptr, to.x + of.column, to.x_stride, to.m,
                 y + of.done, y_stride, lines_ != 0, near_, of.streams});
  };
  const Rows all{row, count, 0, columns_};
  if (lines_ != 0) return for_each_line(all, rows);
  for_each_run(all, dot_float8_rows_, rows,
               to.m == 1 ? for_streams(all, dot_float8_rows_, rows) : 0);
}

void LinearWeight::dot_eights(std::int64_t row, std::int64_t count, std::int64_t k, std::int64_t n,
                              const Bf16Vectors& to, float* y,
                              std::int64_t y_stride) const noexcept {
  const auto rows = [&](const Run& run, const Stretch& of) {
    dot_eights_({run, of.some, columns_, of.columns, nullptr, to.x + of.column, to.x_stride, to.m,
                 y + of.done, y_stride, lines_ != 0, near_});
  };
  const Rows some{row, count, k, n};
  lines_ == 0 ? for_each_run(some, dot_eights_rows_, rows) : for_each_line(some, rows);
}

void LinearWeight::dot_bytes(std::int64_t row, std::int64_t count, const BytesVectors& to, float* y,
                             std::int64_t y_stride) const noexcept {
  constexpr std::int64_t ahead = 8192;  // bytes
  TakenOffProducts taken;
  const bool in_lines = dot_bytes_kind_ == kForFloat8 && lines_ != 0;
  const auto rows = [&](const Run& run, const Stretch& of) {
    const bool rounds = run.rounds != Dtype::unknown;
    const std::uint8_t* x = to.x + of.column * kBytesOfX[dot_bytes_kind_];
    dot_bytes_({rounds ? taken.of(run) : run, of.some, columns_, of.columns, ahead, x, to.x_stride,
                to.m, y + of.done, y_stride, in_lines, nullptr, near_, !runs_.expands(),
                of.streams});
  };
  const bool lines = dot_kept_ != nullptr && to.m == 1;
  if (lines || dot_bytes_exponents_ != nullptr) {
    const Run whole{codes_, row * columns_, nullptr, runs_.group(), count * columns_};
    BytesDotTask task{whole, count,       columns_, columns_, ahead,
                      to.x,  to.x_stride, to.m,     y,        y_stride};
    task.run.zeros = runs_.zeros(), task.near = near_, task.in_place = lines;
    task.exponents = dot_bytes_exponents_, task.kept = kept_scales_;
    if (kept_outer_ != nullptr) task.outer = *kept_outer_;
    return (lines ? dot_kept_ : dot_bytes_)(task);
  }
  const Rows all{row, count, 0, columns_};
  if (in_lines) return for_each_line(all, rows);
  for_each_run(all, dot_bytes_rows_, rows, to.m == 1 ? for_streams(all, dot_bytes_rows_, rows) : 0);
}

}  // namespace stowage
