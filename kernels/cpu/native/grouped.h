// Products with whole weights of 4 or 8 bits, of which groups of an output's inputs share a scale (and a zero), on AMX.
// A group's weights become bf16 in the core's cache as `value - zero`, which is exact; its sums are scaled in float32.
#pragma once
#include <vector>

#include "matrix.h"

namespace troupe {

constexpr int64_t AHEAD = 1024;  // bytes of weights that are fetched before they are wanted; the processor sees to more
constexpr int64_t PANEL = 256;  // tokens that a block's weights are made bf16 for at once

// Inputs that are made bf16 at a time: they divide a group.
inline int64_t stride_of(int64_t group) { return group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : 32; }

inline int64_t grouped_values(int64_t outputs, int64_t inputs, int64_t bits) {
    return blocks(outputs) * WIDE * inputs * bits / 8;
}

// Bytes of a packed weight: its values, then [block][group] 32 float scales, then of each 32 uint8 zeros.
inline int64_t packed_grouped(int64_t outputs, int64_t inputs, int64_t group, int64_t bits) {
    return grouped_values(outputs, inputs, bits) + blocks(outputs) * (inputs / group) * WIDE * 5;
}

// values uint8 [outputs, inputs], scales float and zeros uint8 [outputs, groups] -> [block of 32 outputs][32 inputs][half
// of 16][pair of inputs][output][2], as `pack`, with two pairs side by side: [two pairs][output][pair][2]. Of 4 bits, four
// pairs share their bytes: pair i is in bits 4i of 16.
inline void pack_grouped(const uint8_t* values, const float* scales, const uint8_t* zeros, int64_t outputs,
                         int64_t inputs, int64_t group, int64_t bits, uint8_t* packed) {
    const int64_t groups = inputs / group;
    const auto value = [&](int64_t output, int64_t input) -> uint16_t {
        return output < outputs ? values[output * inputs + input] : 0;
    };
    for (int64_t block = 0; block < blocks(outputs); block++)
        for (int64_t depth = 0; depth < inputs; depth += DEPTH)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t pair = 0; pair < TILE; pair += bits == 4 ? 4 : 2)
                    for (int64_t lane = 0; lane < WIDE; lane++) {
                        const int64_t output = block * WIDE + half * TILE + lane / 2, input = depth + 2 * pair;
                        if (bits == 8) {
                            for (int64_t i = 0; i < 2; i++)
                                *packed++ = static_cast<uint8_t>(value(output, input + 2 * (lane % 2) + i));
                            continue;
                        }
                        uint16_t all = 0;
                        for (int64_t i = 0; i < 4; i++)
                            all |= static_cast<uint16_t>(value(output, input + lane % 2 + 2 * i) << 4 * i);
                        std::memcpy(packed, &all, 2);
                        packed += 2;
                    }
    float* to = reinterpret_cast<float*>(packed);
    uint8_t* zero = packed + blocks(outputs) * groups * WIDE * 4;
    for (int64_t block = 0; block < blocks(outputs); block++)
        for (int64_t each = 0; each < groups; each++)
            for (int64_t lane = 0; lane < WIDE; lane++) {
                const int64_t output = block * WIDE + lane;
                *to++ = output < outputs ? scales[output * groups + each] : 0.0f;
                *zero++ = output >= outputs ? 0 : zeros ? zeros[output * groups + each] : 1 << (bits - 1);
            }
}

struct Grouped : Product {
    const int64_t* order;  // of the inputs, null: as they come
    std::vector<bf16>* ordered;
    int64_t group, bits;

    int64_t groups() const { return inputs() / group; }
    const float* scales(int64_t block, int64_t each) const {
        return reinterpret_cast<const float*>(weight + grouped_values(outputs, inputs(), bits)) + (block * groups() + each) * WIDE;
    }
    const uint8_t* zeros(int64_t block, int64_t each) const {
        return reinterpret_cast<const uint8_t*>(scales(blocks(outputs), 0)) + (block * groups() + each) * WIDE;
    }
};

// The zeros of 16 outputs, each for the two inputs of a pair.
inline __m512i zeros_of(const uint8_t* zeros) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// -16 .. 15 as bf16, by their lowest five bits
struct alignas(64) Table {
    uint16_t values[32];
    Table() {
        for (int i = 0; i < 32; i++) {
            const float value = static_cast<float>(i < 16 ? i : i - 32);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            values[i] = static_cast<uint16_t>(bits >> 16);
        }
    }
};

