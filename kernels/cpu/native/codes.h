// Products with weights in blocks whose codes of 4 and 5 bits stand for numbers of a table, of which 32 inputs share a scale (and
// a zero): the weights that an output has in a group are made bf16 once, and codes look them up (columns.h).
#pragma once
#include "columns.h"
#include "layout.h"

namespace troupe {

// Of a block of 32 outputs: unit after unit of inputs, where groups have whole scales 32 float16 scales (and zeros), then for 128
// inputs and eight outputs a cell: of four groups whole scales [group][output] (and zeros), or float16 ones; codes [output][32 words],
// of which word i has inputs i, 32 + i and so on, from the lowest bits on; of 5 bits the highest ones of four outputs at a time,
// input 32j + i of output k in bit (4k + j + 4) % 16.
struct Coded {
    int64_t whole, zeros, codes, cell, unit, inputs;  // codes: bytes of a cell; unit: bytes of one, which has so many inputs

    explicit Coded(const Layout& of) : whole(of.groups() > 0), zeros(of.zeros), codes(of.low == 5 ? 640 : 512) {
        cell = (whole ? 32 : 64) * (1 + zeros) + codes;
        inputs = whole ? of.super : 128;
        unit = head() + inputs / 128 * 4 * cell;
    }

    int64_t head() const { return whole ? 2 * WIDE * (1 + zeros) : 0; }
    int64_t block(int64_t all) const { return (all + inputs - 1) / inputs * unit; }
};

// Outputs from `first` on, a multiple of 32, of a packed weight that has its head.
inline void pack_codes(const Blocks& from, int64_t first, int64_t outputs, int64_t inputs, uint8_t* packed) {
    const Layout& of = *reinterpret_cast<const Layout*>(packed);
    const Coded coded(of);
    packed += sizeof(Layout) + first / WIDE * coded.block(inputs);
    std::memset(packed, 0, blocks(outputs) * coded.block(inputs));
    const int64_t supers = inputs / of.super, groups = inputs / of.group;
    for (int64_t output = 0; output < outputs; output++) {
        const int64_t lane = output % WIDE, at = lane % 8;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t input = group * of.group, super = output * supers + input / of.super;
            uint8_t* unit = packed + output / WIDE * coded.block(inputs) + input / coded.inputs * coded.unit;
            uint8_t* cell = unit + coded.head() + (input % coded.inputs / 128 * 4 + lane / 8) * coded.cell;
            const int64_t place = input % 128 / of.group * 8 + at;
            if (coded.whole) {
                std::memcpy(unit + 2 * lane, from.scales + super, 2);
                cell[place] = static_cast<uint8_t>(from.whole[output * groups + group]);
                if (of.zeros) {
                    std::memcpy(unit + 2 * (WIDE + lane), from.zeros + super, 2);
                    cell[32 + place] = from.less[output * groups + group];
                }
            } else {
                std::memcpy(cell + 2 * place, from.scales + super, 2);
                if (of.zeros) std::memcpy(cell + 64 + 2 * place, from.zeros + super, 2);
            }
            uint16_t* words = reinterpret_cast<uint16_t*>(cell + coded.cell - coded.codes);
            const int64_t line = input % 128 / DEPTH;
            for (int64_t i = 0; i < DEPTH; i++) {
                const uint16_t code = from.codes[output * inputs + input + i];
                words[at * DEPTH + i] |= static_cast<uint16_t>((code & 15) << 4 * line);
                if (of.low == 5) words[(8 + at / 4) * DEPTH + i] |= static_cast<uint16_t>(code >> 4 << (4 * (at % 4) + line + 4) % 16);
            }
        }
    }
}

struct CodeProduct : Product {
    const bf16* columns = nullptr;  // tokens as columns, null: still to be made

    static constexpr bool made = true;
    const Layout& layout() const { return *reinterpret_cast<const Layout*>(weight); }
    const char* coming(int64_t output) const { return weight + sizeof(Layout) + output / WIDE * Coded(layout()).block(inputs()); }
    const char* ready(int64_t output, char* space) const { return turned(*this, output, space); }
    class Weights;
};

// Makes bf16 of a weight in codes.
class CodeProduct::Weights {
  public:
    explicit Weights(const CodeProduct& p)
        : of_(p.layout()), coded_(of_), values_(p.weight + sizeof(Layout)), size_(coded_.block(p.inputs())), lines_(p.lines),
          first_(_mm512_loadu_ps(of_.table)), second_(_mm512_loadu_ps(of_.table + TILE)) {}

