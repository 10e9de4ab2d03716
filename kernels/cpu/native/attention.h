// Attention of one query a row, or of a few, over its pages, each page read once, in one piece, for all heads.
//
// Scores are K Q^T on AMX: sixteen tokens of a page are a tile as they lie in the cache, up to sixteen heads are its
// columns, those of one query after those of another. Weights and values are added up in float32, token after token,
// relative to a power of two for each column: to exchange it for another one rounds nothing. So what a column comes to is
// the same bits whatever columns are beside it, and whatever tokens that it does not see lie between those that it
// sees: a draft is verified with the numbers that it would be decoded with.
#pragma once
#include <vector>

#include "matrix.h"
#include "narrow.h"
#include "program.h"
#include "scratch.h"

namespace troupe {

struct Cached {
    const bf16* keys;     // of the first of some kv heads, in page 0
    int64_t token;        // elements from one token to the next
    const int32_t* pages;
    int64_t page_size;

    const bf16* at(int64_t position) const { return keys + place(position) * token; }
    int64_t place(int64_t position) const { return pages[position / page_size] * page_size + position % page_size; }
};

// What the queries of one row see.
struct Seen {
    int64_t first, count, end;  // its tokens in the step, and its tokens in the cache
    int64_t root;               // all before this position is seen by each
    const uint64_t* bits;       // of each query: what it sees from there on; null: all up to its own position

    Seen(const Step& step, int64_t row) {
        first = step.offsets ? step.offsets[row] : row;
        count = step.offsets ? step.offsets[row + 1] - first : 1;
        end = step.lengths[row];
        const int64_t draft = row - step.decodes;
        const bool tree = step.bits && draft >= 0;
        root = tree && step.roots ? step.roots[draft] : end - count;
        bits = tree ? step.bits + draft * step.bits_stride : nullptr;
    }

    // The query's own bits, of which a window takes the last.
    uint64_t of(int64_t query, int64_t window) const {
        uint64_t found = bits ? bits[query] : ~uint64_t{0} >> (63 - query);
        if (window)
            while (__builtin_popcountll(found) > window) found &= found - 1;
        return found;
    }
};

// sums [COLUMNS][dim], from vector `vector` on: adds weight * value of `tokens` tokens. weights [token][16]. Keys come by
// themselves, for the processor runs ahead in each of sixteen tokens; values come sooner where the next ones are fetched.
template <int VECTORS, int COLUMNS, class T>
void add_values(const T* value, int64_t token, int64_t tokens, const float* weights, float* sums, int64_t dim,
                int64_t vector) {
    __m512 added[COLUMNS][VECTORS];
    sums += vector * TILE;
    value += vector * TILE;
    for (int c = 0; c < COLUMNS; c++)
        for (int v = 0; v < VECTORS; v++) added[c][v] = _mm512_load_ps(sums + c * dim + v * TILE);
    for (int64_t i = 0; i < tokens; i++, value += token, weights += TILE) {
        for (int v = 0; v < VECTORS; v++) {
            if (v % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(value + (VECTORS + v) * TILE), _MM_HINT_T0);
            const __m512 part = load(value + v * TILE);
            for (int c = 0; c < COLUMNS; c++)
                added[c][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[c]), part, added[c][v]);
        }
    }
    for (int c = 0; c < COLUMNS; c++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + c * dim + v * TILE, added[c][v]);
}

// Columns that `all_values` adds up for `columns`: as many, or a multiple of four.
inline int64_t padded(int64_t columns) { return columns <= 4 ? columns : (columns + 3) / 4 * 4; }

// A converted value serves as many columns as registers can sum: few columns over much of the head, or many over a part.
template <class T>
void all_values(const T* value, int64_t token, int64_t tokens, const float* weights, float* sums, int64_t dim,
                       int64_t columns) {
    auto all = [&]<int VECTORS, int COLUMNS>() {
        for (int64_t vector = 0; vector < dim / TILE; vector += VECTORS)
            add_values<VECTORS, COLUMNS, T>(value, token, tokens, weights, sums, dim, vector);
    };
    auto few = [&]<int COLUMNS>() {
        if (dim % (8 * TILE) == 0) return all.template operator()<COLUMNS == 4 ? 4 : 8, COLUMNS>();
        if (dim % (4 * TILE) == 0) return all.template operator()<4, COLUMNS>();
        all.template operator()<2, COLUMNS>();
    };
    switch (padded(columns)) {
        case 1: return few.template operator()<1>();
        case 2: return few.template operator()<2>();
        case 3: return few.template operator()<3>();
        case 4: return few.template operator()<4>();
        case 8: return all.template operator()<2, 8>();
        case 12: return all.template operator()<2, 12>();
        default: return all.template operator()<1, 16>();
    }
}

