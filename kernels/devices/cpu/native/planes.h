// Tokens as integers of 16 bits, for products with integer weights that are not converted to floats. 32 inputs of a token share a
// scale; a number is stored as an upper and a lower byte, and each byte is multiplied by itself. Sums of products are exact: only a
// token's numbers are rounded, to a 65,000th of the largest among 32.
#pragma once
#include <bit>
#include <cmath>

#include "matrix.h"
#include "scratch.h"

namespace troupe {

// Up to so many rows are multiplied so. On AMX its tiles are faster from five rows on; without it converting weights to bf16 costs as
// much as the second byte does.
constexpr int64_t FEWEST = AMX ? 4 : 32;
constexpr int64_t QUANTIZED_ROWS = 4;  // whose sums are in registers at a time
constexpr int64_t HALVES = 2;   // of a line of 32 inputs: some weights have a scale for each
constexpr int64_t OFFSETS = 4;  // of a line: of each half, of both, unused
constexpr int64_t SCALES = 4;

struct Planes {
    Scratch<int8_t> values;    // [row][line][upper, lower][32], of four inputs the first, the third, the second and the last
    Scratch<float> scales;     // [row][line][SCALES]: the scale, the sum of the numbers that it makes, and those of the halves
    Scratch<int32_t> offsets;  // [row][line][OFFSETS]: sums times -offset

    Scratch<float> shares;     // of rows that are not quantized, see `share_out`

    void reserve(int64_t rows, int64_t lines, bool rounded) {
        if (!rounded) return static_cast<void>(shares.of(rows * lines * HALVES * 2));
        values.of(rows * lines * LINE);
        scales.of(rows * lines * SCALES);
        offsets.of(rows * lines * OFFSETS);
    }
};

// Rows of Planes.
struct Whole {
    const int8_t* values;
    const float* scales;
    const int32_t* offsets;
    int64_t lines;

    Whole(Planes& of, int64_t row, int64_t lines)
        : values(of.values.of(0) + row * lines * LINE), scales(of.scales.of(0) + row * lines * SCALES),
          offsets(of.offsets.of(0) + row * lines * OFFSETS), lines(lines) {}

    // The rows from `row` on.
    Whole from(int64_t row) const {
        Whole found = *this;
        found.values += row * lines * LINE, found.scales += row * lines * SCALES, found.offsets += row * lines * OFFSETS;
        return found;
    }
};

// Quantizes a token. Integers cannot express what is not finite: the scale of such inputs is not finite either. `offset`: by how much
// a weight's codes exceed its values.
inline void round_planes(const bf16* x, int64_t lines, int32_t offset, int64_t row, Planes& to) {
    int8_t* values = to.values.of(0) + row * lines * LINE;
    float* scales = to.scales.of(0) + row * lines * SCALES;
    int32_t* offsets = to.offsets.of(0) + row * lines * OFFSETS;
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(128);
    const __m128i order = _mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
    for (int64_t line = 0; line < lines; line++, x += DEPTH, values += LINE, scales += SCALES, offsets += OFFSETS) {
        const __m512 part[HALVES] = {load(x), load(x + TILE)};
        const __m512i bits = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(part[0]), sign),
                                              _mm512_and_si512(_mm512_castps_si512(part[1]), sign));  // a NaN's are the most
        const float most = std::bit_cast<float>(_mm512_reduce_max_epi32(bits));
        const bool finite = most < INFINITY;
        const __m512 by = _mm512_set1_ps(finite && most > 0x1p-100f ? 32512.0f / most : 0.0f);
        int32_t sum = 0;
        scales[0] = finite ? most / 32512.0f : most;
        for (int64_t i = 0; i < HALVES; i++) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], by));
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, half), 8);
            const auto put = [&](int8_t* at, __m512i of) {
                _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(of), order));
            };
            put(values + i * TILE, upper);
            put(values + DEPTH + i * TILE, whole);
            const int32_t some = finite ? _mm512_reduce_add_epi32(whole) : 0;
            offsets[i] = -offset * some, sum += some;
            scales[2 + i] = scales[0] * static_cast<float>(some);
        }
        offsets[HALVES] = offsets[0] + offsets[1];
        scales[1] = scales[0] * static_cast<float>(sum);
    }
}

// Sums of a token's inputs, `each` at a time, a multiple of 16 -> [part][2]: the sum times `times`, and the sum
inline void share_out(const bf16* x, int64_t inputs, int64_t each, float times, float* shares) {
    for (int64_t part = 0; part < inputs; part += each, shares += 2) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < each; i += TILE) sum = _mm512_add_ps(sum, load(x + part + i));
        shares[1] = _mm512_reduce_add_ps(sum);
        shares[0] = times == 0.0f ? 0.0f : times * shares[1];  // also of a sum that is not finite
    }
}

// The products of a token and 16 outputs, from the sums of its two bytes. `offset`: the token's.
inline __m512 whole_sum(__m512i upper, __m512i lower, const int32_t* offset) {
    const __m512i sum = _mm512_add_epi32(lower, _mm512_set1_epi32(*offset));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), sum));
}

// Sums of products of up to four tokens with 32 outputs.
template <int ROWS>
struct VectorSums {
    __m512i upper[ROWS][2], lower[ROWS][2];

    VectorSums() {
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) upper[row][half] = lower[row][half] = _mm512_setzero_si512();
    }

    // Adds four inputs of a line: codes of the first and the last 16 outputs.
    void add(const Whole& x, int64_t line, int64_t four, __m512i codes, __m512i others) {
        for (int row = 0; row < ROWS; row++) {
            const int8_t* from = x.values + (row * x.lines + line) * LINE + 4 * four;
            int32_t bytes[2];
            std::memcpy(bytes, from, 4);
            std::memcpy(bytes + 1, from + DEPTH, 4);
            const __m512i high = _mm512_set1_epi32(bytes[0]), low = _mm512_set1_epi32(bytes[1]);
            upper[row][0] = _mm512_dpbusd_epi32(upper[row][0], codes, high);
            upper[row][1] = _mm512_dpbusd_epi32(upper[row][1], others, high);
            lower[row][0] = _mm512_dpbusd_epi32(lower[row][0], codes, low);
            lower[row][1] = _mm512_dpbusd_epi32(lower[row][1], others, low);
        }
    }

    __m512 of(int64_t row, int64_t half, const int32_t* offset) const { return whole_sum(upper[row][half], lower[row][half], offset); }
};

// call<ROWS>() for one to four rows.
template <class Call>
inline void with_rows(int64_t rows, Call call) {
    switch (rows) {
        case 1: return call.template operator()<1>();
        case 2: return call.template operator()<2>();
        case 3: return call.template operator()<3>();
        case 4: return call.template operator()<4>();
    }
}

}  // namespace troupe
