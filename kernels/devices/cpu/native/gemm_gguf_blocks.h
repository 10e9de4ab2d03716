// Products with weights in blocks of integers of 2 to 6 or of 8 bits, as in GGUF files. A looked-up row is `scale * code - zero` in
// float32, rounded to bf16.
#pragma once
#include "packed_codes.h"

namespace troupe {

// Bytes of a packed weight: its head, then [block of 32 outputs][superblock]: 32 float16 scales (and zeros), int8 scales
// [group][32] (and uint8 zeros), then cells.
inline int64_t packed_blocks(const Layout& of, int64_t outputs, int64_t inputs) {
    return sizeof(Layout) + blocks(outputs) * of.block(inputs);
}

// Packs outputs from `first`, a multiple of 32, into a weight whose head is written.
inline void pack_blocks(const Blocks& from, int64_t first, int64_t outputs, int64_t inputs, uint8_t* packed) {
    const Layout& of = *reinterpret_cast<const Layout*>(packed);
    packed += sizeof(Layout) + first / WIDE * of.block(inputs);
    const int64_t supers = inputs / of.super, groups = of.groups();
    for (int64_t output = 0; output < outputs; output += WIDE)
        for (int64_t super = 0; super < supers; super++, packed += of.part()) {
            uint16_t* scales = reinterpret_cast<uint16_t*>(packed);
            uint8_t* integers = packed + WIDE * 2 * (1 + of.zeros);
            std::memset(packed, 0, of.factors());
            for (int64_t lane = 0; lane < std::min(WIDE, outputs - output); lane++) {
                const int64_t at = (output + lane) * supers + super;
                scales[lane] = from.scales[at];
                if (of.zeros) scales[WIDE + lane] = from.zeros[at];
                for (int64_t group = 0; group < groups; group++) {
                    integers[group * WIDE + lane] = static_cast<uint8_t>(from.group_scales[at * groups + group]);
                    if (of.zeros) integers[(groups + group) * WIDE + lane] = from.group_zeros[at * groups + group];
                }
            }
            for (int64_t cell = 0; cell < of.super / DEPTH; cell++)
                pack_cell(of, from.codes + output * inputs + super * of.super + cell * DEPTH, inputs, outputs - output,
                          packed + of.factors() + cell * of.cell());
        }
}

template <int BITS>
struct BlockProduct : Widened {
    const Layout& layout() const { return *reinterpret_cast<const Layout*>(weight); }
    const uint8_t* part(int64_t block) const {
        return reinterpret_cast<const uint8_t*>(weight) + sizeof(Layout) + block * layout().block(inputs());
    }
    static constexpr bool integer_codes() { return true; }
    static constexpr bool by_scaled() { return true; }
    static constexpr bool by_shares() { return false; }
    static constexpr bool opens = false;
    int64_t shares() const { return layout().group; }
    int32_t offset() const { return static_cast<int32_t>(layout().offset); }
    const char* coming(int64_t output) const { return reinterpret_cast<const char*>(part(output / WIDE)); }
    const char* ready(int64_t output, char* space) const { return widen_block(*this, output / WIDE, reinterpret_cast<bf16*>(space)); }

    class Maker;
    template <int GROUPS, bool WITH_ZEROS>
    struct Supers;

    template <class Call>
    void with_supers(int64_t block, Call call) const {
        // The combinations that formats have; each is compiled apart.
        if constexpr (BITS == 2) return call(Supers<TILE, true>(*this, block));
        if constexpr (BITS == 3 || BITS == 6) return call(Supers<TILE, false>(*this, block));
        if constexpr (BITS == 8) return call(Supers<0, false>(*this, block));
        if constexpr (BITS == 4 || BITS == 5) {
            const bool zeros = layout().zeros;
            if (!layout().groups()) return zeros ? call(Supers<0, true>(*this, block)) : call(Supers<0, false>(*this, block));
            if (BITS == 5 || zeros) return call(Supers<DEPTH, true>(*this, block));
            if constexpr (BITS == 4) call(Supers<DEPTH, false>(*this, block));
        }
    }
};

// Codes as bytes; codes of 4 bits as their table values plus the offset.
template <int BITS>
class ByteCodes {
  public:
    explicit ByteCodes(const Layout& of) {
        if (BITS != 4) return;
        const Floats values = load(of.table) + splat(static_cast<float>(of.offset));
        uint8_t bytes[16];
        store_bytes(bytes, to_ints(values));
        table_ = table_of_bytes(bytes);
    }

    Ints operator()(const uint8_t* cell, int64_t half, int64_t four) const {
        const Ints codes = codes_of<BITS>(cell, half, four);
        return BITS == 4 ? look_up_bytes(table_, codes) : codes;
    }

  private:
    Ints table_;
};

template <int BITS>
class BlockProduct<BITS>::Maker {
  public:
    Maker(const BlockProduct& p, int64_t block) : of_(p.layout()), block_(p.part(block)), codes_(of_) {}

