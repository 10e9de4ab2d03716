// Products with whole weights of 4 or 8 bits, of which groups of an output's inputs share a scale (and a zero), on AMX. Each is
// made `(value - zero) * scale` in float32 and rounded to bf16 in the core's cache, so a product is, bit for bit, that with a
// weight which was made bf16 before (matrix.h).
//
// Of 4 bits an output has sixteen weights in a group: these are rounded once, and codes look them up. So a vector is inputs of
// one output, and outputs are the rows of a tile; tokens are the columns of another (columns.h). Many rows meet weights that are
// turned to be columns instead, in panels.
#pragma once
#include <vector>

#include "columns.h"
#include "matrix.h"

namespace troupe {

constexpr int64_t CHUNK = 128;  // inputs whose codes of 4 bits fill a line

inline int64_t grouped_block(int64_t inputs, int64_t bits) {
    return bits == 4 ? (inputs + CHUNK - 1) / CHUNK * WIDE * LINE : inputs * WIDE;
}

inline int64_t grouped_values(int64_t outputs, int64_t inputs, int64_t bits) {
    return blocks(outputs) * grouped_block(inputs, bits);
}

// Bytes of a packed weight: its values, then [block][group] 32 float scales, then of each 32 uint8 zeros.
inline int64_t packed_grouped(int64_t outputs, int64_t inputs, int64_t group, int64_t bits) {
    return grouped_values(outputs, inputs, bits) + blocks(outputs) * (inputs / group) * WIDE * 5;
}

// values uint8 [outputs, inputs], scales float and zeros uint8 [outputs, groups]. Of 4 bits -> [block of 32 outputs][128
// inputs][output][32 words], of which word i has inputs i, 32 + i and so on, from the lowest bits on; of 8 -> [block][32 inputs]
// [output][32], each less 128, and zeros, too.
inline void pack_grouped(const uint8_t* values, const float* scales, const uint8_t* zeros, int64_t outputs,
                         int64_t inputs, int64_t group, int64_t bits, uint8_t* packed) {
    const int64_t groups = inputs / group, middle = 1 << (bits - 1), size = grouped_block(inputs, bits);
    std::memset(packed, 0, packed_grouped(outputs, inputs, group, bits));
    for (int64_t output = 0; output < outputs; output++) {
        const uint8_t* from = values + output * inputs;
        uint8_t* to = packed + output / WIDE * size;
        for (int64_t input = 0; input < inputs; input++) {
            if (bits == 4) {
                const int64_t word = (input / CHUNK * WIDE + output % WIDE) * DEPTH + input % DEPTH;
                to[2 * word + input % CHUNK / 64] |= static_cast<uint8_t>(from[input] << 4 * (input / DEPTH % 2));
            } else {
                to[(input / DEPTH * WIDE + output % WIDE) * DEPTH + input % DEPTH] = from[input] ^ 0x80;
            }
        }
    }
    float* to = reinterpret_cast<float*>(packed + grouped_values(outputs, inputs, bits));
    uint8_t* zero = reinterpret_cast<uint8_t*>(to + blocks(outputs) * groups * WIDE);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t each = 0; each < groups; each++) {
            const int64_t at = (output / WIDE * groups + each) * WIDE + output % WIDE;
            to[at] = scales[output * groups + each];
            const int64_t value = zeros ? zeros[output * groups + each] : middle;
            zero[at] = static_cast<uint8_t>(bits == 4 ? value : value ^ 0x80);
        }
}

// What codes of 4 bits stand for, by their zeros.
struct alignas(64) Differences {
    float values[16][16] = {};
    constexpr Differences() {
        for (int zero = 0; zero < 16; zero++)
            for (int code = 0; code < 16; code++) values[zero][code] = static_cast<float>(code - zero);
    }
};

inline constexpr Differences differences;  // nothing may run when the library is loaded, on whatever processor

