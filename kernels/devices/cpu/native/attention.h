// Attention of one query a row, or of a few, over its pages; each page is read once, for all heads.
//
// Scores are K Q^T of 16 tokens of a page, as they are in the cache, with up to 16 columns: the queries of the heads of a group, one
// query after another. On AMX both are tiles. Weights and values are summed in float32, token after token, relative to a power of two
// for each column; changing the power rounds nothing. Sums of pieces of a sequence are added at the end, whichever thread found them
// (split_kv.h). So a column's result is the same bits whatever columns are beside it, and whatever tokens that it does not see lie
// between those that it sees: a draft token is verified with the numbers that it would be decoded with.
//
// Latent vectors (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1) are keys of one kv head, and their first numbers its values: all heads
// are columns. Products of weights with pairs of tokens in bf16 would take half the time, but add up pairs by their places in the cache.
#pragma once
#include <vector>

#include "gemm_bf16.h"
#include "int16_tokens.h"
#include "kv_cache_8bit.h"
#include "program.h"
#include "scratch.h"
#include "softmax.h"
#include "split_kv.h"

namespace troupe {

// sums [COLUMNS][dim], from vector `vector` on: adds weight * value of `tokens` tokens. weights [token][lanes]. The processor
// prefetches keys by itself, in each of 16 tokens, but values later than this does.
template <int VECTORS, int COLUMNS, class T>
void add_values(const T* value, int64_t token, int64_t tokens, const float* weights, int64_t lanes, float* sums, int64_t dim,
                int64_t vector) {
    Floats added[COLUMNS][VECTORS];
    sums += vector * TILE;
    value += vector * TILE;
    // call(column, vector, where its sums are)
    const auto each = [&](const auto& call) {
        unrolled<COLUMNS>([&](auto c) { unrolled<VECTORS>([&](auto v) { call(c, v, sums + c * dim + v * TILE); }); });
    };
    each([&](auto c, auto v, const float* from) { added[c][v] = load(from); });
    for (int64_t i = 0; i < tokens; i++, value += token, weights += lanes)
        unrolled<VECTORS>([&](auto v) {
            if (v % 2 == 0) prefetch(value + (VECTORS + v) * TILE);
            const Floats part = load(value + v * TILE);
            unrolled<COLUMNS>([&](auto c) { added[c][v] = fma(splat(weights[c]), part, added[c][v]); });
        });
    each([&](auto c, auto v, float* to) { store(to, added[c][v]); });
}

// A converted value serves as many columns as registers can sum: few columns over much of the head, or many over a part.
template <class T>
void all_values(const T* value, int64_t token, int64_t tokens, const float* weights, int64_t lanes, float* sums, int64_t dim,
                int64_t columns) {
    auto all = [&]<int VECTORS, int COLUMNS>(int64_t column) {
        for (int64_t vector = 0; vector < dim / TILE; vector += VECTORS)
            add_values<VECTORS, COLUMNS, T>(value, token, tokens, weights + column, lanes, sums + column * dim, dim, vector);
    };
    auto few = [&]<int COLUMNS>(int64_t column) {
        constexpr int64_t TILES_AT_ONCE = LARGE ? COLUMNS == 4 ? 4 : 8 : COLUMNS == 1 ? 4 : COLUMNS == 2 ? 2 : 1;
        if (dim % (TILES_AT_ONCE * TILE) == 0) return all.template operator()<TILES_AT_ONCE, COLUMNS>(column);
        if (LARGE && dim % (4 * TILE) == 0) return all.template operator()<4, COLUMNS>(column);
        all.template operator()<LARGE ? 2 : 1, COLUMNS>(column);
    };
    const int64_t count = padded(columns);
    if (count <= 4 || !LARGE)
        for (int64_t column = 0; column < count; column += 4)
            with_rows(std::min<int64_t>(count - column, 4), [&]<int COLUMNS>() { few.template operator()<COLUMNS>(column); });
    else if (count == 8) all.template operator()<2, 8>(0);
    else if (count == 12) all.template operator()<2, 12>(0);
    else all.template operator()<1, 16>(0);
}

struct Attending {
    const Op* op;
    const Step* step;
    std::vector<Scratch<float>>* spaces;  // by thread
    int64_t split = 1;                    // chunks of a row, by kv heads
    int64_t column_split = 1;             // or, of latent vectors, by tiles of columns
    Pieces* pieces = nullptr;             // of rows, if they are attended to in such
};

constexpr int64_t PREFETCH_TOKENS = 4 * TILE;  // tokens by which attention prefetches

// Prefetches tokens: a core does it by itself within a page of memory, but not in the next one.
struct Coming {
    const char* first;
    int64_t token, values, size;  // bytes: of a token, from its keys to its values, and of either