struct Attending {
    const Op* op;
    const Step* step;
    std::vector<Scratch<float>>* spaces;  // by thread
    int64_t split;                        // chunks of a row
};

// Columns of one tile of scores: of several kv heads, where all columns of each fit, or some of a single one's.
struct Columns {
    int64_t head, heads;     // kv heads
    int64_t column, count;   // of each: the first, and how many
    const uint32_t* asked;   // [head][pair of dims][column]
    float* sums;             // [head][padded column][dim]
    alignas(64) float whole[TILE] = {};  // sums of weights
    alignas(64) float power[TILE];       // the powers of two to which weights and sums are relative
    uint64_t bits[TILE] = {};
    int64_t firsts[TILE];
};

constexpr float UNSEEN = -1e30f;
constexpr float FAR = 60;  // powers of two that weights may come to

// Scores [16 tokens][16 columns] to weights, in place. `seen`: of each token, by which columns; null: all by all. What
// scores, besides the factor, and weights of a token are multiplied by: `scale_of`(token, 0), (token, 1).
template <class Scale>
void weigh(Columns& of, float* scores, int64_t tokens, const __mmask16* seen, float factor, int64_t dim, const Scale& scale_of) {
    __m512 rest[TILE], n[TILE], most = _mm512_set1_ps(UNSEEN);
    for (int64_t i = 0; i < tokens; i++) {
        __m512 by = _mm512_set1_ps(factor);
        if constexpr (Scale::some) by = _mm512_mul_ps(by, scale_of(i, 0));
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + i * TILE), by);
        n[i] = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        rest[i] = _mm512_sub_ps(x, n[i]);
        most = seen ? _mm512_mask_max_ps(most, seen[i], most, n[i]) : _mm512_max_ps(most, n[i]);
    }
    __m512 power = _mm512_load_ps(of.power), whole = _mm512_load_ps(of.whole);
    const __mmask16 far = _mm512_cmp_ps_mask(most, _mm512_add_ps(power, _mm512_set1_ps(FAR)), _CMP_GT_OQ);
    if (far) {
        alignas(64) float by[TILE];
        const __m512 scale = _mm512_mask_scalef_ps(_mm512_set1_ps(1), far, _mm512_set1_ps(1), _mm512_sub_ps(power, most));
        _mm512_store_ps(by, scale);
        whole = _mm512_mul_ps(whole, scale);
        power = _mm512_mask_mov_ps(power, far, most);
        _mm512_store_ps(of.power, power);
        for (int64_t c = 0; c < of.heads * of.count; c++) {
            float* sums = of.sums + (c / of.count * padded(of.count) + c % of.count) * dim;
            for (int64_t d = 0; d < dim; d += TILE)
                _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), _mm512_set1_ps(by[c])));
        }
    }
    for (int64_t i = 0; i < tokens; i++) {
        __m512 weight = _mm512_scalef_ps(exp2_near(rest[i]), _mm512_sub_ps(n[i], power));
        if (seen) weight = _mm512_maskz_mov_ps(seen[i], weight);
        whole = _mm512_add_ps(whole, weight);
        if constexpr (Scale::some) weight = _mm512_maskz_mul_ps(seen ? seen[i] : 0xffff, weight, scale_of(i, 1));
        _mm512_store_ps(scores + i * TILE, weight);
    }
    _mm512_store_ps(of.whole, whole);
}

// Tiles 0-1 accumulate the scores of so many columns, 4-5 hold keys, 6-7 queries.
inline void configure_columns(int64_t columns) {
    const int id = static_cast<int>(1 << 16 | columns);
    if (configured == id) return;
    configured = id;
    TileShapes config;
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 64 : 4 * columns);
        config.rows[tile] = TILE;
    }
    config.load();
}

