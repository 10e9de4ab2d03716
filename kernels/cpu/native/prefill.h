// Causal attention of a row's chunk of queries over all keys so far, block after block of keys (FlashAttention,
// arXiv:2205.14135).
//
// Keys and values are laid out for AMX once, for all queries and all heads of a group. A block of scores is Q K^T for 32
// queries of a head and 256 tokens, which stays in a core's first cache; its weights are rounded to bf16 for P V.
#pragma once
#include "attention.h"

namespace troupe {

constexpr int64_t QUERIES = 2 * TILE;
constexpr int64_t KEYS = 8 * DEPTH;              // tokens of a block of scores
constexpr int64_t SCORES = KEYS + TILE;          // floats from one query's scores to the next one's
constexpr int64_t LAID_OUT = 1 << 21;            // elements of keys, and of values, that stay in the cores' second caches

struct Workspace {
    Scratch<float> floats;
    Scratch<bf16> halves;
};

struct Prefilling {
    const Op* op;
    const int32_t* pages;
    int64_t begin;         // the first of its queries in the step
    int64_t start, count;  // that one's position, and how many there are
    int64_t first_block;  // of 32 tokens, the first that any query sees
    int64_t blocks;       // from there on
    int64_t head, heads;  // kv heads that are laid out at a time
    bf16 *keys, *values;  // [kv head][block of 32 tokens][dim * 32]
    std::vector<Workspace>* spaces;  // by thread
};

// Of a block of 32 tokens, for each kv head: keys [32 dims][half of 16 tokens][pair of dims][token][2], values [16 dims]
// [pair of tokens][dim][2]. What follows the last token is zero.
inline void lay_out_chunk(void* context, int64_t block, int) {
    const Prefilling& task = *static_cast<const Prefilling*>(context);
    const int64_t dim = task.op->i0, kv_heads = task.op->i2, token = 2 * kv_heads * dim;
    const int64_t position = (task.first_block + block) * DEPTH, tokens = std::min(DEPTH, task.start + task.count - position);
    const Cached cached = {static_cast<const bf16*>(task.op->b) + task.head * dim, token, task.pages, task.op->i4};
    const Kept kept(*task.op, task.op->b, dim, kv_heads);
    int64_t places[DEPTH];
    for (int64_t i = 0; i < tokens; i++) places[i] = cached.place(position + i);
    auto line = [&](int64_t i, int64_t head, int64_t d) {
        if (i >= tokens) return _mm512_setzero_si512();
        if (task.op->narrow) return kept.line(places[i], task.head + head, d);
        return _mm512_loadu_si512(cached.keys + places[i] * token + head * dim + d);
    };
    for (int64_t head = 0; head < task.heads; head++) {
        bf16* keys = task.keys + (head * task.blocks + block) * dim * DEPTH;
        for (int64_t d = 0; d < dim; d += DEPTH)
            for (int64_t half = 0; half < 2; half++, keys += TILE * DEPTH) {
                __m512i part[TILE];
                for (int64_t i = 0; i < TILE; i++) part[i] = line(half * TILE + i, head, d);
                transpose(part);
                for (int64_t i = 0; i < TILE; i++) _mm512_store_si512(keys + i * DEPTH, part[i]);
            }
    }
    alignas(64) uint16_t order[DEPTH];  // of two tokens' dims
    for (int64_t i = 0; i < DEPTH; i++) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * DEPTH);
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(TILE));
    for (int64_t head = 0; head < task.heads; head++) {
        bf16* values = task.values + (head * task.blocks + block) * dim * DEPTH;
        for (int64_t pair = 0; pair < TILE; pair++, values += DEPTH)
            for (int64_t d = 0; d < dim; d += DEPTH) {
                const __m512i even = line(2 * pair, kv_heads + head, d), odd = line(2 * pair + 1, kv_heads + head, d);
                _mm512_store_si512(values + d * DEPTH, _mm512_permutex2var_epi16(even, low, odd));
                _mm512_store_si512(values + (d + TILE) * DEPTH, _mm512_permutex2var_epi16(even, high, odd));
            }
    }
}

// 2^x to a ten thousandth, a twentieth of what rounding to bf16 takes; what is less than 2^-125 is that.
inline __m512 rough_exp2(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: a sum's last bits are a whole number
    x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x);     // a NaN stays one
    const __m512 whole = _mm512_add_ps(x, magic), r = _mm512_sub_ps(x, _mm512_sub_ps(whole, magic));
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(5.517167e-2f), _mm512_set1_ps(2.4261113e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9326099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.9992807e-1f));
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(whole), 23)));
}

// The queries of one head, and what they have come to.
struct Asking {
    const bf16* queries;  // [32 dims][query][32]
    float* sums;          // [query][dim]
    float* whole;         // [query][16]: parts of the sums of weights
    float* power;         // [query]: weights and sums are relative to 2 to this power
};

