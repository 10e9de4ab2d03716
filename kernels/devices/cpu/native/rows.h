// Rows of numbers, one by one.
#pragma once
#include <bit>
#include <cfloat>

#include "vectors.h"

namespace troupe {

// The row's largest, without its sign; a NaN where it has one.
inline float largest(const bf16* x, int64_t size) {
    __m512i bits = _mm512_setzero_si512();  // of absolute values: a NaN's are more than infinity's
    for (int64_t i = 0; i < size; i += 16)
        bits = _mm512_max_epu32(bits, _mm512_castps_si512(_mm512_abs_ps(load(x + i))));
    return std::bit_cast<float>(_mm512_reduce_max_epu32(bits));
}

// Hold a row within `share` of its largest, rounded to bf16; `x` may be `out`. Of a NaN and another, min and max take the
// second.
inline void clip_row(const bf16* x, bf16* out, int64_t size, float share) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_set1_ps(largest(x, size) * share)));
    const __m512 most = widen(rounded), least = _mm512_sub_ps(_mm512_setzero_ps(), most);
    for (int64_t i = 0; i < size; i += 16) store(out + i, _mm512_min_ps(_mm512_max_ps(load(x + i), least), most));
}

// Round to whole shares of the row's largest over 127; `x` may be `out`.
inline void fake_quantize_row(const bf16* x, bf16* out, int64_t size) {
    float scale = largest(x, size) / 127.0f;
    if (scale < FLT_MIN) scale = FLT_MIN;
    const __m512 wide = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 share = _mm512_div_ps(load(x + i), wide);
        const __m512 whole = _mm512_roundscale_ps(share, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        store(out + i, _mm512_mul_ps(whole, wide));
    }
}

// silu(gate) * other of gates and `size` others after them.
inline void silu_row(const bf16* gate, bf16* out, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store(out + i, _mm512_mul_ps(silu(load(gate + i)), load(gate + size + i)));
}

// x + sigmoid(logit) * y; `x` may be `out`.
inline void add_weighted(const bf16* x, const bf16* y, bf16 logit, bf16* out, int64_t size) {
    const __m512 one = _mm512_set1_ps(1.0f), wide = widen(_mm256_set1_epi16(static_cast<int16_t>(logit)));
    const __m512 share = _mm512_div_ps(one, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), wide))));
    for (int64_t i = 0; i < size; i += 16) store(out + i, _mm512_fmadd_ps(share, load(y + i), load(x + i)));
}

}  // namespace troupe
