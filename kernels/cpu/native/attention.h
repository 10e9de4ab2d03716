// Attention of one query a row, or of a few, over its pages, each page read once for all heads that share it.
//
// Scores are K Q^T on AMX: sixteen tokens of a page are a tile as they lie in the cache, up to sixteen heads of a group
// are its columns, those of one query after those of another. The softmax then runs over columns, and values are added
// up in float32. What a column comes to is the same bits whatever columns are beside it, and whatever tokens that it
// does not see lie between those that it sees: a draft is verified with the numbers that it would be decoded with.
#pragma once
#include <vector>

#include "matrix.h"
#include "program.h"

namespace troupe {

struct Cached {
    const bf16* keys;     // of the row's kv head, in page 0
    int64_t token, page;  // elements from one token to the next, and from one page to the next
    const int32_t* pages;
    int64_t page_size;
    int64_t dim = 0;
    int64_t next = 0;  // elements to the keys that are wanted next, while values are added up; 0: none

    const bf16* at(int64_t position) const {
        return keys + pages[position / page_size] * page + position % page_size * token;
    }
};

// Keys or values of one head from some tokens on. They lie between those of other heads, too far from one another for
// the processor to see what comes next, and those of all heads together are too many to be kept.
inline void fetch(const bf16* from, int64_t tokens, const Cached& cached) {
    for (int64_t i = 0; i < tokens; i++, from += cached.token)
        for (int64_t line = 0; line < cached.dim; line += 32)
            _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T1);
}

// weights float [tokens from `first`][width]; sums of weight * value for `COLUMNS` columns from `column` on, of which
// `columns` are to be stored, and `VECTORS` vectors of the head from `vector` on.
template <int VECTORS, int COLUMNS>
void add_values(const Cached& cached, int64_t values, int64_t first, int64_t end, const float* weights, int64_t width,
                int64_t column, int64_t columns, int64_t vector, const float* scale, bf16* const* out) {
    __m512 sums[COLUMNS][VECTORS];
    for (auto& of_column : sums)
        for (auto& sum : of_column) sum = _mm512_setzero_ps();
    for (int64_t position = first; position < end;) {
        const bf16* value = cached.at(position) + values + vector * TILE;
        int64_t stop = std::min(end, (position / TILE + 1) * TILE);
        if (cached.next && column == 0 && vector == 0) fetch(value - values + cached.next, stop - position, cached);
        for (; position < stop; position++, value += cached.token) {
            const float* weight = weights + (position - first) * width + column;
            for (int v = 0; v < VECTORS; v++) {
                __m512 part = load(value + v * TILE);
                for (int c = 0; c < COLUMNS; c++)
                    sums[c][v] = _mm512_fmadd_ps(_mm512_set1_ps(weight[c]), part, sums[c][v]);
            }
        }
    }
    for (int c = 0; c < COLUMNS && c < columns; c++)
        for (int v = 0; v < VECTORS; v++)
            store(out[column + c] + (vector + v) * TILE,
                  _mm512_mul_ps(sums[c][v], _mm512_set1_ps(scale[column + c])));
}

template <int VECTORS>
constexpr int most_columns = VECTORS <= 4 ? 4 : VECTORS <= 8 ? 3 : 1;

// A converted value serves as many columns as registers can sum: few columns over the whole head, or, of many (which
// are filled up to a multiple of four: `width` is 16), all over a part of it.
template <int VECTORS>
void all_values(const Cached& cached, int64_t values, int64_t first, int64_t end, const float* weights,
                int64_t width, int64_t columns, const float* scale, bf16* const* out) {
    auto add = [&]<int PART, int COLUMNS>(int64_t column, int64_t vector) {
        add_values<PART, COLUMNS>(cached, values, first, end, weights, width, column, columns, vector, scale, out);
    };
    if (columns > 4) {
        for (int64_t vector = 0; vector < VECTORS; vector += columns > 12 ? 1 : 2) {
            if (columns > 12) add.template operator()<1, 16>(0, vector);
            else if (columns > 8) add.template operator()<2, 12>(0, vector);
            else add.template operator()<2, 8>(0, vector);
        }
        return;
    }
    constexpr int MOST = most_columns<VECTORS>;
    int64_t column = 0;
    for (; column + MOST <= columns; column += MOST) add.template operator()<VECTORS, MOST>(column, 0);
    if constexpr (MOST > 2) {
        if (MOST > 3 && columns - column == 3) return add.template operator()<VECTORS, 3>(column, 0);
        if (columns - column == 2) return add.template operator()<VECTORS, 2>(column, 0);
    }
    for (; column < columns; column++) add.template operator()<VECTORS, 1>(column, 0);
}

