// Products with packed weights on AMX. A row's result is the same bits whatever the rows around it.
#pragma once
#include <algorithm>
#include <cstring>

#include "team.h"
#include "vectors.h"

namespace troupe {

constexpr int64_t TILE = 16;           // rows of a tile
constexpr int64_t DEPTH = 32;          // bf16 of a tile's row
constexpr int64_t WIDE = 2 * TILE;     // outputs of one block of packed weight
constexpr int64_t PANEL = 256;         // tokens that stay in a core's cache while the weight passes by

inline thread_local int configured = -1;

// To the compiler tiles read no memory: what they are to read must be written before here.
inline void written() { asm volatile("" ::: "memory"); }

// Other libraries use the tiles of the calling thread, too: none of them finds anything of ours, nor we of theirs.
inline void release_tiles() {
    _tile_release();
    configured = -1;
}

// Tiles 0-3 accumulate, 4-5 hold tokens, 6-7 weights. `first`, `second`: rows of the two tiles of tokens.
inline void configure(int first, int second) {
    if (configured == first * 32 + second) return;
    configured = first * 32 + second;
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const int rows[8] = {first, first, std::max(second, 1), std::max(second, 1), first, std::max(second, 1), 16, 16};
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = 64;
        config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    }
    written();
    _tile_loadconfig(&config);
}

inline int64_t blocks(int64_t outputs) { return (outputs + WIDE - 1) / WIDE; }

// weight [outputs, inputs] -> [block of 32 outputs][32 inputs][half of 16][pair of inputs][output][2], zeros at the end
inline void pack(const bf16* weight, int64_t outputs, int64_t inputs, bf16* packed) {
    for (int64_t block = 0; block < blocks(outputs); block++)
        for (int64_t depth = 0; depth < inputs; depth += DEPTH)
            for (int64_t half = 0; half < 2; half++)
                for (int64_t pair = 0; pair < TILE; pair++)
                    for (int64_t lane = 0; lane < TILE; lane++) {
                        int64_t output = block * WIDE + half * TILE + lane;
                        const bf16* from = weight + output * inputs + depth + 2 * pair;
                        uint32_t both = 0;
                        if (output < outputs) std::memcpy(&both, from, 4);
                        std::memcpy(packed, &both, 4);
                        packed += 2;
                    }
}

// Row `output` of a packed weight, as it was.
inline void unpack(const bf16* packed, int64_t output, int64_t inputs, bf16* row) {
    const bf16* from = packed + output / WIDE * WIDE * inputs + output % WIDE / TILE * TILE * DEPTH + output % TILE * 2;
    const __m512i pairs = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(TILE));
    for (int64_t depth = 0; depth < inputs; depth += DEPTH, from += WIDE * DEPTH)
        _mm512_storeu_si512(row + depth, _mm512_i32gather_epi32(pairs, from, 4));
}

struct Product {
    const bf16* x;
    const bf16* weight;
    const bf16* bias;
    bf16* out;
    int64_t rows, inputs, outputs, stride_x, stride_out, chunk;
    int64_t panel = PANEL;  // rows of one
    int64_t threads = 1;
    bool past = false;  // whether results are written past the caches
};

// Weight that is wanted after this one: a core that waits for memory at the start of each block spends half its time so.
struct Ahead {
    const bf16* from = nullptr;
    int64_t lines = 0;  // for each step of depth

    void fetch() {
        for (int64_t line = 0; line < lines; line++, from += 32)
            _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);
    }
};

// Sums of a block that are still to be rounded and stored.
struct Pending {
    const float* sums = nullptr;
    int64_t row = 0, rows = 0, output = 0;
};

// Rows `begin` to `end` of it.
inline void finish(const Product& p, const Pending& of, int64_t begin, int64_t end) {
    const int64_t left = p.outputs - of.output;
    const __mmask16 first = left >= TILE ? 0xffff : static_cast<__mmask16>((1 << left) - 1);
    const __mmask16 second = left >= WIDE ? 0xffff : left <= TILE ? 0 : static_cast<__mmask16>((1 << (left - TILE)) - 1);
    const __mmask32 both = first | static_cast<__mmask32>(second) << TILE;
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    if (p.bias) low = load(p.bias + of.output, first), high = load(p.bias + of.output + TILE, second);
    for (int64_t i = begin; i < end; i++) {
        const __m512bh line = _mm512_cvtne2ps_pbh(_mm512_add_ps(_mm512_load_ps(of.sums + i * WIDE + TILE), high),
                                                  _mm512_add_ps(_mm512_load_ps(of.sums + i * WIDE), low));
        bf16* out = p.out + (of.row + i) * p.stride_out + of.output;
        if (p.past && left >= WIDE) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(line));
        } else {
            _mm512_mask_storeu_epi16(out, both, reinterpret_cast<__m512i>(line));
        }
    }
}

