// Attention of one query a row over its pages, each page read once for all heads that share it.
//
// Scores are K Q^T on AMX: sixteen tokens of a page are a tile as they lie in the cache, up to sixteen heads of a group
// are its columns. The softmax then runs over columns, and values are added up in float32.
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

    const bf16* at(int64_t position) const {
        return keys + pages[position / page_size] * page + position % page_size * token;
    }
};

// weights float [tokens from `first`][width]; sums of weight * value for `HEADS` columns from `head` on.
template <int VECTORS, int HEADS>
void add_values(const Cached& cached, int64_t values, int64_t first, int64_t end, const float* weights,
                int64_t width, int64_t head, const float* scale, bf16* out) {
    __m512 sums[HEADS][VECTORS];
    for (auto& of_head : sums)
        for (auto& sum : of_head) sum = _mm512_setzero_ps();
    for (int64_t position = first; position < end;) {
        const bf16* value = cached.at(position) + values;
        int64_t stop = std::min(end, (position / TILE + 1) * TILE);
        for (; position < stop; position++, value += cached.token) {
            const float* weight = weights + (position - first) * width + head;
            for (int v = 0; v < VECTORS; v++) {
                __m512 part = load(value + v * TILE);
                for (int h = 0; h < HEADS; h++)
                    sums[h][v] = _mm512_fmadd_ps(_mm512_set1_ps(weight[h]), part, sums[h][v]);
            }
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECTORS; v++)
            store(out + (head + h) * VECTORS * TILE + v * TILE,
                  _mm512_mul_ps(sums[h][v], _mm512_set1_ps(scale[head + h])));
}

template <int VECTORS>
constexpr int most_heads = VECTORS <= 4 ? 4 : VECTORS <= 8 ? 3 : 1;

template <int VECTORS>
void all_values(const Cached& cached, int64_t values, int64_t first, int64_t end, const float* weights,
                int64_t width, int64_t heads, const float* scale, bf16* out) {
    constexpr int MOST = most_heads<VECTORS>;
    auto add = [&]<int HEADS>(int64_t head) {
        add_values<VECTORS, HEADS>(cached, values, first, end, weights, width, head, scale, out);
    };
    int64_t head = 0;
    for (; head + MOST <= heads; head += MOST) add.template operator()<MOST>(head);
    if constexpr (MOST > 2) {
        if (MOST > 3 && heads - head == 3) return add.template operator()<3>(head);
        if (heads - head == 2) return add.template operator()<2>(head);
    }
    for (; head < heads; head++) add.template operator()<1>(head);
}

// Softmax of scores [tokens][16] over the tokens, before it is divided by the sums. In place. -> 1 / sums.
inline __m512 softmax(float* scores, int64_t tokens, __m512 factor) {
    __m512 most = _mm512_set1_ps(-3e38f), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < tokens; i++) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i * TILE));
    for (int64_t i = 0; i < tokens; i++) {
        __m512 weight = exp(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i * TILE), most), factor));
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + i * TILE, weight);
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
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
    __m512 most = nothing, sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < tokens; i += 4) most = _mm512_max_ps(most, four(i, mask(i)));
    most = turn(most, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
    for (int64_t i = 0; i < tokens; i += 4) {
        __m512 weight = exp(_mm512_mul_ps(_mm512_sub_ps(four(i, mask(i)), most), factor));
        weight = _mm512_maskz_mov_ps(mask(i), weight);
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + i * 4, weight);
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), turn(sum, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); }));
}

struct Attending {
    const Op* op;
    const Step* step;
    std::vector<std::vector<float>>* scores;  // by thread
    int64_t split;                            // chunks of a row
};

constexpr int64_t AHEAD = 4 * TILE;  // tokens

// All of a page's tile for all kv heads, whose keys and values lie between one another.
inline void fetch(const bf16* from, int64_t count) {
    for (int64_t line = 0; line < count; line += 32)
        _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T1);
}

// A block of up to sixteen heads of one kv head in one row.
inline void attend(const Attending& task, int64_t row, int64_t kv_head, int64_t head, int64_t heads, int thread) {
    const Op& op = *task.op;
    const Step& step = *task.step;
    const int64_t dim = op.i0, kv_heads = op.i2, token = 2 * kv_heads * dim;
    const bf16* queries = static_cast<const bf16*>(op.a) + row * op.stride_a + head * dim;
    bf16* out = static_cast<bf16*>(op.out) + row * op.stride_out + head * dim;
    const Cached cached = {static_cast<const bf16*>(op.b) + kv_head * dim, token, op.i4 * token,
                           step.pages + row * step.pages_stride, op.i4};
    const int64_t end = step.lengths[row], first = op.i3 ? std::max<int64_t>(0, end - op.i3) : 0;
    const int64_t begin = first / TILE * TILE;

    alignas(64) uint32_t columns[256 / 2][TILE];  // queries as a tile of weights: [pair of dims][head]
    std::memset(columns, 0, sizeof(columns[0]) * dim / 2);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t pair = 0; pair < dim / 2; pair++) std::memcpy(&columns[pair][h], queries + h * dim + 2 * pair, 4);
    auto& scores = (*task.scores)[thread];
    if (static_cast<int64_t>(scores.size()) < (end - begin + TILE) * TILE) scores.resize((end - begin + 512) * TILE);

    configure(TILE, 0);
    for (int64_t position = begin; position < end; position += TILE) {
        const bf16* keys = cached.at(position);
        if (kv_head == 0 && position + AHEAD < end) fetch(cached.at(position + AHEAD), token * TILE);
        _tile_zero(0);
        for (int64_t depth = 0; depth < dim; depth += DEPTH) {
            _tile_loadd(4, keys + depth, 2 * token);
            _tile_loadd(6, columns[depth / 2], 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores.data() + (position - begin) * TILE, 64);
    }

    const __m512 factor = _mm512_set1_ps(static_cast<float>(op.f0));
    const int64_t width = heads <= 4 ? 4 : TILE;
    float* weights = scores.data() + (first - begin) * TILE;
    alignas(64) float scale[TILE];
    _mm512_store_ps(scale, (heads <= 4 ? softmax_of_four : softmax)(weights, end - first, factor));

    const int64_t values = kv_heads * dim;
    switch (dim / TILE) {
        case 2: return all_values<2>(cached, values, first, end, weights, width, heads, scale, out);
        case 4: return all_values<4>(cached, values, first, end, weights, width, heads, scale, out);
        case 6: return all_values<6>(cached, values, first, end, weights, width, heads, scale, out);
        case 8: return all_values<8>(cached, values, first, end, weights, width, heads, scale, out);
        case 16: return all_values<16>(cached, values, first, end, weights, width, heads, scale, out);
    }
}

// A chunk is a row, or, of few rows, one kv head of a row.
inline void attend_chunk(void* context, int64_t chunk, int thread) {
    const Attending& task = *static_cast<const Attending*>(context);
    const int64_t kv_heads = task.op->i2, group = task.op->i1 / kv_heads;
    const int64_t row = chunk / task.split, each = kv_heads / task.split, first = chunk % task.split * each;
    for (int64_t kv_head = first; kv_head < first + each; kv_head++)
        for (int64_t head = 0; head < group; head += TILE)
            attend(task, row, kv_head, kv_head * group + head, std::min(TILE, group - head), thread);
}

}  // namespace troupe