// Sums of floats in double, so that their order does not show in them.
struct Sum {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

    void add(__m512 x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    }
};

inline __m512 both(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

// Softmax of scores [tokens][16] over the tokens, before it is divided by the sums. In place. -> 1 / sums.
inline __m512 softmax(float* scores, int64_t tokens, __m512 factor) {
    __m512 most = _mm512_set1_ps(-3e38f);
    Sum sum;
    for (int64_t i = 0; i < tokens; i++) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i * TILE));
    for (int64_t i = 0; i < tokens; i++) {
        __m512 weight = exp(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i * TILE), most), factor));
        sum.add(weight);
        _mm512_storeu_ps(scores + i * TILE, weight);
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), both(_mm512_cvtpd_ps(sum.low), _mm512_cvtpd_ps(sum.high)));
}

// The same for up to four heads, four tokens in a vector; the result is [tokens][4] from `scores` on.
inline __m512 softmax_of_four(float* scores, int64_t tokens, __m512 factor) {
    const __m512 nothing = _mm512_set1_ps(-3e38f);
    auto four = [&](int64_t i, __mmask16 mask) {
        const float* from = scores + i * TILE;
        __m512 found = _mm512_castps128_ps512(_mm_loadu_ps(from));
        found = _mm512_insertf32x4(found, _mm_loadu_ps(from + TILE), 1);
        found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 2 * TILE), 2);
        found = _mm512_insertf32x4(found, _mm_loadu_ps(from + 3 * TILE), 3);
        return _mm512_mask_mov_ps(nothing, mask, found);
    };
    auto mask = [&](int64_t i) {
        return tokens - i >= 4 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1 << 4 * (tokens - i)) - 1);
    };
    auto turn = [](__m512 x, auto with) {  // over the four tokens, for each head
        x = with(x, _mm512_shuffle_f32x4(x, x, 0x4e));
        return with(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    };
    __m512 most = nothing;
    Sum sum;
    for (int64_t i = 0; i < tokens; i += 4) most = _mm512_max_ps(most, four(i, mask(i)));
    most = turn(most, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
    for (int64_t i = 0; i < tokens; i += 4) {
        __m512 weight = exp(_mm512_mul_ps(_mm512_sub_ps(four(i, mask(i)), most), factor));
        weight = _mm512_maskz_mov_ps(mask(i), weight);
        sum.add(weight);
        _mm512_storeu_ps(scores + i * 4, weight);
    }
    const __m512d halves = _mm512_add_pd(sum.low, sum.high);
    const __m256 whole = _mm512_cvtpd_ps(_mm512_add_pd(halves, _mm512_shuffle_f64x2(halves, halves, 0x4e)));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), both(whole, whole));
}

struct Attending {
    const Op* op;
    const Step* step;
    std::vector<std::vector<float>>* scores;  // by thread
    int64_t split;                            // chunks of a row
};

constexpr int64_t AHEAD = 4 * TILE;  // tokens

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

