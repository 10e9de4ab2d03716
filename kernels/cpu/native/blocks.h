// Products with weights in blocks of whole numbers of 2 to 6 bits, as GGUF files have them, on AMX: each weight is made
// `scale * code - zero` in float32 in registers and rounded to bf16, so a product is, bit for bit, that with a weight
// which was made bf16 before (matrix.h).
#pragma once
#include <bit>
#include <vector>

#include "matrix.h"

namespace troupe {

constexpr int64_t QUARTER = 8;          // outputs whose two inputs of a pair fill a vector of 32 bits each
constexpr int64_t CELL = WIDE * DEPTH;  // weights of 32 outputs and 32 inputs

// How codes are kept: the head of a packed weight. `low` bits of each, 2 and 4 to 6, and of 2 perhaps `high` 1 in another
// plane. `super` inputs share a scale (and a zero) in float16; with `group` below it, whole scales (and
// zeros) of groups multiply these. `table`: what a code of up to 5 bits stands for. One of 6 bits is read as 64 and
// itself, which is `offset` more than what it stands for.
struct alignas(64) Layout {
    int64_t low, high, super, group, zeros, offset;
    float table[32];

    int64_t groups() const { return group < super ? super / group : 0; }
    int64_t cell() const { return CELL * (low + high) / 8; }
    int64_t factors() const { return WIDE * (1 + zeros) * (2 + groups()); }
    int64_t part() const { return factors() + super / DEPTH * cell(); }  // of 32 outputs and `super` inputs
    int64_t block(int64_t inputs) const { return inputs / super * part(); }
};

// Bytes of a packed weight: its head, then [block of 32 outputs][super]: 32 float16 scales (and zeros), int8 scales
// [group][32] (and uint8 zeros), then cells. Of a cell: quarter by quarter vectors whose lane is `2 * output + input % 2`.
//   2 and 4 bits: pair i of 16 in bits low * i; then high bits, of pair i in bit `i + low`, rolled, two quarters a vector
//   5 bits: two vectors each and one for both of two quarters: pair 6j + i of vector j from bit 5i on; in a half of the shared
//     one pairs 12 to 14; of pair 15 two bits at the end of each own vector, and one at the end of that half
//   6 bits: pair 5j + i of vector j of 3 from bit 17 + 6i on, rolled, and two bits of pair 15 in what is left, from 15 on
inline int64_t packed_blocks(const Layout& of, int64_t outputs, int64_t inputs) {
    return sizeof(Layout) + blocks(outputs) * of.block(inputs);
}

// codes uint8 [outputs, inputs]; scales, zeros float16 [outputs, inputs / super]; whole int8 and less uint8 [outputs,
// inputs / group]: the groups' scales and zeros.
struct Blocks {
    const uint8_t* codes;
    const uint16_t *scales, *zeros;
    const int8_t* whole;
    const uint8_t* less;
};

inline void pack_cell(const Layout& of, const uint8_t* codes, int64_t inputs, int64_t left, uint8_t* packed) {
    uint32_t* out = reinterpret_cast<uint32_t*>(packed);
    std::memset(packed, 0, of.cell());
    const int64_t each = 32 / of.low, vectors = TILE / each;  // pairs of a lane; lanes' vectors of a quarter
    uint32_t* high = out + 4 * vectors * TILE;
    for (int64_t output = 0; output < std::min(left, WIDE); output++)
        for (int64_t input = 0; input < DEPTH; input++) {
            const uint32_t code = codes[output * inputs + input];
            const int64_t quarter = output / QUARTER, lane = 2 * (output % QUARTER) + input % 2, pair = input / 2;
            if (of.low == 5) {
                uint32_t* third = out + (5 * (quarter / 2) + 4) * TILE + lane;
                uint32_t* to = out + (5 * (quarter / 2) + 2 * (quarter % 2)) * TILE + lane;
                if (pair < 12) to[pair / 6 * TILE] |= code << 5 * (pair % 6);
                else if (pair < 15) *third |= code << (16 * (quarter % 2) + 5 * (pair - 12));
                else to[0] |= code << 30, to[TILE] |= code >> 2 << 30, *third |= code >> 4 << (16 * (quarter % 2) + 15);
                continue;
            }
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
    int64_t panel = 0;  // rows of one
    const Layout& layout() const { return *reinterpret_cast<const Layout*>(weight); }
    const uint8_t* part(int64_t block) const {
        return reinterpret_cast<const uint8_t*>(weight) + sizeof(Layout) + block * layout().block(inputs());
    }
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
            low[side] = _mm512_loadu_si512(cell + (LOW == 4 ? 2 * quarter + eight : quarter) * 64);
            if (LOW == 2) low[side] = _mm512_srlv_epi32(low[side], _mm512_set1_epi32(16 * eight));
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

// A cell of codes of 5 bits, all of one group.
inline void widen_five(const Layout& of, const uint8_t* cell, const Factors& by, bf16* out) {
    const __m512 first = _mm512_loadu_ps(of.table), second = _mm512_loadu_ps(of.table + TILE);
    const __m512i two = _mm512_set1_epi32(3), four = _mm512_set1_epi32(15);
    for (int64_t half = 0; half < 2; half++, cell += 5 * 64) {
        __m512i codes[2][3], last[2];
        for (int64_t side = 0; side < 2; side++) {
            __m512i* own = codes[side];
            for (int64_t j = 0; j < 2; j++) own[j] = _mm512_loadu_si512(cell + (2 * side + j) * 64);
            own[2] = _mm512_srlv_epi32(_mm512_loadu_si512(cell + 4 * 64), _mm512_set1_epi32(16 * side));
            last[side] = _mm512_ternarylogic_epi32(two, _mm512_srli_epi32(own[0], 30), _mm512_srli_epi32(own[1], 28), 0xca);
            last[side] = _mm512_ternarylogic_epi32(four, last[side], _mm512_srli_epi32(own[2], 11), 0xca);
        }
        const auto put = [&](int64_t pair, __m512i one, __m512i other) {
            const auto made = [&](__m512i code, int64_t side) {  // the lookup takes five bits
                const __m512 value = _mm512_permutex2var_ps(first, code, second);
                return _mm512_fmsub_ps(value, by.scales[2 * half + side], by.zeros[2 * half + side]);
            };
            _mm512_store_si512(out + half * CELL / 2 + pair * WIDE,
                               reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(made(other, 1), made(one, 0))));
        };
        for (int64_t j = 0; j < 3; j++)
            for (int64_t i = 0; i < (j < 2 ? 6 : 3); i++) {
                put(6 * j + i, codes[0][j], codes[1][j]);
                for (int64_t side = 0; side < 2; side++) codes[side][j] = _mm512_srli_epi32(codes[side][j], 5);
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
        if constexpr (LOW == 5) {
            widen_five(of, cell, by, out);
        } else {
            widen_pairs<LOW, HIGH>(of, cell, 0, by, out);
            if (of.group < DEPTH) factors_of(of, part, at / of.group + 1, by);
            widen_pairs<LOW, HIGH>(of, cell, 1, by, out);
        }
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

inline thread_local std::vector<bf16> widened;  // a block's weights, where many rows meet them

template <int LOW, int HIGH>
inline void multiply_blocks_chunk(void* context, int64_t chunk, int) {
    const BlockProduct& p = *static_cast<const BlockProduct*>(context);
    const int64_t inputs = p.inputs(), all = blocks(p.outputs), each = (all + p.chunk - 1) / p.chunk;
    const int64_t panel = chunk / each * p.panel, first = chunk % each * p.chunk;
    const int64_t end = std::min(panel + p.panel, p.rows);
    alignas(64) float sums[2][WIDE * WIDE];
    bf16* wide = nullptr;
    if (end - panel > WIDE) {
        if (static_cast<int64_t>(widened.size()) < WIDE * (inputs + 1)) widened.resize(WIDE * (inputs + 1));
        wide = widened.data() + (64 - reinterpret_cast<uintptr_t>(widened.data()) % 64) % 64 / 2;
    }
    for (int64_t block = first; block < std::min(first + p.chunk, all); block++) {
        const uint8_t* weight = p.part(block);
        if (end - panel <= WIDE) {
            multiply_widened<LOW, HIGH>(p, weight, panel, end - panel, sums[0]);
            finish<Product>(p, {sums[0], nullptr, panel, end - panel, block * WIDE}, 0, end - panel);
            continue;
        }
        Factors by;
        for (int64_t input = 0; input < inputs; input += DEPTH)
            widen_inputs<LOW, HIGH>(p, weight, input, by, wide + input * WIDE);
        written();
        Product alone = p;  // of these outputs
        alone.weight = reinterpret_cast<const char*>(wide), alone.outputs -= block * WIDE, alone.out += block * WIDE;
        if (alone.bias) alone.bias += block * WIDE;
        Pending<float> pending;
        Ahead nothing;
        for (int64_t row = panel, turn = 0; row < end; row += WIDE, turn ^= 1) {
            const int64_t rows = std::min(WIDE, end - row);
            multiply_block(alone, 0, row, rows, sums[turn], pending, nothing);
            pending = {sums[turn], nullptr, row, rows, 0};
        }
        finish(alone, pending, 0, pending.rows);
    }
}

// call<LOW, HIGH>() for the layout's planes.
template <class Call>
inline void with_planes(const Layout& of, Call call) {
    switch (10 * of.low + of.high) {
        case 20: return call.template operator()<2, 0>();
        case 21: return call.template operator()<2, 1>();
        case 40: return call.template operator()<4, 0>();
        case 50: return call.template operator()<5, 0>();
        case 60: return call.template operator()<6, 0>();
    }
}

// Output `output` of a packed weight -> bf16 [inputs]
inline void unpack_blocks(const uint8_t* weight, int64_t output, int64_t inputs, bf16* out) {
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

inline int64_t divide(BlockProduct& p, int threads) {
    const int64_t most = std::max<int64_t>(256, (1 << 19) / p.inputs() / WIDE * WIDE);
    const int64_t panels = (p.rows + most - 1) / most, all = blocks(p.outputs);
    p.panel = ((p.rows + panels - 1) / panels + WIDE - 1) / WIDE * WIDE;
    p.chunk = std::max<int64_t>(1, std::min(all / (4 * threads), 1 + (1 << 17) / (WIDE * p.inputs())));
    return panels * ((all + p.chunk - 1) / p.chunk);
}

inline void multiply(Team& team, BlockProduct p) {
    const int64_t chunks = divide(p, team.size());
    with_planes(p.layout(), [&]<int LOW, int HIGH>() { team.each(chunks, multiply_blocks_chunk<LOW, HIGH>, &p); });
}

}  // namespace troupe
