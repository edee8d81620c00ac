# Writes OUT, which defines stowage::device::texts(): each of the files NAMES ("a|b") of ROOT, as it
# stands.
string(REPLACE "|" ";" names "${NAMES}")
set(rows "")
foreach(name IN LISTS names)
  file(READ ${ROOT}/${name} text)
  string(APPEND rows "    {\"${name}\", R\"stowage(${text})stowage\"},\n")
endforeach()
file(WRITE ${OUT} "// Written by cmake/embed_texts.cmake.
#include \"device/texts.h\"

#include <iterator>

namespace stowage::device {
namespace {
constexpr Text kTexts[] = {
${rows}};
}
std::span<const Text> texts() noexcept { return kTexts; }
}  // namespace stowage::device
")
