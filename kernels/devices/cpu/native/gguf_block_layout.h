// The layout of packed weights in blocks of integers of 2 to 6 or of 8 bits, as in GGUF files.
#pragma once
#include <cstdint>

#include "gemm_bf16.h"

namespace troupe {

constexpr int64_t CELL = WIDE * DEPTH;  // weights of 32 outputs and 32 inputs

// The head of a packed weight with codes of 2 to 6 or of 8 `bits`. A superblock of `super` inputs shares a scale (and a zero) in float16. If
// `group` is smaller, integer scales (and zeros) of groups multiply these. A code is its value plus `offset`. A code of 4 bits is
// an index of `table`, whose values plus `offset` are in 0 .. 255.
struct alignas(64) Layout {
    int64_t bits, super, group, zeros, offset;
    float table[16];

    int64_t groups() const { return group < super ? super / group : 0; }

    // Bytes for 32 outputs and `super` inputs.
    int64_t cell() const { return CELL * bits / 8; }
    int64_t factors() const { return WIDE * (1 + zeros) * (2 + groups()); }
    int64_t part() const { return factors() + super / DEPTH * cell(); }
    int64_t block(int64_t inputs) const { return inputs / super * part(); }
};

// codes uint8 [outputs, inputs]; scales, zeros float16 [outputs, inputs / super]; group_scales int8 and group_zeros uint8
// [outputs, inputs / group].
struct Blocks {
    const uint8_t* codes;
    const uint16_t *scales, *zeros;
    const int8_t* group_scales;
    const uint8_t* group_zeros;
};

}  // namespace troupe
