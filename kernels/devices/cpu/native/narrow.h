// Keys and values of 8 bits: quantized when they are written to the cache, widened to bf16 in a core's cache when they are read.
#pragma once
#include <bit>
#include <cmath>

#include "program.h"
#include "tiles.h"
#include "vectors.h"

namespace troupe {

enum Narrow : int64_t { PLAIN, WHOLE, E4M3, E5M2 };  // bf16, int8 and floats of 8 bits

constexpr float LARGEST[] = {0.0f, 127.0f, 448.0f, 57344.0f};
constexpr float LEAST_SCALE = 0x1p-126f;
constexpr uint8_t NONE = 0x80;  // among int8 with scales that are fixed beforehand: a value that was not finite

inline float wide(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

inline __m512 widen(const uint8_t* x, int64_t kind) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    if (kind == WHOLE) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw));
    const __m256i bits = _mm256_cvtepu8_epi16(raw);
    if (kind == E5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(bits, 8));  // the upper half of a binary16
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    // As binary16, whose exponent bias is 8 larger.
    const __m512 scaled = _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)));
    const __mmask16 none = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    return _mm512_mask_mov_ps(_mm512_mul_ps(scaled, _mm512_set1_ps(256.0f)), none, _mm512_set1_ps(NAN));
}

// Rounds to the nearest; values too large become the largest, and a NaN stays one, or becomes 0 where the type has none.
inline void narrow(uint8_t* out, __m512 x, int64_t kind) {
    const __m512 most = _mm512_set1_ps(LARGEST[kind]), least = _mm512_set1_ps(-LARGEST[kind]);
    x = _mm512_min_ps(most, _mm512_max_ps(least, x));  // min and max return the second operand if one is a NaN
    __m128i bytes;
    if (kind == WHOLE) {
        bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    } else {
        const int bits = kind == E4M3 ? 7 : 8;
        if (kind == E4M3) x = _mm512_mul_ps(x, _mm512_set1_ps(0x1p-8f));
        const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x7fff));
        const __m256i even = _mm256_and_si256(_mm256_srli_epi16(magnitude, bits), _mm256_set1_epi16(1));
        const __m256i up = _mm256_add_epi16(even, _mm256_set1_epi16(static_cast<int16_t>((1 << (bits - 1)) - 1)));
        __m256i found = _mm256_srli_epi16(_mm256_add_epi16(magnitude, up), bits);
        const __mmask16 none = _mm256_cmpgt_epi16_mask(magnitude, _mm256_set1_epi16(0x7c00));
        found = _mm256_mask_mov_epi16(found, none, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
        bytes = _mm256_cvtepi16_epi8(_mm256_or_si256(found, sign));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}

// A cache of 8 bits: [token][head of keys, then of values][dim].
struct Kept {
    uint8_t* values;
    bf16* scales;                   // [token][head], or null
    const float *fixed, *offsets;   // scales and offsets of all tokens [head][dim]; offsets may be null, and with `scales` both are
    const float* by_head;           // fixed scales [head], if all dims of a head share one and there are no offsets
    int64_t kind, dim, heads;

    Kept(const Op& op, void* values, int64_t dim, int64_t kv_heads)
        : values(static_cast<uint8_t*>(values)), scales(static_cast<bf16*>(op.scales)),
          fixed(static_cast<const float*>(op.fixed)), offsets(static_cast<const float*>(op.offsets)),
          by_head(static_cast<const float*>(op.by_head)), kind(op.narrow), dim(dim), heads(2 * kv_heads) {}

