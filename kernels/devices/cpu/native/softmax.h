// Turns scores into weights, relative to a power of two for each column (attention.h). With up to four columns four tokens share a
// vector; else each token has its own. Either way a column's weights are the same bits.
#pragma once
#include "kv_cache_8bit.h"
#include "split_kv.h"

namespace troupe {

constexpr int64_t FOUR = 4;                 // columns up to which tokens share vectors
constexpr int64_t PLANE = TILE * TILE;      // scores of a tile
constexpr int64_t SCORES = 2 * PLANE;       // of integers: of both bytes
constexpr float MASKED_SCORE = -1e30f;
constexpr float FAR = 60;  // powers of two that weights may come to

// The columns of one tile of scores: all columns of several kv heads, or some of one. With few columns a column's numbers are repeated
// for each of four tokens.
struct Columns {
    int64_t head, heads;     // kv heads
    int64_t column, count;   // of each: the first, and how many
    const uint32_t* packed_queries;   // [head][pair of dims][column], or of integers [head][upper, lower][four dims][column]
    float* sums;             // [head][padded column][dim]
    alignas(64) float weight_sum[TILE] = {};    // sums of weights
    alignas(64) float power[TILE];         // the powers of two to which weights and sums are relative
    alignas(64) float factors[TILE] = {};  // of scores
    float* totals;           // as `sums`, of the pieces before
    float total_weight_sum[TILE] = {}, total_power[TILE];
    uint64_t bits[TILE] = {};
    int64_t firsts[TILE], lengths[TILE];

    // Adds the sums of columns for which `packed_queries`(lane) to the totals, and clears them.
    template <class Wanted>
    void total(int64_t lanes, int64_t dim, const Wanted& wanted);
};

// Columns that have memory for sums: `columns`, or the next multiple of four.
inline int64_t padded(int64_t columns) { return columns <= 4 ? columns : (columns + 3) / 4 * 4; }

template <class Wanted>
void Columns::total(int64_t lanes, int64_t dim, const Wanted& wanted) {
    for (int64_t lane = 0; lane < heads * count; lane++) {
        if (!wanted(lane)) continue;
        const int64_t at = (lane / count * padded(count) + lane % count) * dim;
        Partial result = {totals + at, total_weight_sum[lane], total_power[lane]};
        result.add({sums + at, weight_sum[lane], power[lane]}, dim);
        total_weight_sum[lane] = result.weight_sum, total_power[lane] = result.power;
        std::memset(sums + at, 0, dim * sizeof(float));
        weight_sum[lane] = 0;
        for (int64_t i = lane; i < TILE; i += lanes) power[i] = MASKED_SCORE;
    }
}

// Scales of cached tokens, which scores and weights are multiplied by. Lanes without a column count as further kv heads: behind a
// token's last head comes the next token, and behind the last token of a vector memory may end.
class ScalesOf {
  public:
    // `each`: columns of a kv head in a tile.
    ScalesOf(const Sixteen& made, const Cache8bit& kept, int64_t each, int64_t lanes) : made_(made), kept_(kept), lanes_(lanes) {
        alignas(64) uint32_t heads[TILE] = {}, words[TILE] = {};
        for (int64_t lane = 0; lane < TILE; lane++) {
            heads[lane] = static_cast<uint32_t>(lane % lanes / each);
            words[lane] = static_cast<uint32_t>(lane / lanes * kept.heads + heads[lane]) << 16;
        }
        heads_ = load_line(heads), words_ = load_line(words);
        count_ = (TILE / lanes - 1) * kept.heads + heads[lanes - 1] + 1;
        together_ = count_ <= WIDE;
    }

    // For the `i`th vector of scores of `turn`, whose first kv head is `head`: the scales of keys (part 0) or values (1).
    Floats operator()(int64_t turn, int64_t i, int64_t part, int64_t head) const {
        const int64_t from = part * (kept_.heads / 2) + made_.head() + head;
        if (!kept_.scales) {
            if (!kept_.by_head) return splat(1.0f);
            const Ints last = splat(static_cast<int>(kept_.heads - from - 1));
            return gather(kept_.by_head + from, min(heads_, last), 0xffff);
        }
        const int64_t there = TILE / lanes_ * kept_.heads - from;  // of the vector's tokens
        const bf16* all = kept_.scales + (made_.place(turn) + i * (TILE / lanes_)) * kept_.heads + from;
        if (together_) return pick(all, std::min(count_, there), words_);
        alignas(64) uint32_t result[TILE], at[TILE];
        store_line(at, words_);
        const uint32_t last = static_cast<uint32_t>(there - 1);
        for (int64_t lane = 0; lane < TILE; lane++)
            result[lane] = static_cast<uint32_t>(all[std::min(at[lane] >> 16, last)]) << 16;
        return from_bits(load_line(result));
    }

