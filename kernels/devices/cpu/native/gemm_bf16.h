// Products of bf16 weights.
#pragma once
#include "gemm.h"

namespace troupe {

constexpr int64_t DEPTH = LINE / sizeof(bf16);  // inputs of a line

inline void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed) {
    pack_lines(weight, outputs, inputs * sizeof(bf16), packed);
}

// Row `output` of a packed weight.
inline void unpack(const bf16* packed, int64_t output, int64_t inputs, bf16* row) {
    const bf16* from = packed + output / WIDE * WIDE * inputs + output % WIDE / TILE * TILE * DEPTH + output % TILE * 2;
    for (int64_t depth = 0; depth < inputs; depth += DEPTH, from += WIDE * DEPTH)
        store_line(row + depth, gather(reinterpret_cast<const int32_t*>(from), lane_numbers() << 4));
}

struct Product : Operands {
    using Sum = float;

    int64_t inputs() const { return lines * DEPTH; }

    struct Rounded {
        Floats low, high;

        Rounded(const Product& p, int64_t output) : low(Floats{}), high(low) {
            if (!p.bias) return;
            const int64_t left = p.outputs - output;
            low = load(p.bias + output, first_lanes(left));
            if (left > TILE) high = load(p.bias + output + TILE, first_lanes(left - TILE));
        }

        Ints operator()(const float* sums, int64_t) const {
            return to_bf16(load(sums) + low, load(sums + TILE) + high);
        }
    };
};

inline void multiply(Team& team, const Product& p) { multiply_all(team, p); }

}  // namespace troupe