    // Stores x [dim] of a head of token `place`.
    void store(int64_t place, int64_t head, const bf16* x) const {
        const int64_t at = place * heads + head;
        uint8_t* out = values + at * dim;
        if (scales) {
            __m512i bits = _mm512_setzero_si512();  // compared so, a NaN is larger than infinity
            for (int64_t i = 0; i < dim; i += 16)
                bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_castps_si512(load(x + i)), _mm512_set1_epi32(0x7fffffff)));
            const float size = std::bit_cast<float>(_mm512_reduce_max_epu32(bits)) / LARGEST[kind];
            const __m128bh nearest = _mm_cvtneps_pbh(_mm_set_ss(size < LEAST_SCALE ? LEAST_SCALE : size));
            scales[at] = static_cast<bf16>(_mm_cvtsi128_si32(reinterpret_cast<__m128i>(nearest)));
            const __m512 divisor = _mm512_set1_ps(wide(scales[at]));
            for (int64_t i = 0; i < dim; i += 16) narrow(out + i, _mm512_div_ps(load(x + i), divisor), kind);
            return;
        }
        for (int64_t i = 0; i < dim; i += 16) {
            __m512 value = load(x + i);
            const __mmask16 broken = _mm512_fpclass_ps_mask(value, 0x99);  // infinities and NaNs, which no scale expresses
            value = _mm512_div_ps(value, _mm512_loadu_ps(fixed + head * dim + i));
            if (offsets) value = _mm512_add_ps(value, _mm512_loadu_ps(offsets + head * dim + i));
            narrow(out + i, _mm512_mask_mov_ps(value, broken, _mm512_set1_ps(NAN)), kind);
            if (kind == WHOLE) _mm_mask_storeu_epi8(out + i, broken, _mm_set1_epi8(static_cast<char>(NONE)));
        }
    }

    // 16 dims from `i` on of a head of token `place`, dequantized.
    __m512 at(int64_t place, int64_t head, int64_t i) const {
        const uint8_t* x = values + (place * heads + head) * dim + i;
        __m512 value = widen(x, kind);
        if (scales) return _mm512_mul_ps(value, _mm512_set1_ps(wide(scales[place * heads + head])));
        if (kind == WHOLE) {
            const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
            const __mmask16 broken = _mm_cmpeq_epi8_mask(raw, _mm_set1_epi8(static_cast<char>(NONE)));
            value = _mm512_mask_mov_ps(value, broken, _mm512_set1_ps(NAN));
        }
        if (offsets) value = _mm512_sub_ps(value, _mm512_loadu_ps(offsets + head * dim + i));
        return _mm512_mul_ps(value, _mm512_loadu_ps(fixed + head * dim + i));
    }

    // The same of 32 dims as bf16.
    __m512i line(int64_t place, int64_t head, int64_t i) const {
        return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(at(place, head, i + 16), at(place, head, i)));
    }
};

// WRITE_NARROW, one token.
inline void write_narrow(const Op& op, const Step& step, int64_t row) {
    const bf16* x = static_cast<const bf16*>(op.a) + row * op.stride_a;
    const Kept kept(op, op.out, op.i0, op.i1 / 2);
    for (int64_t head = 0; head < op.i1; head++, x += op.i0) kept.store(step.index[row], head, x);
}

// The bytes of all magnitudes of 8 bits as bf16, which can express each.
struct alignas(64) Magnitudes {
    uint8_t upper[128], lower[128];

    explicit Magnitudes(int64_t kind) {
        for (int i = 0; i < 128; i++) {
            alignas(64) uint8_t code[16] = {static_cast<uint8_t>(i)};
            const uint32_t bits = std::bit_cast<uint32_t>(_mm512_cvtss_f32(widen(code, kind)));
            upper[i] = static_cast<uint8_t>(bits >> 24), lower[i] = static_cast<uint8_t>(bits >> 16);
        }
    }
};

// Widens numbers of 8 bits to bf16, without their scales. Exact.
class Widening {
  public:
    explicit Widening(const Kept& kept) : whole_(kept.kind == WHOLE), broken_(whole_ && !kept.scales) {
        if (!kept.kind) return;
        static const Magnitudes all[] = {Magnitudes(WHOLE), Magnitudes(E4M3), Magnitudes(E5M2)};
        const Magnitudes& of = all[kept.kind - WHOLE];
        for (int64_t i = 0; i < 2; i++)
            upper_[i] = _mm512_load_si512(of.upper + 64 * i), lower_[i] = _mm512_load_si512(of.lower + 64 * i);
    }

    // `count` numbers, a multiple of 32, of each of `rows` rows, `stride` bytes apart.
    void run(const uint8_t* from, int64_t stride, int64_t rows, int64_t count, bf16* to, int64_t stride_to) const {
        if (!whole_) return all<false, false>(from, stride, rows, count, to, stride_to);
        broken_ ? all<true, true>(from, stride, rows, count, to, stride_to)
                : all<true, false>(from, stride, rows, count, to, stride_to);
    }

  private:
    template <bool WHOLE_NUMBERS, bool BROKEN>
    void all(const uint8_t* first, int64_t stride, int64_t rows, int64_t each, bf16* to_first, int64_t stride_to) const {
        const __m512i halves = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), sign = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i upper[2] = {upper_[0], upper_[1]}, lower[2] = {lower_[0], lower_[1]};
        const auto part = [&](__m512i x, __m512i& low, __m512i& high) {
            x = _mm512_permutexvar_epi64(halves, x);
            const __m512i size = WHOLE_NUMBERS ? _mm512_abs_epi8(x) : x;
            high = _mm512_permutex2var_epi8(upper[0], size, upper[1]);  // takes seven bits
            low = _mm512_permutex2var_epi8(lower[0], size, lower[1]);
            high = _mm512_ternarylogic_epi32(high, x, sign, 0xf8);  // high | x & sign
            if (BROKEN) {
                const __mmask64 none = _mm512_cmpeq_epi8_mask(x, sign);
                high = _mm512_mask_mov_epi8(high, none, _mm512_set1_epi8(0x7f));
                low = _mm512_mask_mov_epi8(low, none, _mm512_set1_epi8(static_cast<char>(0xc0)));
            }
        };
        for (int64_t row = 0; row < rows; row++, first += stride, to_first += stride_to) {
            const uint8_t* from = first;
            bf16* to = to_first;
            int64_t count = each;
            __m512i low, high;
            for (; count >= 64; count -= 64, from += 64, to += 64) {
                part(_mm512_loadu_si512(from), low, high);
                _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
                _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
            }
            if (!count) continue;
            part(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), low, high);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
        }
    }

    __m512i upper_[2], lower_[2];
    bool whole_, broken_;
};

