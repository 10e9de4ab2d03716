// The tiles of AMX, and how weights are packed for them.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace troupe {

constexpr int64_t TILE = 16;                // rows of a tile
constexpr int64_t LINE = 64;                // bytes of a tile's row
constexpr int64_t WIDE = 2 * TILE;          // outputs of one block of packed weight, and the most tokens beside them
constexpr int64_t LINES = WIDE * LINE;      // bytes of a line of each of a block's outputs: two tiles

inline thread_local int configured = -1;

// Other libraries use the tiles of the calling thread, too: none of them finds anything of ours, nor we of theirs.
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
        asm volatile("" : : "m"(*this));  // the intrinsic tells the compiler of its first bytes only
        _tile_loadconfig(this);
    }
};

// Tiles 0-3 accumulate, 4-5 hold tokens, 6-7 weights. `first`, `second`: rows of the two tiles of tokens.
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

// After what is written for tiles to load: their intrinsics do not tell the compiler what they read.
inline void written() { asm volatile("" : : : "memory"); }

inline int64_t blocks(int64_t outputs) { return (outputs + WIDE - 1) / WIDE; }

// weight [outputs][inputs of `bytes` in all] -> [block of 32 outputs][line of inputs][half of 16][four bytes of inputs]
// [output][4 bytes], zeros at the end. Returns where it ends.
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
