// SPDX-License-Identifier: Apache-2.0
// Runs the real program in a process of its own, and makes the small models it is given.
#pragma once
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "stowage/file.h"
#include "stowage/quantize.h"
#include "stowage/writer.h"

namespace stowage::cli {

namespace fs = std::filesystem;

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

struct Result {
  int code;
  std::string out, err;
};

/// A folder of its own for each test, and the program run in it.
class Program : public testing::Test {
 protected:
  Program() {
    std::string name = (fs::temp_directory_path() / "stowage_cli_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Program() override { fs::remove_all(folder_); }

  fs::path path(const std::string& name) const { return folder_ / name; }

  /// How a run differs from a plain one.
  struct Surroundings {
    std::vector<std::string> variables{};  // NAME=VALUE
    std::string stdout_path{};             // where stdout goes
    rlim_t private_bytes = RLIM_INFINITY;  // memory that is no file's
    rlim_t file_bytes = RLIM_INFINITY;     // of one file that is written
    int interrupt_after_us = -1;           // a signal so long after the start:
    int signal = SIGINT;
  };
  Result run(std::vector<std::string> arguments) const { return run(std::move(arguments), {}); }
  Result run(std::vector<std::string> arguments, const Surroundings& around) const {
    const fs::path out = folder_ / ".out", err = folder_ / ".err";
    arguments.insert(arguments.begin(), "stowage");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      redirect(around.stdout_path.empty() ? out.string() : around.stdout_path, STDOUT_FILENO);
      redirect(err.string(), STDERR_FILENO);
      for (const std::string& variable : around.variables) putenv(strdup(variable.c_str()));
      const rlimit limit{around.private_bytes, around.private_bytes};
      setrlimit(RLIMIT_DATA, &limit);
      const rlimit longest{around.file_bytes, around.file_bytes};
      if (around.file_bytes != RLIM_INFINITY) signal(SIGXFSZ, SIG_IGN);
      setrlimit(RLIMIT_FSIZE, &longest);
      signal(SIGINT, SIG_DFL);  // a shell's background jobs ignore it
      if (chdir(folder_.c_str()) == 0) execv(STOWAGE_PROGRAM, argv.data());
      _exit(127);
    }
    if (around.interrupt_after_us >= 0) {
      usleep(static_cast<useconds_t>(around.interrupt_after_us));
      kill(child, around.signal);
    }
    int status = -1;
    waitpid(child, &status, 0);
    const Result result{WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_text(out),
                        read_text(err)};
    fs::remove(out);
    fs::remove(err);
    return result;
  }

  /// What `run` prints; the exit code must be 0 and stderr empty.
  std::string expect_ok(const std::vector<std::string>& arguments) const {
    const Result result = run(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    return result.out;
  }

  /// The one line on stderr.
  std::string expect_failure(int code, const std::vector<std::string>& arguments) const {
    const std::set<std::string> before = names();
    const Result result = run(arguments);
    EXPECT_EQ(result.code, code) << result.out << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(result.err.starts_with("stowage: ")) << result.err;
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
    EXPECT_EQ(names(), before) << "something half-written was left";
    return result.err;
  }

  /// Everything in the folder, at any depth.
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_))
      found.insert(fs::relative(entry.path(), folder_));
    return found;
  }

 private:
  static void redirect(const std::string& path, int descriptor) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, descriptor);
  }

  fs::path folder_;
};

/// Deterministic values in (-1, 1), different for each seed.
inline std::vector<float> some_values(std::int64_t n, std::uint32_t seed) {
  std::vector<float> values(static_cast<std::size_t>(n));
  std::uint32_t s = seed * 2654435761u + 1;
  for (float& x : values) {
    s = s * 1664525u + 1013904223u;
    x = static_cast<float>(static_cast<std::int32_t>(s)) * 0x1p-31f;
  }
  return values;
}

struct Tensor {
  std::string name;
  Dtype dtype;
  Shape shape;
  std::vector<std::byte> bytes;
};

inline Tensor f32_tensor(const std::string& name, const Shape& shape,
                         const std::vector<float>& values) {
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  return {name, Dtype::f32, shape, {data, data + values.size() * sizeof(float)}};
}

inline Tensor f32_tensor(const std::string& name, const Shape& shape, std::uint32_t seed) {
  return f32_tensor(name, shape, some_values(shape.elements(), seed));
}

inline void write_model(const fs::path& path, const std::vector<Tensor>& tensors) {
  std::vector<Declaration> declared;
  for (const Tensor& t : tensors) declared.push_back({t.name, t.dtype, t.shape, "", 0});
  Writer writer(path, declared, {.metadata = {}, .weights = {}, .checksums = false});
  for (const Tensor& t : tensors) writer.write(t.name, t.bytes);
  writer.finish();
}

/// A model like a small language model: embedding, linear, bias, norm, head, a mask, a counter.
inline std::vector<Tensor> small_model() {
  const float inf = std::numeric_limits<float>::infinity();
  return {f32_tensor("embed.weight", {8, 64}, 1),
          f32_tensor("layers.0.linear.weight", {16, 64}, 2),
          f32_tensor("layers.0.linear.bias", {16}, 3),
          f32_tensor("layers.0.norm.weight", {64}, 4),
          f32_tensor("lm_head.weight", {8, 64}, 5),
          f32_tensor("mask", {2, 2}, {0, -inf, 0, 0}),
          {"steps", Dtype::i64, {2}, std::vector<std::byte>(16, std::byte{7})}};
}

}  // namespace stowage::cli