// scores [query][SCORES]: Q K^T of `blocks` blocks of 32 tokens.
inline void score(const Asking& of, const bf16* keys, int64_t blocks, int64_t dim, float* scores) {
    for (int64_t block = 0; block < blocks; block++, scores += DEPTH) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16* queries = of.queries;
        for (int64_t d = 0; d < dim; d += DEPTH, queries += QUERIES * DEPTH, keys += DEPTH * DEPTH) {
            _tile_loadd(4, queries, 64);
            _tile_loadd(6, keys, 64);
            _tile_loadd(7, keys + TILE * DEPTH, 64);
            _tile_loadd(5, queries + TILE * DEPTH, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, scores, 4 * SCORES);
        _tile_stored(1, scores + TILE, 4 * SCORES);
        _tile_stored(2, scores + TILE * SCORES, 4 * SCORES);
        _tile_stored(3, scores + TILE * SCORES + TILE, 4 * SCORES);
    }
}

// A query at position `last` sees positions last - window < t <= last: hides the others of tokens `begin` to `end`, of
// which the first stands at `position`.
inline void hide(float* scores, int64_t begin, int64_t end, int64_t position, int64_t last, int64_t window) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i high = _mm512_set1_epi32(static_cast<int>(last));
    const __m512i low = _mm512_set1_epi32(static_cast<int>(window ? last - window : -1));
    for (int64_t i = begin / TILE * TILE; i < end; i += TILE) {
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(position + i)));
        const __mmask16 hidden = _mm512_cmpgt_epi32_mask(at, high) | _mm512_cmple_epi32_mask(at, low);
        _mm512_mask_storeu_ps(scores + i, hidden, _mm512_set1_ps(-3e38f));
    }
}

// One query's scores of 32 tokens after 32 to weights in their place, of which bf16 takes half.
inline void weigh(const Asking& of, int64_t query, float* scores, int64_t blocks, float factor, int64_t dim) {
    __m512 most = _mm512_loadu_ps(scores), other = _mm512_loadu_ps(scores + TILE);
    for (int64_t i = DEPTH; i < blocks * DEPTH; i += DEPTH) {
        most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
        other = _mm512_max_ps(other, _mm512_loadu_ps(scores + i + TILE));
    }
    const float power = _mm512_reduce_max_ps(_mm512_max_ps(most, other)) * factor;
    __m512 whole = _mm512_load_ps(of.whole + query * TILE), more = _mm512_setzero_ps();
    if (power > of.power[query] + FAR) {
        const __m512 by = exp2(_mm512_set1_ps(of.power[query] - power));
        float* sums = of.sums + query * dim;
        for (int64_t d = 0; d < dim && of.power[query] > UNSEEN; d += TILE)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), by));
        whole = _mm512_mul_ps(whole, by);
        of.power[query] = power;
    }
    const __m512 scale = _mm512_set1_ps(factor), above = _mm512_set1_ps(of.power[query]);
    for (int64_t i = 0; i < blocks; i++, scores += DEPTH) {
        const __m512 low = rough_exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores), scale, above));
        const __m512 high = rough_exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + TILE), scale, above));
        whole = _mm512_add_ps(whole, low);
        more = _mm512_add_ps(more, high);
        const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(scores, reinterpret_cast<__m512i>(both));
    }
    _mm512_store_ps(of.whole + query * TILE, _mm512_add_ps(whole, more));
}