struct Grouped : Product {
    const int64_t* order;  // of the inputs, null: as they come
    std::vector<bf16>* ordered;
    int64_t group, bits;
    const bf16* columns = nullptr;  // tokens as columns, null: still to be made

    static constexpr bool made = true;
    const char* coming(int64_t output) const { return weight + output / WIDE * grouped_block(inputs(), bits); }
    const char* ready(int64_t output, char* space) const { return turned(*this, output, space); }
    class Weights;
};

// Makes bf16 of a grouped weight.
class Grouped::Weights {
  public:
    explicit Weights(const Grouped& p)
        : values_(p.weight), size_(grouped_block(p.inputs(), p.bits)), lines_(p.lines), bits_(p.bits),
          each_(p.group / DEPTH), groups_(p.inputs() / p.group), inverse_(((int64_t{1} << 32) + each_ - 1) / each_),
          scales_(reinterpret_cast<const float*>(p.weight + grouped_values(p.outputs, p.inputs(), p.bits))),
          zeros_(reinterpret_cast<const uint8_t*>(scales_ + blocks(p.outputs) * groups_ * WIDE)) {}

    // Of a block, outputs from `output` on, a quarter, of lines from `line` on, a multiple of 4 -> bf16 [line][output][32]; as many
    // as there are, of 4.
    void make(int64_t block, int64_t line, int64_t output, bf16* out) const {
        out += output * DEPTH;
        const char* from = values_ + block * size_;
        if (bits_ == 8) {
            from += (line * WIDE + output) * DEPTH;
            const int64_t left = std::min<int64_t>(4, lines_ - line);
            for (int64_t i = 0, done; i < left; i += done, from += done * WIDE * DEPTH, out += done * WIDE * DEPTH) {
                const int64_t at = factors(block, line + i) + output;
                if (each_ % 4 == 0 && left == 4 && fused<4>(from, at, out)) return;
                done = each_ == 2 && i + 2 <= left && fused<2>(from, at, out) ? 2 : 1;
                if (done == 1) whole(from, at, out);
            }
            return;
        }
        from += (line / 4 * WIDE + output) * LINE;
        const int64_t some = std::min<int64_t>(4, lines_ - line);
        if (each_ % 4 == 0) return codes<4>(from, block, line, output, some, out);
        if (each_ == 2) return codes<2>(from, block, line, output, some, out);
        codes<1>(from, block, line, output, some, out);
    }

  private:
    // Where the factors of a line's group are.
    int64_t factors(int64_t block, int64_t line) const { return (block * groups_ + (line * inverse_ >> 32)) * WIDE; }

    // Eight outputs; `EACH`: lines of a group among four.
    template <int EACH>
    void codes(const char* from, int64_t block, int64_t line, int64_t output, int64_t some, bf16* out) const {
        const float* by[4 / EACH];
        const uint8_t* zero[4 / EACH];
        for (int64_t i = 0; i < 4 / EACH; i++) {
            const int64_t at = factors(block, std::min(line + i * EACH, lines_ - 1)) + output;
            by[i] = scales_ + at, zero[i] = zeros_ + at;
        }
        const auto run = [&](auto count) {
            for (int64_t i = 0; i < PART; i++, from += LINE, out += DEPTH) {
                _mm_prefetch(from + 2 * WIDE * LINE, _MM_HINT_T0);
                const __m512i all = _mm512_loadu_si512(from);
                __m512i table = _mm512_setzero_si512();
                for (int j = 0; j < count; j++) {
                    if (j % EACH == 0) {
                        const __m512 weights = _mm512_mul_ps(_mm512_load_ps(differences.values[zero[j / EACH][i]]),
                                                             _mm512_set1_ps(by[j / EACH][i]));
                        table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weights, weights));  // for a fifth bit of either kind
                    }
                    const __m512i code = j ? _mm512_srli_epi16(all, 4 * j) : all;
                    _mm512_store_si512(out + j * WIDE * DEPTH, _mm512_permutexvar_epi16(code, table));
                }
            }
        };
        if (some == 4) return run(std::integral_constant<int, 4>());
        run(static_cast<int>(some));
    }

    // Eight outputs of some lines of 8 bits in a group; false: not these. A byte below the bits of 2^15 is a float's last but eight.
    // Where the middle is zero and a scale has 15 of its 24 bits, the scale's product with what there is too much is exact.
    template <int COUNT>
    bool fused(const char* from, int64_t at, bf16* out) const {
        uint64_t some;
        std::memcpy(&some, zeros_ + at, PART);
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales_ + at));
        if (some || !_mm256_testz_si256(bits, _mm256_set1_epi32(0x1ff))) return false;
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i first = _mm512_slli_epi32(lanes, 8), second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
        const __m512i power = _mm512_set1_epi32(0x47000000);
        const __m512 more = _mm512_set1_ps(32768.0f + 128.0f);
