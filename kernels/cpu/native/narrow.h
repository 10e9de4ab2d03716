// Keys and values of 8 bits: rounded as they are written to the cache, made bf16 page by page before they are attended to.
#pragma once
#include <bit>
#include <cmath>

#include "program.h"
#include "team.h"
#include "vectors.h"

namespace troupe {

enum Narrow : int64_t { WHOLE, E4M3, E5M2 };

constexpr float LARGEST[] = {127.0f, 448.0f, 57344.0f};
constexpr float LEAST_SCALE = 0x1p-126f;

inline float wide(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

inline __m512 widen(const uint8_t* x, int64_t kind) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    if (kind == WHOLE) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
    const __m256i bits = _mm256_cvtepu8_epi16(raw);
    if (kind == E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(bits, 8));  // the upper half of a binary16
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    // As binary16, whose exponents are 8 more.
    const __m512 scaled = _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)));
    const __mmask16 none = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    return _mm512_mask_mov_ps(_mm512_mul_ps(scaled, _mm512_set1_ps(256.0f)), none, _mm512_set1_ps(NAN));
}

// To the nearest; what is too large becomes the largest, a NaN a NaN, or 0 where there is none.
inline void narrow(uint8_t* out, __m512 x, int64_t kind) {
    const __m512 most = _mm512_set1_ps(LARGEST[kind]), least = _mm512_set1_ps(-LARGEST[kind]);
    x = _mm512_min_ps(most, _mm512_max_ps(least, x));  // of a NaN the second is taken
    __m128i bytes;
    if (kind == WHOLE) {
        bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    } else {
        const int bits = kind == E4M3 ? 7 : 8;
        if (kind == E4M3) x = _mm512_mul_ps(x, _mm512_set1_ps(0x1p-8f));
        const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x7fff));
        const __m256i even = _mm256_and_si256(_mm256_srli_epi16(magnitude, bits), _mm256_set1_epi16(1));
        const __m256i up = _mm256_add_epi16(even, _mm256_set1_epi16(static_cast<int16_t>((1 << (bits - 1)) - 1)));
        __m256i found = _mm256_srli_epi16(_mm256_add_epi16(magnitude, up), bits);
        const __mmask16 none = _mm256_cmpgt_epi16_mask(magnitude, _mm256_set1_epi16(0x7c00));
        found = _mm256_mask_mov_epi16(found, none, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
        bytes = _mm256_cvtepi16_epi8(_mm256_or_si256(found, sign));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}

// WRITE_NARROW, one token.
inline void write_narrow(const Op& op, const Step& step, int64_t row) {
    const bf16* x = static_cast<const bf16*>(op.a) + row * op.stride_a;
    const int64_t place = step.index[row] * op.i1, dim = op.i0;
    const float* fixed = static_cast<const float*>(op.c);
    const float* offsets = reinterpret_cast<const float*>(op.i4);
    for (int64_t head = 0; head < op.i1; head++, x += dim) {
        uint8_t* out = static_cast<uint8_t*>(op.out) + (place + head) * dim;
        if (op.b) {
            __m512i bits = _mm512_setzero_si512();  // compared so, a NaN is larger than infinity
            for (int64_t i = 0; i < dim; i += 16)
                bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_castps_si512(load(x + i)), _mm512_set1_epi32(0x7fffffff)));
            const float size = std::bit_cast<float>(_mm512_reduce_max_epu32(bits)) / LARGEST[op.i2];
            const __m128bh nearest = _mm_cvtneps_pbh(_mm_set_ss(size < LEAST_SCALE ? LEAST_SCALE : size));
            const bf16 scale = static_cast<bf16>(_mm_cvtsi128_si32(reinterpret_cast<__m128i>(nearest)));
            static_cast<bf16*>(op.b)[place + head] = scale;
            const __m512 divisor = _mm512_set1_ps(wide(scale));
            for (int64_t i = 0; i < dim; i += 16) narrow(out + i, _mm512_div_ps(load(x + i), divisor), op.i2);
        } else {
            for (int64_t i = 0; i < dim; i += 16) {
                __m512 value = _mm512_div_ps(load(x + i), _mm512_loadu_ps(fixed + head * dim + i));
                if (offsets) value = _mm512_add_ps(value, _mm512_loadu_ps(offsets + head * dim + i));
                narrow(out + i, value, op.i2);
            }
        }
    }
}

struct Pages {
    const Op* op;
    const Step* step;
};

inline void widen_page(void* context, int64_t page, int) {
    const Op& op = *static_cast<const Pages*>(context)->op;
    const int64_t dim = op.i0, heads = op.i1, each = op.i3 * heads;
    const int64_t first = static_cast<const Pages*>(context)->step->kept[page] * each;
    const uint8_t* x = static_cast<const uint8_t*>(op.a) + first * dim;
    bf16* out = static_cast<bf16*>(op.out) + page * each * dim;
    const bf16* scales = op.b ? static_cast<const bf16*>(op.b) + first : nullptr;
    const float* fixed = static_cast<const float*>(op.c);
    const float* offsets = reinterpret_cast<const float*>(op.i4);
    for (int64_t line = 0; line < each; line++, x += dim, out += dim) {
        const int64_t own = line % heads * dim;
        const __m512 scale = _mm512_set1_ps(scales ? wide(scales[line]) : 1.0f);
        for (int64_t i = 0; i < dim; i += 16) {
            __m512 value = widen(x + i, op.i2);
            if (scales) {
                value = _mm512_mul_ps(value, scale);
            } else {
                if (offsets) value = _mm512_sub_ps(value, _mm512_loadu_ps(offsets + own + i));
                value = _mm512_mul_ps(value, _mm512_loadu_ps(fixed + own + i));
            }
            store(out + i, value);
        }
    }
}

// WIDEN
inline void widen_pages(Team& team, const Op& op, const Step& step) {
    Pages pages = {&op, &step};
    team.each(step.kept_count, widen_page, &pages);
}

}  // namespace troupe
