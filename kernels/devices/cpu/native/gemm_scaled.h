// Products with integer weights whose scales are multiplied into the weights before the sums, so that tiles add up many inputs at once.
// Scales are integer scales of groups of 16 or 32, with one factor for 256 inputs (K types of GGUF files), or are all expressed as
// shares of an output's factor. The scaled weight is computed in float16 and rounded to bf16 bit by bit. Zeros are subtracted first;
// zeros of groups with integer scales may be products of their own.
#pragma once
#include <atomic>

#include "gguf_block_layout.h"
#include "scratch.h"

namespace troupe {

constexpr int64_t SUPER_LINES = 8;  // lines of a superblock of 256 inputs

inline __m512h as_halves(Ints x) { return _mm512_castsi512_ph(x.v); }

// Repeats the numbers of 16 outputs for the two inputs of a pair.
inline Ints in_pairs(__m256i numbers) {
    const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8,  //
                                           7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return {_mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(numbers))};
}

// Makes lines of bf16 in the order of gemm_bf16.h, scaled by 2^-POWER and by the largest scale. Numbers of float16 below two have the
// exponent of bf16 without its upper three bits. `S` is as in gemm_superblocks.h, with: POWER; `bytes(cell, half, four)`, codes in the lowest
// bits, or in all bits if BYTES; `scale(super, half)`; `middle(super, half)`, subtracted from codes; FLOATS, whether zeros are
// not integers.
// ALL: whether all inputs share one factor; otherwise each superblock has its own.
template <class S, bool ALL>
class Scaling {
  public:
    // The factor of each output, for all of its inputs.
    static Floats factor(const S& weight, int64_t lines, int64_t half) {
        Floats result = Floats{};
        for (int64_t super = 0; super < lines / weight.lines(); super++) {
            Floats bound = abs(weight.scale(super, half));
            if constexpr (FLOATS) {
                bound = bound * splat(static_cast<float>(S::LARGEST * S::OF_GROUP));
                bound = fma(abs(weight.zero(super, half)), splat(static_cast<float>(S::OF_GROUP)), bound);
            } else {
                bound = bound * splat(static_cast<float>(1 << S::POWER));
            }
            result = max(result, bound);
        }
        return result;
    }

    // The number that scales are multiplied with, given the factor.
    static Floats share(Floats factor) {
        return keep(factor > splat(0x1p-100f), splat(64.0f) / factor);
    }

    // `shares`: those of both halves, if ALL.
    Scaling(const S& weight, const Floats* shares) : of_(weight) {
        if (ALL) by_[0] = shares[0], by_[1] = shares[1];
    }

    // Makes a line of sixteen outputs.
    void half(int64_t line, int64_t half, bf16* out) const {
        const uint8_t* cell = of_.cell(line);
        Factors by = factors(line, 0, half);
        fours<0>(cell, half, by, out);
        if (S::GROUP == TILE) by = factors(line, 1, half);
        fours<4>(cell, half, by, out);
    }

    void line(int64_t line, bf16* out) const {
        of_.fetch(line);
        half(line, 0, out);
        half(line, 1, out + WIDE * DEPTH / 2);
    }

    // Writes the zeros of a group's outputs for each pair of inputs.
    void zeros(int64_t line, int64_t second, int64_t half, bf16* out) const {
        const Ints bits = bits_of(of_.group_zero(line, second, half));  // an integer below 256
        store_line(out, bits | bits >> 16);
    }

  private:
    static constexpr float SHARE = 64.0f / (1 << S::POWER);
    static constexpr bool FLOATS = ALL && (S::FLOATS || (S::GROUP && S::ZEROS));  // whether zeros are subtracted as floats
    static constexpr bool UNSIGNED = !ALL && S::ZEROS;

    struct Factors {
        __m512h scale, less, zero;
    };

