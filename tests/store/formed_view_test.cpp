// SPDX-License-Identifier: Apache-2.0
// Parts at addresses: what a touch finds there, however little stack the handler has that forms it.
#include "store/formed_view.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "scratch.h"
#include "store/part_drawings.h"

namespace stowage::test {
namespace {

// A form of each way that parts are formed, and a shape of whole lines, of tiles, and of rests.
struct Case {
  PartForm form;
  Shape part;
};
const std::vector<Case> kCases{
    {kAwq, {256, 192}},
    {kAwq, {520, 150}},
    {kTurnedWords, {192, 512}},
    {kTurnedWords, {70, 196}},
    {{.in_file = 8, .in_part = 8, .word = 32, .transposed = true, .bias = 128}, {128, 256}},
    {{.in_file = 16, .in_part = 16, .word = 16, .transposed = true}, {160, 96}},
    {{.in_file = 4, .in_part = 8, .word = 32, .axis = PartForm::Axis::rows}, {264, 40}},
    {{.in_file = 4, .in_part = 8, .word = 32, .bias = 8}, {40, 264}},
    {{.in_file = 4, .in_part = 4, .word = 8, .order = {1, 0, 2, 3, 4, 5, 6, 7}}, {40, 264}},
    {kTiles, {256, 64}},
    {kTiles, {130, 17}},
    {{.in_file = 4, .in_part = 4, .word = 8, .record = 18, .at = 2, .span = 16, .halves = 32},
     {48, 64}},
    {{.in_file = 3, .in_part = 3, .word = 32}, {24, 120}},
    {{.in_file = 6, .in_part = 6, .word = 8, .record = 210, .span = 192, .halves = 128}, {8, 384}},
};

// What Python's faulthandler gives a handler beside what the system takes for itself, the least
// that is usual; instrumented code takes more.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kLeast = 64 << 10;
#else
constexpr std::size_t kLeast = 8 << 10;
#endif

// On a thread whose handlers have a stack of that size, below which is nothing.
void with_small_stack(const std::function<void()>& work) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_MINSIGSTKSZ)) + kLeast;
  const std::size_t all = (bytes + page - 1) / page * page + page;
  auto* const memory = static_cast<std::byte*>(
      ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(memory), MAP_FAILED);
  ASSERT_EQ(::mprotect(memory, page, PROT_NONE), 0);
  std::thread([&] {
    const stack_t small{.ss_sp = memory + page, .ss_flags = 0, .ss_size = all - page};
    stack_t before{};
    ASSERT_EQ(::sigaltstack(&small, &before), 0);
    work();
    ASSERT_EQ(::sigaltstack(&before, nullptr), 0);
  }).join();
  ::munmap(memory, all);
}

TEST(FormedViews, AreFormedOnASmallStack) {
  std::mt19937 random(3);
  std::vector<std::vector<std::byte>> parts;
  std::string text;
  std::vector<std::uint64_t> begins;
  for (const auto& [form, shape] : kCases) {
    SCOPED_TRACE(form_key(form));
    ASSERT_TRUE(is_legal(form) && has_view(form));
    const Shape words = tensor_shape(form, shape);
    const bool is_bytes = form.record != 0 || form.halves != 0;
    std::vector<std::byte> tensor(
        static_cast<std::size_t>(words.elements() * (is_bytes ? 1 : form.word / 8)));
    // Numbers that the part has: bits of none of them are 0.
    const std::vector<std::byte> none = part_of_tensor(form, {{"f", "t", 0}, tensor}, shape, {});
    std::vector<std::byte> part(none.size());
    const unsigned mask = form.in_part == 8 ? (1u << form.in_file) - 1 : 255u;
    for (std::byte& byte : part) byte = static_cast<std::byte>((random() & mask) - form.bias);
    tensor = tensor_of_part(form, part, shape);
    begins.push_back(text.size());
    text.append(reinterpret_cast<const char*>(tensor.data()), tensor.size());
    parts.push_back(std::move(part));
  }
  begins.push_back(text.size());
  const Scratch folder;
  const MappedFile file(folder.write("parts", text));
  std::vector<ViewedPart> viewed;
  for (std::size_t i = 0; i < kCases.size(); ++i)
    viewed.push_back({parts[i].size(),
                      {{&file,
                        begins[i],
                        begins[i + 1] - begins[i],
                        {"f", "t", 0},
                        kCases[i].form,
                        kCases[i].part,
                        0,
                        parts[i].size()}}});
  const FormedViews views(viewed);
  with_small_stack([&] {
    for (int round = 0; round < 2; ++round)  // the second: of those that had to go
      for (std::size_t i = 0; i < parts.size(); ++i)
        EXPECT_TRUE(std::ranges::equal(parts[i], std::span(views.address(i), parts[i].size())))
            << form_key(kCases[i].form);
  });
  EXPECT_EQ(mappings_damaged(), 0u);
}

// Bits that no number has: as if the file had lost its bytes, and the thread goes on.
TEST(FormedViews, AreZerosWhereThePartIsRefused) {
  const PartForm form{.in_file = 3, .in_part = 3, .word = 32};  // two bits of a word are spare
  const Shape shape{24, 120};
  const std::size_t bytes = 24 * 32 * 4;
  const Scratch folder;
  const MappedFile file(folder.write("parts", std::string(bytes, '\xff')));
  const FormedViews views(
      {{24 * 120, {{&file, 0, bytes, {"f", "t", 0}, form, shape, 0, 24 * 120}}}});
  with_small_stack([&] {
    EXPECT_EQ(std::ranges::count(std::span(views.address(0), 24 * 120), std::byte{}), 24 * 120);
  });
  EXPECT_EQ(mappings_damaged(), 1u);
}

}  // namespace
}  // namespace stowage::test
