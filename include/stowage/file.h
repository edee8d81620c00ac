// SPDX-License-Identifier: Apache-2.0
// Reading safetensors files and shard sets, and the weights that rest in them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/stack.h"
#include "stowage/weight.h"

namespace stowage {

class Stacks;

inline namespace v0 {

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::unknown;
  std::string dtype_name;  // as the header spells it, also where dtype is unknown
  Shape shape;
  int shard = 0;                        // index into File::paths()
  std::uint64_t offset = 0, bytes = 0;  // offset from the start of the shard
};

/// How a part lies in its tensor of a file, where a dialect has it in another order than memory
/// has. The part is a matrix of numbers; the tensor is one of words, each with those that are
/// neighbours along one axis of the part. No fields: the bytes of the tensor are the part's.
struct PartForm {
  enum class Axis : std::uint8_t { columns, rows };
  std::uint8_t in_file = 0;   // bits of a number there: 2 to 8, or 16
  std::uint8_t in_part = 0;   // here; those of less than 8 lie as in storages, packed
  std::uint8_t word = 0;      // bits of a word: 8, 16 or 32
  Axis axis = Axis::columns;  // of the part, along which the numbers of a word are neighbours
  std::array<std::uint8_t, 8> order{0, 1, 2, 3, 4, 5, 6, 7};  // they, from the lowest bits up
  bool transposed = false;                                    // the matrix of words
  bool folded = false;      // the part is taken for a matrix of as many rows as a word has numbers
  bool tiled = false;       // that in tiles of 128 rows by 4, each 32 times four quarters
  std::uint8_t bias = 0;    // a number in the file is so much more; of 8 bits, modulo 256; of 4
                            // there and here, modulo 16
  std::uint8_t less = 0;    // then taken from each of a word, as one number: with borrows
  bool rounded = false;     // numbers of f32, to the compute dtype, as their owner's decoder does
  std::uint8_t record = 0;  // bytes of a record with several parts; the tensor is one of them
  std::uint8_t at = 0, span = 0;  // where in each the words of this part lie, and their bytes
  std::uint8_t halves = 0;  // numbers of a run; bytes hold one of its first half, low, and one of
                            // its second, high. Of 6 bits those are the lower four; the others
                            // follow those of all runs, in fours: of each quarter of a run one
  std::uint8_t most = 0;    // a number in records must be no larger; 0: any may be
  bool one = false;         // the part is the number 1 of f32, which no tensor has
  bool string = false;      // numbers that do not fill a word go on in the next one along the axis

  bool is_whole() const noexcept { return in_file == 0 && !rounded && !one; }
  bool operator==(const PartForm&) const = default;
};

/// The bytes of the tensor that a part of that shape, which has numbers that were not rounded, lies
/// in; those of other parts of its records are 0. Throws invalid_argument for a number that the
/// tensor has no bits for, and for bytes that are not those of such a part.
STOWAGE_API std::vector<std::byte> tensor_of_part(const PartForm& form,
                                                  std::span<const std::byte> part,
                                                  const Shape& shape);
/// One integer that stands for a form across a language door, 0 for a whole one, 1 for a rounded
/// one, and back (throws on a bad key).
STOWAGE_API std::int64_t form_key(const PartForm& form) noexcept;
STOWAGE_API PartForm form_from_key(std::int64_t key);

/// A weight as a model names it, whatever tensors it is made of.
struct WeightInfo {
  std::string name;  // "layers.0.weight"
  Storage storage;   // a float tensor is a plain cast of itself; others have no WeightInfo
  Shape shape;       // logical
  std::vector<std::string> parts;        // tensor names in the file, in the order of layout()
  std::optional<Dtype> compute;          // what the file says it computes in
  std::vector<std::string> beside = {};  // further tensors, which only tell what it is
  float nested_offset = 0;               // of nested storages
  std::vector<PartForm> forms = {};      // of each part; none: all are whole
};

/// The weights among tensors, and those that are none though they hold 8-bit codes: by name, the
/// tensor beside each that says how it is scaled in a way that is not known here.
struct FoundWeights {
  std::vector<WeightInfo> weights;  // sorted by name
  std::map<std::string, std::string> unreadable;
  std::vector<std::string> markers = {};  // tensors that only show the dialect of the file
  std::string dialect = {};  // of the whole file, where it is a peer's: "fp8", "modelopt", ...
};

/// What tensors in memory are, told by the rules of docs/formats.md as in a file without a
/// manifest: states have names, dtypes and shapes only. `read` gives the bytes of a tensor of at
/// most 64 KiB; shards, offsets and parts of TensorInfo are ignored; scales may be of f16 or bf16.
/// `where` begins the text of errors. Throws bad_file as File::open().
STOWAGE_API FoundWeights weights_among(const std::string& where, std::vector<TensorInfo> tensors,
                                       const std::function<std::string(const TensorInfo&)>& read);

/// An opened model: one .safetensors file, a shard index, or a folder that holds either. Tensors
/// are mapped read-only and paged in on use. Copies share the mapping; a Weight from it keeps it
/// alive. If another process cuts a file short or its disk fails, what is lost reads as zeros: the
/// functions of quantize.h then throw bad_file, and who reads bytes() himself calls check() after.
/// For that a handler of SIGBUS is installed once, which passes on all that is not ours.
class STOWAGE_API File {
 public:
  /// Throws io (cannot open), bad_file (naming the file, the tensor and the byte offset).
  static File open(const std::string& path);

