// Products with weights in blocks of whole numbers of 2, 3 and 6 bits, as GGUF files have them, on AMX: each weight is made
// `scale * code - zero` in float32 in registers and rounded to bf16, so a product is, bit for bit, that with a weight
// which was made bf16 before (matrix.h).
#pragma once
#include <bit>
#include <vector>

#include "codes.h"
#include "matrix.h"

namespace troupe {

constexpr int64_t QUARTER = 8;  // outputs whose two inputs of a pair fill a vector of 32 bits each

// Codes of 2, 3 and 6 bits: [block of 32 outputs][super]: 32 float16 scales (and zeros), int8 scales [group][32] (and uint8
// zeros), then cells. Of a cell: quarter by quarter vectors whose lane is `2 * output + input % 2`.
//   2 bits: pair i of 16 in bits 2i; then high bits, of pair i in bit `i + 2`, rolled, two quarters a vector
//   6 bits: pair 5j + i of vector j of 3 from bit 17 + 6i on, rolled, and two bits of pair 15 in what is left, from 15 on

// Bytes of a packed weight: its head, then its blocks.
inline int64_t packed_blocks(const Layout& of, int64_t outputs, int64_t inputs) {
    const int64_t size = of.by_output() ? Coded(of).block(inputs) : of.block(inputs);
    return sizeof(Layout) + blocks(outputs) * size;
}

inline void pack_cell(const Layout& of, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    uint32_t* out = reinterpret_cast<uint32_t*>(packed);
    std::memset(packed, 0, of.cell());
    const int64_t each = 32 / of.low, vectors = TILE / each;  // pairs of a lane; lanes' vectors of a quarter
    uint32_t* high = out + 4 * vectors * TILE;
    for (int64_t output = 0; output < std::min(left, WIDE); output++)
        for (int64_t input = 0; input < DEPTH; input++) {
            const uint32_t code = codes[output * inputs + input];
            const int64_t quarter = output / QUARTER, lane = 2 * (output % QUARTER) + input % 2, pair = input / 2;
            if (of.low == 6) {
                uint32_t* to = out + quarter * 3 * TILE + lane;
                if (pair < 15) to[pair / 5 * TILE] |= std::rotl(code, static_cast<int>(17 + 6 * (pair % 5)));
                for (int64_t j = 0; pair == 15 && j < 3; j++) to[j * TILE] |= (code >> 2 * j & 3) << 15;
                continue;
            }
            out[(quarter * vectors + pair / each) * TILE + lane] |= (code & ((1u << of.low) - 1)) << of.low * (pair % each);
            if (!of.high) continue;
            const int64_t more = 16 * (quarter % 2);
            high[quarter / 2 * TILE + lane] |= std::rotl(code >> of.low, static_cast<int>(pair + of.low + more));
        }
}

// Outputs from `first` on, a multiple of 32, of a packed weight that has its head.
inline void pack_blocks(const Blocks& from, int64_t first, int64_t outputs, int64_t inputs, uint8_t* packed) {
    if (reinterpret_cast<const Layout*>(packed)->by_output()) return pack_codes(from, first, outputs, inputs, packed);
    const Layout& of = *reinterpret_cast<const Layout*>(packed);
    packed += sizeof(Layout) + first / WIDE * of.block(inputs);
    const int64_t supers = inputs / of.super, groups = of.groups();
    for (int64_t output = 0; output < outputs; output += WIDE)
        for (int64_t super = 0; super < supers; super++, packed += of.part()) {
            uint16_t* scales = reinterpret_cast<uint16_t*>(packed);
            uint8_t* whole = packed + WIDE * 2 * (1 + of.zeros);
            std::memset(packed, 0, of.factors());
            for (int64_t lane = 0; lane < std::min(WIDE, outputs - output); lane++) {
                const int64_t at = (output + lane) * supers + super;
                scales[lane] = from.scales[at];
                if (of.zeros) scales[WIDE + lane] = from.zeros[at];
                for (int64_t group = 0; group < groups; group++) {
                    whole[group * WIDE + lane] = static_cast<uint8_t>(from.whole[at * groups + group]);
                    if (of.zeros) whole[(groups + group) * WIDE + lane] = from.less[at * groups + group];
                }
            }
            for (int64_t cell = 0; cell < of.super / DEPTH; cell++)
                pack_cell(of, from.codes + output * inputs + super * of.super + cell * DEPTH, inputs, outputs - output,
                          packed + of.factors() + cell * of.cell());
        }
}

struct BlockProduct : Product {
    static constexpr bool made = true;

    const Layout& layout() const { return *reinterpret_cast<const Layout*>(weight); }
    const uint8_t* part(int64_t block) const {
        return reinterpret_cast<const uint8_t*>(weight) + sizeof(Layout) + block * layout().block(inputs());
    }
    const char* coming(int64_t output) const { return reinterpret_cast<const char*>(part(output / WIDE)); }
    const char* ready(int64_t output, char* space) const;
};

// Scales and zeros of the four quarters, each for the two inputs of a pair.
struct Factors {
    __m512 scales[4], zeros[4];
};

inline void spread(__m512 of, __m512* to) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    to[0] = _mm512_permutexvar_ps(low, of);
    to[1] = _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(QUARTER)), of);
}

