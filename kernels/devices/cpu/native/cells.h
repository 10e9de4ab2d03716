// Codes as they are packed, 32 inputs of 32 outputs a cell, and what becomes bf16 of them in the order of matrix.h.
//
// Of 8 bits: bytes of [half][four inputs][output][4], as products of whole numbers take them, of four inputs the first, the third, the
// second and the last: words of the even bytes are a pair of inputs, and so are those of the odd ones.
// Of 4 to 6 bits: for each half of the outputs the lowest four bits of inputs 0 to 15, in such bytes, and of the others above them;
// then, half by half, the fifth bit of fours i in bit i, or the last two of fours 4j + i of vector j in bits 2i.
// Of 2 and 3 bits: the lowest two as the last two of 6, then the third as the fifth of 5.
#pragma once
#include <bit>

#include "widened.h"

namespace troupe {

// codes [output][inputs]; `packed` is zero.
inline void pack_fours(int64_t bits, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    const int64_t lowest = bits == 8 ? 8 : bits < 4 ? 2 : 4;
    // `of` bits of a code, `from` some on, in vectors from `first` on, which have as many fours as fit into bytes.
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

// Of a cell, the codes of four inputs of a half's outputs, one in the lowest bits of each byte.
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

// All of a cell of up to 7 bits as bf16, each 128 more. codes(cell, half, four)
template <class Codes>
inline void open_cell(const uint8_t* cell, bf16* out, const Codes& codes) {
    const Ints more = splat_words(0x4300), lower = splat_words(0xff);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; i++, out += 2 * WIDE) {
        const Ints all = codes(cell, i / 8, i % 8);
        store_line(out, and_or(all, lower, more));  // all & lower | more
        store_line(out + WIDE, words_right(all, 8) | more);
    }
}

// Scales and zeros of the four quarters, each for the two inputs of a pair.
struct Factors {
    Floats scales[4], zeros[4];
};

inline Floats signed_at(const uint8_t* from) { return load(reinterpret_cast<const int8_t*>(from)); }
inline Floats unsigned_at(const uint8_t* from) { return to_floats(load_unsigned(from)); }

// Of group `group` of the super at `part`.
inline void factors_of(const Layout& of, const uint8_t* part, int64_t group, Factors& to) {
    const int64_t groups = of.groups();
    const uint8_t* whole = part + WIDE * 2 * (1 + of.zeros) + group * WIDE;
    for (int64_t half = 0; half < 2; half++) {
        Floats scale = load_halves(part + half * LINE / 2), zero = Floats{};
        if (groups) scale = scale * signed_at(whole + half * TILE);
        if (of.zeros) {
            zero = load_halves(part + LINE + half * LINE / 2);
            if (groups) zero = zero * unsigned_at(whole + groups * WIDE + half * TILE);
        } else if (of.offset) {
            zero = scale * splat(static_cast<float>(of.offset));  // exactly: of few bits
        }
        spread(scale, to.scales + 2 * half);
        spread(zero, to.zeros + 2 * half);
    }
}

// Fours `BEGIN` to `END` of a cell. codes(cell, half, four); make(floats of codes, quarter)
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
