// Products of tokens with packed weights in steps of one line (64 bytes of each row): the only header whose code differs between
// instruction sets. On AMX the sums are tiles; on AVX-512 BF16 and VNNI they are registers, at most eight rows at a time.
//
// Both add a row's products in the order of its inputs, so a row's sums are the same bits whatever rows are beside it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace troupe {

#ifdef __AMX_TILE__
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

constexpr int64_t TILE = 16;            // rows of a tile, and 32-bit lanes of a vector
constexpr int64_t LINE = 64;            // bytes of a row that one step multiplies
constexpr int64_t WIDE = 2 * TILE;      // outputs of a block of packed weights, and the most rows of a step
constexpr int64_t BLOCK_LINE_BYTES = WIDE * LINE;  // bytes of a block's weights for one step

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

// Call it between writing memory and loading it into tiles: the compiler does not know what the intrinsics read.
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
            add(static_cast<const char*>(x) + line * next, stride, static_cast<const char*>(weight) + line * BLOCK_LINE_BYTES, [] {});
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

constexpr int64_t GROUP_ROWS = LARGE ? 8 : 4;  // rows whose sums are in registers at a time: enough for two products a cycle
constexpr int64_t BROAD_ROWS = LARGE ? 8 : 1;  // up to so many rows are multiplied with both halves of a block at a time

inline Floats load_sums(const float* from) { return load(from); }
inline Ints load_sums(const int32_t* from) { return load_line(from); }
inline void store_sums(float* to, Floats sums) { store(to, sums); }
inline void store_sums(int32_t* to, Ints sums) { store_line(to, sums); }

// Where a product's rows and weights are: bytes from one row to the next and from one line of a row to the next. `ahead`: bytes by
// which weights are prefetched.
struct Lines {
    const char* x;
    int64_t stride, next;
    const char* weight;
    int64_t lines, ahead;

    // The same rows with the second half of the block.
    Lines second() const { return {x, stride, next, weight + TILE * LINE, lines, 0}; }
};

// Sums of ROWS rows with one half of a block, at `low`, or with two. `low` and `high`: see TileSums. `fresh`: the sums start from zero.
template <int ROWS, int HALVES, class Sum>
[[gnu::noinline]] void multiply_rows(const Lines& of, Sum* low, Sum* high, int64_t stride, bool fresh) {
    using Vector = decltype(load_sums(low));
    Vector sums[ROWS][HALVES] = {};
    // call(row, half, where its sums are)
    const auto each = [&](const auto& call) {
        unrolled<ROWS>([&](auto row) { unrolled<HALVES>([&](auto half) { call(row, half, (half ? high : low) + row * stride); }); });
    };
    if (!fresh) each([&](auto row, auto half, const Sum* from) { sums[row][half] = load_sums(from); });
    // Three rows share a register for their address, so that all addresses stay in registers.
    const char *weight = of.weight, *ahead = of.weight + of.ahead;
    const char* rows[] = {of.x, of.x + 3 * of.stride, of.x + 6 * of.stride};
    const int64_t apart = of.stride;
    for (int64_t line = 0; line < of.lines; line++) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < LINE; i += 4, weight += LINE, ahead += 2 * LINE) {
            Ints lines[HALVES];
            unrolled<HALVES>([&](auto half) { lines[half] = load_line(weight + half * TILE * LINE); });
            prefetch(ahead);
            prefetch(ahead + LINE);
            unrolled<ROWS>([&](auto row) {
                const Ints token = splat_at(rows[row / 3] + row % 3 * apart + i);
                unrolled<HALVES>([&](auto half) { sums[row][half] = dot(sums[row][half], token, lines[half]); });
            });
        }
        weight += TILE * LINE;
        for (const char*& row : rows) row += of.next;
    }
    asm("" : "+r"(low), "+r"(high), "+r"(stride));  // else every address of sums stays in a register meanwhile
    each([&](auto row, auto half, Sum* to) { store_sums(to, sums[row][half]); });
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
            Sum *low = low_ + row * stride_, *high = high_ + row * stride_;
            with_group(end - row, [&]<int ROWS>() {
                if constexpr (ROWS <= BROAD_ROWS) {
                    multiply_rows<ROWS, 2>(of, low, high, stride_, fresh_);
                } else if constexpr (ROWS <= GROUP_ROWS) {
                    multiply_rows<ROWS, 1>(of, low, low, stride_, fresh_);
                    multiply_rows<ROWS, 1>(of.second(), high, high, stride_, fresh_);
                }
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
