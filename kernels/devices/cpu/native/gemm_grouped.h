// Products with integer weights of 4 or 8 bits, whose inputs are divided into groups that share a scale (and a zero).
#pragma once
#include "packed_codes.h"

namespace troupe {

// Bytes of a packed weight: [block of 32 outputs][32 inputs] cells (packed_codes.h), then [block][group] 32 float scales, then [block][group]
// 32 uint8 zeros.
inline int64_t packed_grouped(int64_t outputs, int64_t inputs, int64_t group, int64_t bits) {
    return blocks(outputs) * WIDE * (inputs * bits / 8 + inputs / group * 5);
}

// values uint8 [outputs, inputs], scales float and zeros uint8 [outputs, groups]; null: all zeros are half of the range.
inline void pack_grouped(const uint8_t* values, const float* scales, const uint8_t* zeros, int64_t outputs, int64_t inputs,
                         int64_t group, int64_t bits, uint8_t* packed) {
    const int64_t groups = inputs / group, cell = CELL * bits / 8;
    std::memset(packed, 0, packed_grouped(outputs, inputs, group, bits));
    uint8_t* to = packed;
    for (int64_t output = 0; output < outputs; output += WIDE)
        for (int64_t input = 0; input < inputs; input += DEPTH, to += cell)
            pack_fours(bits, values + output * inputs + input, inputs, outputs - output, to);
    float* scale = reinterpret_cast<float*>(to);
    uint8_t* zero = reinterpret_cast<uint8_t*>(scale + blocks(outputs) * groups * WIDE);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t each = 0; each < groups; each++) {
            const int64_t at = (output / WIDE * groups + each) * WIDE + output % WIDE, from = output * groups + each;
            scale[at] = scales[from];
            zero[at] = zeros ? zeros[from] : static_cast<uint8_t>(1 << (bits - 1));
        }
}

template <int BITS>
struct Grouped : Widened {
    const int64_t* order;  // of the inputs; null: unchanged
    std::vector<bf16>* ordered;
    int64_t group;
    bool zeroed;  // whether any zero is not half of the range

    static constexpr int32_t offset() { return 1 << (BITS - 1); }
    static constexpr bool integer_codes() { return true; }
    bool by_shares() const { return AMX && BITS < 8 && group >= 128; }
    bool by_scaled() const { return !by_shares(); }
    int64_t shares() const { return group; }
    int64_t block_size() const { return inputs() * WIDE * BITS / 8; }
    const uint8_t* cells(int64_t block) const { return reinterpret_cast<const uint8_t*>(weight) + block * block_size(); }
    const float* scales(int64_t block) const {
        return reinterpret_cast<const float*>(cells(blocks(outputs))) + block * (inputs() / group) * WIDE;
    }
    const uint8_t* zeros(int64_t block) const {
        return reinterpret_cast<const uint8_t*>(scales(blocks(outputs))) + block * (inputs() / group) * WIDE;
    }
    const char* coming(int64_t output) const { return weight + output / WIDE * block_size(); }
    const char* ready(int64_t output, char* space) const { return widen_block(*this, output / WIDE, reinterpret_cast<bf16*>(space)); }

    template <bool ZEROED>
    struct Supers;
    class Maker;

    template <class Call>
    void with_supers(int64_t block, Call call) const {
        zeroed ? call(Supers<true>(*this, block)) : call(Supers<false>(*this, block));
    }
};

template <int BITS>
template <bool ZEROED>
struct Grouped<BITS>::Supers {
    static constexpr int GROUP = 0, CODE_BITS = BITS, POWER = ZEROED ? BITS : BITS - 1;
    static constexpr bool ZEROS = ZEROED, BYTES = BITS == 8, FLOATS = false, SUMS = true;

    int64_t each;
    const uint8_t* cells;
    const float* scales;
    const uint8_t* zeros;

