// Products whose weights are made as rows of tiles, sixteen outputs of 32 inputs, and whose tokens are columns: how tokens are laid
// out, and the products of few of them.
#pragma once
#include "products.h"
#include "scratch.h"

namespace troupe {

// A tile's 16 rows of 64 bytes, `stride` elements apart -> sixteen times four bytes of each row.
inline void turn(const bf16* rows, int64_t stride, void* to) {
    __m512i part[TILE];
    for (int64_t i = 0; i < TILE; i++) part[i] = _mm512_loadu_si512(rows + i * stride);
    transpose(part);
    for (int64_t i = 0; i < TILE; i++) _mm512_store_si512(static_cast<char*>(to) + i * LINE, part[i]);
}

constexpr int64_t COLUMN_LINES = 8;  // that a chunk lays out

template <class P>
int64_t column_chunks(const P& p) {
    return (p.rows + TILE - 1) / TILE * ((p.lines + COLUMN_LINES - 1) / COLUMN_LINES);
}

// Lines from `line` on of sixteen tokens from `row` on -> [16 tokens' lines][line][pair of inputs][token][2], of as many tokens as
// there are.
template <class P>
void lay_out_columns(const P& p, int64_t row, int64_t line, int64_t end, bf16* columns) {
    const int64_t tokens = std::min(TILE, p.rows - row);
    const __mmask16 mask = static_cast<__mmask16>((1 << tokens) - 1);
    bf16* to = columns + (row * p.lines + line * tokens) * 32;
    for (; line < end; line++) {
        __m512i part[TILE];
        for (int64_t i = 0; i < TILE; i++)
            part[i] = i < tokens ? _mm512_loadu_si512(p.x + (row + i) * p.stride_x + line * LINE) : _mm512_setzero_si512();
        transpose(part);
        for (int64_t i = 0; i < TILE; i++, to += 2 * tokens) _mm512_mask_storeu_epi32(to, mask, part[i]);
    }
}

template <class P>
void lay_out_columns_chunk(void* context, int64_t chunk, int) {
    const P& p = *static_cast<const P*>(context);
    const int64_t each = (p.lines + COLUMN_LINES - 1) / COLUMN_LINES, line = chunk % each * COLUMN_LINES;
    lay_out_columns(p, chunk / each * TILE, line, std::min(line + COLUMN_LINES, p.lines), const_cast<bf16*>(p.columns));
}

// Tiles 0-3 accumulate: outputs' halves by the first tokens, then by the second; 4-5 hold weights, 6-7 so many tokens each.
inline void configure_outputs(int64_t first, int64_t second) {
    const int id = static_cast<int>(1 << 17 | first << 8 | second);
    if (configured == id) return;
    configured = id;
    TileShapes config;
    for (int tile = 0; tile < 8; tile++) {
        const int64_t tokens = tile < 4 ? (tile < 2 ? first : second) : tile == 6 ? first : tile == 7 ? second : TILE;
        config.bytes[tile] = static_cast<uint16_t>(4 * std::max<int64_t>(tokens, 1));
        config.rows[tile] = TILE;
    }
    config.load();
}

// Sums of sixteen outputs [output][16 tokens] -> [token][32], of `tokens`.
inline void store_sums(const float* found, int64_t tokens, float* sums) {
    __m512i part[TILE];
    for (int64_t i = 0; i < TILE; i++) part[i] = _mm512_load_si512(found + i * TILE);
    transpose(part);
    for (int64_t i = 0; i < tokens; i++) _mm512_store_si512(sums + i * WIDE, part[i]);
}

// Sums [token][32] of up to 32 tokens from `row` on and a block. weights(line): where its tiles are.
template <class P, class Weights>
void multiply_columns(const P& p, const bf16* columns, int64_t row, float* sums, const Weights& weights) {
    const int64_t rows = std::min(WIDE, p.rows - row), first = std::min(rows, TILE), second = rows - first;
    const bf16 *x = columns + row * p.lines * 32, *more = x + TILE * p.lines * 32;
    configure_outputs(first, second);
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t line = 0; line < p.lines; line++) {
        const bf16* weight = weights(line);
        _tile_loadd(6, x + line * first * 32, 4 * first);
        _tile_loadd(4, weight, LINE);
        _tile_loadd(5, weight + TILE * 32, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (second) {
            _tile_loadd(7, more + line * second * 32, 4 * second);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    if (rows == 1) {
        _tile_stored(0, sums, 4);
        _tile_stored(1, sums + TILE, 4);
        return;
    }
    alignas(64) float found[TILE * TILE];
    const auto put = [&](int64_t tokens, float* to) {
        written();
        store_sums(found, tokens, to);
    };
    _tile_stored(0, found, LINE);
    put(first, sums);
    _tile_stored(1, found, LINE);
    put(first, sums + TILE);
    if (!second) return;
    _tile_stored(2, found, LINE);
    put(second, sums + TILE * WIDE);
    _tile_stored(3, found, LINE);
    put(second, sums + TILE * WIDE + TILE);
}

inline thread_local Scratch<bf16> own_columns;

constexpr int64_t PART = WIDE / 4;  // outputs that are made between two lines' products, of the next four lines

// Blocks' weights, four lines after four lines, made while those before are multiplied: what was stored just now would be waited
// for, and a core does little else while it waits for a product.
template <class P>
struct Making {
    const P& p;
    const typename P::Weights weights{p};
    int64_t of = 0, next = 0, turn = 0;  // blocks; next: -1 for none
    alignas(64) bf16 made[2][4 * WIDE * 32];

    void begin(int64_t block) {
        next = block;
        for (int64_t part = 0; part < WIDE; part += PART) weights.make(block, 0, part, made[turn]);
    }

    const bf16* line(int64_t line) {
        const int64_t at = line % 4, begin = line - at + 4;
        const bool last = begin >= p.lines, end = line + 1 == std::min(begin, p.lines);
        if (const int64_t block = last ? next : of; block >= 0)
            for (int64_t part = at; part < (end ? 4 : at + 1); part++) weights.make(block, last ? 0 : begin, part * PART, made[turn ^ 1]);
        written();
        const bf16* found = made[turn] + at * WIDE * 32;
        if (end) turn ^= 1;
        return found;
    }
};

// Some blocks of a product. Weights are made again for each 32 rows, which takes no longer than to fetch them from a second cache.
template <class P>
void multiply_by_columns(const P& p, int64_t chunk) {
    const bf16* columns = p.columns;
    if (!columns && p.rows == 1) columns = reinterpret_cast<const bf16*>(p.x);
    if (!columns) {
        bf16* own = own_columns.of(p.rows * p.lines * 32);
        for (int64_t row = 0; row < p.rows; row += TILE) lay_out_columns(p, row, 0, p.lines, own);
        columns = own;
    }
    written();
    alignas(64) float sums[2][WIDE * WIDE];
    const int64_t all = blocks(p.wide()), first = chunk * p.chunk, end = std::min(first + p.chunk, all);
    Making<P> making{p};
    making.begin(first);
    for (int64_t block = first; block < end; block++)
        for (int64_t row = 0; row < p.rows; row += WIDE) {
            const auto run = [&](int64_t of, int64_t next, float* to) {
                making.of = of, making.next = next;
                multiply_columns(p, columns, row, to, [&](int64_t line) { return making.line(line); });
            };
            const int64_t next = row + WIDE < p.rows ? block : block + 1 < end ? block + 1 : -1;
            if (p.gated) run(block, block + all, sums[1]);
            run(block + (p.gated ? all : 0), next, sums[0]);
            written();
            const int64_t rows = std::min(WIDE, p.rows - row);
            finish<P>(p, {sums[0], p.gated ? sums[1] : nullptr, row, rows, block * WIDE}, 0, rows);
        }
}

// The weights of 32 outputs as columns, in the order of matrix.h.
template <class P>
const char* turned(const P& p, int64_t output, char* space) {
    alignas(64) bf16 rows[4 * WIDE * 32];
    const typename P::Weights weights(p);
    char* to = space;
    for (int64_t line = 0; line < p.lines; line += 4) {
        for (int64_t part = 0; part < WIDE; part += PART) weights.make(output / WIDE, line, part, rows);
        for (int64_t tile = 0; tile < 2 * std::min<int64_t>(4, p.lines - line); tile++, to += TILE * LINE)
            turn(rows + tile * TILE * 32, 32, to);
    }
    written();
    return space;
}

template <class P>
void multiply_outputs_chunk(void* context, int64_t chunk, int) {
    multiply_by_columns(*static_cast<const P*>(context), chunk);
}

template <class P>
void multiply_by_outputs(Team& team, P p, Scratch<bf16>& columns) {
    if (p.rows >= FEW) return multiply_all(team, p);
    if (p.rows > 1) {
        p.columns = columns.of(p.rows * p.inputs());
        team.each(column_chunks(p), lay_out_columns_chunk<P>, &p);
    }
    team.each(divide(p, team.size()), multiply_outputs_chunk<P>, &p);
}

}  // namespace troupe