    Coming(const Op& op, int64_t heads, int64_t head) {
        const TokenLayout layout(op);
        const int64_t element = op.cache_type ? 1 : sizeof(bf16), each = op.i0 * element;
        first = static_cast<const char*>(op.b) + head * each;
        token = layout.token * element, values = layout.values * element, size = heads * each;
    }

    // With a large second cache the sequence stays there, and the processor itself prefetches tokens of 16 bits in more than a few
    // lines.
    bool worthwhile(bool quantized, int64_t tokens) const {
        return !AMX || (tokens * token > L2_BYTES / 2 && (quantized || size <= MIN_READ_BYTES));
    }

    // Sixteen tokens.
    void fetch(int64_t place) const {
        const char* from = first + place * token;
        for (int64_t i = 0; i < TILE; i++, from += token)
            for (int64_t byte = 0; byte < size; byte += LINE) {
                AMX ? prefetch(from + byte) : prefetch_second(from + byte);
                AMX ? prefetch(from + values + byte) : prefetch_second(from + values + byte);
            }
    }
};

#ifdef __AMX_TILE__

// Tiles 0-3 hold the scores of `columns` columns, 4-5 keys, 6-7 queries.
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

// Copies a query [dim] to a column of `each` columns.
inline void place_query(const bf16* from, int64_t dim, int64_t column, int64_t each, uint32_t* to) {
    for (int64_t pair = 0; pair < dim / 2; pair++) std::memcpy(to + pair * each + column, from + 2 * pair, 4);
}

// Scores of a tile's columns [token][column], `row` bytes from one token to the next. `keys`: of the first of these kv heads;
// `token`: elements from one token to the next.
inline void score_floats(const Columns& column_tile, const bf16* keys, int64_t token, int64_t dim, int64_t each, int64_t queries_each,
                         float* out, int64_t row) {
    keys += column_tile.head * dim;
    const uint32_t* packed = column_tile.packed_queries;
    for (int64_t h = 0; h < column_tile.heads; h++, keys += dim, packed += queries_each, out += column_tile.count) {
        if (h % 2) {
            _tile_zero(1);
            for (int64_t depth = 0; depth < dim; depth += DEPTH) {
                _tile_loadd(5, keys + depth, 2 * token);
                _tile_loadd(7, packed + depth / 2 * each, 4 * each);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_stored(1, out, row);
        } else {
            _tile_zero(0);
            for (int64_t depth = 0; depth < dim; depth += DEPTH) {
                _tile_loadd(4, keys + depth, 2 * token);
                _tile_loadd(6, packed + depth / 2 * each, 4 * each);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, out, row);
        }
    }
}

// The same of int8 keys, as integers: the sums of the upper bytes, and PLANE behind them those of the lower ones.
inline void score_int8(const Columns& column_tile, const int8_t* keys, int64_t token, int64_t dim, int64_t each, int64_t queries_each,
                        float* out, int64_t row) {
    keys += column_tile.head * dim;
    const uint32_t* packed = column_tile.packed_queries;
    for (int64_t h = 0; h < column_tile.heads; h++, keys += dim, packed += queries_each, out += column_tile.count) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t depth = 0; depth < dim; depth += LINE) {
            const uint32_t* upper = packed + depth / 4 * each;
            _tile_loadd(4, keys + depth, token);
            _tile_loadd(6, upper, 4 * each);
            _tile_loadd(7, upper + dim / 4 * each, 4 * each);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        }
        _tile_stored(0, out, row);
        _tile_stored(1, out + PLANE, row);
    }
}

