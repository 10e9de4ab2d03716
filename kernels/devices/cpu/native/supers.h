// Products of up to 32 tokens with a block of 32 outputs of integers, whose inputs are divided into supers that share a scale (and a
// zero). Only tokens (planes.h) and sums are rounded. There are two ways, for few and for more tokens; within each a token's result
// is the same bits whatever tokens are beside it.
//
// `S` describes a block: GROUP, the inputs within a super that share an integer scale (0: there are none); ZEROS; `lines()` of a super;
// `cell(line)`; `codes(cell, half, four)`, one a byte; `open(line, out)`, a line as bf16 in the order of matrix.h (for multiply_shared
// only, as is SUMS: whether it needs the sums of tokens); `whole(line, second, half)` and `less(line, second, half)`, integer scales
// and zeros of groups; `end(super, half, some, less, found)`, which adds a super's sums to those before; `fetch(line)`, which prefetches.
#pragma once
#include "layout.h"
#include "planes.h"

namespace troupe {

// Sums [token][32] of up to four tokens, which are quantized (planes.h).
template <int ROWS, class S>
void multiply_vectors(const S& of, const Whole& x, float* sums) {
    constexpr bool twice = S::GROUP == TILE;
    __m512 found[ROWS][2], some[ROWS][2], less[ROWS][2];
    for (int row = 0; row < ROWS; row++) found[row][0] = found[row][1] = _mm512_setzero_ps();
    for (int64_t line = 0, super = 0; line < x.lines; super++) {
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++) some[row][half] = less[row][half] = _mm512_setzero_ps();
        for (const int64_t end = line + of.lines(); line < end; line++) {
            of.fetch(line);
            __m512 values[ROWS][2];
            const auto part = [&]<int PART>() {
                VectorSums<ROWS> sum;
                const uint8_t* cell = of.cell(line);
#pragma GCC unroll 8
                for (int64_t four = twice ? 4 * PART : 0; four < (twice ? 4 * PART + 4 : 8); four++)
                    sum.add(x, line, four, of.codes(cell, 0, four), of.codes(cell, 1, four));
                for (int half = 0; half < 2; half++) {
                    const __m512 by = S::GROUP ? of.whole(line, PART, half) : _mm512_setzero_ps();
                    for (int row = 0; row < ROWS; row++) {
                        const __m512 value = sum.of(row, half, x.offsets + (row * x.lines + line) * OFFSETS + (twice ? PART : HALVES));
                        values[row][half] = !S::GROUP ? value : PART ? _mm512_fmadd_ps(value, by, values[row][half]) : _mm512_mul_ps(value, by);
                    }
                }
            };
            part.template operator()<0>();
            if constexpr (twice) part.template operator()<1>();
            for (int half = 0; half < 2; half++) {
                for (int row = 0; row < ROWS; row++) {
                    const float* scales = x.scales + (row * x.lines + line) * SCALES;
                    some[row][half] = _mm512_fmadd_ps(values[row][half], _mm512_set1_ps(scales[0]), some[row][half]);
                    const auto take = [&](__m512 by, float sum) {
                        less[row][half] = _mm512_fmadd_ps(by, _mm512_set1_ps(sum), less[row][half]);
                    };
                    if constexpr (S::ZEROS && S::GROUP == 0) take(_mm512_set1_ps(1.0f), scales[1]);
                    if constexpr (S::ZEROS && S::GROUP == DEPTH) take(of.less(line, 0, half), scales[1]);
                    if constexpr (S::ZEROS && twice)
                        for (int part = 0; part < HALVES; part++) take(of.less(line, part, half), scales[2 + part]);
                }
            }
        }
        for (int half = 0; half < 2; half++)
            for (int row = 0; row < ROWS; row++) found[row][half] = of.end(super, half, some[row][half], less[row][half], found[row][half]);
    }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) _mm512_store_ps(sums + row * WIDE + half * TILE, found[row][half]);
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
void multiply_shared(const S& of, const Shared& x, int64_t row, int64_t rows, float* sums) {
    alignas(64) bf16 wide[2][WIDE * DEPTH];
    alignas(64) float found[2][WIDE * WIDE];
    const int64_t each = of.lines();
    for (int64_t i = 0; i < rows * WIDE; i += TILE) _mm512_store_ps(sums + i, _mm512_setzero_ps());

    const auto take = [&](int64_t part) {  // scales and adds the stored sums of a part
        const float* from = found[part % 2];
        for (int64_t half = 0; half < 2; half++) {
            const float* share = S::SUMS ? x.shares + (row * x.parts + part) * 2 : nullptr;
            for (int64_t i = half * TILE; i < rows * WIDE; i += WIDE) {
                __m512 some = _mm512_load_ps(from + i), sum = _mm512_setzero_ps();
                if constexpr (S::SUMS) {
                    some = _mm512_sub_ps(some, _mm512_set1_ps(share[0])), sum = _mm512_set1_ps(share[1]);
                    share += 2 * x.parts;
                }
                _mm512_store_ps(sums + i, of.end(part, half, some, sum, _mm512_load_ps(sums + i)));
            }
        }
    };

    const char* tokens = x.x + row * x.stride;
    of.open(0, wide[0]);
    for (int64_t part = 0, line = 0; part < x.parts; part++) {
        TileSums<float> tiles(rows, found[part % 2]);
        tiles.begin();
        for (const int64_t end = line + each; line < end; line++) {
            // A load of what was stored just now would wait for the store, so the next line is unpacked first.
            if (line + 1 < x.lines) of.open(line + 1, wide[(line + 1) % 2]);
            written();
            tiles.add(tokens + line * LINE, x.stride, wide[line % 2], [] {});
        }
        tiles.end();
        if (part) take(part - 1);  // for the same reason the part before
    }
    take(x.parts - 1);
}

}  // namespace troupe
