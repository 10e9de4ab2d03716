// Tokens as integers of 16 bits, for products with integer weights that are not converted to floats. 32 inputs of a token share a
// scale; a number is stored as an upper and a lower byte, and each byte is multiplied by itself. Sums of products are exact: only a
// token's numbers are rounded, to a 65,000th of the largest among 32.
#pragma once
#include <bit>
#include <cmath>

#include "gemm_bf16.h"
#include "scratch.h"

namespace troupe {

// Up to so many rows are multiplied so. On AMX its tiles are faster from five rows on; without it converting weights to bf16 costs as
// much as the second byte does.
constexpr int64_t MAX_QUANTIZED_TOKENS = AMX ? 4 : 32;
constexpr int64_t QUANTIZED_ROWS = LARGE ? 4 : 2;  // whose sums are in registers at a time
constexpr int64_t HALVES = 2;   // of a line of 32 inputs: some weights have a scale for each
constexpr int64_t OFFSETS = 4;  // of a line: of each half, of both, unused
constexpr int64_t SCALES = 4;

struct Planes {
    // [row][line][upper, lower][32], of four inputs the first, the third, the second and the last; without BYTE_DOTS words [row][line][32]
    Scratch<int8_t> values;
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
struct Int16Tokens {
    const int8_t* values;
    const float* scales;
    const int32_t* offsets;
    int64_t lines;

    Int16Tokens(Planes& of, int64_t row, int64_t lines)
        : values(of.values.of(0) + row * lines * LINE), scales(of.scales.of(0) + row * lines * SCALES),
          offsets(of.offsets.of(0) + row * lines * OFFSETS), lines(lines) {}

    // The rows from `row` on.
    Int16Tokens from(int64_t row) const {
        Int16Tokens result = *this;
        result.values += row * lines * LINE, result.scales += row * lines * SCALES, result.offsets += row * lines * OFFSETS;
        return result;
    }
};

// Quantizes a token. Integers cannot express what is not finite: the scale of such inputs is not finite either. `offset`: by how much
// a weight's codes exceed its values.
inline void round_planes(const bf16* x, int64_t lines, int32_t offset, int64_t row, Planes& to) {
    int8_t* values = to.values.of(0) + row * lines * LINE;
    float* scales = to.scales.of(0) + row * lines * SCALES;
    int32_t* offsets = to.offsets.of(0) + row * lines * OFFSETS;
    const Ints sign = splat(0x7fffffff), half = splat(128);
    for (int64_t line = 0; line < lines; line++, x += DEPTH, values += LINE, scales += SCALES, offsets += OFFSETS) {
        const Floats part[HALVES] = {load(x), load(x + TILE)};
        const Ints bits = max(bits_of(part[0]) & sign, bits_of(part[1]) & sign);  // a NaN's are the most
        const float amax = std::bit_cast<float>(max_all(bits));
        const bool finite = amax < INFINITY;
        const Floats inverse_scale = splat(finite && amax > 0x1p-100f ? 32512.0f / amax : 0.0f);
        int32_t sum = 0;
        scales[0] = finite ? amax / 32512.0f : amax;
        for (int64_t i = 0; i < HALVES; i++) {
            const Ints integers = to_ints(part[i] * inverse_scale);
            const Ints upper = signed_right(integers + half, 8);
            if constexpr (BYTE_DOTS) {
                store_fours(values + i * TILE, upper);
                store_fours(values + DEPTH + i * TILE, integers);
            } else {
                store_lower(values + 2 * i * TILE, integers);
            }
            const int32_t half_sum = finite ? add_all(integers) : 0;
            offsets[i] = -offset * half_sum, sum += half_sum;
            scales[2 + i] = scales[0] * static_cast<float>(half_sum);
        }
        offsets[HALVES] = offsets[0] + offsets[1];
        scales[1] = scales[0] * static_cast<float>(sum);
    }
}

// Sums of a token's inputs, `each` at a time, a multiple of 16 -> [part][2]: the sum times `times`, and the sum
inline void share_out(const bf16* x, int64_t inputs, int64_t each, float times, float* shares) {
    for (int64_t part = 0; part < inputs; part += each, shares += 2) {
        Floats sum = Floats{};
        for (int64_t i = 0; i < each; i += TILE) sum = sum + load(x + part + i);
        shares[1] = add_all(sum);
        shares[0] = times == 0.0f ? 0.0f : times * shares[1];  // also of a sum that is not finite
    }
}

// Sums of products of ROWS tokens with HALVES times 16 outputs. Of bytes there are two sums, of the upper and the lower ones.
template <int ROWS, int HALF_COUNT>
struct VectorSums {
    Ints sums[ROWS][HALF_COUNT][1 + BYTE_DOTS] = {};

    // Adds four inputs of a line: their codes, of 16 outputs each.
    [[gnu::always_inline]] void add(const Int16Tokens& x, int64_t line, int64_t four, const Ints (&codes)[HALF_COUNT]) {
        unrolled<ROWS>([&](auto row) ALWAYS_INLINE {
            const int8_t* from = x.values + (row * x.lines + line) * LINE + (BYTE_DOTS ? 4 : 8) * four;
            const Ints first = splat_at(from), second = splat_at(from + (BYTE_DOTS ? DEPTH : 4));
            unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE {
                auto& sum = sums[row][half];
                if constexpr (BYTE_DOTS) {
                    sum[0] = dot(sum[0], codes[half], first);
                    sum[1] = dot(sum[1], codes[half], second);
                } else {
                    sum[0] = dot_words(dot_words(sum[0], even_bytes(codes[half]), first), odd_bytes(codes[half]), second);
                }
            });
        });
    }

    // The products of a token and 16 outputs. `offset`: the token's.
    Floats of(int64_t row, int64_t half, const int32_t* offset) const {
        const auto& sum = sums[row][half];
        Ints integers = sum[BYTE_DOTS] + splat(*offset);
        if constexpr (BYTE_DOTS) integers = (sum[0] << 8) + integers;
        return to_floats(integers);
    }
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