    Supers(const Grouped& p, int64_t block)
        : each(p.group / DEPTH), cells(p.cells(block)), scales(p.scales(block)), zeros(p.zeros(block)) {}

    int64_t lines() const { return each; }
    const uint8_t* cell(int64_t line) const { return cells + line * CELL * BITS / 8; }
    void fetch(int64_t line) const { fetch_cell<BITS>(cell(line)); }
    Ints codes(const uint8_t* cell, int64_t half, int64_t four) const { return codes_of<BITS>(cell, half, four); }
    void open(int64_t line, bf16* out) const {
        fetch(line);
        widen_cell(cell(line), out, codes_of<BITS>);
    }
    Floats group_scale(int64_t, int64_t, int64_t) const { return Floats{}; }
    Floats group_zero(int64_t, int64_t, int64_t) const { return Floats{}; }
    Floats scale(int64_t super, int64_t half) const { return load(scales + super * WIDE + half * TILE); }
    Floats middle(int64_t super, int64_t half) const { return unsigned_at(zeros + super * WIDE + half * TILE); }
    Ints bytes(const uint8_t* cell, int64_t half, int64_t four) const { return bytes_of<BITS>(cell, half, four); }
    Floats end(int64_t super, int64_t half, Floats products, Floats zero_products, Floats result) const {
        if (ZEROED) products = fnma(middle(super, half) - splat(static_cast<float>(Grouped::offset())), zero_products, products);
        return fma(products, scale(super, half), result);
    }
};

// Unpacks a block's weights to bf16, `(code - zero) * scale` in float32.
template <int BITS>
class Grouped<BITS>::Maker {
  public:
    Maker(const Grouped& p, int64_t block)
        : each_(p.group / DEPTH), cells_(p.cells(block)), scales_(p.scales(block)), zeros_(p.zeros(block)) {}

    template <int SECOND>
    void part(int64_t line, bf16* out) {
        if (!SECOND && line % each_ == 0)
            for (int64_t half = 0; half < 2; half++) {
                const int64_t at = line / each_ * WIDE + half * TILE;
                spread(load(scales_ + at), by_.scales + 2 * half);
                spread(unsigned_at(zeros_ + at), by_.zeros + 2 * half);
            }
        const uint8_t* cell = cells_ + line * CELL * BITS / 8;
        widen_fours<4 * SECOND, 4 * SECOND + 4>(cell, order_, out, codes_of<BITS>, [&](Floats code, int64_t quarter) {
            return (code - by_.zeros[quarter]) * by_.scales[quarter];
        });
    }

  private:
    const int64_t each_;
    const uint8_t* cells_;
    const float* scales_;
    const uint8_t* zeros_;
    PairOrder order_;
    Factors by_;
};

// A token's inputs in the weight's order -> to [inputs]
template <class P>
void order_inputs(const P& p, int64_t row, bf16* to) {
    const bf16* x = reinterpret_cast<const bf16*>(p.x + row * p.stride_x);
    for (int64_t i = 0; i < p.inputs(); i++) to[i] = x[p.order[i]];
}

template <class P>
void order_chunk(void* context, int64_t chunk, int) {
    const P& p = *static_cast<const P*>(context);
    for (int64_t row = 8 * chunk; row < std::min(p.rows, 8 * chunk + 8); row++)
        order_inputs(p, row, p.ordered->data() + row * p.inputs());
}

template <int BITS>
void multiply(Team& team, Grouped<BITS> p, Planes& planes) {
    if (p.order) {
        if (static_cast<int64_t>(p.ordered->size()) < p.rows * p.inputs()) p.ordered->resize(p.rows * p.inputs());
        team.each((p.rows + 7) / 8, order_chunk<Grouped<BITS>>, &p);
        p.x = reinterpret_cast<const char*>(p.ordered->data()), p.stride_x = p.inputs() * sizeof(bf16);
    }
    multiply_made(team, p, planes);
}

}  // namespace troupe