// 32 inputs of 32 outputs -> bf16 [half][pair][output][2], the packed weight's order.
inline void widen4(const uint8_t* weight, __m512i table, const __m512i zeros[2], bf16* out) {
    const __m512i low = _mm512_set1_epi16(15);
    for (int64_t half = 0; half < 2; half++)
        for (int64_t four = 0; four < 4; four++, weight += 64, out += 128) {
            const __m512i all = _mm512_loadu_si512(weight);
            const auto put = [&](int64_t i, __m512i shifted) {
                const __m512i value = _mm512_sub_epi16(_mm512_and_si512(shifted, low), zeros[half]);
                _mm512_store_si512(out + 32 * i, _mm512_permutexvar_epi16(value, table));  // takes five bits
            };
            put(0, all);
            put(1, _mm512_srli_epi16(all, 4));
            put(2, _mm512_srli_epi16(all, 8));
            put(3, _mm512_srli_epi16(all, 12));
        }
}

// A byte below the bits of 2^23 is a float's last bits, one below those of 2^15 its last but eight: the difference to
// that power of two and zero is exact, and its upper half all there is of it.
inline void widen8(const uint8_t* weight, const __m512i zeros[2], bf16* out) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), byte = _mm512_set1_epi32(0xff);
    const __m512i first = _mm512_set1_epi32(0x4b000000), second = _mm512_set1_epi32(0x47000000);
    for (int64_t half = 0; half < 2; half++) {
        const __m512 zero = _mm512_cvtepi32_ps(_mm512_and_si512(zeros[half], byte));
        const __m512 even = _mm512_add_ps(zero, _mm512_castsi512_ps(first));
        const __m512 odd = _mm512_add_ps(zero, _mm512_castsi512_ps(second));
        for (int64_t pairs = 0; pairs < TILE; pairs += 2, weight += 64, out += 64) {
            const __m512i all = _mm512_loadu_si512(weight);
            const auto put = [&](int64_t pair, __m512i of) {
                // (of & byte) | first, (of & byte << 8) | second
                const __m512i one = _mm512_ternarylogic_epi32(of, byte, first, 0xea);
                const __m512i other = _mm512_ternarylogic_epi32(of, _mm512_slli_epi32(byte, 8), second, 0xea);
                const __m512i low = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(one), even));
                const __m512i high = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(other), odd));
                // high & upper | low >> 16
                const __m512i both = _mm512_ternarylogic_epi32(high, upper, _mm512_srli_epi32(low, 16), 0xea);
                _mm512_store_si512(out + 32 * pair, both);
            };
            put(0, all);
            put(1, _mm512_srli_epi32(all, 16));
        }
    }
}

