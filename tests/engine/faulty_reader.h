// SPDX-License-Identifier: Apache-2.0
// A store that fails, is slow, or gives less than was asked for, when a test says so; and an engine
// that reads from it.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>

#include "engine/core.h"

namespace stowage::test {

class FaultyReader final : public engine::Reader {
 public:
  std::atomic<int> reads = 0;             // so far, interrupted ones too
  std::atomic<int> fail_from = 1 << 30;   // the first read that fails
  std::atomic<int> fail_until = 1 << 30;  // and the first that does not any more
  std::atomic<int> error = EIO;           // 0: the file ends there
  std::atomic<bool> only_direct = false;  // fails those past the page cache
  std::atomic<bool> interrupts = false;   // every other read
  std::atomic<std::size_t> most = std::numeric_limits<std::size_t>::max();  // bytes of one read

  void close_gate() { set_gate(true); }  // reads sleep in front of it
  void open_gate() { set_gate(false); }

  ssize_t read(int descriptor, std::span<const iovec> to, std::uint64_t offset) override {
    const int n = reads++;
    {
      std::unique_lock lock(mutex_);
      gate_.wait(lock, [&] { return !closed_; });
    }
    if (interrupts && n % 2 == 0) return fail(EINTR);
    const bool meant = !only_direct || (::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0;
    if (meant && n >= fail_from && n < fail_until) return error == 0 ? 0 : fail(error);
    // A direct read must be asked for whole pages; less of it may come.
    const ssize_t got = Reader::read(descriptor, to, offset);
    return got <= 0 ? got : static_cast<ssize_t>(std::min(static_cast<std::size_t>(got), +most));
  }
  // Finds that a page cannot be had, so that read() is asked.
  int populate(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes) override {
    (void)Reader::populate(file, offset, bytes);
    return static_cast<int>(fail(EFAULT));
  }

 private:
  static ssize_t fail(int number) {
    errno = number;
    return -1;
  }
  void set_gate(bool closed) {
    {
      const std::scoped_lock lock(mutex_);
      closed_ = closed;
    }
    gate_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable gate_;
  bool closed_ = false;
};

/// An engine over a reader of the test's own.
class OverReader {
 public:
  OverReader(const File& file, const EngineOptions& options, engine::Reader& reader)
      : core_(engine::core_on_disk(file, options, reader)) {}
  OverReader(const OverReader&) = delete;
  ~OverReader() { core_->stop(); }
  engine::Core* operator->() const { return core_.get(); }

 private:
  std::shared_ptr<engine::Core> core_;
};

/// `use(i)` finds weight i right where reads are short and interrupted; where some fail it does so
/// or is told; and finds all right again behind that.
template <class Use>
void expect_faults_mended_or_told(FaultyReader& reader, int weights, Use use) {
  const auto use_all = [&] {
    for (int i = 0; i < weights; ++i) use(i);
  };
  reader.most = 5000;
  reader.interrupts = true;
  use_all();
  reader.interrupts = false;
  for (int nth = 0; nth < 12; ++nth) {
    reader.fail_from = reader.reads + nth % 4;
    reader.fail_until = reader.fail_from + 1;
    for (int i = 0; i < weights; ++i) {
      try {
        use(i);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
      }
    }
  }
  reader.fail_from = reader.fail_until = 1 << 30;
  use_all();
}

}  // namespace stowage::test
