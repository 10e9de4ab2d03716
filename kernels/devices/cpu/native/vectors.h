// Vectors of 16 lanes: `Floats`, `Ints`, and a `Mask` of a bit a lane. An operator is written once with them.
//
// One header a kind of processor says what they are: a register of AVX-512, or parts in registers of AVX2 or NEON. Of integers the
// operators see lanes of 32 bits; functions whose names say so see words of 16 bits or bytes. A line is 64 bytes of memory.
//
//   fma, fms, fnma     a * b + c, a * b - c, c - a * b, rounded once
//   max, min           of a NaN and another the second
//   splat_at(x)        all lanes have the four bytes at x
//   scale(x, p)        x times 2 to the power floor(p); where a register has no instruction for it, 0 below 2^-127
//   select, keep       a where the mask's bit is set, else b, or 0
//   select_bits        the same bit by bit; select_bytes(x, y, ..): of bytes that are equal; select_words(x, y, ..): of words of which
//                      none of the bits y is set
//   and_or             a & b | c
//   dot(sum, a, b)     adds the products of the two bf16, or of the four bytes, unsigned and signed, of each lane
//   load(x, mask)      reads the lanes of the mask, which are the first ones; others are 0
//   pick(x, n, at)     of `n` up to 32 numbers at x those whose index is in the upper half of each lane of `at`
//   to_bf16(a, b)      a line: all of a, then all of b
//   pair_words(a, b)   a line: a lane of a, a lane of b, and so on
//   interleave_words   in the same way words of one half of two lines
//   interleave_ordered and bytes of lines whose bytes were ordered by order_bytes
//   spread(x, to)      two vectors that have each lane twice
//   quarters           four lanes next to each other: max_of_quarters leaves the largest of each place in all four, add_quarters adds
//                      them to the first, one after the other
//   add_lanes          the sum of the lanes of each of 16 vectors
//   transpose          of 16 x 16
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define ALWAYS_INLINE __attribute__((always_inline))  // of a lambda that is called more than once

namespace troupe {

using bf16 = uint16_t;
using Mask = uint16_t;

inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// call(0), call(1), ... call(N - 1), of constants: an array stays in registers only if no index is a variable.
template <int N, class Call>
[[gnu::always_inline]] inline void unrolled(const Call& call) {
    [&]<int... I>(std::integer_sequence<int, I...>) ALWAYS_INLINE {
        (call(std::integral_constant<int, I>()), ...);
    }(std::make_integer_sequence<int, N>());
}

// The mask of the first `count` lanes.
inline Mask first_lanes(int64_t count) { return count >= 16 ? 0xffff : static_cast<Mask>((1 << count) - 1); }

}  // namespace troupe

#if defined(__AVX512VBMI__)
#include "vectors_avx512.h"
#elif defined(__AVX2__)
#include "vectors_avx2.h"
#elif defined(__aarch64__)
#include "vectors_neon.h"
#else
#error "these operators need AVX2, AVX-512 or NEON"
#endif

namespace troupe {

constexpr bool LARGE = REGISTERS > 8;

inline Ints splat(int64_t x) { return splat(static_cast<int32_t>(x)); }

inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 3); }
inline void prefetch_second(const void* from) { __builtin_prefetch(from, 0, 2); }  // into the second cache
inline void prefetch_third(const void* from) { __builtin_prefetch(from, 0, 1); }   // or the third

inline Floats load(const int8_t* from) { return to_floats(load_signed(from)); }
inline void store(bf16* to, Floats x, Mask mask) {
    if (mask == 0xffff) return store(to, x);
    store_words(to, to_bf16(x, x), std::bit_width(mask));
}

inline Ints even_bytes(Ints x) { return x & splat_words(0xff); }
inline Ints odd_bytes(Ints x) { return words_right(x, 8); }

constexpr float LOG2_E = 1.44269504f;

// 2^r for |r| <= 1/2: the Taylor series, of which seven terms reach float's precision.
inline Floats exp2_near(Floats r) {
    Floats p = splat(1.54035304e-4f);
    p = fma(p, r, splat(1.33335581e-3f));
    p = fma(p, r, splat(9.61812911e-3f));
    p = fma(p, r, splat(5.55041087e-2f));
    p = fma(p, r, splat(2.40226507e-1f));
    p = fma(p, r, splat(6.93147181e-1f));
    return fma(p, r, splat(1.0f));
}

inline Floats exp2(Floats x) {
    x = bounded_power(x);
    const Floats n = round(x);
    return scale(exp2_near(x - n), n);
}

inline Floats exp(Floats x) { return exp2(x * splat(LOG2_E)); }

// x * sigmoid(x)
inline Floats silu(Floats x) { return x / (splat(1.0f) + exp(Floats{} - x)); }

}  // namespace troupe
