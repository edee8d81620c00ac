// SPDX-License-Identifier: Apache-2.0
// Dense codes to numbers of a byte, and back. Eight of b bits are b bytes; the kernels of int8 read
// what is made of them.
//
//   in 64 bits      ........ hhhgggfffeeedddcccbbbaaa      a string of eight, here of three bits
//   quarters        hhhgggfffeee | dddcccbbbaaa            one step, of 32 bits
//   pairs, bytes    hhhggg | fffeee | ...    hhh | ggg | fff | ...
#pragma once
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace stowage {
namespace {

constexpr int kEight = 8;  // codes

/// The lowest kBits of each kLane bits.
template <int kLane, int kBits>
constexpr std::uint64_t kLowest = [] {
  std::uint64_t mask = 0;
  for (int at = 0; at < 64; at += kLane) mask |= ((std::uint64_t{1} << kBits) - 1) << at;
  return mask;
}();

/// Each half of the codes of a lane of 2 kLane bits to a lane of its own, and back.
template <int kLane, int kBits>
constexpr std::uint64_t part_lanes(std::uint64_t x) {
  constexpr std::uint64_t kLow = kLowest<2 * kLane, kBits>;
  return (x & kLow) | (x & kLow << kBits) << (kLane - kBits);
}
template <int kLane, int kBits>
constexpr std::uint64_t join_lanes(std::uint64_t x) {
  constexpr std::uint64_t kLow = kLowest<2 * kLane, kBits>;
  return (x & kLow) | (x >> (kLane - kBits) & kLow << kBits);
}

template <int kBits>
constexpr std::uint64_t kHalf = kLowest<8, 1> << (kBits - 1);  // of the range, in each byte
constexpr std::uint64_t kTops = kLowest<8, 1> << 7;

template <int kBits>
void unpack_eight(const std::uint8_t* codes, std::int8_t* out) {
  std::uint64_t x = 0;
  __builtin_memcpy(&x, codes, kBits);
  x = part_lanes<32, 4 * kBits>(x);
  x = part_lanes<8, kBits>(part_lanes<16, 2 * kBits>(x));
  x = ((x | kTops) - kHalf<kBits>)^kTops;
  __builtin_memcpy(out, &x, sizeof x);
}

template <int kBits>
void pack_eight(const std::int8_t* numbers, std::uint8_t* codes) {
  std::uint64_t x;
  __builtin_memcpy(&x, numbers, sizeof x);
  x = ((x ^ kTops) + kHalf<kBits>)^kTops;
  x = join_lanes<16, 2 * kBits>(join_lanes<8, kBits>(x));
  x = join_lanes<32, 4 * kBits>(x);
  __builtin_memcpy(codes, &x, kBits);
}

#if defined(__AVX512VBMI__)
/// 64 codes at a time, a string of eight in each lane of 64 bits: a byte takes the eight bits at
/// its code, whatever lies behind it. Returns how many.
template <int kBits>
std::int64_t unpack_wide(const std::uint8_t* codes, std::int64_t n, std::int8_t* out) {
  alignas(64) std::int8_t bytes[64], begins[64];
  for (int i = 0; i < 64; ++i) {
    bytes[i] = static_cast<std::int8_t>(i / kEight * kBits + i % kEight);
    begins[i] = static_cast<std::int8_t>(i % kEight * kBits);
  }
  const __m512i strings = _mm512_load_si512(bytes), places = _mm512_load_si512(begins);
  const __m512i lowest = _mm512_set1_epi8((1 << kBits) - 1);
  const __m512i half = _mm512_set1_epi8(1 << (kBits - 1));
  constexpr auto kRead = static_cast<__mmask64>(-1) >> (64 - kEight * kBits);
  std::int64_t i = 0;
  for (; n - i >= 64; i += 64, codes += kEight * kBits) {
    const __m512i some = _mm512_maskz_loadu_epi8(kRead, codes);
    const __m512i all =
        _mm512_multishift_epi64_epi8(places, _mm512_permutexvar_epi8(strings, some));
    _mm512_storeu_si512(out + i, _mm512_sub_epi8(_mm512_and_si512(all, lowest), half));
  }
  return i;
}
#elif defined(__AVX2__)
/// 32 codes at a time, as long as 16 bytes can be read at the half of them. Returns how many. Half
/// a register has the string of sixteen; a lane of 16 bits takes the two bytes that hold a code,
/// moves it up to its end, and then down.
template <int kBits>
std::int64_t unpack_wide(const std::uint8_t* codes, std::int64_t n, std::int8_t* out) {
  alignas(32) std::int8_t bytes[32];
  alignas(32) std::int16_t up[16];
  for (int i = 0; i < 16; ++i) {
    const int bit = i % kEight * kBits;
    bytes[2 * i] = static_cast<std::int8_t>(bit / 8);
    bytes[2 * i + 1] = static_cast<std::int8_t>(bit / 8 + 1);
    up[i] = static_cast<std::int16_t>(1 << (16 - kBits - bit % 8));
  }
  const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi8(kBits));
  const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(up));
  const __m256i half = _mm256_set1_epi8(1 << (kBits - 1));
  const auto eight = [&](__m256i strings, __m256i which) {
    return _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(strings, which), places),
                             16 - kBits);
  };
  constexpr std::int64_t kStep = 4 * kEight;
  std::int64_t i = 0;
  for (; (n - i) / kEight * kBits >= 2 * kBits + 16; i += kStep, codes += 4 * kBits) {
    const __m256i strings = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 2 * kBits)), 1);
    const __m256i both = _mm256_packus_epi16(eight(strings, first), eight(strings, second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_sub_epi8(both, half));
  }
  return i;
}
#else
template <int kBits>
std::int64_t unpack_wide(const std::uint8_t*, std::int64_t, std::int8_t*) {
  return 0;
}
#endif