// Of group `group` of the super at `part`.
inline void factors_of(const Layout& of, const uint8_t* part, int64_t group, Factors& to) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(part);
    const int64_t groups = of.groups();
    const uint8_t* whole = part + WIDE * 2 * (1 + of.zeros) + group * WIDE;
    for (int64_t half = 0; half < 2; half++) {
        const auto floats = [&](const uint16_t* from) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half * TILE)));
        };
        const auto bytes = [&](const uint8_t* from) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + half * TILE));
        };
        __m512 scale = floats(scales), zero = _mm512_setzero_ps();
        if (groups) scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(whole))));
        if (of.zeros) {
            zero = floats(scales + WIDE);
            if (groups) zero = _mm512_mul_ps(zero, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(whole + groups * WIDE))));
        } else if (of.offset) {
            zero = _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(of.offset)));
        }
        spread(scale, to.scales + 2 * half);
        spread(zero, to.zeros + 2 * half);
    }
}

// Pairs 0 to 7 or 8 to 15 of a cell, as `eight` is 0 or 1 -> bf16 [half][pair][output][2], the order of matrix.h.
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

// A cell of codes of 6 bits, of groups of 16 inputs. A code in the highest bits of a float's fraction is 64 and itself.
inline void widen_six(const uint8_t* cell, const Factors by[2], bf16* out) {
    const __m512i mask = _mm512_set1_epi32(63 << 17), sixty_four = _mm512_castps_si512(_mm512_set1_ps(64.0f));
    const __m512i two = _mm512_set1_epi32(3 << 17), four = _mm512_set1_epi32(15 << 17);
    for (int64_t half = 0; half < 2; half++) {
        __m512i codes[2][3], last[2];
        for (int64_t side = 0; side < 2; side++) {
            __m512i* of = codes[side];
            for (int64_t j = 0; j < 3; j++) of[j] = _mm512_loadu_si512(cell + (3 * (2 * half + side) + j) * 64);
            last[side] = _mm512_ternarylogic_epi32(two, _mm512_rol_epi32(of[0], 2), _mm512_rol_epi32(of[1], 4), 0xca);
            last[side] = _mm512_ternarylogic_epi32(four, last[side], _mm512_rol_epi32(of[2], 6), 0xca);
        }
        const auto put = [&](int64_t pair, __m512i first, __m512i second) {
            const __m512 *scales = by[pair / 8].scales + 2 * half, *zeros = by[pair / 8].zeros + 2 * half;
            const auto made = [&](__m512i code, int64_t side) {
                const __m512i value = _mm512_ternarylogic_epi32(code, mask, sixty_four, 0xea);  // code & mask | 64
                return _mm512_fmsub_ps(_mm512_castsi512_ps(value), scales[side], zeros[side]);
            };
            _mm512_store_si512(out + half * CELL / 2 + pair * WIDE,
                               reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(made(second, 1), made(first, 0))));
        };
        for (int64_t j = 0; j < 3; j++)
            for (int64_t i = 0; i < 5; i++) {
                put(5 * j + i, codes[0][j], codes[1][j]);
                for (int64_t side = 0; side < 2; side++) codes[side][j] = _mm512_ror_epi32(codes[side][j], 6);
            }
        put(15, last[0], last[1]);
    }
}

// 32 inputs from `input` on of a block -> bf16 in the order of matrix.h. `by`: of the group that they are in, or begin.
template <int LOW, int HIGH>
inline void widen_inputs(const BlockProduct& p, const uint8_t* block, int64_t input, Factors& by, bf16* out) {
    const Layout& of = p.layout();
    const uint8_t* part = block + input / of.super * of.part();
    const int64_t at = input % of.super;
    const uint8_t* cell = part + of.factors() + at / DEPTH * of.cell();
    for (int64_t line = 0; line < of.cell(); line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(cell + 8192 + line), _MM_HINT_T1);
    if constexpr (LOW == 6) {
        Factors both[2];
        for (int64_t i = 0; i < 2; i++) factors_of(of, part, at / of.group + i, both[i]);
        widen_six(cell, both, out);
    } else {
        if (at % of.group == 0) factors_of(of, part, at / of.group, by);
        widen_pairs<LOW, HIGH>(of, cell, 0, by, out);
        if (of.group < DEPTH) factors_of(of, part, at / of.group + 1, by);
        widen_pairs<LOW, HIGH>(of, cell, 1, by, out);
    }
}

