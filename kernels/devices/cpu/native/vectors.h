// Vectors of 16: bf16, exp, and transposition of 16 by 16 (AVX-512).
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace troupe {

using bf16 = uint16_t;

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 load(const bf16* x) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

inline __m512 load(const int8_t* x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

inline void store(bf16* out, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

inline void store(bf16* out, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(out, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

inline __m512 load(const bf16* x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

constexpr float LOG2_E = 1.44269504f;

// 2^r for |r| <= 1/2: the Taylor series, of which seven terms reach float's precision.
inline __m512 exp2_near(__m512 r) {
    __m512 p = _mm512_set1_ps(1.54035304e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.33335581e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147181e-1f));
    return _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
}

inline __m512 exp2(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_near(_mm512_sub_ps(x, n)), n);
}

inline __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(LOG2_E))); }

// x * sigmoid(x)
inline __m512 silu(__m512 x) {
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// Transposes 16 rows of 16: 4 x 4 within quarters of the registers, and then the quarters.
inline void transpose(__m512i* rows) {
    __m512i part[4][4];
    for (int g = 0; g < 4; g++) {
        const __m512i *r = rows + 4 * g, a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
        part[0][g] = _mm512_unpacklo_epi64(a, c);
        part[1][g] = _mm512_unpackhi_epi64(a, c);
        part[2][g] = _mm512_unpacklo_epi64(b, d);
        part[3][g] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(part[i][0], part[i][1], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(part[i][0], part[i][1], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(part[i][2], part[i][3], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(part[i][2], part[i][3], 0xee);
        rows[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[4 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        rows[8 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

}  // namespace troupe