// A block of up to sixteen columns, from `column` on, of one kv head in one row: a query's heads, then the next one's.
// Memory is never idle: values are fetched while their keys are multiplied, and the next head's keys while values are
// added up. `first_head`, `last_head`: whether nobody fetched this one's keys, and whether no other follows.
inline void attend(const Attending& task, int64_t row, int64_t kv_head, int64_t column, bool first_head, bool last_head,
                   int thread) {
    const Op& op = *task.op;
    const Step& step = *task.step;
    const int64_t dim = op.i0, kv_heads = op.i2, group = op.i1 / kv_heads, token = 2 * kv_heads * dim;
    const Seen seen(step, row);
    const int64_t columns = std::min(TILE, seen.count * group - column);
    const Cached cached = {static_cast<const bf16*>(op.b) + kv_head * dim, token, op.i4 * token,
                           step.pages + row * step.pages_stride, op.i4, dim, last_head ? 0 : dim};

    alignas(64) uint32_t tile[256 / 2][TILE];  // queries as a tile of weights: [pair of dims][column]
    bf16* out[TILE];
    uint64_t bits[TILE], any = 0;
    int64_t firsts[TILE], first = seen.end, latest = 0;
    if (columns < TILE) std::memset(tile, 0, sizeof(tile[0]) * dim / 2);
    for (int64_t c = 0; c < columns; c++) {
        const int64_t query = (column + c) / group, head = kv_head * group + (column + c) % group;
        const bf16* asked = static_cast<const bf16*>(op.a) + (seen.first + query) * op.stride_a + head * dim;
        for (int64_t pair = 0; pair < dim / 2; pair++) std::memcpy(&tile[pair][c], asked + 2 * pair, 4);
        out[c] = static_cast<bf16*>(op.out) + (seen.first + query) * op.stride_out + head * dim;
        any |= bits[c] = seen.of(query, op.i3);
        firsts[c] = op.i3 ? std::max<int64_t>(0, seen.root + __builtin_popcountll(bits[c]) - op.i3) : 0;
        first = std::min(first, firsts[c]);
        latest = std::max(latest, firsts[c]);
    }
    const int64_t end = std::min(seen.end, seen.root + 64 - __builtin_clzll(any | 1));
    const int64_t begin = first / TILE * TILE;
    auto& scores = (*task.scores)[thread];
    if (static_cast<int64_t>(scores.size()) < (end - begin + TILE) * TILE) scores.resize((end - begin + 512) * TILE);

    configure(TILE, 0);
    for (int64_t position = begin; position < end; position += TILE) {
        const bf16* keys = cached.at(position);
        if (first_head && position + AHEAD < end) fetch(cached.at(position + AHEAD), TILE, cached);
        if (column == 0) fetch(keys + kv_heads * dim, TILE, cached);
        _tile_zero(0);
        for (int64_t depth = 0; depth < dim; depth += DEPTH) {
            _tile_loadd(4, keys + depth, 2 * token);
            _tile_loadd(6, tile[depth / 2], 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores.data() + (position - begin) * TILE, 64);
    }
    if (seen.count > 1) {
        auto hide = [&](int64_t position, auto hidden) {
            __mmask16 mask = 0;
            for (int64_t c = 0; c < columns; c++) mask |= static_cast<__mmask16>(hidden(c) << c);
            _mm512_mask_storeu_ps(scores.data() + (position - begin) * TILE, mask, _mm512_set1_ps(-1e30f));
        };
        for (int64_t position = first; position < latest; position++)
            hide(position, [&](int64_t c) { return position < firsts[c]; });
        for (int64_t position = std::max(seen.root, first); position < end; position++)
            hide(position, [&](int64_t c) { return !(bits[c] >> (position - seen.root) & 1); });
    }

    const __m512 factor = _mm512_set1_ps(static_cast<float>(op.f0));
    const int64_t width = columns <= 4 ? 4 : TILE;
    float* weights = scores.data() + (first - begin) * TILE;
    alignas(64) float scale[TILE];
    _mm512_store_ps(scale, (columns <= 4 ? softmax_of_four : softmax)(weights, end - first, factor));

    const int64_t values = kv_heads * dim;
    switch (dim / TILE) {
        case 2: return all_values<2>(cached, values, first, end, weights, width, columns, scale, out);
        case 4: return all_values<4>(cached, values, first, end, weights, width, columns, scale, out);
        case 6: return all_values<6>(cached, values, first, end, weights, width, columns, scale, out);
        case 8: return all_values<8>(cached, values, first, end, weights, width, columns, scale, out);
        case 16: return all_values<16>(cached, values, first, end, weights, width, columns, scale, out);
    }
}

// A chunk is a row, or, of few rows, one kv head of a row.
inline void attend_chunk(void* context, int64_t chunk, int thread) {
    const Attending& task = *static_cast<const Attending*>(context);
    const int64_t kv_heads = task.op->i2, group = task.op->i1 / kv_heads;
    const int64_t row = chunk / task.split, each = kv_heads / task.split, first = chunk % task.split * each;
    const int64_t columns = Seen(*task.step, row).count * group;
    for (int64_t kv_head = first; kv_head < first + each; kv_head++)
        for (int64_t column = 0; column < columns; column += TILE)
            attend(task, row, kv_head, column, kv_head == first && column == 0, kv_head == first + each - 1, thread);
}

}  // namespace troupe
