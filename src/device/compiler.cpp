// SPDX-License-Identifier: Apache-2.0
#include "device/compiler.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/formatted.h"
#include "device/form.h"
#include "device/library.h"
#include "device/texts.h"

namespace stowage::device {
namespace {

// What the texts need of the standard library.
constexpr Text kStandard{"cstdint", R"(#pragma once
namespace std {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
}
)"};

std::string number(float x) {  // exact
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%af", static_cast<double>(x));
  return text.data();
}
template <class Numbers, class Say>
std::string listed(const Numbers& numbers, const Say& say) {
  std::string made;
  for (const auto& x : numbers) made += (made.empty() ? "" : ",") + say(x);
  return "{" + made + "}";
}
std::string digits(long long x) { return std::to_string(x); }
template <class Enum>
std::string name(const char* type, Enum value) {
  return std::string(type) + "(" + digits(static_cast<int>(value)) + ")";
}

// A Form as the text of one, in the order of its fields.
std::string form_text(const cuda::Form& form) {
  const std::string fields[] = {
      name("Number", form.values),
      digits(form.x_rows),
      form.many ? "true" : "false",
      form.groups ? "true" : "false",
      name("Element", form.element),
      digits(form.bits),
      digits(form.together),
      digits(form.bias),
      name("Packing", form.packing),
      name("Group", form.group),
      digits(form.n),
      digits(form.m),
      name("Scales", form.scales),
      name("Number", form.number),
      digits(form.record),
      digits(form.inner),
      name("Zeros", form.zeros),
      digits(form.outer_n),
      number(form.factor),
      form.transposed ? "true" : "false",
      name("Codec", form.codec),
      form.whole ? "true" : "false",
      form.slabs ? "true" : "false",
      form.floors ? "true" : "false",
      number(form.least),
      number(form.most),
      number(form.divisor),
      number(form.largest),
      listed(form.values16, number),
      listed(form.thresholds, number),
      listed(form.order, digits),
      listed(form.halves, digits),
  };
  return listed(fields, [](const std::string& field) { return field; });
}

struct File {
  const char* name;
  std::vector<const char*> kernels;
};
const std::vector<File>& files() {
  static const std::vector<File> all{
      {"dequantize.cuh", {"stowage_dequantize", "stowage_embedding"}},
      {"linear.cuh", {"stowage_linear"}},
      {"linear_tiles.cuh", {"stowage_linear_tiles"}},
      {"quantize.cuh",
       {"stowage_reach", "stowage_outer_reach", "stowage_outers", "stowage_scales",
        "stowage_records", "stowage_blocks", "stowage_mean", "stowage_nest", "stowage_encode",
        "stowage_cast", "stowage_amax", "stowage_amax_numbers"}},
  };
  return all;
}

}  // namespace

std::string file_of_kernel(const std::string& kernel) {
  for (const File& file : files())
    if (std::ranges::find(file.kernels, kernel) != file.kernels.end()) return file.name;
  throw Error(Code::invalid_argument, "cuda: no file has a kernel " + kernel);
}

std::string program_text(const cuda::Form& form, const std::string& file, bool short_index) {
  std::string made = "#define STOWAGE_UNROLL _Pragma(\"unroll\")\n";
  if (short_index) made += "#define STOWAGE_INDEX int\n";
  made += "#include \"kernel/cuda/form.cuh\"\nnamespace stowage::cuda {\n";
  made += "constexpr Form form" + form_text(form) + ";\n";
  // In global memory, which a warp reads at sixteen places at once as at one.
  made += "__device__ float table[16]" + listed(form.values16, number) + ";\n";
  made += "__device__ int order[16]" + listed(form.order, digits) + ";\n";
  made += "__device__ std::uint32_t table_planes[8]" + listed(planes_of(form), digits) + ";\n}\n";
  return made + "#include \"kernel/cuda/" + file + "\"\n";
}

std::vector<std::string> compiler_options(int architecture, bool as_ptx) {
  return {std::string("--gpu-architecture=") + (as_ptx ? "compute_" : "sm_") +
              std::to_string(architecture),
          "--std=c++20",
          "--device-as-default-execution-space",
          "--fmad=false",
          "--ftz=false",
          "--prec-div=true",
          "--prec-sqrt=true",
          "--disable-warnings"};  // of what a form does not reach
}

std::vector<std::string> Compiler::default_libraries() {
  return {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
}

Compiler::Compiler(const std::vector<std::string>& libraries) {
  const auto open = [&]() -> Library {
    for (std::size_t i = 0; i + 1 < libraries.size(); ++i) try {
        return Library("cuda: NVRTC", libraries[i]);
      } catch (const Error&) {  // the last one says it
      }
    return Library("cuda: NVRTC", libraries.back());
  };
  const Library library = open();
  library.find("nvrtcGetErrorString", get_error_string_);
  library.find("nvrtcVersion", get_version_);
  library.find("nvrtcGetNumSupportedArchs", count_archs_);
  library.find("nvrtcGetSupportedArchs", get_archs_);
  library.find("nvrtcCreateProgram", create_);
  library.find("nvrtcCompileProgram", compile_);
  library.find("nvrtcDestroyProgram", destroy_);
  library.find("nvrtcGetProgramLogSize", log_size_);
  library.find("nvrtcGetProgramLog", log_);
  library.find("nvrtcGetCUBINSize", cubin_size_);
  library.find("nvrtcGetCUBIN", cubin_);
  library.find("nvrtcGetPTXSize", ptx_size_);
  library.find("nvrtcGetPTX", ptx_);
  int major = 0, minor = 0, count = 0;
  check("nvrtcVersion", get_version_(&major, &minor));
  version_ = std::to_string(major) + "." + std::to_string(minor);
  check("nvrtcGetNumSupportedArchs", count_archs_(&count));
  known_.resize(static_cast<std::size_t>(count));
  check("nvrtcGetSupportedArchs", get_archs_(known_.data()));
  std::ranges::sort(known_);
}

void Compiler::check(const char* what, Result result) const {
  if (result != 0)
    throw Error(Code::cuda, std::string("cuda: ") + what + " must succeed, got error " +
                                std::to_string(result) + ": " + get_error_string_(result));
}

// The newest architecture that is not newer, whose PTX the driver compiles again.
int Compiler::nearest(int architecture) const {
  const auto after = std::ranges::upper_bound(known_, architecture);
  if (after == known_.begin())
    throw Error(Code::unsupported, "cuda: devices must be of " + std::to_string(known_.front()) +
                                       " or newer for NVRTC " + version_ + ", got " +
                                       std::to_string(architecture));
  return *(after - 1);
}

Compiled Compiler::compile(const std::string& text, int architecture, bool as_ptx) const {
  const int target = nearest(architecture);
  as_ptx = as_ptx || target != architecture;
  std::vector<const char*> names{kStandard.name}, contents{kStandard.text};
  for (const Text& header : texts()) names.push_back(header.name), contents.push_back(header.text);
  const std::vector<std::string> options = compiler_options(target, as_ptx);
  std::vector<const char*> said;
  for (const std::string& option : options) said.push_back(option.c_str());
  Handle handle = nullptr;
  check("nvrtcCreateProgram",
        create_(&handle, text.c_str(), "stowage.cu", static_cast<int>(names.size()),
                contents.data(), names.data()));
  struct Ends {
    Handle* handle;
    Result (*destroy)(Handle*);
    ~Ends() { destroy(handle); }
  } const ends{&handle, destroy_};
  const Result result = compile_(handle, static_cast<int>(said.size()), said.data());
  const auto take = [&](auto size_of, auto get) {
    std::size_t size = 0;
    check("nvrtc: a size", size_of(handle, &size));
    std::string made(size, '\0');
    check("nvrtc: what was compiled", get(handle, made.data()));
    return made;
  };
  Compiled made{.code = {}, .log = take(log_size_, log_)};
  if (result != 0)
    throw Error(Code::cuda, "cuda: NVRTC " + version_ + " must compile for " +
                                std::to_string(architecture) + ", got " +
                                get_error_string_(result) + "\n" + made.log);
  made.code = as_ptx ? take(ptx_size_, ptx_) : take(cubin_size_, cubin_);
  return made;
}

}  // namespace stowage::device