constexpr int64_t MOST_WHOLE = 512;  // dims of keys whose products with a query's whole numbers fit into 32 bits

// Quantizes a query [dim] to integers of 16 bits, to a 65,000th of its largest: the upper bytes of four dims, `stride` apart, then
// the lower ones. Returns the scale, which is not finite if a value is not.
inline float round_query(const bf16* x, int64_t dim, uint32_t* to, int64_t stride) {
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), half = _mm512_set1_epi32(128);
    __m512i bits = _mm512_setzero_si512();  // compared so, a NaN is larger than infinity
    for (int64_t i = 0; i < dim; i += 16) bits = _mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(load(x + i)), sign));
    const float most = std::bit_cast<float>(_mm512_reduce_max_epi32(bits));
    const bool finite = most < INFINITY;
    const __m512 by = _mm512_set1_ps(finite && most > 0x1p-100f ? 32512.0f / most : 0.0f);
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i), by));
        alignas(16) uint32_t upper[4], lower[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(upper), _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(whole, half), 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(lower), _mm512_cvtepi32_epi8(whole));
        for (int64_t four = 0; four < 4; four++) {
            to[(i / 4 + four) * stride] = upper[four];
            to[((dim + i) / 4 + four) * stride] = lower[four];
        }
    }
    return finite ? most / 32512.0f : most;
}

// Reads 16 tokens at a time for attention: keys and values of some kv heads as bf16, or int8 unchanged.
class Sixteen {
  public:
    // `memory`: `size` elements.
    Sixteen(const Kept& kept, int64_t head, int64_t heads, bf16* memory)
        : kept_(kept), widening_(kept), head_(head), heads_(heads), memory_(memory) {}

    static int64_t size(int64_t heads, int64_t dim) { return 2 * 16 * 2 * heads * dim; }
    bool whole() const { return kept_.kind == WHOLE && kept_.scales; }  // whether values stay as they are
    bool whole_keys() const { return AMX && whole() && kept_.dim % 64 == 0 && kept_.dim <= MOST_WHOLE; }  // and keys
    int64_t token() const { return 2 * heads_ * kept_.dim; }            // elements from one to the next
    int64_t head() const { return head_; }
    int64_t place(int64_t turn) const { return places_[turn]; }
    const bf16* keys(int64_t turn) const { return memory_ + turn * 16 * token(); }
    const bf16* values(int64_t turn) const { return keys(turn) + heads_ * kept_.dim; }
    const int8_t* whole_at(int64_t turn, int64_t part) const {  // keys (part 0) or values (1)
        return reinterpret_cast<int8_t*>(kept_.values) + (places_[turn] * kept_.heads + part * kept_.heads / 2 + head_) * kept_.dim;
    }

    // Reads 16 tokens from `place` on into the half of the memory that `turn` selects.
    void widen(int64_t place, int64_t turn) {
        places_[turn] = place;
        if (whole_keys()) return;
        bf16* out = memory_ + turn * 16 * token();
        const int64_t dim = kept_.dim, all = kept_.heads / 2;
        const uint8_t* from = kept_.values + (place * kept_.heads + head_) * dim;
        const bool exact = kept_.scales || kept_.by_head;
        for (int64_t part = 0; part < 2 - whole(); part++, out += heads_ * dim, from += all * dim) {
            if (exact) {
                widening_.run(from, kept_.heads * dim, 16, heads_ * dim, out, token());
                continue;
            }
            for (int64_t i = 0; i < 16; i++)
                for (int64_t h = 0; h < heads_; h++)
                    for (int64_t d = 0; d < dim; d += 32)
                        _mm512_storeu_si512(out + i * token() + h * dim + d, kept_.line(place + i, part * all + head_ + h, d));
        }
    }

  private:
    const Kept& kept_;
    Widening widening_;
    int64_t head_, heads_;
    bf16* memory_;
    int64_t places_[2] = {};
};

}  // namespace troupe
