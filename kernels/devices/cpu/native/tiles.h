// Products of tokens with packed weights in steps of one line (64 bytes of each row): the only header whose code differs between
// instruction sets. On AMX the sums are tiles; on AVX-512 BF16 and VNNI they are registers, at most eight rows at a time.
//
// Both add a row's products in the order of its inputs, so a row's sums are the same bits whatever rows are beside it.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace troupe {

#ifdef __AMX_TILE__
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

constexpr int64_t TILE = 16;            // rows of a tile, and 32-bit lanes of a vector
constexpr int64_t LINE = 64;            // bytes of a row that one step multiplies
constexpr int64_t WIDE = 2 * TILE;      // outputs of a block of packed weights, and the most rows of a step
constexpr int64_t LINES = WIDE * LINE;  // bytes of a block's weights for one step

inline int64_t blocks(int64_t outputs) { return (outputs + WIDE - 1) / WIDE; }

#ifdef __AMX_TILE__

inline thread_local int configured = -1;  // the shapes that this thread's tiles have

// Other libraries use the tiles of this thread, too, so neither may find the other's configuration.
inline void release_tiles() {
    _tile_release();
    configured = -1;
}

// Rows of each tile, and bytes of each row.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void load() const {
        asm volatile("" : : "m"(*this));  // the intrinsic declares that it reads the first bytes only
        _tile_loadconfig(this);
    }
};

// Tiles 0-3 hold sums, 4-5 tokens, 6-7 weights. `first`, `second`: rows of the two tiles of tokens.
inline void configure(int first, int second) {
    if (configured == first * 32 + second) return;
    configured = first * 32 + second;
    TileShapes config;
    const int rows[8] = {first, first, std::max(second, 1), std::max(second, 1), first, std::max(second, 1), 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = LINE;
        config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    }
    config.load();
}

// Call it between writing memory and loading it into tiles: the intrinsics do not tell the compiler what they read.
inline void written() { asm volatile("" : : : "memory"); }

inline void multiply_upper(float) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
}

inline void multiply_lower(float) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

inline void multiply_upper(int32_t) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
}

inline void multiply_lower(int32_t) {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
}

// Sums of products of up to 32 rows with the 32 outputs of a block: float of bf16, int32 of int8.
//
// `begin` or `resume`, then `add` for each line, then `end`. `low` and `high`: the sums of the first and the last 16 outputs of row
// 0; `stride`: elements from one row's sums to the next row's.
template <class Sum>
class TileSums {
  public:
    TileSums(int64_t rows, Sum* low, Sum* high, int64_t stride)
        : more_(rows > TILE), low_(low), high_(high), stride_(stride * static_cast<int64_t>(sizeof(Sum))), below_(TILE * stride) {
        configure(static_cast<int>(std::min(rows, TILE)), static_cast<int>(std::max<int64_t>(rows - TILE, 0)));
    }
    TileSums(int64_t rows, Sum* sums) : TileSums(rows, sums, sums + TILE, WIDE) {}  // [row][32]

    // Starts from zero.
    void begin() const {
        _tile_zero(0);
        _tile_zero(1);
        if (!more_) return;
        _tile_zero(2);
        _tile_zero(3);
    }

    // Starts from the sums in memory.
    void resume() const {
        _tile_loadd(0, low_, stride_);
        _tile_loadd(1, high_, stride_);
        if (!more_) return;
        _tile_loadd(2, low_ + below_, stride_);
        _tile_loadd(3, high_ + below_, stride_);
    }

    // Adds one line. `stride`: bytes from one row of `x` to the next. `between` runs beside the tiles. STREAMED: rows are loaded
    // past the first cache.
    template <bool STREAMED = false, class Between>
    void add(const void* x, int64_t stride, const void* weight, const Between& between) const {
        const char *tokens = static_cast<const char*>(x), *line = static_cast<const char*>(weight);
        if (STREAMED) _tile_stream_loadd(4, tokens, stride);
        else _tile_loadd(4, tokens, stride);
        _tile_loadd(6, line, LINE);
        _tile_loadd(7, line + TILE * LINE, LINE);
        if (!more_) {
            multiply_upper(Sum());
            return between();
        }
        if (STREAMED) _tile_stream_loadd(5, tokens + TILE * stride, stride);
        else _tile_loadd(5, tokens + TILE * stride, stride);
        multiply_upper(Sum());
        between();
        multiply_lower(Sum());
    }

