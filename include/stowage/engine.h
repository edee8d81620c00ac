// SPDX-License-Identifier: Apache-2.0
// Weights that rest in a file and come into memory when they are used, within a budget of bytes.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/file.h"

namespace stowage {

namespace engine {
class Core;
struct Session;
enum class Hold : std::uint8_t;
}  // namespace engine

inline namespace v0 {

using WeightId = std::int32_t;

/// How bytes come from the file. `mapped` computes straight from the page cache and gives its pages
/// back; `buffered` and `direct` (O_DIRECT) read into memory of the engine's own.
enum class Reads : std::uint8_t { automatic, mapped, buffered, direct };
STOWAGE_API const char* to_string(Reads reads) noexcept;

/// A weight that comes by so many indices of dim 0 at a time: one of a stack of experts [E, O, K],
/// say. Each such slice comes and goes by itself.
struct RowCut {
  std::string name;
  std::int64_t rows = 1;
};

struct EngineOptions {
  std::uint64_t ram = 0;  // the most bytes held at a time; at least those of the largest that
                          // comes, and of the scratch through which parts in another order come
  Reads reads = Reads::automatic;  // mapped where the file lies in the page cache, else direct
  int workers = 8;                 // threads that prefetch; 0 reads only what is asked for
  double timeout = 0;  // seconds that acquire() waits for bytes or room; 0: as long as it takes
  bool lock = false;   // keep the memory from being swapped; not with mapped reads
  /// Names of weights and tensors that never come into memory: leases give the mapping. The budget
  /// need not have room for them (an embedding, of which rows are read).
  std::vector<std::string> mapped_only{};
  /// Weights that come by rows, which must end where blocks do, and lie in the file as they rest.
  /// The budget need not have room for more than one slice.
  std::vector<RowCut> by_rows{};
};

struct EngineReport {
  Reads reads;                                       // what automatic came to
  std::uint64_t acquired = 0, hits = 0, misses = 0;  // acquired = hits + misses + late + borrowed
  std::uint64_t late = 0;      // were being prefetched and had to be waited for
  std::uint64_t borrowed = 0;  // read from the mapping: no room, and the thread held another lease
  std::uint64_t ahead = 0;     // weights whose read was begun before somebody asked
  std::uint64_t unused = 0;    // of these: that went again, or failed, before somebody did
  std::uint64_t evicted = 0;
  std::uint64_t bytes_read = 0;      // from the file, widened to what a read must align to
  std::uint64_t bytes_formed = 0;    // of parts that the file has in another order, and of values
                                     // that moved to a line's begin
  std::uint64_t held = 0, peak = 0;  // bytes in memory now, and at most
  double stall = 0;                  // seconds that acquire() waited for bytes or room
  double forming = 0;  // seconds that putting parts in order took, of all threads together
};

/// The same of one weight, plain tensor or slice.
struct WeightUses {
  std::uint32_t hits = 0, misses = 0, late = 0, borrowed = 0, ahead = 0, unused = 0;
  double stall = 0;
  std::uint64_t acquired() const noexcept { return std::uint64_t{hits} + misses + late + borrowed; }
};

/// The slices of a weight that comes by rows: ids first <= id < first + count, each of `rows`
/// indices of dim 0 (the last one maybe of fewer). Of others: none.
struct SliceIds {
  WeightId first = 0, count = 0;
  std::int64_t rows = 0;
};

/// A weight's bytes in memory for as long as this lives. Ends on the thread that acquired it.
class STOWAGE_API Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  /// The weight, its parts in memory. Must not outlive the lease, nor be used in a forked child,
  /// where it is to be asked for again. Throws invalid_argument for a plain tensor.
  Weight weight() const;
  /// Where the byte lies that the file's mapping has at `mapped`; other addresses stay as they are.
  const void* at(const void* mapped) const noexcept;

 private:
  friend class engine::Core;
  using Time = std::chrono::steady_clock::time_point;
  Lease(std::shared_ptr<engine::Session> session, WeightId id, engine::Hold hold,
        Time begun) noexcept;
  std::shared_ptr<engine::Session> session_;
  WeightId id_;
  engine::Hold hold_;
  Time begun_;  // for a trace
};

/// Holds at most `ram` bytes of a file's weights. Which weight is used next is learnt from use, by
/// input signature, and prefetch; a wrong guess costs one read. Threads may share an engine: one
/// that holds a lease never waits for room. A weight and its scales come and go as one.
///
/// In a forked child, the parent's engines hold nothing: leases show the mapping.
class STOWAGE_API Engine {
 public:
  /// Throws invalid_argument (naming the budget that the largest weight needs; a timeout without
  /// workers, since nobody can leave a read of his own), io, out_of_memory (the budget, what may be
  /// locked, or threads).
  Engine(File file, const EngineOptions& options);
  ~Engine();  // cancels, and waits for reads in flight; leases stay good

