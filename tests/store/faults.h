// SPDX-License-Identifier: Apache-2.0
// Makes the system calls of this test program fail on demand: faults.cpp defines them ahead of the
// C library, so the library under test needs no hook.
#pragma once
#include <string>
#include <vector>

namespace stowage::test {

/// While one lives, the n-th call (from 0) to a call that writing uses (fallocate, pwrite, fsync,
/// linkat, rename, unlink) sets errno and fails; -1 fails none and only counts.
class Fault {
 public:
  Fault(int nth, int error);
  Fault(const Fault&) = delete;
  ~Fault();
  static int calls();                            // since the last Fault was made
  static std::string failed();                   // the name of the call that failed, or ""
  static const std::vector<std::string>& log();  // the names of all calls that were made
};

/// While one lives, fsync does nothing: for tests of killed processes, who lose no bytes.
class NoDisk {
 public:
  NoDisk();
  NoDisk(const NoDisk&) = delete;
  ~NoDisk();
};

/// From now on the process is killed ahead of the n-th such call: for children.
void die_at(int nth);

/// While one lives, pwrite and pread take at most `bytes` at a time, and every other call of them
/// is interrupted by a signal (EINTR).
class SmallSteps {
 public:
  explicit SmallSteps(std::size_t bytes);
  SmallSteps(const SmallSteps&) = delete;
  ~SmallSteps();
};

/// While one lives, the file system cannot make nameless files or reserve space.
class PlainFileSystem {
 public:
  PlainFileSystem();
  PlainFileSystem(const PlainFileSystem&) = delete;
  ~PlainFileSystem();
};

/// While one lives, the first lock of a file that has a name is lost to another writer, who takes
/// the file for abandoned and removes it before it is given its size.
class StolenLock {
 public:
  StolenLock();
  StolenLock(const StolenLock&) = delete;
  ~StolenLock();
  static bool happened();
};

}  // namespace stowage::test