  const std::vector<std::string>& paths() const noexcept;
  const std::string& index() const noexcept;  // the path of the shard index, "" for a single file
  const std::map<std::string, std::string>& metadata() const noexcept;  // of the first shard
  const std::vector<TensorInfo>& tensors() const noexcept;              // sorted by name
  const TensorInfo* find(std::string_view name) const noexcept;
  std::span<const std::byte> bytes(const TensorInfo& tensor) const noexcept;
  /// The same into `out`, of as many bytes, past the mapping, whose pages cost more to touch than
  /// their bytes to copy. Throws io; bad_file where the file was cut short.
  void read(const TensorInfo& tensor, std::span<std::byte> out) const;
  /// The same from a byte of the tensor on. Throws out_of_range where it has fewer.
  void read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> out) const;
  const std::vector<WeightInfo>& weights() const noexcept;  // sorted by name
  const WeightInfo* find_weight(std::string_view name) const noexcept;
  const std::map<std::string, std::string>& unreadable() const noexcept;  // as in FoundWeights
  const std::string& dialect() const noexcept;                            // as in FoundWeights
  const std::vector<std::string>& markers() const noexcept;               // as in FoundWeights
  /// Throws invalid_argument for an unknown name. Scales that are rounded to the compute dtype are
  /// rounded to `compute`, else to what the file says that the weight computes in, else to bf16.
  /// `touched`: parts that have one lie at their formed_place().
  Weight weight(std::string_view name, std::optional<Dtype> compute = {},
                bool touched = false) const;
  /// The bytes of part `i` of a weight, where its form is not whole.
  std::vector<std::byte> formed_part(const WeightInfo& weight, int i,
                                     std::optional<Dtype> compute = {}) const;
  /// How many bytes part `i` of a weight has here: those of its tensor where its form is whole,
  /// else those of its layout. None for the offset of nested scales.
  std::uint64_t part_bytes(const WeightInfo& weight, int i) const;
  /// Every part into memory of that many bytes, past the mapping, but those for which there is
  /// none. Throws as read() does, and bad_file for numbers that no part has.
  void read_parts(const WeightInfo& weight, std::optional<Dtype> compute,
                  std::span<const std::span<std::byte>> out) const;
  /// How many bytes read_rows() puts into the memory of part `i`.
  std::uint64_t rows_bytes(const WeightInfo& weight, int i, std::int64_t first,
                           std::int64_t last) const;
  /// Rows [first, last) of a weight: of each part that parts_in_rows() counts into memory of as
  /// many bytes as these rows have of it, of the others the whole. Returns how many bytes of the
  /// file were read: more than those of the rows only where a word has numbers of others too, or
  /// numbers of a row lie all over the tensor. Throws as read_parts() does, and invalid_argument
  /// for rows that are not the weight's, or with ends in a block that others have rows of, and for
  /// memory of another size.
  std::uint64_t read_rows(const WeightInfo& weight, std::int64_t first, std::int64_t last,
                          std::optional<Dtype> compute,
                          std::span<const std::span<std::byte>> out) const;
  /// The bytes of part `i` from those of its tensor, wherever they lie, to memory of their size.
  void form_part(const WeightInfo& weight, int i, std::span<const std::byte> tensor,
                 std::span<std::byte> out) const;
  /// Where the bytes of part `i` of a weight of this file can be read that its tensor has in
  /// another order: the part is formed when one of them is touched, and stays until four others
  /// were. Null where the form is whole, rounds, or is of no tensor. Who reads here calls check()
  /// after, as of bytes(). System calls must not be given such memory that was not touched.
  const std::byte* formed_place(const WeightInfo& weight, int i) const;
  /// The JSON of a shard, byte for byte; of a GGUF file all that stands before its data.
  std::string header(int shard) const;
  /// Fetches a part of a tensor's bytes into memory before they are read: advice, which never
  /// throws; a part that reaches past the tensor's end ends there.
  void populate(const TensorInfo& tensor, std::uint64_t begin, std::uint64_t bytes) const noexcept;
  /// The same before they are read past the mapping; does not wait for them.
  void expect(const TensorInfo& tensor, std::uint64_t begin, std::uint64_t bytes) const noexcept;
  /// Gives the pages of a tensor back to the system; the next read fetches them again.
  void drop(const TensorInfo& tensor) const noexcept;
  /// Throws bad_file where a file was cut short, written in place or unreadable since it was
  /// opened, as far as its size, its time of change and what was read by now tell. One that was
  /// renamed, replaced or deleted keeps its bytes here. Under 1 us for each shard.
  void check() const;
  /// Compares every stored checksum, and does what check() does; throws bad_file at the first
  /// difference. Returns how many tensors had one.
  std::int64_t verify() const;

  /// The same file with stacks of its matrices, in the place of those that it had; it shares all
  /// else with this one. A number that a matrix has once, and its stack for each row, lies there
  /// for each of its rows. Throws invalid_argument where matrices do not fit a stack, and for
  /// numbers that are rounded to the compute dtype or that no tensor has.
  File with_stacks(std::vector<StackInfo> stacks) const;
  const std::vector<StackInfo>& stacks() const noexcept;  // sorted by name
  /// A stack, whose parts lie where whoever touches them finds them, as at formed_place(). Throws
  /// invalid_argument where there is none of that name.
  Weight stack(std::string_view name) const;

 private:
  friend struct OpenShards;
  friend struct OpenStacks;
  struct State;
  std::shared_ptr<const State> state_;
  std::shared_ptr<const Stacks> stacks_;
};

}  // namespace v0
}  // namespace stowage