    static __m512h all(float x) { return _mm512_set1_ph(static_cast<_Float16>(x)); }
    static __m512h halves(Floats x) {
        return as_halves(in_pairs(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
    }
    static __m128i bytes_at(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

    Factors factors(int64_t line, int64_t second, int64_t half) const {
        const int64_t super = line / (S::GROUP ? SUPER_LINES : of_.lines());
        __m512h scale = all(0), middle, zero = all(0);
        if constexpr (ALL) scale = halves(of_.scale(super, half) * by_[half]);
        if constexpr (FLOATS)  // the sum turns negative zero into zero
            zero = halves(fma(of_.zero(super, half), by_[half] * splat(0x1p-6f), Floats{}));
        if constexpr (S::GROUP == 0) {
            middle = halves(fma(of_.middle(super, half), splat(0x1p-6f), splat(16.0f)));
        } else {
            const uint8_t* from = of_.of_group(line, half) + second * WIDE;
            const __m512h integers = _mm512_cvtepi16_ph(in_pairs(_mm256_cvtepi8_epi16(bytes_at(from))).v);
            scale = _mm512_mul_ph(integers, ALL ? scale : all(SHARE));
            middle = UNSIGNED ? _mm512_mul_ph(scale, all(-16)) : all(16 + of_.offset / 64.0f);
            if constexpr (FLOATS)
                zero = _mm512_mul_ph(zero, _mm512_cvtepi16_ph(in_pairs(_mm256_cvtepu8_epi16(bytes_at(from + of_.groups * WIDE))).v));
        }
        return {scale, middle, zero};
    }

    // Makes fours `BEGIN` to `BEGIN` + 3 of a half.
    template <int BEGIN>
    void fours(const uint8_t* cell, int64_t half, const Factors& by, bf16* out) const {
        // 16 + code / 64 in float16: the code is the lowest bits.
        const Ints more = splat_words(0x4c00), codes = splat_words(S::BYTES ? 0xff : (1 << S::CODE_BITS) - 1);
        const Ints eighth = splat_words(1 << 12), rest = splat_words(static_cast<int16_t>(0x87ff));
        const auto put = [&]<bool ODD>(Ints from, bf16* to) {
            const __m512h code = as_halves(and_or(from, codes, more));  // from & codes | more
            const __m512h value = UNSIGNED ? code : _mm512_sub_ph(code, by.less), zero = UNSIGNED ? by.less : by.zero;
            // Every other input is computed negated, and its sign is flipped below. A zero has a positive sign in both cases, so it
            // becomes -2^-15 for these inputs and 2^-15 for the others, and these errors cancel instead of adding up.
            const __m512h result = UNSIGNED ? (ODD ? _mm512_fnmsub_ph(value, by.scale, zero) : _mm512_fmadd_ph(value, by.scale, zero))
                                  : ODD    ? _mm512_fnmadd_ph(value, by.scale, zero)
                                  : FLOATS ? _mm512_fmsub_ph(value, by.scale, zero)
                                           : _mm512_fmadd_ph(value, by.scale, zero);
            // The bits divided by eight and rounded have the mantissa of bf16.
            const Ints bits = {_mm512_mulhrs_epi16(_mm512_castph_si512(result), eighth.v)};
            const Ints upper = splat_words(static_cast<int16_t>(ODD ? 0xb800 : 0x3800));
            store_line(to, {_mm512_ternarylogic_epi32(bits.v, rest.v, upper.v, 0x6a)});  // (bits & rest) ^ upper
        };
#pragma GCC unroll 4
        for (int64_t four = BEGIN; four < BEGIN + 4; four++) {
            const Ints all = of_.bytes(cell, half, four);
            put.template operator()<false>(all, out + 2 * four * WIDE);
            put.template operator()<true>(words_right(all, 8), out + (2 * four + 1) * WIDE);
        }
    }

    const S& of_;
    Floats by_[2];
};

// Ones that add up groups of `GROUP` inputs: column i sums group i of 256 inputs. [line][pair][column][2]
template <int GROUP>
struct GroupOnes {
    alignas(64) bf16 lines[SUPER_LINES][TILE * DEPTH] = {};

    GroupOnes() {
        for (int64_t line = 0; line < SUPER_LINES; line++)
            for (int64_t input = 0; input < DEPTH; input++)
                lines[line][input / 2 * DEPTH + (line * DEPTH + input) / GROUP * 2 + input % 2] = 0x3f80;
    }
};

// The factors of zeros: the sum of each group of a token's inputs, as two numbers of bf16 whose sum it is.
// [row][256 inputs][group 16][2]. Each thread computes them once for a product, which `number` identifies.
class GroupSums {
  public:
    template <int GROUP>
    const bf16* of(uint64_t number, const char* x, int64_t stride, int64_t rows, int64_t lines) {
        if (number_ == number) return sums_.of(0);
        static const GroupOnes<GROUP> ones;
        alignas(64) float result[TILE * TILE];
        const int64_t supers = lines / SUPER_LINES;
        bf16* out = sums_.of(rows * supers * DEPTH);
        for (int64_t row = 0; row < rows; row += TILE, x += TILE * stride) {
            const int64_t here = std::min(rows - row, TILE);
            configure(static_cast<int>(here), 0);
            for (int64_t super = 0; super < supers; super++) {
                _tile_zero(0);
                for (int64_t line = 0; line < SUPER_LINES; line++) {
                    _tile_loadd(4, x + (super * SUPER_LINES + line) * LINE, stride);
                    _tile_loadd(6, ones.lines[line], LINE);
                    _tile_dpbf16ps(0, 4, 6);
                }
                _tile_stored(0, result, LINE);
                written();
                for (int64_t i = 0; i < here; i++) {
                    const Floats sum = load(result + i * TILE);
                    const Floats leading = round_bf16(sum), rest = round_bf16(sum - leading);
                    const Ints low = bits_of(leading) >> 16, high = bits_of(rest);
                    store_line(out + ((row + i) * supers + super) * DEPTH, low | high);
                }
            }
        }
        written();
        number_ = number;
        return out;
    }

  private:
    Scratch<bf16> sums_;
    uint64_t number_ = 0;
};

inline thread_local GroupSums group_sums;

// Up to 32 tokens of a product with such weights. `sums`: sums of their groups, if there are zeros.
struct Grouping {
    const char* x;
    int64_t stride, rows, lines;
    const bf16* sums;
};

// Writes `sums` [token][32] of 32 outputs.
template <class S>
void multiply_scaled(const S& weight, const Grouping& x, float* sums) {
    constexpr bool APART = S::ZEROS && S::GROUP != 0;
    alignas(64) bf16 wide[2][WIDE * DEPTH];
    alignas(64) float result[APART ? 2 : 1][WIDE * WIDE];
    alignas(64) static thread_local bf16 zeros[2][TILE * DEPTH] = {};  // [half][group]; missing groups are zero
    const int64_t rows = x.rows, each = S::GROUP ? SUPER_LINES : x.lines, supers = x.lines / each;
    const bool more = rows > TILE;
    const char* others = x.x + TILE * x.stride;
    configure(static_cast<int>(std::min(rows, TILE)), static_cast<int>(more ? rows - TILE : 0));
    using Scaled = Scaling<S, S::GROUP == 0>;
    Floats factors[2], shares[2];
    for (int64_t half = 0; S::GROUP == 0 && half < 2; half++)
        factors[half] = Scaled::factor(weight, x.lines, half), shares[half] = Scaled::share(factors[half]);
    const Scaled scaling(weight, shares);
    const auto clear = [&] {
        _tile_zero(0);
        _tile_zero(1);
        if (!more) return;
        _tile_zero(2);
        _tile_zero(3);
    };
    const auto multiply = [&](const char* tokens, const char* second, int64_t stride, const bf16* low, const bf16* high) {
        _tile_loadd(4, tokens, stride);
        _tile_loadd(6, low, LINE);
        _tile_loadd(7, high, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!more) return;
        _tile_loadd(5, second, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    };
    const auto keep = [&](float* to) {
        _tile_stored(0, to, 2 * LINE);
        _tile_stored(1, to + TILE, 2 * LINE);
        if (!more) return;
        _tile_stored(2, to + TILE * WIDE, 2 * LINE);
        _tile_stored(3, to + TILE * WIDE + TILE, 2 * LINE);
    };

    scaling.line(0, wide[0]);
    for (int64_t super = 0; super < supers; super++) {
        const int64_t begin = super * each;
        clear();
        if constexpr (APART)
            for (int64_t i = 0; i < SUPER_LINES * DEPTH / S::GROUP; i++)
                for (int64_t half = 0; half < 2; half++)
                    scaling.zeros(begin + i * S::GROUP / DEPTH, i % (DEPTH / S::GROUP), half, zeros[half] + i * DEPTH);
        for (int64_t line = begin; line < begin + each; line++) {
            // Tiles would wait for stores that are just issued, so the next line is made before this one is loaded.
            if (line + 1 < x.lines) scaling.line(line + 1, wide[(line + 1) % 2]);
            written();
            multiply(x.x + line * LINE, others + line * LINE, x.stride, wide[line % 2], wide[line % 2] + WIDE * DEPTH / 2);
        }
        keep(result[0]);
        if constexpr (APART) {
            const char* tokens = reinterpret_cast<const char*>(x.sums) + super * LINE;
            clear();
            multiply(tokens, tokens + TILE * supers * LINE, supers * LINE, zeros[0], zeros[1]);
            keep(result[1]);
        }
        written();
        for (int64_t half = 0; half < 2; half++) {
            const Floats scale = S::GROUP ? weight.scale(super, half) * splat(static_cast<float>(1 << S::POWER))
                                          : factors[half];
            Floats zero = Floats{};
            if constexpr (APART) zero = weight.zero(super, half);
            for (int64_t i = half * TILE; i < rows * WIDE; i += WIDE) {
                Floats sum = super ? load(sums + i) : Floats{};
                sum = fma(load(result[0] + i), scale, sum);
                if constexpr (APART) sum = fnma(load(result[1] + i), zero, sum);
                store(sums + i, sum);
            }
        }
    }
}

}  // namespace troupe
