// Causal attention of a row's chunk of queries over all keys so far.
//
// Scores are K Q^T on AMX with the keys as they lie in the cache and 32 queries of a head as columns, so that softmax
// runs over columns, 16 queries in a vector. The result is V^T P^T, for which values are transposed once a row.
#pragma once
#include "attention.h"

namespace troupe {

constexpr int64_t QUERIES = 2 * TILE;

struct Workspace {
    std::vector<float> scores;  // [token][32 queries]
    std::vector<bf16> weights;  // [block of 32 tokens][half of 16 queries][pair of tokens][query][2]
};

struct Prefilling {
    const Op* op;
    const int32_t* pages;
    int64_t start, count;
    int64_t first_block;  // of 32 tokens, the first that any query sees
    bf16* values;         // [kv head][block of 32 tokens][dim][token]
    int64_t value_blocks;
    std::vector<Workspace>* spaces;  // by thread

    Cached cached(int64_t kv_head) const {
        const int64_t token = 2 * op->i2 * op->i0;
        return {static_cast<const bf16*>(op->b) + kv_head * op->i0, token, op->i4 * token, pages, op->i4};
    }
    int64_t end() const { return start + count; }
};

inline void transpose_chunk(void* context, int64_t chunk, int) {
    const Prefilling& task = *static_cast<const Prefilling*>(context);
    const int64_t dim = task.op->i0, kv_heads = task.op->i2;
    const int64_t kv_head = chunk % kv_heads, block = chunk / kv_heads;
    const Cached cached = task.cached(kv_head);
    bf16* out = task.values + (kv_head * task.value_blocks + block) * dim * DEPTH;
    for (int64_t i = 0; i < DEPTH; i++) {
        const int64_t position = (task.first_block + block) * DEPTH + i;
        if (position < task.end()) {
            const bf16* value = cached.at(position) + kv_heads * dim;
            for (int64_t d = 0; d < dim; d++) out[d * DEPTH + i] = value[d];
        } else {
            for (int64_t d = 0; d < dim; d++) out[d * DEPTH + i] = 0;
        }
    }
}

inline void prefill_chunk(void* context, int64_t chunk, int thread) {
    const Prefilling& task = *static_cast<const Prefilling*>(context);
    const Op& op = *task.op;
    const int64_t dim = op.i0, heads = op.i1, group = heads / op.i2, window = op.i3;
    const int64_t head = chunk % heads, kv_head = head / group, query = chunk / heads * QUERIES;
    const int64_t queries = std::min(QUERIES, task.count - query);
    const Cached cached = task.cached(kv_head);
    const bf16* asked = static_cast<const bf16*>(op.a) + query * op.stride_a + head * dim;
    bf16* out = static_cast<bf16*>(op.out) + query * op.stride_out + head * dim;

    const int64_t low = task.start + query, high = low + queries;  // positions of the queries
    const int64_t first = window ? std::max<int64_t>(0, low + 1 - window) / DEPTH : 0;
    const int64_t blocks = (high + DEPTH - 1) / DEPTH - first;

    alignas(64) uint32_t columns[2][256 / 2][TILE];
    if (queries < QUERIES) std::memset(columns, 0, sizeof(columns));
    for (int64_t q = 0; q < queries; q++)
        for (int64_t pair = 0; pair < dim / 2; pair++)
            std::memcpy(&columns[q / TILE][pair][q % TILE], asked + q * op.stride_a + 2 * pair, 4);
    Workspace& space = (*task.spaces)[thread];
    if (static_cast<int64_t>(space.scores.size()) < blocks * DEPTH * QUERIES) {
        space.scores.resize(blocks * DEPTH * QUERIES);
        space.weights.resize(blocks * DEPTH * QUERIES);
    }

    configure(TILE, TILE);
    for (int64_t tile = 0; tile < 2 * blocks; tile++) {
        const int64_t position = first * DEPTH + tile * TILE;
        if (position >= high) break;
        const bf16* keys = cached.at(position);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t depth = 0; depth < dim; depth += DEPTH) {
            _tile_loadd(4, keys + depth, 2 * cached.token);
            _tile_loadd(6, columns[0][depth / 2], 64);
            _tile_loadd(7, columns[1][depth / 2], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, space.scores.data() + tile * TILE * QUERIES, 128);
        _tile_stored(1, space.scores.data() + tile * TILE * QUERIES + TILE, 128);
    }

    // Column q sees positions last - window < t <= last.
    const __m512 factor = _mm512_set1_ps(static_cast<float>(op.f0) * LOG2_E), nothing = _mm512_set1_ps(-3e38f);
    alignas(64) float scale[QUERIES];
    for (int64_t half = 0; half < 2; half++) {
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i last = _mm512_min_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(low + half * TILE)),
                                              _mm512_set1_epi32(high - 1));
        const __m512i before = window ? _mm512_sub_epi32(last, _mm512_set1_epi32(window)) : _mm512_set1_epi32(-1);
        auto seen = [&](int64_t position) {
            const __m512i at = _mm512_set1_epi32(position);
            return _mm512_cmple_epi32_mask(at, last) & _mm512_cmpgt_epi32_mask(at, before);
        };
        const float* scores = space.scores.data() + half * TILE;
        bf16* weights = space.weights.data() + half * DEPTH * TILE;
        // Blocks that every query sees need no masks: from `plain` up to `masked`.
        const int64_t masked = std::max<int64_t>(0, (low + half * TILE + 1) / DEPTH - first);
        const int64_t plain = window ? std::min(masked, std::max<int64_t>(0, high - window + DEPTH - 1) / DEPTH - first) : 0;
        __m512 most = nothing, other = nothing, sum = _mm512_setzero_ps();
        auto largest = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin * DEPTH; i < end * DEPTH; i++)
                most = _mm512_mask_max_ps(most, seen(first * DEPTH + i), most, _mm512_loadu_ps(scores + i * QUERIES));
        };
        largest(0, plain);
        for (int64_t i = plain * DEPTH; i < masked * DEPTH; i += 2) {
            most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i * QUERIES));
            other = _mm512_max_ps(other, _mm512_loadu_ps(scores + (i + 1) * QUERIES));
        }
        largest(masked, blocks);
        const __m512 above = _mm512_mul_ps(_mm512_max_ps(most, other), factor);
        auto weight = [&](int64_t i) {
            return exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + i * QUERIES), factor, above));
        };
        auto put = [&](int64_t i, __m512 even, __m512 odd) {
            const __m512i low_bits = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(even)));
            const __m512i high_bits = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(odd)));
            const __m512i both = _mm512_or_si512(low_bits, _mm512_slli_epi32(high_bits, 16));
            _mm512_storeu_si512(weights + i / DEPTH * DEPTH * QUERIES + i % DEPTH * TILE, both);
            sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        };
        auto some = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin * DEPTH; i < end * DEPTH; i += 2)
                put(i, _mm512_maskz_mov_ps(seen(first * DEPTH + i), weight(i)),
                    _mm512_maskz_mov_ps(seen(first * DEPTH + i + 1), weight(i + 1)));
        };
        some(0, plain);
        for (int64_t i = plain * DEPTH; i < masked * DEPTH; i += 2) put(i, weight(i), weight(i + 1));
        some(masked, blocks);
        _mm512_store_ps(scale + half * TILE, _mm512_div_ps(_mm512_set1_ps(1.0f), sum));
    }

    const bf16* values = task.values + (kv_head * task.value_blocks + first - task.first_block) * dim * DEPTH;
    alignas(64) float sums[QUERIES][QUERIES];  // [dim][query]
    for (int64_t d = 0; d < dim; d += QUERIES) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t block = 0; block < blocks; block++) {
            const bf16* value = values + (block * dim + d) * DEPTH;
            const bf16* weight = space.weights.data() + block * DEPTH * QUERIES;
            _tile_loadd(4, value, 64);
            _tile_loadd(5, value + TILE * DEPTH, 64);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + DEPTH * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, &sums[0][0], 128);
        _tile_stored(1, &sums[0][TILE], 128);
        _tile_stored(2, &sums[TILE][0], 128);
        _tile_stored(3, &sums[TILE][TILE], 128);
        const __m512i down = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                _mm512_set1_epi32(QUERIES));
        for (int64_t q = 0; q < queries; q++)
            for (int64_t half = 0; half < QUERIES; half += TILE)
                store(out + q * op.stride_out + d + half,
                      _mm512_mul_ps(_mm512_i32gather_ps(down, &sums[half][q], 4), _mm512_set1_ps(scale[q])));
    }
}

// `values`: memory to reuse, because memory that is new to a process is dear.
inline void prefill(Team& team, std::vector<Workspace>& spaces, std::vector<bf16>& values, const Op& op,
                    int64_t count) {
    const int64_t start = op.stride_b, first = op.i3 ? std::max<int64_t>(0, start + 1 - op.i3) / DEPTH : 0;
    const int64_t blocks = (start + count + DEPTH - 1) / DEPTH - first;
    const size_t needed = op.i2 * blocks * op.i0 * DEPTH;
    if (values.size() < needed) values.resize(needed);
    Prefilling task = {&op, static_cast<const int32_t*>(op.c), start, count, first, values.data(), blocks, &spaces};
    team.each(op.i2 * blocks, transpose_chunk, &task);
    team.each((count + QUERIES - 1) / QUERIES * op.i1, prefill_chunk, &task);
}

}  // namespace troupe
