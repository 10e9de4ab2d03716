// AMX's tiles and AVX-512 FP16 in instructions of the level `avx512`, to test the sources of the level `amx` without such a processor.
// Include it before a source that is compiled for `avx512`.
//
// Operations follow the pseudocode of Intel's Software Developer's Manual; where the processor would raise an exception, the process
// aborts. Not emulated: tiles treat numbers below 2^-126 as zero, and the compiler does not see which memory they read.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

inline void expect(bool allowed, const char* otherwise, int tile) {
    if (allowed) return;
    std::fprintf(stderr, "emulated AMX, tile %d: %s\n", tile, otherwise);
    std::abort();
}

struct Tile {
    alignas(64) char row[16][64];
    int rows, bytes;  // 0: there is no such tile
};

struct Tiles {
    bool configured;
    Tile of[8];

    Tile& at(int tile) {
        expect(configured, "nothing is configured", tile);
        expect(of[tile].rows > 0, "it has no rows", tile);
        return of[tile];
    }
};

inline thread_local Tiles tiles = {};

inline void release() { tiles = {}; }

inline void configure(const void* from) {
    const uint8_t* config = static_cast<const uint8_t*>(from);
    release();
    tiles.configured = true;
    expect(config[0] == 1, "the palette is not 1", -1);
    for (int i = 1; i < 16; i++) expect(config[i] == 0, "the start row or a reserved byte is not 0", -1);
    for (int tile = 0; tile < 16; tile++) {
        uint16_t bytes;
        std::memcpy(&bytes, config + 16 + 2 * tile, 2);
        const int rows = config[48 + tile];
        expect(rows <= 16 && bytes <= 64, "too many rows or bytes", tile);
        expect((rows == 0) == (bytes == 0), "rows without bytes, or bytes without rows", tile);
        expect(tile < 8 || rows == 0, "there are eight tiles", tile);
        if (tile < 8) tiles.of[tile].rows = rows, tiles.of[tile].bytes = bytes;
    }
}

inline void clear(int tile) { std::memset(tiles.at(tile).row, 0, sizeof(Tile::row)); }

inline void load(int tile, const void* base, int64_t stride) {
    clear(tile);
    Tile& to = tiles.at(tile);
    for (int row = 0; row < to.rows; row++) std::memcpy(to.row[row], static_cast<const char*>(base) + row * stride, to.bytes);
}

inline void store(int tile, void* base, int64_t stride) {
    const Tile& from = tiles.at(tile);
    for (int row = 0; row < from.rows; row++) std::memcpy(static_cast<char*>(base) + row * stride, from.row[row], from.bytes);
}

inline __mmask16 check(int sum, int left, int right) {
    const Tile &c = tiles.at(sum), &a = tiles.at(left), &b = tiles.at(right);
    expect(sum != left && sum != right && left != right, "a product has a tile twice", sum);
    expect(c.bytes % 4 == 0 && a.bytes % 4 == 0 && b.bytes % 4 == 0, "a product's rows have bytes that are no number", sum);
    expect(c.rows == a.rows && a.bytes / 4 == b.rows && c.bytes == b.bytes, "shapes do not fit in a product", sum);
    return static_cast<__mmask16>((1 << c.bytes / 4) - 1);
}

inline void multiply_bf16(int sum, int left, int right) {
    const __mmask16 columns = check(sum, left, right);
    Tile &c = tiles.at(sum), &a = tiles.at(left), &b = tiles.at(right);
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int m = 0; m < c.rows; m++) {
        __m512 found[2] = {};
        for (int k = 0; k < b.rows; k++) {
            int pair;
            std::memcpy(&pair, a.row[m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(b.row[k]);
            found[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), found[0]);
            found[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, odd)), _mm512_castsi512_ps(_mm512_and_si512(y, odd)), found[1]);
        }
        const __m512 all = _mm512_add_ps(_mm512_load_ps(c.row[m]), _mm512_add_ps(found[0], found[1]));
        _mm512_store_ps(c.row[m], _mm512_maskz_mov_ps(columns, all));
    }
}

