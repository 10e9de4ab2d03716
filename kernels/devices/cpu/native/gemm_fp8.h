// Products with weights of e4m3, where an output, or a group of its inputs, has a scale. Every number of e4m3 is a number of bf16, so
// weights for up to 32 tokens are not rounded, and their sums are scaled (gemm_superblocks.h). For more tokens `value * scale` is rounded from
// float32 to bf16: such a product equals, bit for bit, the product with a weight that was dequantized to bf16 before (gemm_bf16.h).
#pragma once
#include "packed_codes.h"

namespace troupe {

// Bytes of a packed weight: [block of 32 outputs][32 inputs] cells of 8 bits (packed_codes.h), then [block][group] 32 float scales, then
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
    static constexpr uint16_t SMALL_ONES[] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // times 2^-9
    Ints of_small = table_of_bytes(SMALL_ONES);
    Ints magnitude = splat_words(0x7f0), power = splat_words(0x780), more = splat_words(0x3c00);
    Ints sign = splat_words(static_cast<int16_t>(0x8000));

    // `shifted`: magnitudes in bits 4 to 10; `lowest`: in the lowest bits; `upper`: in the upper byte, with the sign.
    template <bool SMALL>
    Ints one(Ints shifted, Ints lowest, Ints upper) const {
        const Ints bits = shifted & magnitude;
        Ints result = add_words(bits, more);
        if (SMALL) result = select_words(bits, power, look_up_words(of_small, lowest), result);
        return select_bits(sign, upper, result);
    }

    template <bool SMALL>
    Ints even(Ints x) const {
        return one<SMALL>(words_left(x, 4), x, words_left(x, 8));
    }

    template <bool SMALL>
    Ints odd(Ints x) const {
        return one<SMALL>(words_right(x, 4), SMALL ? words_right(x, 8) : x, x);
    }

    // A cell, in the order of gemm_bf16.h.
    template <bool SMALL>
    void open(const uint8_t* cell, bf16* out) const {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; i++, cell += LINE, out += 2 * WIDE) {
            const Ints all = load_line(cell);
            store_line(out, even<SMALL>(all));
            store_line(out + WIDE, odd<SMALL>(all));
        }
    }
};

struct Fp8Product : Widened {
    using Rounded = Product::Rounded;
    int64_t group;

    static constexpr bool integer_codes() { return false; }  // tokens are not quantized
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
        for (int64_t i = 0; i < CELL; i += LINE) prefetch(cell + PREFETCH_BYTES + i);
        small[line] ? eights.open<true>(cell, out) : eights.open<false>(cell, out);
    }
    Floats group_scale(int64_t, int64_t, int64_t) const { return Floats{}; }
    Floats group_zero(int64_t, int64_t, int64_t) const { return Floats{}; }
    Floats end(int64_t super, int64_t half, Floats products, Floats, Floats result) const {
        return fma(products, load(scales + super * WIDE + half * TILE), result);
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
                spread(load(supers_.scales + line / supers_.each * WIDE + half * TILE), by_ + 2 * half);
        if (!SECOND) supers_.open(line, out);
        out += SECOND * CELL / 2;
        for (int64_t i = 0; i < CELL / WIDE / 2; i++, out += WIDE) {
            const Floats low = load(out) * by_[2 * SECOND], high = load(out + TILE) * by_[2 * SECOND + 1];
            store_line(out, to_bf16(low, high));
        }
    }

  private:
    Supers supers_;
    Floats by_[4];
};

template <class Call>
void Fp8Product::with_supers(int64_t block, Call call) const {
    call(Supers(*this, block));
}

}  // namespace troupe