// `before`: what is finished meanwhile, by vectors beside the tiles.
inline Pending multiply_block(const Product& p, int64_t block, int64_t row, int64_t rows, float* sums,
                              const Pending& before, Ahead& ahead) {
    const int64_t depths = p.inputs / DEPTH;
    const bf16* weight = p.weight + block * WIDE * p.inputs;
    const bf16* x = p.x + row * p.stride_x;
    const int64_t step = 2 * p.stride_x;
    if (rows > TILE) {
        configure(TILE, static_cast<int>(rows - TILE));
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16* second = x + TILE * p.stride_x;
        const int64_t each = (before.rows + depths - 1) / depths;
        for (int64_t depth = 0, done = 0; depth < depths; depth++) {
            if (done < before.rows) {
                const int64_t end = std::min(done + each, before.rows);
                finish(p, before, done, end);
                done = end;
            }
            _tile_loadd(4, x + depth * DEPTH, step);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + 512, 64);
            _tile_loadd(5, second + depth * DEPTH, step);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            ahead.fetch();
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            weight += 1024;
        }
        _tile_stored(2, sums + TILE * WIDE, 128);
        _tile_stored(3, sums + TILE * WIDE + TILE, 128);
    } else {
        finish(p, before, 0, before.rows);
        configure(static_cast<int>(rows), 0);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t depth = 0; depth < depths; depth++) {
            for (int64_t line = 0; line < 1024; line += 32)
                _mm_prefetch(reinterpret_cast<const char*>(weight + 4096 + line), _MM_HINT_T0);
            _tile_loadd(4, x + depth * DEPTH, step);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            weight += 1024;
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    return {sums, row, rows, block * WIDE};
}

inline void multiply_chunk(void* context, int64_t chunk, int) {
    const Product& p = *static_cast<const Product*>(context);
    const int64_t all = blocks(p.outputs), each = (all + p.chunk - 1) / p.chunk;
    const int64_t panel = chunk / each * p.panel, first = chunk % each * p.chunk;
    const int64_t end = std::min(panel + p.panel, p.rows), last = std::min(first + p.chunk, all) - 1;
    const int64_t halves = (end - panel + WIDE - 1) / WIDE;
    alignas(64) float sums[2][WIDE * WIDE];
    Pending pending;
    int turn = 0;
    for (int64_t block = first; block <= last; block++) {
        // The other threads take the chunks between this one and the next.
        const int64_t next = (block < last ? block + 1 : first + p.threads * p.chunk) % all;
        Ahead ahead = {p.weight + next * WIDE * p.inputs, (WIDE + halves - 1) / halves};
        for (int64_t row = panel; row < end; row += WIDE, turn ^= 1)
            pending = multiply_block(p, block, row, std::min(WIDE, end - row), sums[turn], pending, ahead);
    }
    finish(p, pending, 0, pending.rows);
    if (p.past) _mm_sfence();
}

inline void multiply(Team& team, Product p) {
    const int64_t cached = (1 << 19) / p.inputs / WIDE * WIDE;  // rows of 1 MB, half of a second cache
    const int64_t most = std::max<int64_t>(64, std::min<int64_t>(512, cached));
    const int64_t panels = std::max<int64_t>(1, (p.rows + most - 1) / most);
    p.panel = ((p.rows + panels - 1) / panels + WIDE - 1) / WIDE * WIDE;
    p.threads = team.size();
    // What is more than the second cache holds comes back from memory, and need not be read before it is written.
    p.past = p.rows * p.outputs > 1 << 20 && p.stride_out % 32 == 0 && reinterpret_cast<uintptr_t>(p.out) % 64 == 0;
    const int64_t all = blocks(p.outputs);
    // A chunk is worth its claim, yet there are enough to share: at least 64 kB of weight.
    p.chunk = std::max<int64_t>(1, std::min(all / (4 * team.size()), 1 + (1 << 17) / (WIDE * p.inputs * 2)));
    team.each(panels * ((all + p.chunk - 1) / p.chunk), multiply_chunk, &p);
}

}  // namespace troupe