    // Adds `lines` lines; `next`: bytes from one line of `x` to the next.
    void add(const void* x, int64_t stride, int64_t next, const void* weight, int64_t lines) const {
        for (int64_t line = 0; line < lines; line++)
            add(static_cast<const char*>(x) + line * next, stride, static_cast<const char*>(weight) + line * LINES, [] {});
    }

    // Stores the sums.
    void end() const {
        _tile_stored(0, low_, stride_);
        _tile_stored(1, high_, stride_);
        if (more_) {
            _tile_stored(2, low_ + below_, stride_);
            _tile_stored(3, high_ + below_, stride_);
        }
        written();
    }

  private:
    const bool more_;  // than one tile of rows
    Sum *const low_, *const high_;
    const int64_t stride_, below_;
};

#else

inline void release_tiles() {}
inline void written() {}

constexpr int64_t GROUP_ROWS = 8;  // rows whose sums are in registers at a time: enough for two products a cycle

inline __m512 dot(__m512 sum, __m512i x, __m512i weight) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(weight));
}
inline __m512i dot(__m512i sum, __m512i x, __m512i weight) { return _mm512_dpbusd_epi32(sum, x, weight); }
inline __m512 load_sums(const float* from) { return _mm512_load_ps(from); }
inline __m512i load_sums(const int32_t* from) { return _mm512_load_si512(from); }
inline void store_sums(float* to, __m512 sums) { _mm512_store_ps(to, sums); }
inline void store_sums(int32_t* to, __m512i sums) { _mm512_store_si512(to, sums); }

// Where a product's rows and weights are: bytes from one row to the next and from one line of a row to the next. `ahead`: bytes by
// which weights are prefetched.
struct Lines {
    const char* x;
    int64_t stride, next;
    const char* weight;
    int64_t lines, ahead;
};

// Sums of ROWS rows. `low` and `high`: see TileSums. `fresh`: the sums start from zero.
template <int ROWS, class Sum>
[[gnu::noinline]] void multiply_rows(const Lines& of, Sum* low, Sum* high, int64_t stride, bool fresh) {
    using Vector = decltype(load_sums(low));
    Vector sums[ROWS][2] = {};
    if (!fresh)
#pragma GCC unroll 8  // an array stays in registers only if no index is a variable
        for (int row = 0; row < ROWS; row++)
            sums[row][0] = load_sums(low + row * stride), sums[row][1] = load_sums(high + row * stride);
    // Three rows share a register for their address, so that all addresses stay in registers.
    const char *weight = of.weight, *ahead = of.weight + of.ahead;
    const char* rows[] = {of.x, of.x + 3 * of.stride, of.x + 6 * of.stride};
    const int64_t apart = of.stride;
    for (int64_t line = 0; line < of.lines; line++) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < LINE; i += 4, weight += LINE, ahead += 2 * LINE) {
            const __m512i first = _mm512_loadu_si512(weight), second = _mm512_loadu_si512(weight + TILE * LINE);
            _mm_prefetch(ahead, _MM_HINT_T0);
            _mm_prefetch(ahead + LINE, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                int32_t few;
                std::memcpy(&few, rows[row / 3] + row % 3 * apart + i, 4);
                const __m512i token = _mm512_set1_epi32(few);
                sums[row][0] = dot(sums[row][0], token, first);
                sums[row][1] = dot(sums[row][1], token, second);
            }
        }
        weight += TILE * LINE;
        for (const char*& row : rows) row += of.next;
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) store_sums(low + row * stride, sums[row][0]), store_sums(high + row * stride, sums[row][1]);
}

// Sums of ROWS rows and two blocks from zero, the second with its weights at `other`: twice the independent products of a block, whose
// latency bounds one or two rows.
template <int ROWS, class Sum>
[[gnu::noinline]] void multiply_pair(const Lines& of, const char* other, Sum* sums, Sum* others) {
    using Vector = decltype(load_sums(sums));
    Vector found[ROWS][4] = {};
    const char* tokens = of.x;
    const int64_t apart = other - of.weight;
    for (const char *weight = of.weight, *end = weight + of.lines * LINES; weight < end; weight += TILE * LINE, tokens += of.next)
#pragma GCC unroll 4
        for (int64_t i = 0; i < LINE; i += 4, weight += LINE) {
            const char* second = weight + apart;
            const __m512i lines[] = {_mm512_loadu_si512(weight), _mm512_loadu_si512(weight + TILE * LINE), _mm512_loadu_si512(second),
                                     _mm512_loadu_si512(second + TILE * LINE)};
            for (int64_t half : {int64_t{0}, TILE * LINE}) {
                _mm_prefetch(weight + of.ahead + half, _MM_HINT_T0);
                _mm_prefetch(second + of.ahead + half, _MM_HINT_T0);
            }
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                int32_t few;
                std::memcpy(&few, tokens + row * of.stride + i, 4);
                const __m512i token = _mm512_set1_epi32(few);
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) found[row][part] = dot(found[row][part], token, lines[part]);
            }
        }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
        store_sums(sums + row * WIDE, found[row][0]), store_sums(sums + row * WIDE + TILE, found[row][1]);
        store_sums(others + row * WIDE, found[row][2]), store_sums(others + row * WIDE + TILE, found[row][3]);
    }
}