    template <int SECOND>
    void part(int64_t line, bf16* out) {
        const int64_t input = line * DEPTH, at = input % of_.super, half = of_.cell() / 2;
        const uint8_t* part = block_ + input / of_.super * of_.part();
        const uint8_t* cell = part + of_.factors() + at / DEPTH * of_.cell();
        for (int64_t i = SECOND * half; i < (SECOND + 1) * half; i += LINE)
            prefetch(cell + PREFETCH_BYTES + i);
        if (SECOND ? of_.group < DEPTH : at % of_.group == 0) factors_of(of_, part, at / of_.group + SECOND, by_);
        widen_fours<4 * SECOND, 4 * SECOND + 4>(cell, order_, out, codes_, [&](Floats code, int64_t quarter) {
            return fms(code, by_.scales[quarter], by_.zeros[quarter]);
        });
    }

  private:
    const Layout& of_;
    const uint8_t* block_;
    ByteCodes<BITS> codes_;
    PairOrder order_;
    Factors by_;
};

template <int BITS>
template <int GROUPS, bool WITH_ZEROS>
struct BlockProduct<BITS>::Supers {
    static constexpr int GROUP = GROUPS, CODE_BITS = BITS;
    static constexpr bool ZEROS = WITH_ZEROS;
    static constexpr bool TABLE = BITS == 4 && !ZEROS;  // whether codes are indices of the table
    static constexpr bool BYTES = BITS == 8 || TABLE;
    static constexpr bool FLOATS = ZEROS && !GROUP;
    static constexpr int LARGEST = ZEROS ? (1 << BITS) - 1 : TABLE ? 127 : 1 << (BITS - 1);  // magnitude
    static constexpr int OF_GROUP = GROUP == 0 ? 1 : BITS == 2 ? 15 : ZEROS ? 63 : BITS == 6 ? 128 : 32;
    static constexpr int POWER = FLOATS ? 0 : std::bit_width(static_cast<unsigned>(LARGEST * OF_GROUP)) - 1;  // the quotient is below two

    const uint8_t* block;
    ByteCodes<BITS> codes;
    int64_t groups, of_lines, part_size, cell_size, factors, offset;

    Supers(const BlockProduct& p, int64_t at)
        : block(p.part(at)), codes(p.layout()), groups(p.layout().groups()), of_lines(p.layout().super / DEPTH),
          part_size(p.layout().part()), cell_size(p.layout().cell()), factors(p.layout().factors()),
          offset(p.layout().offset) {}

    int64_t lines() const { return of_lines; }
    const uint8_t* part(int64_t line) const { return block + line / (GROUP ? 8 : of_lines) * part_size; }
    int64_t place(int64_t line) const { return line % (GROUP ? 8 : of_lines); }
    const uint8_t* cell(int64_t line) const { return part(line) + factors + place(line) * cell_size; }
    void fetch(int64_t line) const { fetch_cell<BITS>(cell(line), GROUP ? 0 : LINE * (1 + ZEROS)); }  // and the factors of a single cell
    const uint8_t* of_group(int64_t line, int64_t half) const {
        return part(line) + LINE * (1 + ZEROS) + place(line) * (GROUP == TILE ? 2 : 1) * WIDE + half * TILE;
    }
    Floats group_scale(int64_t line, int64_t second, int64_t half) const { return signed_at(of_group(line, half) + second * WIDE); }
    Floats group_zero(int64_t line, int64_t second, int64_t half) const {
        return unsigned_at(of_group(line, half) + (groups + second) * WIDE);
    }
    Floats scale(int64_t super, int64_t half) const { return load_halves(block + super * part_size + half * LINE / 2); }
    Floats zero(int64_t super, int64_t half) const { return load_halves(block + super * part_size + LINE + half * LINE / 2); }
    Floats middle(int64_t, int64_t) const { return splat(static_cast<float>(offset)); }
    Ints bytes(const uint8_t* cell, int64_t half, int64_t four) const {
        return BYTES ? codes(cell, half, four) : bytes_of<BITS>(cell, half, four);
    }
    Floats end(int64_t super, int64_t half, Floats products, Floats zero_products, Floats result) const {
        result = fma(products, scale(super, half), result);
        return ZEROS ? fnma(zero_products, zero(super, half), result) : result;
    }
};

// Calls call<BITS>() for the layout's bits.
template <class Call>
inline void with_bits(const Layout& layout, Call call) {
    switch (layout.bits) {
        case 2: return call.template operator()<2>();
        case 3: return call.template operator()<3>();
        case 4: return call.template operator()<4>();
        case 5: return call.template operator()<5>();
        case 6: return call.template operator()<6>();
        case 8: return call.template operator()<8>();
    }
}

// Unpacks row `output` of a packed weight to bf16 [inputs].
inline void unpack_blocks(const uint8_t* weight, int64_t output, int64_t inputs, bf16* out) {
    const Layout& layout = *reinterpret_cast<const Layout*>(weight);
    with_bits(layout, [&]<int BITS>() {
        BlockProduct<BITS> p{};
        p.weight = reinterpret_cast<const char*>(weight), p.lines = inputs / DEPTH;
        typename BlockProduct<BITS>::Maker maker(p, output / WIDE);
        alignas(64) bf16 wide[CELL];
        const bf16* own = wide + output % WIDE / TILE * CELL / 2 + 2 * (output % TILE);
        for (int64_t line = 0; line < p.lines; line++) {
            make_line(maker, line, wide);
            for (int64_t pair = 0; pair < TILE; pair++) std::memcpy(out + line * DEPTH + 2 * pair, own + pair * WIDE, 4);
        }
    });
}

}  // namespace troupe