// Keys and values as they lie in a cache of bf16.
struct Plain {
    static constexpr bool some = false;
};

// Scales of a tile's columns, of keys and values of 8 bits.
struct Scaled {
    static constexpr bool some = true;
    const Sixteen& of;
    int64_t turn, low, head;
    __mmask16 heads;
    __m512i spread;  // of each column its head, in the upper half

    __m512 operator()(int64_t i, int64_t part) const {
        return of.scales(turn, low + i, part, head, heads, spread);
    }
};

// Some kv heads of one row, from `head` on.
inline void attend(const Attending& task, int64_t row, int64_t head, int64_t heads, int thread) {
    const Op& op = *task.op;
    const Step& step = *task.step;
    const int64_t dim = op.i0, kv_heads = op.i2, group = op.i1 / kv_heads, window = op.i3, token = 2 * kv_heads * dim;
    const Seen seen(step, row);
    const int64_t wide = seen.count * group;         // columns of a head
    const int64_t each = std::min(wide, TILE);       // of a tile
    const int64_t together = wide < TILE ? TILE / wide : 1;  // heads of a tile
    const int64_t parts = (wide + TILE - 1) / TILE;  // tiles of a head
    const int64_t tiles = (heads + together - 1) / together * parts;
    const Cached cached = {static_cast<const bf16*>(op.b) + head * dim, token, step.pages + row * step.pages_stride, op.i4};

    std::vector<Columns> all(tiles);
    const int64_t asked_each = dim / 2 * each, sums_each = padded(each) * dim;
    const int64_t narrow = op.narrow ? Sixteen::size(heads, dim) / 2 : 0;
    float* space = (*task.spaces)[thread].of(2 * TILE * TILE + narrow + heads * parts * (asked_each + sums_each));
    float* scores = space;
    space += 2 * TILE * TILE;
    const Kept kept(op, op.b, dim, kv_heads);
    Sixteen made(kept, head, heads, reinterpret_cast<bf16*>(space));
    space += narrow;
    std::memset(space, 0, heads * parts * (asked_each + sums_each) * sizeof(float));
    int64_t first = seen.end, latest = 0;
    uint64_t any = 0;
    for (int64_t t = 0; t < tiles; t++) {
        Columns& of = all[t];
        of.head = t / parts * together;
        of.heads = std::min(together, heads - of.head);
        of.column = t % parts * TILE;
        of.count = std::min(wide - of.column, TILE);
        of.sums = space;
        space += of.heads * sums_each;
        uint32_t* asked = reinterpret_cast<uint32_t*>(space);
        of.asked = asked;
        space += of.heads * asked_each;
        for (int64_t c = 0; c < TILE; c++) of.power[c] = UNSEEN;
        for (int64_t h = 0; h < of.heads; h++)
            for (int64_t c = 0; c < of.count; c++) {
                const int64_t query = (of.column + c) / group, lane = h * of.count + c;
                const bf16* from = static_cast<const bf16*>(op.a) + (seen.first + query) * op.stride_a +
                                   ((head + of.head + h) * group + (of.column + c) % group) * dim;
                for (int64_t pair = 0; pair < dim / 2; pair++)
                    std::memcpy(asked + h * asked_each + pair * each + c, from + 2 * pair, 4);
                any |= of.bits[lane] = seen.of(query, window);
                of.firsts[lane] = window ? std::max<int64_t>(0, seen.root + __builtin_popcountll(of.bits[lane]) - window) : 0;
                first = std::min(first, of.firsts[lane]);
                latest = std::max(latest, of.firsts[lane]);
            }
    }
    const int64_t end = std::min(seen.end, seen.root + 64 - __builtin_clzll(any | 1));

    alignas(64) int32_t heads_of[TILE] = {};
    for (int64_t c = 0; c < together * each; c++) heads_of[c] = static_cast<int32_t>(c / each << 16);
    const __m512i spread = _mm512_load_si512(heads_of);
    configure_columns(each);
    written();
    const float factor = static_cast<float>(op.f0) * LOG2_E;
    const int64_t line = op.narrow ? made.token() : token;
    if (op.narrow) made.widen(cached.place(first / TILE * TILE));
    for (int64_t position = first / TILE * TILE; position < end; position += TILE) {
        const int64_t turn = made.turn();
        const bf16* keys = op.narrow ? made.keys(turn) : cached.at(position);
        if (op.narrow) {  // what was stored just now would be waited for: the next are made first
            if (position + TILE < end) made.widen(cached.place(position + TILE));
            written();
        }
        const int64_t low = std::max<int64_t>(0, first - position), high = std::min(TILE, end - position);
        const bool plain = position >= latest && position + high <= seen.root;
        for (Columns& of : all) {
            for (int64_t h = 0; h < of.heads; h++) {
                const bf16* key = keys + (of.head + h) * dim;
                const uint32_t* asked = of.asked + h * asked_each;
                float* out = scores + h * of.count;
                if (h % 2) {
                    _tile_zero(1);
                    for (int64_t depth = 0; depth < dim; depth += DEPTH) {
                        _tile_loadd(5, key + depth, 2 * line);
                        _tile_loadd(7, asked + depth / 2 * each, 4 * each);
                        _tile_dpbf16ps(1, 5, 7);
                    }
                    _tile_stored(1, out, 64);
                } else {
                    _tile_zero(0);
                    for (int64_t depth = 0; depth < dim; depth += DEPTH) {
                        _tile_loadd(4, key + depth, 2 * line);
                        _tile_loadd(6, asked + depth / 2 * each, 4 * each);
                        _tile_dpbf16ps(0, 4, 6);
                    }
                    _tile_stored(0, out, 64);
                }
            }
            __mmask16 masks[TILE];
            for (int64_t i = low; !plain && i < high; i++) {
                masks[i] = 0;
                for (int64_t c = 0; c < of.heads * of.count; c++) {
                    const int64_t beyond = position + i - seen.root;
                    const bool sees = beyond < 0 ? position + i >= of.firsts[c] : of.bits[c] >> beyond & 1;
                    masks[i] |= static_cast<__mmask16>(sees << c);
                }
            }
            const __mmask16* seen_by = plain ? nullptr : masks + low;
            if (op.narrow) {
                const Scaled scaled = {made, turn, low, of.head, static_cast<__mmask16>((1 << of.heads) - 1), spread};
                weigh(of, scores + low * TILE, high - low, seen_by, factor, dim, scaled);
            } else {
                weigh(of, scores + low * TILE, high - low, seen_by, factor, dim, Plain());
            }
            const auto add = [&](const auto* values, int64_t line) {
                for (int64_t h = 0; h < of.heads; h++)
                    all_values(values + low * line + (of.head + h) * dim, line, high - low,
                               scores + low * TILE + h * of.count, of.sums + h * sums_each, dim, of.count);
            };
            if (!op.narrow) add(keys + kv_heads * dim, token);
            else if (made.whole()) add(made.whole_values(turn), token);
            else add(made.values(turn), line);
        }
    }

    for (const Columns& of : all)
        for (int64_t h = 0; h < of.heads; h++)
            for (int64_t c = 0; c < of.count; c++) {
                const int64_t query = (of.column + c) / group, lane = h * of.count + c;
                bf16* out = static_cast<bf16*>(op.out) + (seen.first + query) * op.stride_out +
                            ((head + of.head + h) * group + (of.column + c) % group) * dim;
                const float* sums = of.sums + h * sums_each + c * dim;
                const __m512 scale = _mm512_set1_ps(1 / of.whole[lane]);
                for (int64_t d = 0; d < dim; d += TILE) store(out + d, _mm512_mul_ps(_mm512_load_ps(sums + d), scale));
            }
}

// A chunk is a row, or, of few rows, some kv heads of a row.
inline void attend_chunk(void* context, int64_t chunk, int thread) {
    const Attending& task = *static_cast<const Attending*>(context);
    const int64_t heads = task.op->i2 / task.split;
    attend(task, chunk / task.split, chunk % task.split * heads, heads, thread);
}

inline void attention(Team& team, std::vector<Scratch<float>>& spaces, const Op& op, const Step& step) {
    int64_t split = 1;
    const int64_t sequences = step.sequences - step.prompts;
    while (sequences * split < 2 * team.size() && op.i2 % (2 * split) == 0) split *= 2;
    Attending task = {&op, &step, &spaces, split};
    team.each(sequences * split, attend_chunk, &task);
}

}  // namespace troupe
