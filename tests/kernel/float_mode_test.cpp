// SPDX-License-Identifier: Apache-2.0
// The caller's floating-point mode changes no byte, and comes back.
#include "kernel/float_mode.h"

#include "base/threads.h"
#include "kernel/drivers.h"
#include "samples.h"

#if defined(__SSE__) || defined(__aarch64__)
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace stowage::float_mode_test {
namespace {

using namespace stowage::samples;

#if defined(__SSE__)
using Mode = unsigned;
constexpr Mode kAsked = 0xE040, kSet = 0xA040;  // flush to zero, subnormals are zero, round down
Mode mode() { return _mm_getcsr(); }
void set_mode(Mode mode) { _mm_setcsr(mode); }
#else
using Mode = std::uint64_t;
constexpr Mode kAsked = Mode{0x1C} << 20, kSet = Mode{0x18} << 20;  // flush to zero, round down
Mode mode() {
  Mode mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_mode(Mode mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
#endif

// Another mode, and back again.
class Disturbed {
 public:
  Disturbed() : before_(mode()) { set_mode((before_ & ~kAsked) | kSet); }
  ~Disturbed() { set_mode(before_); }
  bool stands() const { return (mode() & kAsked) == kSet; }

 private:
  Mode before_;
};

// Executes on the calling thread, as one task or as many.
struct Caller : Executor {
  int threads() const noexcept override { return 1; }
  void run(std::int64_t count, Task task, void* context) override {
    for (std::int64_t i = 0; i < count; ++i) task(context, i);
  }
};

STOWAGE_ON_EACH_ISA(FloatMode, OfTheCallerChangesNoByte) {
  const Shape shape{133, 1031};  // more than one task
  const auto n = static_cast<std::size_t>(shape.elements());
  Caller caller;
  for (const Kind kind : {Kind::tiny, Kind::wide}) {
    for (const Dtype in : {Dtype::f32, Dtype::f64}) {
      const Bytes values = as_type(numbers(kind, n), in);
      for (const char* name :
           {"f32", "f16", "f8_e4m3", "int8:row", "f8_e5m2:tensor", "nf4", "fp4:block64:nested"}) {
        const Storage storage = parse_storage(name);
        const Parts expected = reference_parts(values, in, shape, storage);
        const Weight weight = expected.weight(storage, shape);
        const Bytes expected_values = reference_values(weight, Dtype::f32);
        Parts parts(storage, shape);
        Bytes got(expected_values.size());
        {
          const Disturbed disturbed;
          quantize_with(table, values.data(), in, shape, storage, parts.writable(),
                        {.executor = &caller});
          dequantize_with(table, weight, {0, shape.rows()}, got.data(), Dtype::f32, caller);
          EXPECT_TRUE(disturbed.stands());
        }
        EXPECT_TRUE(parts.bytes == expected.bytes) << name;
        EXPECT_TRUE(got == expected_values) << name;
      }
    }
  }
}

TEST(ExactFloats, LastsAsLongAsItsScope) {
  const Disturbed disturbed;
  volatile float tiny = 0x1p-140f;
  EXPECT_EQ(tiny * 1.0f, 0.0f);
  {
    const ExactFloats exact;
    EXPECT_EQ(tiny * 1.0f, 0x1p-140f);
  }
  EXPECT_EQ(tiny * 1.0f, 0.0f);
}

}  // namespace
}  // namespace stowage::float_mode_test
#endif