// Adds P V of `blocks` blocks of 32 tokens. weights: where scores were.
inline void add_up(const Asking& of, const float* weights, const bf16* values, int64_t blocks, int64_t dim) {
    for (int64_t d = 0; d < dim; d += DEPTH) {
        float *low = of.sums + d, *high = low + TILE * dim;
        _tile_loadd(0, low, 4 * dim);
        _tile_loadd(1, low + TILE, 4 * dim);
        _tile_loadd(2, high, 4 * dim);
        _tile_loadd(3, high + TILE, 4 * dim);
        for (int64_t block = 0; block < blocks; block++) {
            const float* weight = weights + block * DEPTH;
            const bf16* value = values + (block * dim + d) * DEPTH;
            _tile_loadd(4, weight, 4 * SCORES);
            _tile_loadd(6, value, 64);
            _tile_loadd(7, value + TILE * DEPTH, 64);
            _tile_loadd(5, weight + TILE * SCORES, 4 * SCORES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, 4 * dim);
        _tile_stored(1, low + TILE, 4 * dim);
        _tile_stored(2, high, 4 * dim);
        _tile_stored(3, high + TILE, 4 * dim);
    }
}

// 32 queries of all heads of a group; the last ones, which see the most, come first.
inline void prefill_chunk(void* context, int64_t chunk, int thread) {
    const Prefilling& task = *static_cast<const Prefilling*>(context);
    const Op& op = *task.op;
    const int64_t dim = op.i0, group = op.i1 / op.i2, window = op.i3, chunks = (task.count + QUERIES - 1) / QUERIES;
    const int64_t head = chunk / chunks, query = (chunks - 1 - chunk % chunks) * QUERIES;
    const int64_t queries = std::min(QUERIES, task.count - query);
    const int64_t low = task.start + query, high = low + queries;  // positions of the queries
    const int64_t first = window ? std::max<int64_t>(0, low + 1 - window) / DEPTH : 0;
    const int64_t end = (high + DEPTH - 1) / DEPTH;

    Workspace& space = (*task.spaces)[thread];
    const int64_t each = QUERIES * (dim + TILE + 1);
    float* scores = space.floats.of(QUERIES * SCORES + group * each);
    float* floats = scores + QUERIES * SCORES;
    bf16* halves = space.halves.of(group * QUERIES * dim);
    std::memset(floats, 0, group * each * sizeof(float));
    const int64_t heads = (task.head + head) * group;
    auto asking = [&](int64_t h) {
        float* from = floats + h * each;
        return Asking{halves + h * QUERIES * dim, from, from + QUERIES * dim, from + QUERIES * (dim + TILE)};
    };
    for (int64_t h = 0; h < group; h++) {
        const Asking of = asking(h);
        bf16* out = halves + h * QUERIES * dim;
        for (int64_t d = 0; d < dim; d += DEPTH)
            for (int64_t q = 0; q < QUERIES; q++, out += DEPTH) {
                const bf16* from = static_cast<const bf16*>(op.a) + (task.begin + query + q) * op.stride_a + (heads + h) * dim + d;
                _mm512_store_si512(out, q < queries ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
            }
        for (int64_t q = 0; q < QUERIES; q++) of.power[q] = UNSEEN;
    }

    configure(TILE, TILE);
    const float factor = static_cast<float>(op.f0) * LOG2_E;
    for (int64_t block = first; block < end; block += KEYS / DEPTH) {
        const int64_t blocks = std::min(KEYS / DEPTH, end - block), position = block * DEPTH;
        const int64_t from = (head * task.blocks + block - task.first_block) * dim * DEPTH;
        const int64_t tokens = blocks * DEPTH, seen = std::max<int64_t>(0, low + 1 - position);
        const int64_t before = window ? std::min(tokens, high - window - position) : 0;
        for (int64_t h = 0; h < group; h++) {
            const Asking of = asking(h);
            score(of, task.keys + from, blocks, dim, scores);
            for (int64_t q = 0; q < QUERIES; q++) {
                float* row = scores + q * SCORES;
                const int64_t last = std::min(low + q, high - 1);
                hide(row, 0, before, position, last, window);
                hide(row, seen, tokens, position, last, window);
                weigh(of, q, row, blocks, factor, dim);
            }
            add_up(of, scores, task.values + from, blocks, dim);
        }
    }
    for (int64_t h = 0; h < group; h++) {
        const Asking of = asking(h);
        for (int64_t q = 0; q < queries; q++) {
            bf16* out = static_cast<bf16*>(op.out) + (task.begin + query + q) * op.stride_out + (heads + h) * dim;
            const __m512 scale = _mm512_set1_ps(1 / _mm512_reduce_add_ps(_mm512_load_ps(of.whole + q * TILE)));
            for (const float *sums = of.sums + q * dim, *end = sums + dim; sums < end; sums += DEPTH, out += DEPTH) {
                const __m512 first = _mm512_mul_ps(_mm512_load_ps(sums), scale);
                const __m512 second = _mm512_mul_ps(_mm512_load_ps(sums + TILE), scale);
                _mm512_storeu_si512(out, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
            }
        }
    }
}

// The chunk of a prompt that is a step's sequence. `space`: memory to reuse, because memory that is new to a process is
// dear.
inline void prefill(Team& team, std::vector<Workspace>& spaces, Scratch<bf16>& space, const Op& op, const Step& step,
                    int64_t sequence) {
    const int64_t begin = step.offsets[sequence], count = step.offsets[sequence + 1] - begin;
    const int64_t start = step.lengths[sequence] - count, first = op.i3 ? std::max<int64_t>(0, start + 1 - op.i3) / DEPTH : 0;
    const int64_t blocks = (start + count + DEPTH - 1) / DEPTH - first, each = blocks * op.i0 * DEPTH;
    const int64_t most = std::clamp<int64_t>(LAID_OUT / each, 1, op.i2);  // kv heads at a time
    bf16* keys = space.of(2 * most * each);
    Prefilling task = {&op, step.pages + sequence * step.pages_stride, begin, start, count, first, blocks, 0, 0, keys,
                       keys + most * each, &spaces};
    for (; task.head < op.i2; task.head += task.heads) {
        task.heads = std::min(most, op.i2 - task.head);
        team.each(blocks, lay_out_chunk, &task);
        team.each(task.heads * ((count + QUERIES - 1) / QUERIES), prefill_chunk, &task);
    }
}

}  // namespace troupe
