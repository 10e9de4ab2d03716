// Products of whole numbers on AMX: int8 weights with a scale for each output, tokens rounded to int8 as they come.
#pragma once
#include <bit>
#include <cmath>
#include <vector>

#include "matrix.h"

namespace troupe {

constexpr int64_t DEPTH8 = 64;  // int8 of a tile's row

// Bytes of a packed weight: its values, then of each output a float scale, then an int32 correction.
inline int64_t packed8(int64_t outputs, int64_t inputs) { return blocks(outputs) * WIDE * (inputs + 8); }

// weight [outputs, inputs] -> [block of 32 outputs][64 inputs][half of 16][four inputs][output][4], zeros at the end
inline void pack8(const int8_t* weight, const float* scales, const int32_t* correction, int64_t outputs, int64_t inputs,
                  int8_t* packed) {
    const int64_t wide = blocks(outputs) * WIDE;
    for (int64_t block = 0; block < blocks(outputs); block++)
        for (int64_t depth = 0; depth < inputs; depth += DEPTH8)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t four = 0; four < TILE; four++)
                    for (int64_t lane = 0; lane < TILE; lane++, packed += 4) {
                        const int64_t output = block * WIDE + half * TILE + lane;
                        uint32_t all = 0;
                        if (output < outputs) std::memcpy(&all, weight + output * inputs + depth + 4 * four, 4);
                        std::memcpy(packed, &all, 4);
                    }
    std::memset(packed, 0, wide * 8);
    std::memcpy(packed, scales, outputs * 4);
    if (correction) std::memcpy(packed + wide * 4, correction, outputs * 4);
}

// Tokens as whole numbers [rows, inputs], and the scale of each.
struct Tokens8 {
    std::vector<int8_t> values;
    std::vector<float> scales;
};

struct Product8 {
    const bf16* x;
    const int8_t* weight;
    const bf16* bias;
    bf16* out;
    Tokens8* tokens;
    int64_t rows, inputs, outputs, stride_x, stride_out, chunk;
    float scale;  // of every token; 0: each token's own
    int64_t offset;
    const float* scales() const { return reinterpret_cast<const float*>(weight + blocks(outputs) * WIDE * inputs); }
    const int32_t* correction() const { return reinterpret_cast<const int32_t*>(scales() + blocks(outputs) * WIDE); }
};

// What is not finite in a token is lost in whole numbers: then its scale is what is not.
inline void round_token(const Product8& p, int64_t row) {
    const bf16* x = p.x + row * p.stride_x;
    __m512i bits = _mm512_setzero_si512();  // of the largest number: compared so, a NaN is larger than infinity
    for (int64_t i = 0; i < p.inputs; i += 16)
        bits = _mm512_max_epi32(bits, _mm512_castps_si512(_mm512_abs_ps(load(x + i))));
    const float most = std::bit_cast<float>(_mm512_reduce_max_epi32(bits));
    const float scale = p.scale == 0 ? std::max(most / 127.0f, 1.17549435e-38f) : p.scale;
    const __m512 by = _mm512_set1_ps(scale), far = _mm512_set1_ps(1e9f), below = _mm512_set1_ps(-1e9f);
    const __m512i offset = _mm512_set1_epi32(static_cast<int>(p.offset));
    int8_t* out = p.tokens->values.data() + row * p.inputs;
    for (int64_t i = 0; i < p.inputs; i += 16) {
        const __m512 value = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(load(x + i), by), far), below);
        const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(value), offset);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtsepi32_epi8(whole));
    }
    p.tokens->scales[row] = std::isfinite(most) ? scale : most;
}

inline void round_chunk(void* context, int64_t chunk, int) {
    const Product8& p = *static_cast<const Product8*>(context);
    for (int64_t row = 8 * chunk; row < std::min(p.rows, 8 * chunk + 8); row++) round_token(p, row);
}

// Sums of a block that are still to be scaled and stored.
struct Pending8 {
    const int32_t* sums = nullptr;
    int64_t row = 0, rows = 0, output = 0;
};

