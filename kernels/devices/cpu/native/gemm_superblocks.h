// Products of up to 32 tokens with a block of 32 outputs of integers, whose inputs are divided into supers that share a scale (and a
// zero). Only tokens (int16_tokens.h) and sums are rounded. There are two ways, for few and for more tokens; within each a token's result
// is the same bits whatever tokens are beside it.
//
// `S` describes a block: GROUP, the inputs within a super that share an integer scale (0: there are none); ZEROS; `lines()` of a super;
// `cell(line)`; `codes(cell, half, four)`, one a byte; `open(line, out)`, a line as bf16 in the order of gemm_bf16.h (for multiply_shared
// only, as is SUMS: whether it needs the sums of tokens); `group_scale(line, second, half)` and `group_zero(line, second, half)`, integer scales
// and zeros of groups; `end(super, half, some, less, sum)`, which adds a super's sums to those before; `fetch(line)`, which prefetches.
#pragma once
#include "gguf_block_layout.h"
#include "int16_tokens.h"

namespace troupe {

// Sums [token][32] of up to four tokens, which are quantized (int16_tokens.h): HALF_COUNT halves of the outputs, from `first` on.
template <int ROWS, int HALF_COUNT, class S>
void multiply_halves(const S& weight, const Int16Tokens& x, int64_t first, float* sums) {
    constexpr bool twice = S::GROUP == TILE;
    Floats result[ROWS][HALF_COUNT] = {};
    for (int64_t line = 0, super = 0; line < x.lines; super++) {
        Floats products[ROWS][HALF_COUNT] = {}, zero_products[ROWS][HALF_COUNT] = {};
        for (const int64_t end = line + weight.lines(); line < end; line++) {
            if (first == 0) weight.fetch(line);
            Floats values[ROWS][HALF_COUNT];
            const auto part = [&]<int PLACE>() ALWAYS_INLINE {
                VectorSums<ROWS, HALF_COUNT> sum;
                const uint8_t* cell = weight.cell(line);
                unrolled<twice ? 4 : 8>([&](auto n) ALWAYS_INLINE {
                    constexpr int64_t four = n + (twice ? 4 * PLACE : 0);
                    Ints codes[HALF_COUNT];
                    unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE { codes[half] = weight.codes(cell, first + half, four); });
                    sum.add(x, line, four, codes);
                });
                unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE {
                    const Floats scale = S::GROUP ? weight.group_scale(line, PLACE, first + half) : Floats{};
                    unrolled<ROWS>([&](auto row) ALWAYS_INLINE {
                        const int64_t offset = S::GROUP == TILE ? PLACE : HALVES;  // Clang 14 does not know `twice` here
                        const Floats value = sum.of(row, half, x.offsets + (row * x.lines + line) * OFFSETS + offset);
                        values[row][half] = !S::GROUP ? value : PLACE ? fma(value, scale, values[row][half]) : value * scale;
                    });
                });
            };
            part.template operator()<0>();
            if constexpr (twice) part.template operator()<1>();
            unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE {
                unrolled<ROWS>([&](auto row) ALWAYS_INLINE {
                    const float* scales = x.scales + (row * x.lines + line) * SCALES;
                    products[row][half] = fma(values[row][half], splat(scales[0]), products[row][half]);
                    const auto add_part = [&](Floats scale, float sum) {
                        zero_products[row][half] = fma(scale, splat(sum), zero_products[row][half]);
                    };
                    if constexpr (S::ZEROS && S::GROUP == 0) add_part(splat(1.0f), scales[1]);
                    if constexpr (S::ZEROS && S::GROUP == DEPTH) add_part(weight.group_zero(line, 0, first + half), scales[1]);
                    if constexpr (S::ZEROS && twice)
                        for (int part = 0; part < HALVES; part++) add_part(weight.group_zero(line, part, first + half), scales[2 + part]);
                });
            });
        }
        unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE {
            unrolled<ROWS>([&](auto row) ALWAYS_INLINE {
                result[row][half] = weight.end(super, first + half, products[row][half], zero_products[row][half], result[row][half]);
            });
        });
    }
    unrolled<ROWS>([&](auto row) ALWAYS_INLINE {
        unrolled<HALF_COUNT>([&](auto half) ALWAYS_INLINE { store(sums + row * WIDE + (first + half) * TILE, result[row][half]); });
    });
}

// All of the outputs: both halves at a time where registers hold their sums.
template <int ROWS, class S>
void multiply_vectors(const S& weight, const Int16Tokens& x, float* sums) {
    if constexpr (LARGE || ROWS == 1) return multiply_halves<ROWS, 2>(weight, x, 0, sums);
    for (int64_t half = 0; half < 2; half++) multiply_halves<ROWS, 1>(weight, x, half, sums);
}

// More tokens, as bf16 [row][32 inputs of each line]. Weights are multiplied as 128 + code, of codes of up to 7 bits, which a mask
// makes bf16. `shares` [row][part][2]: the sum of the inputs that share a scale, times 128 and the offset, and the sum itself; null
// if `S` has no SUMS.
struct Shared {
    const char* x;
    int64_t stride;
    const float* shares;
    int64_t parts, lines;
};

// Sums [token][32] of up to 32 tokens from `row` on.
template <class S>
void multiply_shared(const S& weight, const Shared& x, int64_t row, int64_t rows, float* sums) {
    alignas(64) bf16 wide[2][WIDE * DEPTH];
    alignas(64) float result[2][WIDE * WIDE];
    const int64_t part_lines = weight.lines();
    for (int64_t i = 0; i < rows * WIDE; i += TILE) store(sums + i, Floats{});

    const auto add_part = [&](int64_t part) {  // scales and adds the stored sums of a part
        const float* from = result[part % 2];
        for (int64_t half = 0; half < 2; half++) {
            const float* share = S::SUMS ? x.shares + (row * x.parts + part) * 2 : nullptr;
            for (int64_t i = half * TILE; i < rows * WIDE; i += WIDE) {
                Floats products = load(from + i), sum = Floats{};
                if constexpr (S::SUMS) {
                    products = products - splat(share[0]), sum = splat(share[1]);
                    share += 2 * x.parts;
                }
                store(sums + i, weight.end(part, half, products, sum, load(sums + i)));
            }
        }
    };

    const char* tokens = x.x + row * x.stride;
    weight.open(0, wide[0]);
    for (int64_t part = 0, line = 0; part < x.parts; part++) {
        TileSums<float> tiles(rows, result[part % 2]);
        tiles.begin();
        for (const int64_t end = line + part_lines; line < end; line++) {
            // A load of what was stored just now would wait for the store, so the next line is unpacked first.
            if (line + 1 < x.lines) weight.open(line + 1, wide[(line + 1) % 2]);
            written();
            tiles.add(tokens + line * LINE, x.stride, wide[line % 2], [] {});
        }
        tiles.end();
        if (part) add_part(part - 1);  // for the same reason the part before
    }
    add_part(x.parts - 1);
}

}  // namespace troupe