inline void multiply_int8(int sum, int left, int right) {
    const __mmask16 columns = check(sum, left, right);
    Tile &c = tiles.at(sum), &a = tiles.at(left), &b = tiles.at(right);
    const auto even = [](__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); };
    const auto odd = [](__m512i x) { return _mm512_srai_epi16(x, 8); };
    for (int m = 0; m < c.rows; m++) {
        __m512i found = _mm512_load_si512(c.row[m]);
        for (int k = 0; k < b.rows; k++) {
            int four;
            std::memcpy(&four, a.row[m] + 4 * k, 4);
            const __m512i x = _mm512_set1_epi32(four), y = _mm512_load_si512(b.row[k]);
            found = _mm512_add_epi32(found, _mm512_madd_epi16(even(x), even(y)));
            found = _mm512_add_epi32(found, _mm512_madd_epi16(odd(x), odd(y)));
        }
        _mm512_store_si512(c.row[m], _mm512_maskz_mov_epi32(columns, found));
    }
}

// 32 numbers of binary16.
struct Halves {
    __m512i bits;
};

inline __m512 upper(Halves x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x.bits, 1)); }
inline __m512 lower(Halves x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x.bits)); }

inline Halves halves(__m512 low, __m512 high) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, nearest)), _mm512_cvtps_ph(high, nearest), 1)};
}

inline Halves all(float x) { return halves(_mm512_set1_ps(x), _mm512_set1_ps(x)); }

inline Halves from_integers(__m512i x) {
    return halves(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(x))),
                  _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1))));
}

// float has more than twice the bits of binary16, so rounding to both changes nothing.
inline Halves multiply(Halves a, Halves b) { return halves(_mm512_mul_ps(lower(a), lower(b)), _mm512_mul_ps(upper(a), upper(b))); }
inline Halves subtract(Halves a, Halves b) { return halves(_mm512_sub_ps(lower(a), lower(b)), _mm512_sub_ps(upper(a), upper(b))); }

// a * b + c, rounded to odd from double, which is rounded to binary16 as the exact sum is.
inline __m512 sum_to_odd(__m512 a, __m512 b, __m512 c) {
    const auto eight = [](__m256 a, __m256 b, __m256 c) {
        const __m512d exact = _mm512_fmadd_pd(_mm512_cvtps_pd(a), _mm512_cvtps_pd(b), _mm512_cvtps_pd(c));
        const __m256 cut = _mm512_cvt_roundpd_ps(exact, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), exact, _CMP_NEQ_OQ);
        const __m256i bits = _mm256_castps_si256(cut);
        return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
    };
    const auto half = [](__m512 x, int which) { return which ? _mm512_extractf32x8_ps(x, 1) : _mm512_castps512_ps256(x); };
    return _mm512_insertf32x8(_mm512_castps256_ps512(eight(half(a, 0), half(b, 0), half(c, 0))),
                              eight(half(a, 1), half(b, 1), half(c, 1)), 1);
}

// ±a * b ± c
template <bool NEGATIVE, bool LESS>
inline Halves multiply_add(Halves a, Halves b, Halves c) {
    const auto turned = [](bool turn, __m512 x) { return turn ? _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)) : x; };
    return halves(sum_to_odd(turned(NEGATIVE, lower(a)), lower(b), turned(LESS, lower(c))),
                  sum_to_odd(turned(NEGATIVE, upper(a)), upper(b), turned(LESS, upper(c))));
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated::configure
#define _tile_release emulated::release
#define _tile_zero emulated::clear
#define _tile_loadd emulated::load
#define _tile_stream_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::multiply_bf16
#define _tile_dpbssd emulated::multiply_int8

#define __m512h emulated::Halves
#define _mm512_castsi512_ph(x) emulated::Halves{x}
#define _mm512_castph_si512(x) (x).bits
#define _mm512_set1_ph emulated::all
#define _mm512_cvtepi16_ph emulated::from_integers
#define _mm512_mul_ph emulated::multiply
#define _mm512_sub_ph emulated::subtract
#define _mm512_fmadd_ph emulated::multiply_add<false, false>
#define _mm512_fmsub_ph emulated::multiply_add<false, true>
#define _mm512_fnmadd_ph emulated::multiply_add<true, false>
#define _mm512_fnmsub_ph emulated::multiply_add<true, true>

// `troupe_ready` asks for the level `amx`.
#define __AMX_TILE__ 1
#define __builtin_cpu_supports(name) 1
#define syscall(...) 0L