#else

inline void configure_columns(int64_t) {}

// Copies a query [dim] to a column.
inline void place_query(const bf16* from, int64_t dim, int64_t column, int64_t, uint32_t* to) {
    std::memcpy(to + column * dim / 2, from, dim * sizeof(bf16));
}

// Scores of 16 tokens and up to four queries [column][dim]. `row`: floats from one token's scores to the next.
template <int COLUMNS>
void score_columns(const bf16* keys, int64_t token, int64_t dim, const bf16* queries, float* out, int64_t row) {
    constexpr int64_t EACH = COLUMNS == 3 ? FOUR : COLUMNS, TOKENS_OF = TILE / EACH;  // lanes of a token, and tokens of a vector
    constexpr int64_t BESIDE = LARGE ? TOKENS_OF : FOUR / EACH;  // tokens whose sums are in registers at a time
    for (int64_t i = 0; i < TILE; i += TOKENS_OF, keys += TOKENS_OF * token, out += TOKENS_OF * row) {
        Floats sums[TILE] = {};
        unrolled<TOKENS_OF / BESIDE>([&](auto part) {
            constexpr int64_t first = part * BESIDE;
            Floats some[BESIDE * EACH] = {};
            for (int64_t d = 0; d < dim; d += DEPTH) {
                Ints query[COLUMNS];
                unrolled<COLUMNS>([&](auto c) { query[c] = load_line(queries + c * dim + d); });
                unrolled<BESIDE>([&](auto t) {
                    const Ints key = load_line(keys + (first + t) * token + d);
                    unrolled<COLUMNS>([&](auto c) { some[t * EACH + c] = dot(some[t * EACH + c], key, query[c]); });
                });
            }
            unrolled<BESIDE * EACH>([&](auto i) { sums[first * EACH + i] = some[i]; });
        });
        alignas(64) float result[TILE];
        store(result, add_lanes(sums));
#pragma GCC unroll 16
        for (int64_t t = 0; t < TOKENS_OF; t++) std::memcpy(out + t * row, result + t * EACH, COLUMNS * sizeof(float));
    }
}

// Scores of a tile's columns [token][column], `row` bytes from one token to the next. `keys`: of the first of these kv heads;
// `token`: elements from one token to the next. A column's score does not depend on the columns beside it: a lane sums every
// sixteenth pair of dims, and then lanes are added.
inline void score_floats(const Columns& column_tile, const bf16* keys, int64_t token, int64_t dim, int64_t, int64_t queries_each, float* out,
                         int64_t row) {
    keys += column_tile.head * dim;
    const uint32_t* packed = column_tile.packed_queries;
    for (int64_t h = 0; h < column_tile.heads; h++, keys += dim, packed += queries_each, out += column_tile.count) {
        const bf16* queries = reinterpret_cast<const bf16*>(packed);
        for (int64_t c = 0; c < column_tile.count; c += FOUR)
            with_rows(std::min(FOUR, column_tile.count - c), [&]<int COLUMNS>() {
                score_columns<COLUMNS>(keys, token, dim, queries + c * dim, out + c, row / static_cast<int64_t>(sizeof(float)));
            });
    }
}

// Never called: int8 keys become bf16 first (Sixteen::whole_keys).
inline void score_int8(const Columns&, const int8_t*, int64_t, int64_t, int64_t, int64_t, float*, int64_t) {}

#endif