  private:
    const Sixteen& made_;
    const Cache8bit& kept_;
    const int64_t lanes_;
    Ints heads_, words_;  // of each lane, `words` in the upper half
    int64_t count_;          // of words
    bool together_;
};

// Turns scores of 16 tokens, `LANES` each, into weights, in place. `seen`: the columns that see each token; null: all see all.
// INTEGERS: scores are integers, in two parts. `scale_of`(vector, part), if SCALED.
template <int64_t LANES, bool SCALED, bool INTEGERS, class Scale>
void weigh(Columns& column_tile, float* scores, const Mask* seen, int64_t dim, const Scale& scale_of) {
    constexpr int64_t TOKENS_OF = TILE / LANES, COUNT = LANES;  // tokens of a vector, and vectors
    Floats rest[COUNT], n[COUNT], max_score = splat(MASKED_SCORE);
    Mask masks[COUNT];
    const Floats factor = load(column_tile.factors);
    for (int64_t i = 0; i < COUNT; i++) {
        masks[i] = 0xffff;
        if (seen) {
            masks[i] = 0;
            for (int64_t t = 0; t < TOKENS_OF; t++)
                masks[i] |= static_cast<Mask>((seen[i * TOKENS_OF + t] & ((1u << LANES) - 1)) << (t * LANES));
        }
        Floats score_scale = factor, score = load(scores + i * TILE);
        if constexpr (SCALED) score_scale = score_scale * scale_of(i, 0);
        if constexpr (INTEGERS) {
            const Ints lower = load_line(scores + PLANE + i * TILE);
            score = to_floats((bits_of(score) << 8) + lower);
        }
        const Floats x = score * score_scale;
        n[i] = round(x);
        rest[i] = x - n[i];
        max_score = select(masks[i], max(max_score, n[i]), max_score);
    }
    if constexpr (LANES == FOUR) max_score = max_of_quarters(max_score);
    Floats power = load(column_tile.power), weight_sum = load(column_tile.weight_sum);
    const Mask far = max_score > power + splat(FAR);
    if (far) {
        alignas(64) float rescale[TILE];
        const Floats times = select(far, scale(splat(1.0f), power - max_score), splat(1.0f));
        store(rescale, times);
        weight_sum = weight_sum * times;
        power = select(far, max_score, power);
        store(column_tile.power, power);
        for (int64_t c = 0; c < column_tile.heads * column_tile.count; c++) {
            float* sums = column_tile.sums + (c / column_tile.count * padded(column_tile.count) + c % column_tile.count) * dim;
            for (int64_t d = 0; d < dim; d += TILE)
                store(sums + d, load(sums + d) * splat(rescale[c]));
        }
    }
    for (int64_t i = 0; i < COUNT; i++) {
        Floats weight = keep(masks[i], scale(exp2_near(rest[i]), n[i] - power));
        weight_sum = LANES == TILE ? weight_sum + weight : add_quarters(weight_sum, weight);  // one token after the other
        if constexpr (SCALED) weight = keep(masks[i], weight * scale_of(i, 1));
        store(scores + i * TILE, weight);
    }
    store(column_tile.weight_sum, weight_sum);
}

inline void weigh_all(Columns& column_tile, float* scores, const Mask* seen, int64_t lanes, int64_t dim, const Sixteen& made,
                      const ScalesOf& scales, int64_t turn, bool quantized) {
    const auto scale_of = [&](int64_t i, int64_t part) { return scales(turn, i, part, column_tile.head); };
    const auto run = [&]<int64_t LANES>() {
        if (!quantized) return weigh<LANES, false, false>(column_tile, scores, seen, dim, scale_of);
        if (made.int8_keys()) return weigh<LANES, true, true>(column_tile, scores, seen, dim, scale_of);
        weigh<LANES, true, false>(column_tile, scores, seen, dim, scale_of);
    };
    lanes == FOUR ? run.template operator()<FOUR>() : run.template operator()<TILE>();
}

}  // namespace troupe