inline void finish(const Product8& p, const Pending8& of, int64_t begin, int64_t end) {
    for (int64_t half = 0; half < WIDE; half += TILE) {
        const int64_t at = of.output + half, left = p.outputs - at;
        if (left <= 0) return;
        const __mmask16 mask = left >= TILE ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
        const __m512 scales = _mm512_loadu_ps(p.scales() + at);
        const __m512i correction = _mm512_loadu_si512(p.correction() + at);
        const __m512 bias = p.bias ? load(p.bias + at, mask) : _mm512_setzero_ps();
        for (int64_t i = begin; i < end; i++) {
            const __m512i sum = _mm512_add_epi32(_mm512_load_si512(of.sums + i * WIDE + half), correction);
            const __m512 by = _mm512_mul_ps(scales, _mm512_set1_ps(p.tokens->scales[of.row + i]));
            store(p.out + (of.row + i) * p.stride_out + at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), by, bias), mask);
        }
    }
}

// As `multiply_block`: what is pending is finished by vectors beside the tiles.
inline Pending8 multiply_block(const Product8& p, int64_t block, int64_t row, int64_t rows, int32_t* sums,
                               const Pending8& before) {
    const int64_t depths = p.inputs / DEPTH8;
    const int8_t* weight = p.weight + block * WIDE * p.inputs;
    const int8_t* x = p.tokens->values.data() + row * p.inputs;
    if (rows > TILE) {
        configure(TILE, static_cast<int>(rows - TILE));
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const int8_t* second = x + TILE * p.inputs;
        const int64_t each = (before.rows + depths - 1) / depths;
        for (int64_t depth = 0, done = 0; depth < depths; depth++) {
            if (done < before.rows) {
                const int64_t end = std::min(done + each, before.rows);
                finish(p, before, done, end);
                done = end;
            }
            _tile_loadd(4, x + depth * DEPTH8, p.inputs);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + 1024, 64);
            _tile_loadd(5, second + depth * DEPTH8, p.inputs);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
            weight += 2048;
        }
        _tile_stored(2, sums + TILE * WIDE, 128);
        _tile_stored(3, sums + TILE * WIDE + TILE, 128);
    } else {
        finish(p, before, 0, before.rows);
        configure(static_cast<int>(rows), 0);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t depth = 0; depth < depths; depth++) {
            for (int64_t line = 0; line < 2048; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(weight + 8192 + line), _MM_HINT_T0);
            _tile_loadd(4, x + depth * DEPTH8, p.inputs);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + 1024, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            weight += 2048;
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    return {sums, row, rows, block * WIDE};
}

inline void multiply8_chunk(void* context, int64_t chunk, int) {
    const Product8& p = *static_cast<const Product8*>(context);
    const int64_t all = blocks(p.outputs), each = (all + p.chunk - 1) / p.chunk;
    const int64_t panel = chunk / each * PANEL, first = chunk % each * p.chunk;
    const int64_t end = std::min(panel + PANEL, p.rows);
    alignas(64) int32_t sums[2][WIDE * WIDE];
    Pending8 pending;
    int turn = 0;
    for (int64_t block = first; block < std::min(first + p.chunk, all); block++)
        for (int64_t row = panel; row < end; row += WIDE, turn ^= 1)
            pending = multiply_block(p, block, row, std::min(WIDE, end - row), sums[turn], pending);
    finish(p, pending, 0, pending.rows);
}

inline void multiply(Team& team, Product8 p) {
    if (static_cast<int64_t>(p.tokens->values.size()) < p.rows * p.inputs) p.tokens->values.resize(p.rows * p.inputs);
    if (static_cast<int64_t>(p.tokens->scales.size()) < p.rows) p.tokens->scales.resize(p.rows);
    team.each((p.rows + 7) / 8, round_chunk, &p);
    const int64_t all = blocks(p.outputs), panels = (p.rows + PANEL - 1) / PANEL;
    p.chunk = std::max<int64_t>(1, std::min(all / (4 * team.size()), 1 + (1 << 17) / (WIDE * p.inputs)));
    team.each(panels * ((all + p.chunk - 1) / p.chunk), multiply8_chunk, &p);
}

}  // namespace troupe
