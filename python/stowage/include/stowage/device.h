// SPDX-License-Identifier: Apache-2.0
// Memory beside the CPU's, as the engine needs it: allocate, copy in on a stream of its own,
// events.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

/// An accelerator's memory and the link to it. Copies run on a stream of the device's own, in the
/// order in which they were asked for, beside the streams that compute. Any thread may call; the
/// host waits in wait() only. All may throw Error with Code::cuda, out_of_memory for allocate().
class STOWAGE_API Device {
 public:
  /// The device's handle of a stream that computes; null is its default one.
  using Stream = void*;
  /// A point in the work of one stream. 0 is done already; later ones of one stream are larger.
  using Event = std::uint64_t;

  virtual ~Device();

  virtual std::string name() const = 0;
  /// Aligned to 256 bytes.
  virtual void* allocate(std::uint64_t bytes) = 0;
  /// Of memory that no copy and no work on a stream uses any more.
  virtual void free(void* memory) noexcept = 0;
  /// Locks host memory into place, so that copies from it need no detour and do not hold up the
  /// host. False: it is already, by somebody else who unpins it.
  virtual bool pin(void* memory, std::uint64_t bytes) = 0;
  virtual void unpin(void* memory) noexcept = 0;

  /// Copies from host memory once all of `after` are done. `from` must keep its bytes until the
  /// returned event is done.
  virtual Event copy_in(void* to, const void* from, std::uint64_t bytes,
                        std::span<const Event> after) = 0;
  /// What the stream has been given so far.
  virtual Event record(Stream stream) = 0;
  /// What the stream is given from now on begins after `event`; the host goes on.
  virtual void wait_on(Stream stream, Event event) = 0;
  virtual bool done(Event event) = 0;
  virtual void wait(Event event) = 0;
};

/// The CUDA device of that number, through the driver that the machine has: its primary context,
/// which torch shares. `library` is what dlopen() is asked for. Throws unsupported where there is
/// no driver, cuda with the driver's own words.
STOWAGE_API std::unique_ptr<Device> make_cuda_device(int index = 0,
                                                     const std::string& library = "libcuda.so.1");

struct PretendOptions {
  std::uint64_t memory = std::uint64_t{1} << 30;  // bytes that allocate() gives out in all
  double bytes_per_second = 0;                    // of the link; 0: as fast as memory
};

/// A device for tests and for trying a plan without an accelerator: its memory is the host's, but
/// copies run on a thread of their own at the given rate, and what it computes on another. Bytes
/// that are not there yet or no more are poison: new and freed memory is overwritten.
class STOWAGE_API PretendDevice : public Device {
 public:
  static constexpr std::uint8_t kPoison = 0xD5;

  explicit PretendDevice(const PretendOptions& options);
  PretendDevice(const PretendDevice&) = delete;
  PretendDevice& operator=(const PretendDevice&) = delete;
  ~PretendDevice() override;  // ends all work; frees what was not

  /// A stream that computes, until the device ends.
  Stream make_stream();
  /// Gives a stream work that may read and write the device's memory. What it throws comes out of
  /// wait() for the returned event.
  Event launch(Stream stream, std::function<void()> work);
  /// The next `count` copies fail, as a device that was lost would have them.
  void fail_copies(int count);
  std::uint64_t allocated() const;
  std::uint64_t pinned() const;  // bytes of host memory
  std::uint64_t copied() const;

  std::string name() const override;
  void* allocate(std::uint64_t bytes) override;
  void free(void* memory) noexcept override;
  bool pin(void* memory, std::uint64_t bytes) override;
  void unpin(void* memory) noexcept override;
  Event copy_in(void* to, const void* from, std::uint64_t bytes,
                std::span<const Event> after) override;
  Event record(Stream stream) override;
  void wait_on(Stream stream, Event event) override;
  bool done(Event event) override;
  void wait(Event event) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace stowage