// Up to 32 rows: what is widened meets its tokens at once.
template <int LOW, int HIGH>
inline void multiply_widened(const BlockProduct& p, const uint8_t* block, int64_t row, int64_t rows, float* sums) {
    alignas(64) bf16 wide[2][CELL];
    const char *x = p.x + row * p.stride_x, *second = x + TILE * p.stride_x;
    const int64_t more = std::max<int64_t>(rows - TILE, 0), inputs = p.inputs();
    configure(static_cast<int>(std::min(rows, TILE)), static_cast<int>(more));
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    Factors by;
    widen_inputs<LOW, HIGH>(p, block, 0, by, wide[0]);
    for (int64_t input = 0, turn = 0; input < inputs; input += DEPTH, turn ^= 1, x += LINE, second += LINE) {
        // What was stored just now would be waited for: the next is widened first.
        if (input + DEPTH < inputs) widen_inputs<LOW, HIGH>(p, block, input + DEPTH, by, wide[turn ^ 1]);
        written();
        _tile_loadd(4, x, p.stride_x);
        _tile_loadd(6, wide[turn], 64);
        _tile_loadd(7, wide[turn] + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (more) {
            _tile_loadd(5, second, p.stride_x);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    if (more) {
        _tile_stored(2, sums + TILE * WIDE, 128);
        _tile_stored(3, sums + TILE * WIDE + TILE, 128);
    }
}

inline thread_local Scratch<bf16> widened;  // a block's weights, where more rows meet them

// All of a block -> bf16 in the order of matrix.h
template <int LOW, int HIGH>
inline void widen_block(const BlockProduct& p, int64_t block, bf16* out) {
    Factors by;
    for (int64_t input = 0; input < p.inputs(); input += DEPTH)
        widen_inputs<LOW, HIGH>(p, p.part(block), input, by, out + input * WIDE);
    written();
}

template <int LOW, int HIGH>
inline void multiply_blocks_chunk(void* context, int64_t chunk, int) {
    const BlockProduct& p = *static_cast<const BlockProduct*>(context);
    const int64_t all = blocks(p.wide()), first = chunk * p.chunk, size = p.inputs() * WIDE;
    alignas(64) float sums[2][WIDE * WIDE];
    bf16* wide = p.rows > WIDE ? widened.of(2 * size) : nullptr;
    for (int64_t block = first; block < std::min(first + p.chunk, all); block++) {
        const int64_t others = block + (p.gated ? all : 0);
        if (wide) widen_block<LOW, HIGH>(p, others, wide);
        if (wide && p.gated) widen_block<LOW, HIGH>(p, block, wide + size);
        for (int64_t row = 0; row < p.rows; row += WIDE) {
            const int64_t rows = std::min(WIDE, p.rows - row);
            const auto run = [&](int64_t of, const bf16* weights, float* to) {
                if (!wide) return multiply_widened<LOW, HIGH>(p, p.part(of), row, rows, to);
                Product alone = p;
                alone.weight = reinterpret_cast<const char*>(weights);
                Ahead nothing;
                multiply_block(alone, 0, row, rows, to, {}, nothing);
            };
            if (p.gated) run(block, wide + size, sums[1]);
            run(others, wide, sums[0]);
            written();
            finish<Product>(p, {sums[0], p.gated ? sums[1] : nullptr, row, rows, block * WIDE}, 0, rows);
        }
    }
}

// call<LOW, HIGH>() for the layout's planes.
template <class Call>
inline void with_planes(const Layout& of, Call call) {
    switch (10 * of.low + of.high) {
        case 20: return call.template operator()<2, 0>();
        case 21: return call.template operator()<2, 1>();
        case 60: return call.template operator()<6, 0>();
    }
}

// Output `output` of a packed weight -> bf16 [inputs]
inline void unpack_blocks(const uint8_t* weight, int64_t output, int64_t inputs, bf16* out) {
    if (reinterpret_cast<const Layout*>(weight)->by_output()) return unpack_codes(weight, output, inputs, out);
    BlockProduct p{};
    p.weight = reinterpret_cast<const char*>(weight), p.lines = inputs / DEPTH;
    const uint8_t* block = p.part(output / WIDE);
    with_planes(p.layout(), [&]<int LOW, int HIGH>() {
        alignas(64) bf16 wide[CELL];
        const bf16* own = wide + output % WIDE / TILE * CELL / 2 + 2 * (output % TILE);
        Factors by;
        for (int64_t input = 0; input < inputs; input += DEPTH) {
            widen_inputs<LOW, HIGH>(p, block, input, by, wide);
            for (int64_t pair = 0; pair < TILE; pair++) std::memcpy(out + input + 2 * pair, own + pair * WIDE, 4);
        }
    });
}

inline const char* BlockProduct::ready(int64_t output, char* space) const {
    with_planes(layout(), [&]<int LOW, int HIGH>() { widen_block<LOW, HIGH>(*this, output / WIDE, reinterpret_cast<bf16*>(space)); });
    return space;
}

inline void multiply(Team& team, BlockProduct p) {
    if (p.rows >= FEW) return multiply_all(team, p);
    const int64_t chunks = divide(p, team.size());
    with_planes(p.layout(), [&]<int LOW, int HIGH>() { team.each(chunks, multiply_blocks_chunk<LOW, HIGH>, &p); });
}

}  // namespace troupe
