// Codes as they are packed, 32 inputs of 32 outputs a cell, and what becomes bf16 of them in the order of matrix.h.
//
// Of 2 and 3 bits: quarter by quarter of the outputs vectors whose lane is `2 * output + input % 2`: pair i of 16 in bits 2i; then
// high bits, of pair i in bit `i + 2`, rolled, two quarters a vector.
// Of 8 bits: bytes of [half][four inputs][output][4], as products of whole numbers take them, of four inputs the first, the third, the
// second and the last: words of the even bytes are a pair of inputs, and so are those of the odd ones.
// Of 4 to 6 bits: for each half of the outputs the lowest four bits of inputs 0 to 15, in such bytes, and of the others above them;
// then, half by half, the fifth bit of fours i in bit i, or the last two of fours 4j + i of vector j in bits 2i.
#pragma once
#include <bit>

#include "widened.h"

namespace troupe {

constexpr int64_t QUARTER = 8;  // outputs whose two inputs of a pair fill a vector of 32 bits each

// codes [output][inputs]; `packed` is zero.
inline void pack_fours(int64_t bits, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    const int64_t each = bits == 6 ? 4 : 8;  // fours of a byte of high bits
    for (int64_t output = 0; output < std::min(left, WIDE); output++)
        for (int64_t input = 0; input < DEPTH; input++) {
            const uint8_t code = codes[output * inputs + input];
            const int64_t half = output / TILE, four = input / 4, at = output % TILE * 4 + input % 2 * 2 + input % 4 / 2;
            if (bits == 8) {
                packed[(half * 8 + four) * LINE + at] = code;
                continue;
            }
            packed[(half * 4 + four % 4) * LINE + at] |= static_cast<uint8_t>((code & 15) << 4 * (four / 4));
            if (bits > 4)
                packed[(8 + half * 8 / each + four / each) * LINE + at] |= static_cast<uint8_t>(code >> 4 << (8 / each) * (four % each));
        }
}

inline void pack_cell(const Layout& of, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    std::memset(packed, 0, of.cell());
    if (of.in_fours()) return pack_fours(of.low, codes, inputs, left, packed);
    uint32_t* out = reinterpret_cast<uint32_t*>(packed);
    const int64_t each = 32 / of.low, vectors = TILE / each;  // pairs of a lane; lanes' vectors of a quarter
    uint32_t* high = out + 4 * vectors * TILE;
    for (int64_t output = 0; output < std::min(left, WIDE); output++)
        for (int64_t input = 0; input < DEPTH; input++) {
            const uint32_t code = codes[output * inputs + input];
            const int64_t quarter = output / QUARTER, lane = 2 * (output % QUARTER) + input % 2, pair = input / 2;
            out[(quarter * vectors + pair / each) * TILE + lane] |= (code & ((1u << of.low) - 1)) << of.low * (pair % each);
            if (!of.high) continue;
            const int64_t more = 16 * (quarter % 2);
            high[quarter / 2 * TILE + lane] |= std::rotl(code >> of.low, static_cast<int>(pair + of.low + more));
        }
}

// Of a cell of 4 to 8 bits, the codes of four inputs of a half's outputs, one a byte.
template <int BITS>
inline __m512i codes_of(const uint8_t* cell, int64_t half, int64_t four) {
    if constexpr (BITS == 8) return _mm512_loadu_si512(cell + (half * 8 + four) * LINE);
    const __m512i lowest = _mm512_set1_epi8(15);
    __m512i low = _mm512_loadu_si512(cell + (half * 4 + four % 4) * LINE);
    if (four >= 4) low = _mm512_srli_epi16(low, 4);
    if constexpr (BITS == 4) return _mm512_and_si512(low, lowest);
    const int64_t more = BITS == 6 ? 2 * half + four / 4 : half, at = BITS == 6 ? 2 * (four % 4) : four;
    __m512i high = _mm512_loadu_si512(cell + (8 + more) * LINE);
    high = at < 4 ? _mm512_slli_epi16(high, static_cast<unsigned>(4 - at)) : _mm512_srli_epi16(high, static_cast<unsigned>(at - 4));
    high = _mm512_and_si512(high, _mm512_set1_epi8(BITS == 6 ? 0x30 : 0x10));
    return _mm512_ternarylogic_epi32(lowest, low, high, 0xca);
}

// All of a cell of up to 7 bits as bf16, each 128 more. codes(cell, half, four)
template <class Codes>
inline void open_cell(const uint8_t* cell, bf16* out, const Codes& codes) {
    const __m512i more = _mm512_set1_epi16(0x4300), lower = _mm512_set1_epi16(0xff);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; i++, out += 2 * WIDE) {
        const __m512i all = codes(cell, i / 8, i % 8);
        _mm512_store_si512(out, _mm512_ternarylogic_epi32(all, lower, more, 0xea));  // all & lower | more
        _mm512_store_si512(out + WIDE, _mm512_or_si512(_mm512_srli_epi16(all, 8), more));
    }
}

