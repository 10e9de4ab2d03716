// Packed codes, in cells of 32 inputs and 32 outputs, and their conversion to bf16 in the order of gemm_bf16.h.
//
// 8 bits: bytes [half][four inputs][output][4], the order that integer products take. The four inputs are stored as first, third,
// second, last, so that the even bytes of a word pair are two neighboring inputs, and so are the odd bytes.
// 4 to 6 bits: for each half of the outputs, the lowest four bits of inputs 0 to 15 in such bytes, with those of inputs 16 to 31 in the
// upper four bits. Then, for each half, the fifth bit of four i in bit i, or the last two bits of four 4j + i of vector j in bits 2i.
// 2 and 3 bits: the lowest two as the last two of 6 bits, then the third as the fifth of 5 bits.
#pragma once
#include <bit>

#include "gemm_few_bits.h"

namespace troupe {

// Packs codes [output][inputs] into `packed`, which is zero before.
inline void pack_fours(int64_t bits, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    const int64_t lowest = bits == 8 ? 8 : bits < 4 ? 2 : 4;
    // Packs `of` bits of each code, from bit `from`, into vectors from `first`; a byte holds as many fours as fit.
    const auto put = [&](int64_t of, int64_t from, int64_t first) {
        const int64_t vectors = of;  // of a half
        for (int64_t output = 0; output < std::min(left, WIDE); output++)
            for (int64_t input = 0; input < DEPTH; input++) {
                const int64_t half = output / TILE, four = input / 4, at = output % TILE * 4 + input % 2 * 2 + input % 4 / 2;
                const int64_t vector = of == 4 ? four % 4 : four * vectors / 8, place = of == 4 ? four / 4 : four % (8 / vectors);
                const uint32_t code = codes[output * inputs + input] >> from & ((1u << of) - 1);
                packed[(first + half * vectors + vector) * LINE + at] |= static_cast<uint8_t>(code << of * place);
            }
    };
    put(lowest, 0, 0);
    if (bits > lowest) put(bits - lowest, lowest, 2 * lowest);
}

inline void pack_cell(const Layout& of, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    std::memset(packed, 0, of.cell());
    pack_fours(of.bits, codes, inputs, left, packed);
}

// The codes of four inputs of a half's outputs in a cell, one in the lowest bits of each byte. Higher bits are undefined.
template <int BITS>
inline Ints bytes_of(const uint8_t* cell, int64_t half, int64_t four) {
    if constexpr (BITS == 8) return load_line(cell + (half * 8 + four) * LINE);
    const auto shifted = [&](int64_t vector, int64_t right) {
        const Ints x = load_line(cell + vector * LINE);
        if (right == 0) return x;
        return right > 0 ? words_right(x, static_cast<unsigned>(right)) : words_left(x, static_cast<unsigned>(-right));
    };
    if constexpr (BITS < 4) {
        const Ints low = shifted(half * 2 + four / 4, 2 * (four % 4));
        if constexpr (BITS == 2) return low;
        return select_bits(splat_bytes(3), low, shifted(4 + half, four - 2));
    } else {
        const Ints low = shifted(half * 4 + four % 4, four < 4 ? 0 : 4);
        if constexpr (BITS == 4) return low;
        const Ints high = BITS == 6 ? shifted(8 + 2 * half + four / 4, 2 * (four % 4) - 4) : shifted(8 + half, four - 4);
        return select_bits(splat_bytes(15), low, high);
    }
}

template <int BITS>
inline Ints codes_of(const uint8_t* cell, int64_t half, int64_t four) {
    if constexpr (BITS == 8) return bytes_of<BITS>(cell, half, four);
    return bytes_of<BITS>(cell, half, four) & splat_bytes((1 << BITS) - 1);
}

// Prefetches a cell's `BITS` bits a weight, and `before` bytes before it. Bytes go into the second cache only: the requests of one token's
// product with them would fill what the first cache has for misses.
template <int BITS>
inline void fetch_cell(const uint8_t* cell, int64_t before = 0) {
    const char* from = reinterpret_cast<const char*>(cell) + PREFETCH_BYTES - before;
#pragma GCC unroll 18
    for (int64_t i = 0; i < CELL * BITS / 8 + before; i += LINE) BITS == 8 ? prefetch_second(from + i) : prefetch(from + i);
}

// Writes all codes of a cell, of up to 7 bits, as bf16 plus 128. codes(cell, half, four)
template <class Codes>
inline void widen_cell(const uint8_t* cell, bf16* out, const Codes& codes) {
    const Ints more = splat_words(0x4300), lower = splat_words(0xff);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; i++, out += 2 * WIDE) {
        const Ints all = codes(cell, i / 8, i % 8);
        store_line(out, and_or(all, lower, more));  // all & lower | more
        store_line(out + WIDE, words_right(all, 8) | more);
    }
}

// Scales and zeros of the four quarters of the outputs, repeated for the two inputs of a pair.
struct Factors {
    Floats scales[4], zeros[4];
};

inline Floats signed_at(const uint8_t* from) { return load(reinterpret_cast<const int8_t*>(from)); }
inline Floats unsigned_at(const uint8_t* from) { return to_floats(load_unsigned(from)); }

// The factors of group `group` in the superblock at `part`.
inline void factors_of(const Layout& of, const uint8_t* part, int64_t group, Factors& to) {
    const int64_t groups = of.groups();
    const uint8_t* integers = part + WIDE * 2 * (1 + of.zeros) + group * WIDE;
    for (int64_t half = 0; half < 2; half++) {
        Floats scale = load_halves(part + half * LINE / 2), zero = Floats{};
        if (groups) scale = scale * signed_at(integers + half * TILE);
        if (of.zeros) {
            zero = load_halves(part + LINE + half * LINE / 2);
            if (groups) zero = zero * unsigned_at(integers + groups * WIDE + half * TILE);
        } else if (of.offset) {
            zero = scale * splat(static_cast<float>(of.offset));  // exact, since the offset has few bits
        }
        spread(scale, to.scales + 2 * half);
        spread(zero, to.zeros + 2 * half);
    }
}

// Widens fours `BEGIN` to `END` of a cell to bf16. codes(cell, half, four); make(floats of codes, quarter)
template <int BEGIN, int END, class Codes, class Make>
inline void widen_fours(const uint8_t* cell, const PairOrder& order, bf16* out, const Codes& codes, const Make& make) {
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; half++)
#pragma GCC unroll 8
        for (int64_t four = BEGIN; four < END; four++) {
            const Ints all = codes(cell, half, four);
            for (int pair = 0; pair < 2; pair++) {
                const auto made = [&](int eight) { return make(order.floats(all, pair, eight), 2 * half + eight); };
                store_line(out + half * CELL / 2 + (2 * four + pair) * WIDE, to_bf16(made(0), made(1)));
            }
        }
}

}  // namespace troupe