#pragma GCC unroll 8
        for (int64_t i = 0; i < PART; i++, from += DEPTH, out += DEPTH) {
            const __m512 scale = _mm512_set1_ps(scales_[at + i]), less = _mm512_mul_ps(scale, more);
            for (int64_t line = 0; line < COUNT; line++) {
                const char* row = from + line * WIDE * DEPTH;
                if (i % 2 == 0) _mm_prefetch(row + 4 * WIDE * DEPTH, _MM_HINT_T0);
                const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
                const __m512i bytes = _mm512_castsi256_si512(_mm256_xor_si256(all, _mm256_set1_epi8(static_cast<char>(0x80))));
                const auto made = [&](__m512i order) {
                    const __m512i value = _mm512_mask_permutexvar_epi8(power, 0x2222222222222222, order, bytes);
                    return _mm512_fmsub_ps(_mm512_castsi512_ps(value), scale, less);
                };
                const __m512bh both = _mm512_cvtne2ps_pbh(made(second), made(first));
                _mm512_store_si512(out + line * WIDE * DEPTH, reinterpret_cast<__m512i>(both));
            }
        }
        return true;
    }

    // Eight outputs of a line of 8 bits.
    void whole(const char* from, int64_t at, bf16* out) const {
        const int8_t* zero = reinterpret_cast<const int8_t*>(zeros_ + at);
        const float* by = scales_ + at;
        uint64_t some;
        std::memcpy(&some, zero, PART);
        const auto run = [&](auto less) {
            for (int64_t i = 0; i < PART; i++, from += DEPTH, out += DEPTH) {
                if (i % 2 == 0) _mm_prefetch(from + 4 * WIDE * DEPTH, _MM_HINT_T0);
                const auto* bytes = reinterpret_cast<const int8_t*>(from);
                __m512 low = load(bytes), high = load(bytes + TILE);
                if (less) low = _mm512_sub_ps(low, _mm512_set1_ps(zero[i])), high = _mm512_sub_ps(high, _mm512_set1_ps(zero[i]));
                const __m512 scale = _mm512_set1_ps(by[i]);
                const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_mul_ps(high, scale), _mm512_mul_ps(low, scale));
                _mm512_store_si512(out, reinterpret_cast<__m512i>(both));
            }
        };
        some ? run(std::true_type()) : run(std::false_type());
    }

    const char* values_;
    int64_t size_, lines_, bits_, each_, groups_, inverse_;  // each: lines of a group; inverse: 2^32 over it
    const float* scales_;
    const uint8_t* zeros_;
};

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

inline void multiply(Team& team, Grouped p, Scratch<bf16>& columns) {
    if (p.order) {
        if (static_cast<int64_t>(p.ordered->size()) < p.rows * p.inputs()) p.ordered->resize(p.rows * p.inputs());
        team.each((p.rows + 7) / 8, order_chunk, &p);
        p.x = reinterpret_cast<const char*>(p.ordered->data()), p.stride_x = p.inputs() * sizeof(bf16);
    }
    multiply_by_outputs(team, p, columns);
}

}  // namespace troupe
