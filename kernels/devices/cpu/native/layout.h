// How weights in blocks of whole numbers of 2 to 6 bits are kept, as GGUF files have them.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace troupe {

constexpr int64_t CELL = WIDE * DEPTH;  // weights of 32 outputs and 32 inputs

// The head of a packed weight of codes of 2 to 6 `bits`. `super` inputs share a scale (and a zero) in float16; with `group` below it,
// whole scales (and zeros) of groups multiply these. A code is `offset` more than what it stands for; one of 4 bits stands for a
// number of `table`, which with `offset` is from 0 to 255.
struct alignas(64) Layout {
    int64_t bits, super, group, zeros, offset;
    float table[16];

    int64_t groups() const { return group < super ? super / group : 0; }

    // Bytes of 32 outputs and `super` inputs.
    int64_t cell() const { return CELL * bits / 8; }
    int64_t factors() const { return WIDE * (1 + zeros) * (2 + groups()); }
    int64_t part() const { return factors() + super / DEPTH * cell(); }
    int64_t block(int64_t inputs) const { return inputs / super * part(); }
};

// codes uint8 [outputs, inputs]; scales, zeros float16 [outputs, inputs / super]; whole int8 and less uint8 [outputs,
// inputs / group]: the groups' scales and zeros.
struct Blocks {
    const uint8_t* codes;
    const uint16_t *scales, *zeros;
    const int8_t* whole;
    const uint8_t* less;
};

}  // namespace troupe
