// What vectors are on AVX2 with FMA and F16C: two registers each. See vectors.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe {

constexpr int PART = 8;  // of a part
typedef float FloatPart __attribute__((vector_size(32)));
typedef int32_t IntPart __attribute__((vector_size(32)));

inline __m256 raw(FloatPart x) { return (__m256)x; }
inline __m256i raw(IntPart x) { return (__m256i)x; }

inline FloatPart fma_part(FloatPart a, FloatPart b, FloatPart c) { return (FloatPart)_mm256_fmadd_ps(raw(a), raw(b), raw(c)); }
inline FloatPart round_part(FloatPart x) { return (FloatPart)_mm256_round_ps(raw(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline FloatPart floor_part(FloatPart x) { return (FloatPart)_mm256_round_ps(raw(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline IntPart nearest_part(FloatPart x) { return (IntPart)_mm256_cvtps_epi32(raw(x)); }
inline IntPart splat_part_at(const void* from) { return (IntPart)_mm256_broadcast_ss(static_cast<const float*>(from)); }
inline int signs(IntPart x) { return _mm256_movemask_ps((__m256)x); }
inline IntPart add_dot_part(IntPart sum, IntPart a, IntPart b) {
    sum += (IntPart)_mm256_madd_epi16(raw(a), raw(b));
    asm("" : "+x"(sum));  // GCC would add up all products at the end, and keep them in memory until then
    return sum;
}
inline IntPart look_up_part(IntPart table, IntPart at) { return (IntPart)_mm256_shuffle_epi8(raw(table), raw(at)); }

// Numbers of 16 bits in lanes.
inline FloatPart from_halves_part(IntPart x) {
    return (FloatPart)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(raw(x)), _mm256_extracti128_si256(raw(x), 1)));
}
inline IntPart to_halves_part(FloatPart x) {
    return (IntPart)_mm256_cvtepu16_epi32(_mm256_cvtps_ph(raw(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline IntPart pack_part(IntPart a, IntPart b) {
    return (IntPart)_mm256_permute4x64_epi64(_mm256_packus_epi32(raw(a), raw(b)), 0xd8);
}
// The lower or the upper halves of two vectors.
inline IntPart low_of(__m256i a, __m256i b) { return (IntPart)_mm256_permute2x128_si256(a, b, 0x20); }
inline IntPart high_of(__m256i a, __m256i b) { return (IntPart)_mm256_permute2x128_si256(a, b, 0x31); }

inline IntPart low_bytes(IntPart a, IntPart b) {
    return low_of(_mm256_unpacklo_epi8(raw(a), raw(b)), _mm256_unpackhi_epi8(raw(a), raw(b)));
}
inline IntPart high_bytes(IntPart a, IntPart b) {
    return high_of(_mm256_unpacklo_epi8(raw(a), raw(b)), _mm256_unpackhi_epi8(raw(a), raw(b)));
}
inline IntPart low_words(IntPart a, IntPart b) {
    return low_of(_mm256_unpacklo_epi16(raw(a), raw(b)), _mm256_unpackhi_epi16(raw(a), raw(b)));
}
inline IntPart high_words(IntPart a, IntPart b) {
    return high_of(_mm256_unpacklo_epi16(raw(a), raw(b)), _mm256_unpackhi_epi16(raw(a), raw(b)));
}
inline IntPart low_lanes(IntPart a, IntPart b) {
    return low_of(_mm256_unpacklo_epi32(raw(a), raw(b)), _mm256_unpackhi_epi32(raw(a), raw(b)));
}
inline IntPart high_lanes(IntPart a, IntPart b) {
    return high_of(_mm256_unpacklo_epi32(raw(a), raw(b)), _mm256_unpackhi_epi32(raw(a), raw(b)));
}

// Reduces all lanes with `call`.
template <class Part, class Call>
[[gnu::always_inline]] inline Part fold(Part x, const Call& call) {
    x = call(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = call(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    return call(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
}

inline void transpose_part(IntPart (&rows)[PART]) {
    __m256i pairs[PART], fours[PART];
#pragma GCC unroll 4
    for (int n = 0; n < PART; n += 2) {
        pairs[n] = _mm256_unpacklo_epi32(raw(rows[n]), raw(rows[n + 1]));
        pairs[n + 1] = _mm256_unpackhi_epi32(raw(rows[n]), raw(rows[n + 1]));
    }
#pragma GCC unroll 4
    for (int n = 0; n < PART; n += 4) {
        fours[n] = _mm256_unpacklo_epi64(pairs[n], pairs[n + 2]), fours[n + 1] = _mm256_unpackhi_epi64(pairs[n], pairs[n + 2]);
        fours[n + 2] = _mm256_unpacklo_epi64(pairs[n + 1], pairs[n + 3]);
        fours[n + 3] = _mm256_unpackhi_epi64(pairs[n + 1], pairs[n + 3]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) rows[n] = low_of(fours[n], fours[n + 4]), rows[n + 4] = high_of(fours[n], fours[n + 4]);
}

}  // namespace troupe

#include "vectors_parts.h"

namespace troupe {

constexpr bool BYTE_DOTS = false;

inline Floats dot(Floats sum, Ints a, Ints b) { return dot_as_floats(sum, a, b); }
inline Ints dot(Ints sum, Ints a, Ints b) { return dot_as_words(sum, a, b); }

inline void stream_line(void* to, Ints x) {
    _mm256_stream_si256(static_cast<__m256i*>(to), raw(x.part[0]));
    _mm256_stream_si256(static_cast<__m256i*>(to) + 1, raw(x.part[1]));
}
inline void finish_streams() { _mm_sfence(); }
inline void pause() { _mm_pause(); }

class ByteTable {
  public:
    ByteTable() = default;
    explicit ByteTable(const uint8_t* from) {
        for (int n = 0; n < 8; n++) tables_[n] = table_of_bytes(from + 16 * n).part[0];
    }
    Ints operator()(Ints at) const { return ints([&](IntPart x) { return one(raw(x)); }, at); }

  private:
    // Where an index is of another table, its byte's sign is set, and the shuffle finds 0.
    IntPart one(__m256i at) const {
        const __m256i more = _mm256_set1_epi8(0x70);
        at = _mm256_and_si256(at, _mm256_set1_epi8(0x7f));
        __m256i result = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int n = 0; n < 8; n++) {
            const __m256i within = _mm256_adds_epu8(_mm256_sub_epi8(at, _mm256_set1_epi8(static_cast<char>(16 * n))), more);
            result = _mm256_or_si256(result, _mm256_shuffle_epi8(raw(tables_[n]), within));
        }
        return (IntPart)result;
    }

    IntPart tables_[8];
};

inline Floats max_of_quarters(Floats x) {
    const FloatPart larger = (FloatPart)_mm256_max_ps(raw(x.part[0]), raw(x.part[1]));
    const FloatPart all = (FloatPart)_mm256_max_ps(raw(larger), _mm256_permute2f128_ps(raw(larger), raw(larger), 1));
    return {{all, all}};
}
inline Floats add_quarters(Floats sum, Floats x) {
    __m128 result = _mm256_castps256_ps128(raw(sum.part[0]));
    for (const FloatPart part : x.part) {
        result = _mm_add_ps(result, _mm256_castps256_ps128(raw(part)));
        result = _mm_add_ps(result, _mm256_extractf128_ps(raw(part), 1));
    }
    return {{(FloatPart)_mm256_zextps128_ps256(result), FloatPart{}}};
}

[[gnu::always_inline]] inline Floats add_lanes(const Floats (&sums)[16]) {
    const auto both = [&](int n) { return raw(sums[n].part[0] + sums[n].part[1]); };
    const auto four = [&](int n) {  // of four vectors
        const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(both(n), both(n + 1)), _mm256_hadd_ps(both(n + 2), both(n + 3)));
        return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    };
    return {{(FloatPart)_mm256_set_m128(four(4), four(0)), (FloatPart)_mm256_set_m128(four(12), four(8))}};
}

}  // namespace troupe