// call<ROWS>() for 1 to GROUP_ROWS rows.
template <class Call>
inline void with_group(int64_t rows, const Call& call) {
    switch (rows) {
        case 1: return call.template operator()<1>();
        case 2: return call.template operator()<2>();
        case 3: return call.template operator()<3>();
        case 4: return call.template operator()<4>();
        case 5: return call.template operator()<5>();
        case 6: return call.template operator()<6>();
        case 7: return call.template operator()<7>();
        case 8: return call.template operator()<8>();
    }
}

// Sums of products of up to 32 rows with the 32 outputs of a block: float of bf16; int32 of rows of uint8 with weights of int8.
//
// `begin` or `resume`, then `add` for each line or for several, then `end`. `low` and `high`: the sums of the first and the last 16
// outputs of row 0; `stride`: elements from one row's sums to the next row's. Sums are aligned to 64 bytes.
template <class Sum>
class TileSums {
  public:
    TileSums(int64_t rows, Sum* low, Sum* high, int64_t stride) : rows_(rows), low_(low), high_(high), stride_(stride) {}
    TileSums(int64_t rows, Sum* sums) : TileSums(rows, sums, sums + TILE, WIDE) {}  // [row][32]

    // Starts from zero.
    void begin() { fresh_ = true; }

    // Starts from the sums in memory.
    void resume() { fresh_ = false; }

    // Adds one line. `stride`: bytes from one row of `x` to the next. `between` runs, too.
    template <bool STREAMED = false, class Between>
    void add(const void* x, int64_t stride, const void* weight, const Between& between) {
        add(x, stride, LINE, weight, 1);
        between();
    }

    // Adds `lines` lines; `next`: bytes from one line of `x` to the next. `ahead`: bytes by which weights are prefetched, 0: they are
    // in a cache.
    void add(const void* x, int64_t stride, int64_t next, const void* weight, int64_t lines, int64_t ahead = 0) {
        const int64_t groups = (rows_ + GROUP_ROWS - 1) / GROUP_ROWS;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * rows_ / groups, end = (group + 1) * rows_ / groups;
            const Lines of = {static_cast<const char*>(x) + row * stride, stride, next, static_cast<const char*>(weight), lines,
                              group == 0 ? ahead : 0};
            with_group(end - row, [&]<int ROWS>() {
                multiply_rows<ROWS>(of, low_ + row * stride_, high_ + row * stride_, stride_, fresh_);
            });
        }
        fresh_ = false;
    }

    void end() {}

  private:
    const int64_t rows_;
    Sum *const low_, *const high_;
    const int64_t stride_;
    bool fresh_ = true;
};

#endif

// weight [outputs][`bytes` of inputs] -> [block of 32 outputs][line of inputs][half of 16 outputs][four bytes of inputs][output][4
// bytes], zeros beyond the last output. Returns the end.
inline char* pack_lines(const void* weight, int64_t outputs, int64_t bytes, void* packed) {
    const char* from = static_cast<const char*>(weight);
    char* to = static_cast<char*>(packed);
    for (int64_t block = 0; block < blocks(outputs); block++)
        for (int64_t line = 0; line < bytes; line += LINE)
            for (int64_t half = 0; half < WIDE; half += TILE)
                for (int64_t four = 0; four < LINE; four += 4)
                    for (int64_t lane = 0; lane < TILE; lane++, to += 4) {
                        const int64_t output = block * WIDE + half + lane;
                        uint32_t all = 0;
                        if (output < outputs) std::memcpy(&all, from + output * bytes + line + four, 4);
                        std::memcpy(to, &all, 4);
                    }
    return to;
}

}  // namespace troupe