    // As Grouped::Weights.
    void make(int64_t block, int64_t line, int64_t output, bf16* out) const {
        const int64_t input = line * DEPTH, unit = coded_.inputs == 128 ? line / 4 : line / 8;
        const char* at = values_ + block * size_ + unit * coded_.unit;
        const char* cell = at + coded_.head() + ((input - unit * coded_.inputs) / 128 * 4 + output / PART) * coded_.cell;
        alignas(64) float scales[4 * PART], zeros[4 * PART];
        if (coded_.whole) {
            multiply(at + 2 * output, _mm512_cvtepi8_epi32, cell, scales);
            if (coded_.zeros) multiply(at + 2 * (WIDE + output), _mm512_cvtepu8_epi32, cell + 32, zeros);
        } else {
            floats(cell, scales);
            if (coded_.zeros) floats(cell + 64, zeros);
        }
        const char* codes = cell + coded_.cell - coded_.codes;
        for (int64_t i = 0; i < coded_.cell; i += LINE) _mm_prefetch(cell + AHEAD + i, _MM_HINT_T0);
        out += output * DEPTH;
        const int64_t some = std::min<int64_t>(4, lines_ - line);
        const auto run = [&](auto zeroed, auto five) {
            if (some == 4) return look_up<zeroed, five>(codes, scales, zeros, std::integral_constant<int, 4>(), out);
            look_up<zeroed, five>(codes, scales, zeros, static_cast<int>(some), out);
        };
        using Yes = std::true_type;
        using No = std::false_type;
        if (of_.low == 5) return coded_.zeros ? run(Yes(), Yes()) : run(No(), Yes());
        coded_.zeros ? run(Yes(), No()) : run(No(), No());
    }

  private:
    static constexpr int64_t AHEAD = 4096;

    // Eight float16 times whole numbers of four groups.
    template <class Widen>
    static void multiply(const char* halves, Widen widen, const char* whole, float* out) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
        const __m512 by = _mm512_cvtph_ps(_mm256_broadcastsi128_si256(eight));
        for (int64_t i = 0; i < 2; i++) {
            const __m512i wide = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(whole + 16 * i)));
            _mm512_store_ps(out + TILE * i, _mm512_mul_ps(by, _mm512_cvtepi32_ps(wide)));
        }
    }

    static void floats(const char* halves, float* out) {
        for (int64_t i = 0; i < 2; i++)
            _mm512_store_ps(out + TILE * i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 32 * i))));
    }

    template <bool ZEROS, bool FIVE, class Count>
    void look_up(const char* codes, const float* scales, const float* zeros, Count count, bf16* out) const {
        const __m512i fifth = _mm512_set1_epi16(16);
        __m512i high = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < PART; i++, out += DEPTH) {
            const __m512i all = _mm512_loadu_si512(codes + i * LINE);
            if (FIVE && i % 4 == 0) high = _mm512_loadu_si512(codes + (PART + i / 4) * LINE);
            for (int j = 0; j < count; j++) {
                const __m512 scale = _mm512_set1_ps(scales[j * PART + i]);
                const auto made = [&](__m512 value) {
                    return ZEROS ? _mm512_fmsub_ps(value, scale, _mm512_set1_ps(zeros[j * PART + i])) : _mm512_mul_ps(value, scale);
                };
                const __m512 low = made(first_), more = FIVE ? made(second_) : low;
                const __m512i table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(more, low));
                __m512i code = j ? _mm512_srli_epi16(all, 4 * j) : all;
                if (FIVE) {
                    const int at = 4 * (i % 4) + j;  // four bits more, but for the last
                    const __m512i bits = at < 12 ? _mm512_srli_epi16(high, at) : _mm512_slli_epi16(high, 16 - at);
                    code = _mm512_ternarylogic_epi32(fifth, bits, code, 0xca);
                }
                _mm512_store_si512(out + j * WIDE * DEPTH, _mm512_permutexvar_epi16(code, table));  // takes five bits
            }
        }
    }

    const Layout& of_;
    Coded coded_;
    const char* values_;
    int64_t size_, lines_;
    __m512 first_, second_;
};

// Output `output` of a packed weight -> bf16 [inputs]
inline void unpack_codes(const uint8_t* weight, int64_t output, int64_t inputs, bf16* out) {
    CodeProduct p{};
    p.weight = reinterpret_cast<const char*>(weight), p.lines = inputs / DEPTH;
    const CodeProduct::Weights weights(p);
    alignas(64) bf16 made[4 * WIDE * DEPTH];
    for (int64_t line = 0; line < p.lines; line += 4) {
        weights.make(output / WIDE, line, output % WIDE / PART * PART, made);
        for (int64_t i = line; i < std::min(line + 4, p.lines); i++)
            std::memcpy(out + i * DEPTH, made + ((i - line) * WIDE + output % WIDE) * DEPTH, 2 * DEPTH);
    }
}

}  // namespace troupe