// sums += scale * (x . weight), of up to 32 rows, `depths` times 32 inputs and 32 outputs.
inline void add_products(const bf16* x, int64_t stride, int64_t rows, const bf16* weight, int64_t depths,
                         const float* scales, float* sums) {
    alignas(64) float found[WIDE * WIDE];
    const bf16* second = x + TILE * stride;
    const int64_t more = std::max<int64_t>(rows - TILE, 0);
    configure(static_cast<int>(std::min(rows, TILE)), static_cast<int>(more));
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t depth = 0; depth < depths; depth++, weight += 1024) {
        _tile_loadd(4, x + depth * DEPTH, 2 * stride);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (more) {
            _tile_loadd(5, second + depth * DEPTH, 2 * stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, found, 128);
    _tile_stored(1, found + TILE, 128);
    if (more) {
        _tile_stored(2, found + TILE * WIDE, 128);
        _tile_stored(3, found + TILE * WIDE + TILE, 128);
    }
    const __m512 low = _mm512_loadu_ps(scales), high = _mm512_loadu_ps(scales + TILE);
    for (int64_t i = 0; i < rows * WIDE; i += WIDE) {
        _mm512_store_ps(sums + i, _mm512_fmadd_ps(_mm512_load_ps(found + i), low, _mm512_load_ps(sums + i)));
        _mm512_store_ps(sums + i + TILE,
                        _mm512_fmadd_ps(_mm512_load_ps(found + i + TILE), high, _mm512_load_ps(sums + i + TILE)));
    }
}

// Inputs from `input` on as bf16, as many as are made so at a time.
inline void widen(const Grouped& p, int64_t block, int64_t input, bf16* out) {
    static const Table table;
    const __m512i values = _mm512_load_si512(table.values);
    const int64_t step = stride_of(p.group), bytes = step * WIDE * p.bits / 8;
    const auto* weight = reinterpret_cast<const uint8_t*>(p.weight) + (block * p.inputs() + input) * WIDE * p.bits / 8;
    const uint8_t* zero = p.zeros(block, input / p.group);
    const __m512i zeros[2] = {zeros_of(zero), zeros_of(zero + TILE)};
    for (int64_t line = 0; line < bytes; line += LINE)
        _mm_prefetch(reinterpret_cast<const char*>(weight + AHEAD + line), _MM_HINT_T0);
    for (int64_t depth = 0; depth < step; depth += DEPTH, out += DEPTH * WIDE) {
        if (p.bits == 4)
            widen4(weight + depth * WIDE / 2, values, zeros, out);
        else
            widen8(weight + depth * WIDE, zeros, out);
    }
}

inline void multiply_grouped_block(const Grouped& p, int64_t block, int64_t row, int64_t rows, float* sums) {
    alignas(64) bf16 wide[2][128 * WIDE];
    const int64_t inputs = p.inputs(), stride = p.stride_x / sizeof(bf16), step = stride_of(p.group);
    const bf16* x = reinterpret_cast<const bf16*>(p.x) + row * stride;
    std::memset(sums, 0, rows * WIDE * sizeof(float));
    widen(p, block, 0, wide[0]);
    for (int64_t input = 0, turn = 0; input < inputs; input += step, turn ^= 1) {
        // What was stored just now would be waited for: the next is widened first.
        if (input + step < inputs) widen(p, block, input + step, wide[turn ^ 1]);
        written();
        for (int64_t i = 0; i < rows; i += WIDE)
            add_products(x + i * stride + input, stride, std::min(WIDE, rows - i), wide[turn], step / DEPTH,
                         p.scales(block, input / p.group), sums + i * WIDE);
    }
}

inline void multiply_grouped_chunk(void* context, int64_t chunk, int) {
    const Grouped& p = *static_cast<const Grouped*>(context);
    const int64_t all = blocks(p.outputs), each = (all + p.chunk - 1) / p.chunk;
    const int64_t panel = chunk / each * PANEL, first = chunk % each * p.chunk;
    const int64_t rows = std::min(PANEL, p.rows - panel);
    alignas(64) float sums[PANEL * WIDE];
    for (int64_t block = first; block < std::min(first + p.chunk, all); block++) {
        multiply_grouped_block(p, block, panel, rows, sums);
        finish<Product>(p, {sums, nullptr, panel, rows, block * WIDE}, 0, rows);
    }
}

// A token's inputs as the weight has them -> to [inputs]
inline void order_inputs(const Grouped& p, int64_t row, bf16* to) {
    const bf16* x = reinterpret_cast<const bf16*>(p.x + row * p.stride_x);
    for (int64_t i = 0; i < p.inputs(); i++) to[i] = x[p.order[i]];
}

inline void order_chunk(void* context, int64_t chunk, int) {
    const Grouped& p = *static_cast<const Grouped*>(context);
    for (int64_t row = 8 * chunk; row < std::min(p.rows, 8 * chunk + 8); row++)
        order_inputs(p, row, p.ordered->data() + row * p.inputs());
}

inline int64_t divide(Grouped& p, int threads) {
    const int64_t all = blocks(p.outputs), panels = (p.rows + PANEL - 1) / PANEL;
    p.chunk = std::max<int64_t>(1, std::min(all / (4 * threads), 1 + (1 << 17) / (WIDE * p.inputs())));
    return panels * ((all + p.chunk - 1) / p.chunk);
}

inline void multiply(Team& team, Grouped p) {
    if (p.order) {
        if (static_cast<int64_t>(p.ordered->size()) < p.rows * p.inputs()) p.ordered->resize(p.rows * p.inputs());
        team.each((p.rows + 7) / 8, order_chunk, &p);
        p.x = reinterpret_cast<const char*>(p.ordered->data()), p.stride_x = p.inputs() * sizeof(bf16);
    }
    team.each(divide(p, team.size()), multiply_grouped_chunk, &p);
}

}  // namespace troupe
