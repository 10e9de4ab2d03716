// Products of bf16 weights.
#pragma once
#include "products.h"

namespace troupe {

constexpr int64_t DEPTH = LINE / sizeof(bf16);  // inputs of a line

inline void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed) {
    pack_lines(weight, outputs, inputs * sizeof(bf16), packed);
}

// Row `output` of a packed weight.
inline void unpack(const bf16* packed, int64_t output, int64_t inputs, bf16* row) {
    const bf16* from = packed + output / WIDE * WIDE * inputs + output % WIDE / TILE * TILE * DEPTH + output % TILE * 2;
    const __m512i pairs = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(TILE));
    for (int64_t depth = 0; depth < inputs; depth += DEPTH, from += WIDE * DEPTH)
        _mm512_storeu_si512(row + depth, _mm512_i32gather_epi32(pairs, from, 4));
}

struct Product : Operands {
    using Sum = float;

    int64_t inputs() const { return lines * DEPTH; }

    struct Rounded {
        __m512 low, high;

        Rounded(const Product& p, int64_t output) : low(_mm512_setzero_ps()), high(low) {
            if (!p.bias) return;
            const int64_t left = p.outputs - output;
            const __mmask32 mask = left >= WIDE ? ~0u : (1u << left) - 1;
            low = load(p.bias + output, static_cast<__mmask16>(mask));
            high = load(p.bias + output + TILE, static_cast<__mmask16>(mask >> TILE));
        }

        __m512i operator()(const float* sums, int64_t) const {
            return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_add_ps(_mm512_load_ps(sums + TILE), high),
                                                                 _mm512_add_ps(_mm512_load_ps(sums), low)));
        }
    };
};

inline void multiply(Team& team, const Product& p) { multiply_all(team, p); }

}  // namespace troupe
