// Products with weights of e4m3, where an output, or a group of its inputs, has a scale. Every number of e4m3 is a number of bf16, so
// weights for up to 32 tokens are not rounded, and their sums are scaled (supers.h). For more tokens `value * scale` is rounded from
// float32 to bf16: such a product equals, bit for bit, the product with a weight that was dequantized to bf16 before (matrix.h).
#pragma once
#include "cells.h"

namespace troupe {

// Bytes of a packed weight: [block of 32 outputs][32 inputs] cells of 8 bits (cells.h), then [block][group] 32 float scales, then
// [block][32 inputs] a byte: whether any magnitude is below 2^-6, zero included.
inline int64_t packed_fp8(int64_t outputs, int64_t inputs, int64_t group) {
    return blocks(outputs) * (WIDE * (inputs + inputs / group * 4) + inputs / DEPTH);
}

// values uint8 [outputs, inputs] without a NaN, scales float [outputs, inputs / group].
inline void pack_fp8(const uint8_t* values, const float* scales, int64_t outputs, int64_t inputs, int64_t group, uint8_t* packed) {
    const int64_t groups = inputs / group;
    std::memset(packed, 0, packed_fp8(outputs, inputs, group));
    float* scale = reinterpret_cast<float*>(packed + blocks(outputs) * WIDE * inputs);
    uint8_t* small = reinterpret_cast<uint8_t*>(scale + blocks(outputs) * WIDE * groups);
    for (int64_t output = 0; output < outputs; output += WIDE)
        for (int64_t input = 0; input < inputs; input += DEPTH, packed += CELL, small++) {
            pack_fours(8, values + output * inputs + input, inputs, outputs - output, packed);
            for (int64_t i = 0; i < CELL; i++) *small |= (packed[i] & 0x78) == 0;
        }
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t each = 0; each < groups; each++)
            scale[(output / WIDE * groups + each) * WIDE + output % WIDE] = scales[output * groups + each];
}

// Converts a vector of e4m3 to bf16: its even bytes, and its odd ones.
struct Eights {
    __m512i of_small = _mm512_setr_epi32(0x3b000000, 0x3bc03b80, 0x3c203c00, 0x3c603c40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);  // times 2^-9
    __m512i magnitude = _mm512_set1_epi16(0x7f0), power = _mm512_set1_epi16(0x780), more = _mm512_set1_epi16(0x3c00);
    __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));

    // `shifted`: magnitudes in bits 4 to 10; `lowest`: in the lowest bits; `upper`: in the upper byte, with the sign.
    template <bool SMALL>
    __m512i one(__m512i shifted, __m512i lowest, __m512i upper) const {
        const __m512i bits = _mm512_and_si512(shifted, magnitude);
        __m512i found = _mm512_add_epi16(bits, more);
        if (SMALL) found = _mm512_mask_permutexvar_epi16(found, _mm512_testn_epi16_mask(bits, power), lowest, of_small);
        return _mm512_ternarylogic_epi32(sign, upper, found, 0xca);
    }

    template <bool SMALL>
    __m512i even(__m512i x) const {
        return one<SMALL>(_mm512_slli_epi16(x, 4), x, _mm512_slli_epi16(x, 8));
    }

    template <bool SMALL>
    __m512i odd(__m512i x) const {
        return one<SMALL>(_mm512_srli_epi16(x, 4), SMALL ? _mm512_srli_epi16(x, 8) : x, x);
    }

    // A cell, in the order of matrix.h.
    template <bool SMALL>
    void open(const uint8_t* cell, bf16* out) const {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; i++, cell += LINE, out += 2 * WIDE) {
            const __m512i all = _mm512_loadu_si512(cell);
            _mm512_store_si512(out, even<SMALL>(all));
            _mm512_store_si512(out + WIDE, odd<SMALL>(all));
        }
    }
};

struct Fp8Product : Widened {
    using Rounded = Product::Rounded;
    int64_t group;

    static constexpr bool whole_numbers() { return false; }  // tokens are not quantized
    static constexpr bool by_scaled() { return false; }
    static constexpr bool opens = true;
    static constexpr bool sums = false;  // there are no zeros, and no offsets
    bool by_shares() const { return rows <= group / 2; }
    static constexpr int32_t offset() { return 0; }
    int64_t shares() const { return group; }
    const uint8_t* cells(int64_t block) const { return reinterpret_cast<const uint8_t*>(weight) + block * inputs() * WIDE; }
    const float* scales(int64_t block) const {
        return reinterpret_cast<const float*>(cells(blocks(outputs))) + block * (inputs() / group) * WIDE;
    }
    const uint8_t* small(int64_t block) const { return reinterpret_cast<const uint8_t*>(scales(blocks(outputs))) + block * lines; }
    const char* coming(int64_t output) const { return reinterpret_cast<const char*>(cells(output / WIDE)); }
    const char* ready(int64_t output, char* space) const { return widen_block(*this, output / WIDE, reinterpret_cast<bf16*>(space)); }

    struct Supers;
    class Maker;

    template <class Call>
    void with_supers(int64_t block, Call call) const;
};

struct Fp8Product::Supers {
    static constexpr int GROUP = 0;
    static constexpr bool ZEROS = false, SUMS = false;

    int64_t each;
    const uint8_t *cells, *small;
    const float* scales;
    Eights eights;

    Supers(const Fp8Product& p, int64_t block)
        : each(p.group / DEPTH), cells(p.cells(block)), small(p.small(block)), scales(p.scales(block)) {}

    int64_t lines() const { return each; }
    void open(int64_t line, bf16* out) const {
        const uint8_t* cell = cells + line * CELL;
        for (int64_t i = 0; i < CELL; i += LINE) _mm_prefetch(reinterpret_cast<const char*>(cell + PREFETCHED + i), _MM_HINT_T0);
        small[line] ? eights.open<true>(cell, out) : eights.open<false>(cell, out);
    }
    __m512 whole(int64_t, int64_t, int64_t) const { return _mm512_setzero_ps(); }
    __m512 less(int64_t, int64_t, int64_t) const { return _mm512_setzero_ps(); }
    __m512 end(int64_t super, int64_t half, __m512 some, __m512, __m512 found) const {
        return _mm512_fmadd_ps(some, _mm512_loadu_ps(scales + super * WIDE + half * TILE), found);
    }
};

class Fp8Product::Maker {
  public:
    Maker(const Fp8Product& p, int64_t block) : supers_(p, block) {}

    // Half of the outputs, not of the inputs.
    template <int SECOND>
    void part(int64_t line, bf16* out) {
        if (!SECOND && line % supers_.each == 0)
            for (int64_t half = 0; half < 2; half++)
                spread(_mm512_loadu_ps(supers_.scales + line / supers_.each * WIDE + half * TILE), by_ + 2 * half);
        if (!SECOND) supers_.open(line, out);
        out += SECOND * CELL / 2;
        for (int64_t i = 0; i < CELL / WIDE / 2; i++, out += WIDE) {
            const __m512 low = _mm512_mul_ps(load(out), by_[2 * SECOND]), high = _mm512_mul_ps(load(out + TILE), by_[2 * SECOND + 1]);
            _mm512_store_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
        }
    }

  private:
    Supers supers_;
    __m512 by_[4];
};

template <class Call>
void Fp8Product::with_supers(int64_t block, Call call) const {
    call(Supers(*this, block));
}

}  // namespace troupe
