// SPDX-License-Identifier: Apache-2.0
// What a program for a device is made for, and what its launches get. One program serves one
// storage and one dtype of values: they are constants of it, so that compilers drop what the
// storage lacks. The texts of this folder (*.cuh) are compiled for devices when they are first
// needed (device/program.h), and by the host's compiler in tests; device/form.h makes a Form of a
// Storage, and its assertions hold the names here to those of the core.
#pragma once
#include <cstdint>

/// Before a loop over what lies in registers, which no number may choose while it runs.
#ifndef STOWAGE_UNROLL
#define STOWAGE_UNROLL
#endif

namespace stowage::cuda {

enum class Element : std::uint8_t { f32, bf16, f16, e4m3, e5m2, e2m1, int8, biased, table };
enum class Number : std::uint8_t { f64, f32, bf16, f16, e8m0 };
enum class Packing : std::uint8_t { whole, high_first, low_first, dense };
enum class Group : std::uint8_t { none, tensor, row, row2, flat, along, block2, named, column };
enum class Scales : std::uint8_t {
  plain,
  mapped,
  affine,
  q4_k,
  q6_k,
  absmax,
  product,
  product_bf16,
  quotient
};
enum class Zeros : std::uint8_t { none, code, offset, sum, rounded };
enum class Codec : std::uint8_t { cast, amax, bitsandbytes, torchao, ggml };

struct Form {
  Number values;      // that are read or written
  int x_rows;         // of the other factor, in products: all, or so many at a time
  bool many;          // there are as many as a launch says
  bool groups;        // of them, each of which is multiplied by a matrix of its own
  Element element;    // what a code stands for
  int bits;           // of a code
  int together;       // elements that a thread takes at a time
  int bias;           // of biased: the code of 0
  Packing packing;    // how codes lie
  Group group;        // which elements share a scale,
  int n, m;           // and how many of them, as the descriptor says
  Scales scales;      // how scales are kept,
  Number number;      // as numbers of which type; of torchao that of all parts
  int record, inner;  // bytes of a record, and elements of one of its scales
  Zeros zeros;        // what scales have beside them
  int outer_n;        // scales next to one another that share a number: of mapped and affine
  float factor;       // of absmax: multiplies products too
  bool transposed;    // matrices of a stack [E, K, O] lie as [E, O, K]
  Codec codec;        // whose arithmetic makes codes
  bool whole;   // pieces and spans lie in one row and one group, parts and arrays at whole 16 bytes
  bool slabs;   // 64 elements of a row have one scale, and codes stand for 16 values
  bool floors;  // scales that are powers of two are rounded down
  float least, most, divisor;  // what codes reach, and of what amax a scale is a part
  float largest;               // finite value of the format
  float values16[16];          // of a table, by code
  float thresholds[15];        // between its values in order; of torchao the first that is beyond
  int order[16];               // code of each value in order
  std::uint16_t halves[16];    // of formats of 16 values: them, rounded to the dtype of the values
  bool operator==(const Form&) const = default;
};

#ifdef STOWAGE_INDEX
using Index = STOWAGE_INDEX;
#else
using Index = long long;
#endif

/// A number of elements, as launches pass it.
struct Extent {
  long long n = 0;
  Extent() = default;
  Extent(long long count) : n(count) {}
  operator Index() const { return static_cast<Index>(n); }
};

/// A weight in memory of the device, and its shape as the groups need it.
struct Weight {
  std::uint8_t* codes;
  void* parts[4];  // that follow the codes
  Extent elements;
  Extent row;      // elements of a row: of one index of dim 0
  Extent pair;     // elements of one pair of indices of dims 0 and 1
  Extent rows;     // of dim 0
  Extent lines;    // of the last dim but one
  Extent columns;  // of the last dim
  Extent under;    // scales that stand under one number
};

/// A line of K elements of a weight: which index of dim 0 has it, and where in that it begins.
struct Line {
  Index row, begin;
};
/// Some rows of the other factor of a product.
struct Rows {
  Index first, end;
};

/// What quantizing works with beside its parts, all in one piece of memory that begins as zeros.
struct Working {
  std::uint32_t* refused;  // bits of the largest magnitude; beyond those of infinity: NaN
  std::uint32_t* above;    // of each group (of a record: of each of its steps), the largest value,
  std::uint32_t* below;    // and the largest negated one; without zeros the first is of both
  float* r;                // what values of a group are multiplied with, or divided by
  float* moved;            // and what is added then
  std::uint32_t* most;     // of what scales stand under: the largest magnitude
};

}  // namespace stowage::cuda
