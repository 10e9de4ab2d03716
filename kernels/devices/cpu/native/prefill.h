// Causal attention of a row's chunk of queries over all keys so far, block after block of keys (FlashAttention,
// arXiv:2205.14135).
//
// Keys and values are copied in the order of tiles.h once, for all queries and all heads of a group. Scores are K Q^T of 32 tokens
// and 32 queries of a head, so that each query is a lane of vectors; their weights, rounded to bf16, wait in a core's first cache
// until V^T P is added up over a block of tokens.
#pragma once
#include "attention.h"

namespace troupe {

constexpr int64_t QUERIES = 2 * TILE;
constexpr int64_t TOGETHER = 8;        // blocks of 32 tokens, whose weights are added up together
constexpr int64_t LAID_OUT = 1 << 21;  // elements of keys, and of values, that stay in the cores' second caches

// The queries of one head and their sums, 16 queries at a time.
struct Asking {
    const bf16* queries;  // [32 dims][16 queries][pair of dims][query][2]
    float* sums;          // [16 queries][dim][query]
    float* weight_sum;         // [query]: sums of weights
    float* power;         // [query]: weights and sums are relative to 2 to this power
    bf16* weights;        // [block][16 queries][pair of tokens][query][2] of blocks of 32 tokens
    int64_t waiting = 0;  // blocks of weights that are not yet in the sums
    const bf16* values;   // the values of these blocks
};

struct Workspace {
    Scratch<float> floats;
    Scratch<bf16> halves;
    std::vector<Asking> heads;
};

struct Prefilling {
    const Op* op;
    const int32_t* pages;
    int64_t begin;         // the first of its queries in the step
    int64_t start, count;  // that one's position, and how many there are
    int64_t first_block;   // the first block of 32 tokens that any query sees
    int64_t blocks;        // their number from there on
    int64_t head, heads;   // the kv heads whose keys and values are copied at a time
    bf16 *keys, *values;   // [kv head][block of 32 tokens][dim * 32]
    std::vector<Workspace>* spaces;  // by thread
};

// Copies a block of 32 tokens, for each kv head: keys [32 dims][token][32], values [dim][token], zeros beyond the last token.
inline void lay_out_chunk(void* context, int64_t block, int) {
    const Prefilling& task = *static_cast<const Prefilling*>(context);
    const int64_t dim = task.op->i0, kv_heads = task.op->i2, token = 2 * kv_heads * dim;
    const int64_t position = (task.first_block + block) * DEPTH, tokens = std::min(DEPTH, task.start + task.count - position);
    const CachePages cached = {static_cast<const bf16*>(task.op->b) + task.head * dim, token, task.pages, task.op->i4};
    const Cache8bit kept(*task.op, task.op->b, dim, kv_heads);
    int64_t places[DEPTH];
    for (int64_t i = 0; i < tokens; i++) places[i] = cached.place(position + i);
    auto line = [&](int64_t i, int64_t head, int64_t d) {
        if (i >= tokens) return Ints{};
        if (task.op->cache_type) return kept.line(places[i], task.head + head, d);
        return load_line(cached.keys + places[i] * token + head * dim + d);
    };
    for (int64_t head = 0; head < task.heads; head++) {
        bf16* keys = task.keys + (head * task.blocks + block) * dim * DEPTH;
        for (int64_t i = 0; i < DEPTH; i++)
            for (int64_t d = 0; d < dim; d += DEPTH) store_line(keys + d * DEPTH + i * DEPTH, line(i, head, d));
        bf16* values = task.values + (head * task.blocks + block) * dim * DEPTH;
        for (int64_t d = 0; d < dim; d += DEPTH) {
            Ints first[TILE], second[TILE];  // [pair of tokens][dim][2]
            for (int64_t pair = 0; pair < TILE; pair++) {
                const Ints even = line(2 * pair, kv_heads + head, d), odd = line(2 * pair + 1, kv_heads + head, d);
                first[pair] = interleave_words<0>(even, odd);
                second[pair] = interleave_words<1>(even, odd);
            }
            transpose(first), transpose(second);
            for (int64_t i = 0; i < TILE; i++, values += DEPTH) {
                store_line(values, first[i]);
                store_line(values + TILE * DEPTH, second[i]);
            }
            values += TILE * DEPTH;
        }
    }
}

// 2^x with a relative error below 1e-4, a twentieth of bf16's rounding; a NaN stays one.
inline Floats rough_exp2(Floats x) {
    const Floats r = fraction(x);
    Floats p = fma(r, splat(7.802452e-2f), splat(2.2606716e-1f));
    p = fma(p, r, splat(6.9583354e-1f));
    p = fma(p, r, splat(9.9992522e-1f));
    return scale(p, x);
}

// The tokens that 16 queries see: positions `least` < t <= `last`.
struct Sight {
    Ints last, least;

