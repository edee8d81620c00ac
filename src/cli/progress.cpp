// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "base/formatted.h"
#include "cli/text.h"

namespace stowage::cli {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr std::size_t kNameWidth = 48;

}  // namespace

Progress::Progress(std::string_view verb, std::uint64_t total_bytes)
    : verb_(verb), total_(total_bytes), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void Progress::at(std::string_view name) {
  const auto now = std::chrono::steady_clock::now();
  if (!terminal_ || now < next_) return;
  next_ = now + kInterval;
  shown_ = true;
  const double percent =
      100.0 * static_cast<double>(done_) / static_cast<double>(std::max<std::uint64_t>(total_, 1));
  std::fputs(formatted("\r\x1b[K{} {:3.0f} % of {}  {}", verb_, percent, size_text(total_),
                       printable(name.substr(0, kNameWidth)))
                 .c_str(),
             stderr);
  std::fflush(stderr);
}

}  // namespace stowage::cli
