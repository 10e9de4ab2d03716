// Products of int8 weights, each output with a scale, with tokens that are quantized to int8 row by row.
//
// Without AMX the products are of unsigned tokens with signed weights: tokens are stored 128 larger, and an output's correction
// takes off 128 times the sum of its weights.
#pragma once
#include <bit>
#include <cmath>
#include <vector>

#include "products.h"

namespace troupe {

// Bytes of a packed weight: its values, then a float scale of each output, then an int32 correction of each.
inline int64_t packed8(int64_t outputs, int64_t inputs) { return blocks(outputs) * WIDE * (inputs + 8); }

// As `pack_lines`, then scales and corrections; `correction` may be null.
inline void pack8(const int8_t* weight, const float* scales, const int32_t* correction, int64_t outputs, int64_t inputs,
                  int8_t* packed) {
    const int64_t wide = blocks(outputs) * WIDE;
    char* behind = pack_lines(weight, outputs, inputs, packed);
    std::memset(behind, 0, wide * 8);
    std::memcpy(behind, scales, outputs * 4);
    if (correction) std::memcpy(behind + wide * 4, correction, outputs * 4);
    for (int64_t output = 0; !AMX && output < outputs; output++) {
        int32_t sum = 0, all;
        for (int64_t input = 0; input < inputs; input++) sum += weight[output * inputs + input];
        char* at = behind + (wide + output) * 4;
        std::memcpy(&all, at, 4);
        all -= 128 * sum;
        std::memcpy(at, &all, 4);
    }
}

// Quantized tokens [rows, inputs], and the scale of each.
struct Tokens8 {
    std::vector<int8_t> values;
    std::vector<float> scales;

    void reserve(int64_t rows, int64_t inputs) {
        if (static_cast<int64_t>(values.size()) < rows * inputs) values.resize(rows * inputs);
        if (static_cast<int64_t>(scales.size()) < rows) scales.resize(rows);
    }
};

struct Product8 : Operands {
    const bf16* asked;
    int64_t stride_asked;
    Tokens8* tokens;
    float scale;  // of every token; 0: each token has its own
    int64_t offset;
    int64_t first = 0;  // where its tokens begin in `tokens`
    using Sum = int32_t;

    int64_t inputs() const { return lines * LINE; }
    const float* scales() const { return reinterpret_cast<const float*>(block(blocks(outputs) * WIDE)); }
    const int32_t* correction() const { return reinterpret_cast<const int32_t*>(scales() + blocks(outputs) * WIDE); }

    struct Rounded {
        const float* of_tokens;
        __m512 bias[2], scales[2];
        __m512i correction[2];

        Rounded(const Product8& p, int64_t output) : of_tokens(p.tokens->scales.data() + p.first) {
            for (int64_t half = 0; half < 2; half++) {
                const int64_t at = output + half * TILE, left = std::max<int64_t>(0, p.outputs - at);
                const __mmask16 mask = left >= TILE ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
                bias[half] = p.bias ? load(p.bias + at, mask) : _mm512_setzero_ps();
                scales[half] = _mm512_loadu_ps(p.scales() + at);
                correction[half] = _mm512_loadu_si512(p.correction() + at);
            }
        }

        __m512i operator()(const int32_t* sums, int64_t row) const {
            const auto value = [&](int64_t half) {
                const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums + half * TILE), correction[half]);
                const __m512 by = _mm512_mul_ps(scales[half], _mm512_set1_ps(of_tokens[row]));
                return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), by, bias[half]);
            };
            return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(value(1), value(0)));
        }
    };
};

// Integers cannot express what is not finite: the scale of a token with such a value is not finite either.
inline void round_token(const Product8& p, int64_t row) {
    const bf16* x = p.asked + row * p.stride_asked;
    const int64_t inputs = p.inputs();
    __m512i bits = _mm512_setzero_si512();  // of the largest magnitude; as an integer a NaN is larger than infinity
    for (int64_t i = 0; i < inputs; i += 16)
        bits = _mm512_max_epi32(bits, _mm512_castps_si512(_mm512_abs_ps(load(x + i))));
    const float most = std::bit_cast<float>(_mm512_reduce_max_epi32(bits));
    const float scale = p.scale == 0 ? std::max(most / 127.0f, 1.17549435e-38f) : p.scale;
    const __m512 by = _mm512_set1_ps(scale), far = _mm512_set1_ps(1e9f), below = _mm512_set1_ps(-1e9f);
    const __m512i offset = _mm512_set1_epi32(static_cast<int>(p.offset));
    int8_t* out = p.tokens->values.data() + (p.first + row) * inputs;
    for (int64_t i = 0; i < inputs; i += 16) {
        const __m512 value = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(load(x + i), by), far), below);
        const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(value), offset);
        const __m128i bytes = _mm512_cvtsepi32_epi8(whole);
        const __m128i stored = AMX ? bytes : _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x80)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), stored);
    }
    p.tokens->scales[p.first + row] = std::isfinite(most) ? scale : most;
}

inline void round_chunk(void* context, int64_t chunk, int) {
    const Product8& p = *static_cast<const Product8*>(context);
    for (int64_t row = 8 * chunk; row < std::min(p.rows, 8 * chunk + 8); row++) round_token(p, row);
}

inline void multiply(Team& team, Product8 p) {
    p.tokens->reserve(p.rows, p.inputs());
    team.each((p.rows + 7) / 8, round_chunk, &p);
    p.x = reinterpret_cast<const char*>(p.tokens->values.data()), p.stride_x = p.inputs();
    multiply_all(team, p);
}

}  // namespace troupe