    Mask of(int64_t position) const {
        const Ints at = splat(static_cast<int>(position));
        return (at <= last) & (at > least);
    }
};

// K Q^T of 32 tokens: [16 queries][token][query].
inline void score(const bf16* keys, const bf16* queries, int64_t dim, float* scores) {
    TileSums<float> tiles(DEPTH, scores, scores + DEPTH * TILE, TILE);
    tiles.begin();
    tiles.add(keys, LINE, BLOCK_LINE_BYTES, queries, dim / DEPTH);
    tiles.end();
}

// Adds V^T P of the waiting blocks.
inline void add_up(Asking& asking, int64_t dim) {
    written();
    for (int64_t d = 0; d < dim && asking.waiting; d += DEPTH) {
        float *low = asking.sums + d * TILE, *high = low + dim * TILE;
        TileSums<float> tiles(DEPTH, low, high, TILE);
        tiles.resume();
        tiles.add(asking.values + d * DEPTH, LINE, dim * LINE, asking.weights, asking.waiting);
        tiles.end();
    }
    asking.values += asking.waiting * dim * DEPTH;
    asking.waiting = 0;
}

// Raises a query's power of two to its largest score where the weights so far are too small beside it.
template <bool ALL>
void raise(Asking& asking, const float* scores, int64_t position, const Sight* sights, Floats factor, int64_t dim) {
    for (int64_t half = 0; half < 2; half++, scores += DEPTH * TILE) {
        Floats max_score = splat(2 * MASKED_SCORE), other = max_score;
        for (int64_t i = 0; i < DEPTH; i += 2) {
            const Floats even = load(scores + i * TILE), odd = load(scores + (i + 1) * TILE);
            if (ALL) {
                max_score = max(max_score, even), other = max(other, odd);
            } else {
                max_score = select(sights[half].of(position + i), max(max_score, even), max_score);
                other = select(sights[half].of(position + i + 1), max(other, odd), other);
            }
        }
        max_score = max(max_score, other) * factor;
        const Floats before = load(asking.power + half * TILE);
        const Mask far = max_score > before + splat(FAR);
        if (!far) continue;
        add_up(asking, dim);
        const Floats power = select(far, max_score, before), rescale = exp2(before - power);
        store(asking.power + half * TILE, power);
        store(asking.weight_sum + half * TILE, load(asking.weight_sum + half * TILE) * rescale);
        float* sums = asking.sums + half * dim * TILE;
        for (int64_t d = 0; d < dim; d++, sums += TILE) store(sums, load(sums) * rescale);
    }
}

// Makes weights of the scores of 32 tokens from `position` on. ALL: every query sees all of them.
template <bool ALL>
void weigh(Asking& asking, const float* scores, int64_t position, const Sight* sights, Floats factor, int64_t dim) {
    raise<ALL>(asking, scores, position, sights, factor, dim);
    bf16* out = asking.weights + asking.waiting++ * QUERIES * DEPTH;
    for (int64_t half = 0; half < 2; half++, scores += DEPTH * TILE) {
        const Floats power = load(asking.power + half * TILE);
        Floats weight_sum = load(asking.weight_sum + half * TILE), more = Floats{};
        for (int64_t i = 0; i < DEPTH; i += 2, out += DEPTH) {
            Floats even = rough_exp2(fms(load(scores + i * TILE), factor, power));
            Floats odd = rough_exp2(fms(load(scores + (i + 1) * TILE), factor, power));
            if (!ALL) {
                even = keep(sights[half].of(position + i), even);
                odd = keep(sights[half].of(position + i + 1), odd);
            }
            weight_sum = weight_sum + even;
            more = more + odd;
            store_line(out, pair_words(even, odd));
        }
        store(asking.weight_sum + half * TILE, weight_sum + more);
    }
}

// Copies up to 32 queries of one head [query][dim], `stride` apart, in the order of Asking.
inline void lay_out_queries(const bf16* from, int64_t stride, int64_t queries, int64_t dim, bf16* out) {
    for (int64_t d = 0; d < dim; d += DEPTH)
        for (int64_t half = 0; half < QUERIES; half += TILE, out += TILE * DEPTH) {
            Ints part[TILE];
            for (int64_t q = 0; q < TILE; q++)
                part[q] = half + q < queries ? load_line(from + (half + q) * stride + d) : Ints{};
            transpose(part);
            for (int64_t i = 0; i < TILE; i++) store_line(out + i * DEPTH, part[i]);
        }
}

// Divides the sums by those of the weights -> [query][dim]. `sink`: as of `finish`.
inline void divide_sums(const Asking& asking, int64_t queries, int64_t dim, const float* sink, bf16* to, int64_t stride) {
    for (int64_t half = 0; half < queries; half += TILE) {
        const Floats more = sink ? sink_weights(splat(*sink), load(asking.power + half)) : Floats{};
        const Floats rescale = splat(1.0f) / (load(asking.weight_sum + half) + more);
        for (int64_t d = 0; d < dim; d += DEPTH) {
            Ints low[TILE], high[TILE];
            const float* sums = asking.sums + half * dim + d * TILE;
            for (int64_t i = 0; i < TILE; i++, sums += TILE) {
                low[i] = bits_of(load(sums) * rescale);
                high[i] = bits_of(load(sums + TILE * TILE) * rescale);
            }
            transpose(low);
            transpose(high);
            bf16* out = to + half * stride + d;
            for (int64_t q = 0; q < std::min(TILE, queries - half); q++, out += stride) {
                const Floats first = from_bits(low[q]), second = from_bits(high[q]);
                store_line(out, to_bf16(first, second));
            }
        }
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
    const int64_t end = (high + DEPTH - 1) / DEPTH, heads = (task.head + head) * group;

    Workspace& space = (*task.spaces)[thread];
    const int64_t floats = QUERIES * (dim + 2), halves = QUERIES * dim;
    float* scores = space.floats.of(QUERIES * DEPTH + group * floats);
    bf16* weights = space.halves.of(TOGETHER * QUERIES * DEPTH + group * halves);
    std::memset(scores + QUERIES * DEPTH, 0, group * floats * sizeof(float));
    const bf16* from = static_cast<const bf16*>(op.a) + (task.begin + query) * op.stride_a + heads * dim;
    const int64_t offset = (head * task.blocks + first - task.first_block) * dim * DEPTH;
    space.heads.resize(group);
    for (int64_t h = 0; h < group; h++) {
        bf16* laid_out = weights + TOGETHER * QUERIES * DEPTH + h * halves;
        float* sums = scores + QUERIES * DEPTH + h * floats;
        lay_out_queries(from + h * dim, op.stride_a, queries, dim, laid_out);
        space.heads[h] = {laid_out, sums, sums + QUERIES * dim, sums + QUERIES * (dim + 1), weights, 0, task.values + offset};
        for (int64_t q = 0; q < QUERIES; q++) space.heads[h].power[q] = MASKED_SCORE;
    }
    Sight sights[2];
    const Ints latest = splat(static_cast<int>(high - 1)), none = splat(-1);
    for (int64_t half = 0; half < 2; half++) {
        const Ints own = lane_numbers() + splat(static_cast<int>(low + half * TILE));
        sights[half].last = min(own, latest);
        sights[half].least = window ? sights[half].last - splat(static_cast<int>(window)) : none;
    }

    written();
    const Floats factor = splat(static_cast<float>(op.f0) * LOG2_E);
    for (int64_t begin = first; begin < end; begin += TOGETHER)
        for (Asking& asking : space.heads) {
            for (int64_t block = begin; block < std::min(begin + TOGETHER, end); block++) {
                const int64_t position = block * DEPTH;
                score(task.keys + offset + (block - first) * dim * DEPTH, asking.queries, dim, scores);
                if (position + DEPTH <= low + 1 && (!window || position + window >= high))
                    weigh<true>(asking, scores, position, sights, factor, dim);
                else
                    weigh<false>(asking, scores, position, sights, factor, dim);
            }
            add_up(asking, dim);
        }
    for (int64_t h = 0; h < group; h++)
        divide_sums(space.heads[h], queries, dim, sink_of(op, heads + h),
                    static_cast<bf16*>(op.out) + (task.begin + query) * op.stride_out + (heads + h) * dim, op.stride_out);
}

// Attends to the chunk of a prompt that is a step's sequence. `space` is reused, because new memory of a process is expensive.
inline void prefill(Team& team, std::vector<Workspace>& spaces, Scratch<bf16>& space, const Op& op, const Step& step,
                    int64_t sequence) {
    const int64_t begin = step.offsets[sequence], count = step.offsets[sequence + 1] - begin;
    const int64_t start = step.lengths[sequence] - count, first = op.i3 ? std::max<int64_t>(0, start + 1 - op.i3) / DEPTH : 0;
    const int64_t blocks = (start + count + DEPTH - 1) / DEPTH - first, each = blocks * op.i0 * DEPTH;
    const int64_t heads_at_once = std::clamp<int64_t>(LAID_OUT / each, 1, op.i2);  // kv heads at a time
    bf16* keys = space.of(2 * heads_at_once * each);
    Prefilling task = {&op, step.pages + sequence * step.pages_stride, begin, start, count, first, blocks, 0, 0, keys,
                       keys + heads_at_once * each, &spaces};
    for (; task.head < op.i2; task.head += task.heads) {
        task.heads = std::min(heads_at_once, op.i2 - task.head);
        team.each(blocks, lay_out_chunk, &task);
        team.each(task.heads * ((count + QUERIES - 1) / QUERIES), prefill_chunk, &task);
    }
}

}  // namespace troupe