#if defined(__AVX2__)
/// 32 numbers at a time, as long as 16 bytes can be written for the half of them. Returns how many.
/// Products by powers of two put neighbours next to each other, as part_lanes() parts them.
template <int kBits>
std::int64_t pack_wide(const std::int8_t* numbers, std::int64_t n, std::uint8_t* codes) {
  alignas(16) std::int8_t bytes[16];
  for (int i = 0; i < 16; ++i)
    bytes[i] = static_cast<std::int8_t>(i < 2 * kBits ? i / kBits * 8 + i % kBits : -1);
  const __m256i together =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i half = _mm256_set1_epi8(1 << (kBits - 1));
  const __m256i pairs = _mm256_set1_epi16(static_cast<std::int16_t>(1 | 1 << (8 + kBits)));
  const __m256i quarters = _mm256_set1_epi32(1 | 1 << (16 + 2 * kBits));
  constexpr std::int64_t kStep = 4 * kEight;
  std::int64_t i = 0;
  for (; (n - i) / kEight * kBits >= 2 * kBits + 16; i += kStep, codes += 4 * kBits) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + i));
    const __m256i two = _mm256_maddubs_epi16(pairs, _mm256_add_epi8(some, half));
    const __m256i four = _mm256_madd_epi16(two, quarters);
    const __m256i lower = _mm256_blend_epi32(four, _mm256_setzero_si256(), 0xAA);
    const __m256i upper = _mm256_srli_epi64(four, 32);
    const __m256i eight = _mm256_or_si256(lower, _mm256_slli_epi64(upper, 4 * kBits));
    const __m256i strings = _mm256_shuffle_epi8(eight, together);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(strings));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 2 * kBits),
                     _mm256_extracti128_si256(strings, 1));
  }
  return i;
}
#else
template <int kBits>
std::int64_t pack_wide(const std::int8_t*, std::int64_t, std::uint8_t*) {
  return 0;
}
#endif

template <int kBits>
void unpack_all(const std::uint8_t* codes, std::int64_t n, std::int8_t* out) {
  const std::int64_t whole = (n + kEight - 1) / kEight * kEight;
  for (std::int64_t i = unpack_wide<kBits>(codes, whole, out); i < whole; i += kEight)
    unpack_eight<kBits>(codes + i / kEight * kBits, out + i);
}
template <int kBits>
void pack_all(const std::int8_t* numbers, std::int64_t n, std::uint8_t* codes) {
  for (std::int64_t i = pack_wide<kBits>(numbers, n, codes); i < n; i += kEight)
    pack_eight<kBits>(numbers + i, codes + i / kEight * kBits);
}

/// body.operator()<bits>(), of those that codes of a byte's part can have.
template <int kBits = 2, class Body>
void with_bits(int bits, const Body& body) {
  if constexpr (kBits < 8) {
    if (bits == kBits) return body.template operator()<kBits>();
    with_bits<kBits + 1>(bits, body);
  }
}

}  // namespace
}  // namespace stowage
