// What vectors are on AVX-512 with BF16, VNNI and VBMI: one register each. See vectors.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace troupe {

struct Floats {
    __m512 v;
};

struct Ints {
    __m512i v;
};

constexpr int64_t REGISTERS = 32;  // how many vectors fit into registers
constexpr bool BYTE_DOTS = true;   // whether products of bytes are as fast as those of words

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints splat_at(const void* from) {
    int32_t x;
    std::memcpy(&x, from, 4);
    return splat(x);
}
inline Ints splat_words(int x) { return {_mm512_set1_epi16(static_cast<int16_t>(x))}; }
inline Ints splat_bytes(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
inline Ints lane_numbers() { return {_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}; }

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats fms(Floats a, Floats b, Floats c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
inline Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats x) { return {_mm512_abs_ps(x.v)}; }
inline Floats round(Floats x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats fraction(Floats x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
inline Floats scale(Floats x, Floats power) { return {_mm512_scalef_ps(x.v, power.v)}; }
inline Floats bounded_power(Floats x) { return x; }

inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Ints operator<<(Ints x, unsigned bits) { return {_mm512_slli_epi32(x.v, bits)}; }
inline Ints operator>>(Ints x, unsigned bits) { return {_mm512_srli_epi32(x.v, bits)}; }
inline Ints signed_right(Ints x, unsigned bits) { return {_mm512_srai_epi32(x.v, bits)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Ints min(Ints a, Ints b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline Ints select_bits(Ints where, Ints a, Ints b) { return {_mm512_ternarylogic_epi32(where.v, a.v, b.v, 0xca)}; }
inline Ints and_or(Ints a, Ints b, Ints c) { return {_mm512_ternarylogic_epi32(a.v, b.v, c.v, 0xea)}; }
inline Ints add_words(Ints a, Ints b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline Ints words_left(Ints x, unsigned bits) { return {_mm512_slli_epi16(x.v, bits)}; }
inline Ints words_right(Ints x, unsigned bits) { return {_mm512_srli_epi16(x.v, bits)}; }
inline Ints abs_bytes(Ints x) { return {_mm512_abs_epi8(x.v)}; }
inline Ints select_bytes(Ints equal, Ints to, Ints a, Ints b) {
    return {_mm512_mask_mov_epi8(b.v, _mm512_cmpeq_epi8_mask(equal.v, to.v), a.v)};
}
inline Ints select_words(Ints x, Ints clear, Ints a, Ints b) {
    return {_mm512_mask_mov_epi16(b.v, _mm512_testn_epi16_mask(x.v, clear.v), a.v)};
}

inline Floats to_floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Ints to_ints(Floats x) { return {_mm512_cvtps_epi32(x.v)}; }
inline Ints bits_of(Floats x) { return {_mm512_castps_si512(x.v)}; }
inline Floats from_bits(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
inline Floats from_halves(Ints x) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x.v))}; }
inline Ints to_halves(Floats x) {
    return {_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}

inline Mask operator>(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Mask operator>=(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline Mask operator<(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline Mask operator==(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline Mask operator>(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a.v, b.v); }
inline Mask operator<=(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a.v, b.v); }
inline Mask operator==(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask(a.v, b.v); }
inline Floats select(Mask mask, Floats a, Floats b) { return {_mm512_mask_mov_ps(b.v, mask, a.v)}; }
inline Ints select(Mask mask, Ints a, Ints b) { return {_mm512_mask_mov_epi32(b.v, mask, a.v)}; }
inline Floats keep(Mask mask, Floats x) { return {_mm512_maskz_mov_ps(mask, x.v)}; }

inline float add_all(Floats x) { return _mm512_reduce_add_ps(x.v); }
inline float max_all(Floats x) { return _mm512_reduce_max_ps(x.v); }
inline int32_t add_all(Ints x) { return _mm512_reduce_add_epi32(x.v); }
inline int32_t max_all(Ints x) { return _mm512_reduce_max_epi32(x.v); }
inline int32_t min_all(Ints x) { return _mm512_reduce_min_epi32(x.v); }
inline float first_lane(Floats x) { return _mm512_cvtss_f32(x.v); }

inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const bf16* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
inline Floats load(const bf16* from, Mask mask) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16))};
}
inline Ints load_signed(const void* from) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))}; }
inline Ints load_unsigned(const void* from) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))}; }
inline Floats load_halves(const void* from) { return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))}; }
inline Ints load_line(const void* from) { return {_mm512_loadu_si512(from)}; }
inline Ints load_half_line(const void* from) {
    return {_mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}

inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
inline void store_line(void* to, Ints x) { _mm512_storeu_si512(to, x.v); }
inline void stream_line(void* to, Ints x) { _mm512_stream_si512(static_cast<__m512i*>(to), x.v); }
inline void store_words(void* to, Ints x, int64_t count) {
    _mm512_mask_storeu_epi16(to, count >= 32 ? ~0u : (1u << count) - 1, x.v);
}
inline void store(bf16* to, Floats x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
inline void store_bytes(void* to, Ints x) { _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x.v)); }
// The lower half of each lane; the lowest byte of each, of four the second and third swapped.
inline void store_lower(void* to, Ints x) { _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x.v)); }
inline void store_fours(void* to, Ints x) {
    const __m128i order = _mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x.v), order));
}
inline void finish_streams() { _mm_sfence(); }
inline void pause() { _mm_pause(); }