// Attends with some kv heads of one row, from `head` on. `piece`: one of the row's pieces, whose sums are kept in `pieces`; -1: all.
// `share`: of the row's tiles of columns, one of `task.column_split`.
inline void attend(const Attending& task, int64_t row, int64_t piece, int64_t head, int64_t heads, int64_t share, int thread) {
    const Op& op = *task.op;
    const Step& step = *task.step;
    const TokenLayout layout(op);
    const int64_t dim = op.i0, value_dim = layout.value_dim, kv_heads = op.i2, group = op.i1 / kv_heads, window = op.i3;
    const int64_t token = layout.token;
    const VisibleTokens seen(step, row);
    const int64_t wide = seen.count * group;         // columns of a head
    const int64_t each = std::min(wide, TILE);       // of a tile
    const int64_t together = wide < TILE ? TILE / wide : 1;  // heads of a tile
    const int64_t head_parts = (wide + TILE - 1) / TILE;  // tiles of a head
    const int64_t first_part = share * head_parts / task.column_split;
    const int64_t parts = (share + 1) * head_parts / task.column_split - first_part;  // of these, this call's
    if (!parts) return;
    const int64_t tiles = (heads + together - 1) / together * parts;
    const CachePages cached = {static_cast<const bf16*>(op.b) + head * dim, token, step.pages + row * step.pages_stride, op.i4};

    std::vector<Columns> all(tiles);
    const int64_t queries_each = dim / 2 * each, sums_each = padded(each) * value_dim;
    const int64_t lanes = std::min(together, heads) * each <= FOUR ? FOUR : TILE;  // of a token among scores
    const Cache8bit kept(op, op.b, dim, kv_heads);
    const int64_t unpacked = op.cache_type ? Sixteen::size(heads, dim) / 2 : 0;
    float* space = (*task.spaces)[thread].of(2 * SCORES + unpacked + heads * parts * (queries_each + 2 * sums_each));
    float* const scores[2] = {space, space + SCORES};
    std::memset(space, 0, 2 * SCORES * sizeof(float));  // lanes of no column stay so
    space += 2 * SCORES;
    Sixteen made(kept, head, heads, reinterpret_cast<bf16*>(space));
    space += unpacked;
    std::memset(space, 0, heads * parts * (queries_each + 2 * sums_each) * sizeof(float));
    int64_t first = seen.end, latest = 0;
    uint64_t any = 0;
    for (int64_t t = 0; t < tiles; t++) {
        Columns& column_tile = all[t];
        column_tile.head = t / parts * together;
        column_tile.heads = std::min(together, heads - column_tile.head);
        column_tile.column = (first_part + t % parts) * TILE;
        column_tile.count = std::min(wide - column_tile.column, TILE);
        column_tile.sums = space;
        column_tile.totals = column_tile.sums + column_tile.heads * sums_each;
        space += 2 * column_tile.heads * sums_each;
        uint32_t* packed = reinterpret_cast<uint32_t*>(space);
        column_tile.packed_queries = packed;
        space += column_tile.heads * queries_each;
        for (int64_t c = 0; c < TILE; c++) column_tile.power[c] = column_tile.total_power[c] = MASKED_SCORE;
        for (int64_t h = 0; h < column_tile.heads; h++)
            for (int64_t c = 0; c < column_tile.count; c++) {
                const int64_t query = (column_tile.column + c) / group, lane = h * column_tile.count + c;
                const bf16* from = static_cast<const bf16*>(op.a) + (seen.first + query) * op.stride_a +
                                   ((head + column_tile.head + h) * group + (column_tile.column + c) % group) * dim;
                uint32_t* to = packed + h * queries_each + c;
                float factor = static_cast<float>(op.f0) * LOG2_E;
                if (made.int8_keys()) {
                    factor *= round_query(from, dim, to, each);
                } else {
                    place_query(from, dim, c, each, packed + h * queries_each);
                }
                for (int64_t i = lane; i < TILE; i += lanes) column_tile.factors[i] = factor;
                column_tile.lengths[lane] = seen.root + __builtin_popcountll(seen.of(query, 0));
                any |= column_tile.bits[lane] = seen.of(query, window);
                column_tile.firsts[lane] = window ? std::max<int64_t>(0, seen.root + __builtin_popcountll(column_tile.bits[lane]) - window) : 0;
                first = std::min(first, column_tile.firsts[lane]);
                latest = std::max(latest, column_tile.firsts[lane]);
            }
    }
    const int64_t row_end = std::min(seen.end, seen.root + 64 - __builtin_clzll(any | 1));
    const int64_t end = piece >= 0 ? std::min(row_end, task.pieces->end(row, piece)) : row_end;
    if (piece >= 0) first = std::max(first, task.pieces->begin(piece));

    configure_columns(each);
    written();
    const ScalesOf scales(made, kept, each, lanes);
    const int64_t begin = first / TILE * TILE, line = op.cache_type ? made.token() : token;
    for (int64_t turn = 0; op.cache_type && turn < 2 && begin + turn * TILE < end; turn++)
        made.widen(cached.place(begin + turn * TILE), turn);
    written();

    // Scores of the 16 tokens from `position` on, the `turn`th or a later one with the same remainder by 2.
    const auto score = [&](const Columns& column_tile, int64_t position, int64_t turn, float* out) {
        const int64_t row = lanes * static_cast<int64_t>(sizeof(float));
        if (made.int8_keys()) return score_int8(column_tile, made.int8_at(turn, 0), token, dim, each, queries_each, out, row);
        score_floats(column_tile, op.cache_type ? made.keys(turn) : cached.at(position), line, dim, each, queries_each, out, row);
    };
    const Coming coming(op, heads, head);
    const bool fetched = coming.worthwhile(op.cache_type, row_end);
    int64_t slot = 0;
    if (begin < end) score(all[0], begin, 0, scores[0]);
    for (int64_t position = begin, turn = 0; position < end; position += TILE, turn ^= 1) {
        if (fetched && position + PREFETCH_TOKENS < end) coming.fetch(cached.place(position + PREFETCH_TOKENS));
        const int64_t low = std::max<int64_t>(0, first - position), high = std::min(TILE, end - position);
        const bool plain = position >= latest && position + high <= seen.root;
        for (int64_t t = 0; t < tiles; t++, slot ^= 1) {
            Columns& column_tile = all[t];
            if (position % PIECE == 0 && position > begin)
                column_tile.total(lanes, value_dim, [&](int64_t lane) { return apart(position, column_tile.lengths[lane]); });
            // A load of what was stored just now would wait for the store, so the next scores are found first.
            if (t + 1 < tiles) score(all[t + 1], position, turn, scores[slot ^ 1]);
            else if (position + TILE < end) score(all[0], position + TILE, turn ^ 1, scores[slot ^ 1]);
            Mask masks[TILE];
            const bool all_by_all = plain && low == 0 && high == TILE;
            for (int64_t i = 0; !all_by_all && i < TILE; i++) {
                const bool within = i >= low && i < high;
                masks[i] = within && plain ? 0xffff : 0;
                for (int64_t c = 0; within && !plain && c < column_tile.heads * column_tile.count; c++) {
                    const int64_t beyond = position + i - seen.root;
                    const bool sees = beyond < 0 ? position + i >= column_tile.firsts[c] : column_tile.bits[c] >> beyond & 1;
                    masks[i] |= static_cast<Mask>(sees << c);
                }
            }
            float* result = scores[slot];
            weigh_all(column_tile, result, all_by_all ? nullptr : masks, lanes, value_dim, made, scales, turn, op.cache_type);
            const auto add = [&](const auto* values, int64_t line) {
                for (int64_t h = 0; h < column_tile.heads; h++)
                    all_values(values + low * line + (column_tile.head + h) * dim, line, high - low, result + low * lanes + h * column_tile.count,
                               lanes, column_tile.sums + h * sums_each, value_dim, column_tile.count);
            };
            if (!op.cache_type) add(cached.at(position) + layout.values, token);
            else if (made.int8_values()) add(made.int8_at(turn, 1), token);
            else add(made.values(turn), line);
        }
        if (op.cache_type && position + 2 * TILE < end) {
            made.widen(cached.place(position + 2 * TILE), turn);
            written();
        }
    }

    for (Columns& column_tile : all) {
        if (piece < 0) column_tile.total(lanes, value_dim, [](int64_t) { return true; });
        for (int64_t h = 0; h < column_tile.heads; h++)
            for (int64_t c = 0; c < column_tile.count; c++) {
                const int64_t query = (column_tile.column + c) / group, lane = h * column_tile.count + c;
                const int64_t asking = (head + column_tile.head + h) * group + (column_tile.column + c) % group;
                const int64_t at = h * sums_each + c * value_dim;
                if (piece >= 0) {
                    task.pieces->keep(row, piece, asking, {column_tile.sums + at, column_tile.weight_sum[lane], column_tile.power[lane]});
                } else {
                    bf16* out = static_cast<bf16*>(op.out) + (seen.first + query) * op.stride_out + asking * value_dim;
                    finish({column_tile.totals + at, column_tile.total_weight_sum[lane], column_tile.total_power[lane]}, value_dim,
                           sink_of(op, asking), out);
                }
            }
    }
}

