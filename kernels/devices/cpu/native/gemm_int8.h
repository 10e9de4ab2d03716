// Products of int8 weights, each output with a scale, with tokens that are quantized to int8 row by row.
//
// Without AMX the products are of unsigned tokens with signed weights: tokens are stored 128 larger, and an output's correction
// takes off 128 times the sum of its weights.
#pragma once
#include <bit>
#include <cmath>
#include <vector>

#include "gemm.h"

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
    const bf16* floats;
    int64_t stride_floats;
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
        Floats bias[2], scales[2];
        Ints correction[2];

        Rounded(const Product8& p, int64_t output) : of_tokens(p.tokens->scales.data() + p.first) {
            for (int64_t half = 0; half < 2; half++) {
                const int64_t at = output + half * TILE, left = std::max<int64_t>(0, p.outputs - at);
                const Mask mask = left >= TILE ? 0xffff : static_cast<Mask>((1 << left) - 1);
                bias[half] = p.bias ? load(p.bias + at, mask) : Floats{};
                scales[half] = load(p.scales() + at);
                correction[half] = load_line(p.correction() + at);
            }
        }

        Ints operator()(const int32_t* sums, int64_t row) const {
            const auto value = [&](int64_t half) {
                const Ints sum = load_line(sums + half * TILE) + correction[half];
                const Floats product_scale = scales[half] * splat(of_tokens[row]);
                return fma(to_floats(sum), product_scale, bias[half]);
            };
            return to_bf16(value(0), value(1));
        }
    };
};

// Integers cannot express what is not finite: the scale of a token with such a value is not finite either.
inline void round_token(const Product8& p, int64_t row) {
    const bf16* x = p.floats + row * p.stride_floats;
    const int64_t inputs = p.inputs();
    Ints bits = Ints{};  // of the largest magnitude; as an integer a NaN is larger than infinity
    for (int64_t i = 0; i < inputs; i += 16)
        bits = max(bits, bits_of(abs(load(x + i))));
    const float amax = std::bit_cast<float>(max_all(bits));
    const float scale = p.scale == 0 ? std::max(amax / 127.0f, 1.17549435e-38f) : p.scale;
    const Floats divisor = splat(scale), far = splat(1e9f), below = splat(-1e9f);
    const Ints offset = splat(static_cast<int>(p.offset));
    int8_t* out = p.tokens->values.data() + (p.first + row) * inputs;
    for (int64_t i = 0; i < inputs; i += 16) {
        const Floats value = max(min(load(x + i) / divisor, far), below);
        const Ints integers = to_ints(value) + offset;
        const Ints clamped = max(min(integers, splat(127)), splat(-128));
        store_bytes(out + i, AMX ? clamped : clamped ^ splat(0x80));
    }
    p.tokens->scales[p.first + row] = std::isfinite(amax) ? scale : amax;
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