inline Floats gather(const float* from, Ints at, Mask mask) {
    return {_mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, at.v, from, 4)};
}
inline Ints gather(const int32_t* from, Ints at) { return {_mm512_i32gather_epi32(at.v, from, 4)}; }
inline Floats pick(const bf16* from, int64_t count, Ints at) {
    const __m512i words = _mm512_maskz_loadu_epi16(~0u >> (32 - count), from);
    return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, at.v, words))};
}
inline Ints look_up_words(Ints table, Ints at) { return {_mm512_permutexvar_epi16(at.v, table.v)}; }
inline Ints look_up_bytes(Ints table, Ints at) { return {_mm512_shuffle_epi8(table.v, at.v)}; }
inline Ints table_of_bytes(const void* from) { return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)))}; }

class ByteTable {
  public:
    ByteTable() = default;
    explicit ByteTable(const uint8_t* from) : first_(load_line(from)), second_(load_line(from + 64)) {}
    Ints operator()(Ints at) const { return {_mm512_permutex2var_epi8(first_.v, at.v, second_.v)}; }

  private:
    Ints first_, second_;
};

inline Ints to_bf16(Floats low, Floats high) { return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v))}; }
inline bf16 to_bf16(float x) { return static_cast<bf16>(_mm_cvtsi128_si32(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(x))))); }
inline Floats round_bf16(Floats x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))), 16))};
}
template <int HALF>
inline Floats widen(Ints line) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(line.v, HALF)), 16))};
}
inline Ints pair_words(Floats even, Floats odd) {
    alignas(64) static constexpr uint16_t ORDER[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return {_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), to_bf16(even, odd).v)};
}
template <int HALF>
inline Ints interleave_words(Ints a, Ints b) {
    alignas(64) static constexpr uint16_t ORDER[] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i order = _mm512_load_si512(ORDER);
    return {_mm512_permutex2var_epi16(a.v, HALF ? _mm512_add_epi16(order, _mm512_set1_epi16(16)) : order, b.v)};
}
inline Ints order_bytes(Ints x) { return {_mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), x.v)}; }
template <int HALF>
inline Ints interleave_ordered(Ints low, Ints high) {
    return {HALF ? _mm512_unpackhi_epi8(low.v, high.v) : _mm512_unpacklo_epi8(low.v, high.v)};
}

// The outputs of a half, each with two of its inputs: [pair][eight outputs].
class PairOrder {
  public:
    PairOrder() {
        const __m512i lanes = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        for (int pair = 0; pair < 2; pair++)
            for (int eight = 0; eight < 2; eight++) of_[pair][eight] = {_mm512_add_epi32(lanes, _mm512_set1_epi32(pair + 32 * eight))};
    }
    Floats floats(Ints codes, int pair, int eight) const {
        return {_mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x1111111111111111, of_[pair][eight].v, codes.v))};
    }

  private:
    Ints of_[2][2];
};

inline void spread(Floats of, Floats* to) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    to[0] = {_mm512_permutexvar_ps(low, of.v)};
    to[1] = {_mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), of.v)};
}

inline Ints dot_words(Ints sum, Ints a, Ints b) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }
inline Floats dot(Floats sum, Ints a, Ints b) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
inline Ints dot(Ints sum, Ints a, Ints b) { return {_mm512_dpbusd_epi32(sum.v, a.v, b.v)}; }

inline Floats max_of_quarters(Floats x) {
    x.v = _mm512_max_ps(x.v, _mm512_shuffle_f32x4(x.v, x.v, 0x4e));
    return {_mm512_max_ps(x.v, _mm512_shuffle_f32x4(x.v, x.v, 0xb1))};
}
inline Floats add_quarters(Floats sum, Floats x) {
    __m128 result = _mm512_castps512_ps128(sum.v);
    result = _mm_add_ps(result, _mm512_castps512_ps128(x.v));
    result = _mm_add_ps(result, _mm512_extractf32x4_ps(x.v, 1));
    result = _mm_add_ps(result, _mm512_extractf32x4_ps(x.v, 2));
    result = _mm_add_ps(result, _mm512_extractf32x4_ps(x.v, 3));
    return {_mm512_castps128_ps512(result)};
}

[[gnu::always_inline]] inline Floats add_lanes(const Floats (&sums)[16]) {
    const auto quarters = [&](int64_t i) {  // of four vectors, in each quarter
        const __m512 a = sums[i].v, b = sums[i + 1].v, c = sums[i + 2].v, d = sums[i + 3].v;
        const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    };
    const auto halve = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return {halve(halve(quarters(0), quarters(4)), halve(quarters(8), quarters(12)))};
}

// 4 x 4 within quarters of the registers, and then the quarters.
inline void transpose(Ints* rows) {
    __m512i part[4][4];
    for (int g = 0; g < 4; g++) {
        const Ints* r = rows + 4 * g;
        const __m512i a = _mm512_unpacklo_epi32(r[0].v, r[1].v), b = _mm512_unpackhi_epi32(r[0].v, r[1].v);
        const __m512i c = _mm512_unpacklo_epi32(r[2].v, r[3].v), d = _mm512_unpackhi_epi32(r[2].v, r[3].v);
        part[0][g] = _mm512_unpacklo_epi64(a, c);
        part[1][g] = _mm512_unpackhi_epi64(a, c);
        part[2][g] = _mm512_unpacklo_epi64(b, d);
        part[3][g] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(part[i][0], part[i][1], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(part[i][0], part[i][1], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(part[i][2], part[i][3], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(part[i][2], part[i][3], 0xee);
        rows[i] = {_mm512_shuffle_i32x4(a, c, 0x88)};
        rows[4 + i] = {_mm512_shuffle_i32x4(a, c, 0xdd)};
        rows[8 + i] = {_mm512_shuffle_i32x4(b, d, 0x88)};
        rows[12 + i] = {_mm512_shuffle_i32x4(b, d, 0xdd)};
    }
}

}  // namespace troupe