// A chunk is a row, or, of few rows, some kv heads or columns of a row, or a piece of a row.
inline void attend_chunk(void* context, int64_t chunk, int thread) {
    const Attending& task = *static_cast<const Attending*>(context);
    if (task.pieces) {
        const auto [row, piece] = task.pieces->of(chunk);
        return attend(task, row, piece, 0, task.op->i2, 0, thread);
    }
    if (task.column_split > 1) return attend(task, chunk / task.column_split, -1, 0, 1, chunk % task.column_split, thread);
    const int64_t heads = task.op->i2 / task.split;
    attend(task, chunk / task.split, -1, chunk % task.split * heads, heads, 0, thread);
}

// Threads share few rows by kv heads; by pieces of the sequence where a head's keys are only a line or two of memory. All heads read
// the same latent vectors: rows of them are shared by pieces, and rows of several queries by columns.
inline void attention(Team& team, std::vector<Scratch<float>>& spaces, const Op& op, const Step& step) {
    Attending task = {&op, &step, &spaces};
    const int64_t sequences = step.sequences - step.prompts, wanted = 2 * team.size();
    while (sequences * task.split < wanted && op.i2 % (2 * task.split) == 0) task.split *= 2;
    const int64_t bytes = op.i2 / task.split * op.i0 * static_cast<int64_t>(op.cache_type ? 1 : sizeof(bf16));
    if (sequences >= wanted || (!op.i5 && bytes >= MIN_READ_BYTES)) return team.each(sequences * task.split, attend_chunk, &task);
    static thread_local Scratch<float> memory;
    Pieces pieces(op, step, sequences, memory);
    if (pieces.count() < std::min(wanted, 4 * sequences * task.split)) {
        if (op.i5 && sequences) task.column_split = (wanted + sequences - 1) / sequences;
        return team.each(sequences * task.split * task.column_split, attend_chunk, &task);
    }
    task.pieces = &pieces;
    team.each(pieces.count(), attend_chunk, &task);
    const int64_t value_dim = TokenLayout(op).value_dim;
    for (int64_t row = 0; row < sequences; row++)
        for (int64_t asking = 0; asking < op.i1; asking++)
            finish(pieces.all(row, asking), value_dim, sink_of(op, asking),
                   static_cast<bf16*>(op.out) + VisibleTokens(step, row).first * op.stride_out + asking * value_dim);
}

}  // namespace troupe