// Scales and zeros of the four quarters, each for the two inputs of a pair.
struct Factors {
    __m512 scales[4], zeros[4];
};

inline __m512 halves_at(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline __m512 signed_at(const uint8_t* from) { return load(reinterpret_cast<const int8_t*>(from)); }
inline __m512 unsigned_at(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Of group `group` of the super at `part`.
inline void factors_of(const Layout& of, const uint8_t* part, int64_t group, Factors& to) {
    const int64_t groups = of.groups();
    const uint8_t* whole = part + WIDE * 2 * (1 + of.zeros) + group * WIDE;
    for (int64_t half = 0; half < 2; half++) {
        __m512 scale = halves_at(part + half * LINE / 2), zero = _mm512_setzero_ps();
        if (groups) scale = _mm512_mul_ps(scale, signed_at(whole + half * TILE));
        if (of.zeros) {
            zero = halves_at(part + LINE + half * LINE / 2);
            if (groups) zero = _mm512_mul_ps(zero, unsigned_at(whole + groups * WIDE + half * TILE));
        } else if (of.offset) {
            zero = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(of.offset)));  // exactly: of few bits
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
            const __m512i all = codes(cell, half, four);
            for (int pair = 0; pair < 2; pair++) {
                const auto made = [&](int eight) { return make(order.floats(all, pair, eight), 2 * half + eight); };
                _mm512_store_si512(out + half * CELL / 2 + (2 * four + pair) * WIDE,
                                   reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(made(1), made(0))));
            }
        }
}

// Pairs 0 to 7 or 8 to 15 of a cell of 2 or 3 bits, as `eight` is 0 or 1 -> bf16 [half][pair][output][2]
template <int LOW, int HIGH>
inline void widen_pairs(const Layout& of, const uint8_t* cell, int64_t eight, const Factors& by, bf16* out) {
    constexpr int64_t VECTORS = LOW / 2;  // of a quarter's low codes
    const __m512i select = _mm512_set1_epi32((1 << LOW) - 1);
    const __m512 first = _mm512_loadu_ps(of.table), second = _mm512_loadu_ps(of.table + TILE);
    const uint8_t* plane = cell + 4 * VECTORS * 64;
    for (int64_t half = 0; half < 2; half++) {
        __m512i low[2], high[2];
        for (int64_t side = 0; side < 2; side++) {
            const int64_t quarter = 2 * half + side;
            low[side] = _mm512_loadu_si512(cell + quarter * 64);
            low[side] = _mm512_srlv_epi32(low[side], _mm512_set1_epi32(16 * eight));
            if (HIGH == 0) continue;
            high[side] = _mm512_loadu_si512(plane + half * 64);
            high[side] = _mm512_rorv_epi32(high[side], _mm512_set1_epi32(8 * eight + 16 * side));
        }
        bf16* to = out + half * CELL / 2 + 8 * eight * WIDE;
        for (int64_t pair = 0; pair < 8; pair++, to += WIDE) {
            __m512 made[2];
            for (int64_t side = 0; side < 2; side++) {
                __m512 value;
                if constexpr (HIGH == 0) {
                    value = _mm512_permutexvar_ps(low[side], first);  // takes four bits
                } else {
                    const __m512i code = _mm512_ternarylogic_epi32(select, low[side], high[side], 0xca);
                    value = _mm512_permutex2var_ps(first, code, second);  // five
                    high[side] = _mm512_ror_epi32(high[side], HIGH);
                }
                low[side] = _mm512_srli_epi32(low[side], LOW);
                made[side] = _mm512_fmsub_ps(value, by.scales[2 * half + side], by.zeros[2 * half + side]);
            }
            _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(made[1], made[0])));
        }
    }
}

}  // namespace troupe