  const File& file() const noexcept;
  /// The weights of the file, its plain tensors, and slices of those that come by rows: ids are
  /// 0 <= id < size().
  WeightId size() const noexcept;
  WeightId named() const noexcept;                            // of these, those below: no slices
  std::optional<WeightId> find(std::string_view name) const;  // likewise
  const std::string& name(WeightId id) const;                 // of a slice: "experts.w[3]"
  std::uint64_t bytes(WeightId id) const;  // that it takes in memory; 0 where it never comes, or
                                           // comes by rows
  SliceIds slices(WeightId id) const;
  /// Of the budget, for parts that the file has in another order (mapped reads are refused for
  /// such): as many as the largest weight with such parts has there, or twice that.
  std::uint64_t scratch() const noexcept;

  /// The weight's bytes in memory: at once, or after one read. Throws io (a failed read, with the
  /// byte and what the system said; the timeout; a cancel) and bad_file (cut short, rewritten),
  /// naming the file. It can be asked for again. All of a weight that comes by rows is lent where
  /// it is mapped.
  Lease acquire(WeightId id);
  /// Begins to read these, as far as there is room beside what is used or expected earlier: advice,
  /// which waits for nothing. What is used in which order after slices is not learnt; who knows
  /// which are used next says so here. `after`: behind what this thread said before, as a guess
  /// is; else instead of it. Nothing is begun without workers. Whether some are not there yet.
  bool want(std::span<const WeightId> ids, bool after = false);
  /// Every acquire() that waits now throws io, at the latest when a read of its own returns, and
  /// what nobody has begun to read is not read. What is asked for later is read as ever.
  void cancel() noexcept;
  /// These (of a weight that comes by rows: its slices) stay in memory from their first use on, in
  /// room of their own, and the rest shares what is left of the budget. To be said before the first
  /// acquire(). Throws invalid_argument where the budget does not hold them and the largest of the
  /// rest.
  void keep(std::span<const WeightId> ids);
  /// The order of use to expect where nothing has been learnt; slices are passed over.
  void expect(std::span<const WeightId> order);
  /// What the calling thread works on from now (a hash of its inputs' shapes): orders are learnt
  /// for each signature apart.
  void set_signature(std::uint64_t signature);
  EngineReport report() const;
  std::vector<WeightUses> uses() const;  // of each id
  WeightUses uses(WeightId id) const;
  /// How often each id was used in other runs, so that of slices those stay that were used most.
  /// Workers begin to read these, as many as have room beside the weights of every pass, until
  /// somebody uses a weight. To be said before the first acquire(). Throws invalid_argument where
  /// there are not size() numbers, or after it.
  void foresee(std::span<const std::uint64_t> uses);

  /// A lease on the weight of some living engine that has `mapped` in its file's mapping, if there
  /// is one: how code that was given addresses of a mapping finds the bytes in memory. None where
  /// the engine ends while this waits: the mapping has the bytes too.
  /// `formed`: only where the file has the bytes in another order. `bytes`: that are read from
  /// there; where one slice has not all of them, the lease is on the mapping.
  static std::optional<Lease> lease_at(const void* mapped, bool formed = false,
                                       std::uint64_t bytes = 1);
  /// want() for those slices, by their numbers, of the weights that come by rows which some living
  /// engine has at `mapped` (a byte of the slice that is number 0): all of the first weight, then
  /// of the next; `one_by_one`: all of the first number, then of the next. None: there is none.
  /// Numbers beyond the slices of a weight are passed over, and weights of another engine. Of one
  /// weight: also those slices of the weights that are used with it and after it (together()).
  static std::optional<bool> want_at(std::span<const void* const> mapped,
                                     std::span<const std::int64_t> slices, bool one_by_one = false,
                                     bool after = false);
  /// The weights by rows which some living engine has at these places are used together, slices of
  /// the same number of each, in this order: as the matrices of an expert are. Others are passed
  /// over. What was said of one of them before is forgotten.
  static void together(std::span<const void* const> mapped);

 private:
  std::shared_ptr<engine::Core> core_;
};

}  // namespace v0
}  // namespace stowage
