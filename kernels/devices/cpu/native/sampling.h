// Sampling: the Gumbel-max trick of kernels/core/noise.py among the tokens that top-k, top-p and min-p leave (kernels/sampling/nucleus.py).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "vectors.h"

namespace troupe {

// How a row is sampled. kernels/core/operators.py's DRAWS mirrors it. temperature 0: argmax; top_k 0, top_p 1 and
// log_min_p -inf: all tokens.
struct Draw {
    uint32_t keys[2];  // the seed's
    float temperature, log_min_p;
    double top_p;
    int64_t top_k;
};

inline uint32_t mix(uint32_t h) {
    h = (h ^ h >> 16) * 0x85EBCA6B;
    h = (h ^ h >> 13) * 0xC2B2AE35;
    return h ^ h >> 16;
}

inline float exponential(uint32_t hash) {
    const float u = (static_cast<float>(static_cast<int32_t>(hash & 0x7FFFFFFF)) + 0.5f) * 0x1p-31f;
    return -std::log1p(-std::min(u, 1.0f - 0x1p-24f));
}

// The sample of one row. `ids`: the token of each logit; null: its index.
class GumbelArgmax {
   public:
    static constexpr int BLOCK = 32;

    GumbelArgmax(const bf16* logits, int64_t count, const int64_t* ids, int64_t vocab, const Draw& draw, int64_t position)
        : logits_(logits), count_(count), ids_(ids), draw_(draw) {
        const uint32_t at = static_cast<uint32_t>(position);
        first_key_ = draw.keys[0] + at * 0x9E3779B9, second_key_ = draw.keys[1] + at * 0x7FEB352D;
        thread_local std::vector<Block> blocks;
        thread_local std::vector<float> logarithms;
        blocks.resize((vocab + BLOCK - 1) / BLOCK), logarithms.resize(blocks.size());
        blocks_ = blocks.data(), logarithms_ = logarithms.data();
        for (size_t block = 0; block < blocks.size(); block++) {
            const uint32_t h = hash(~static_cast<uint32_t>(block));
            blocks[block] = {exponential(h) / BLOCK, h};
            logarithms[block] = std::log(blocks[block].first);
        }
    }

    // Returns the index of the winner. `best`, `best_logit`: index and value of the argmax.
    int64_t run(int64_t best, float best_logit) {
        top_ = best_logit;
        float floor = -INFINITY;
        int64_t last = count_;
        if (draw_.top_k > 0) cut(floor, last);
        const float threshold = best_logit + draw_.temperature * draw_.log_min_p;
        if (threshold > floor) floor = threshold, last = count_;
        int64_t winner = among(best, floor, last);
        if (draw_.top_k > 0 || draw_.top_p >= 1) return winner;
        const double goal = draw_.top_p * before(INFINITY, 0, true);
        // Most winners are likely tokens. Where the nucleus ends before one, the search is run again before it.
        while (before(value(winner), winner, false) >= goal) winner = among(best, value(winner), winner - 1);
        return winner;
    }

   private:
    struct Block {
        float first;  // its least exponential
        uint32_t hash;
    };

    uint32_t hash(uint32_t counter) const { return mix(mix(counter + first_key_) + second_key_); }

    float value(int64_t index) const {
        const uint32_t bits = static_cast<uint32_t>(logits_[index]) << 16;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }

    float score(int64_t index) const {
        const uint32_t id = ids_ ? ids_[index] : index;
        const Block& block = blocks_[id / BLOCK];
        const float scaled = (value(index) - top_) / draw_.temperature;
        if (id % BLOCK == (mix(block.hash ^ 0x5BD1E995) & (BLOCK - 1))) return scaled - logarithms_[id / BLOCK];
        return scaled - std::log(block.first + exponential(hash(id)));
    }

    // The winner among the tokens above `floor`, and those equal to it with an index up to `last`. `best` is one of them.
    int64_t among(int64_t best, float floor, int64_t last) const {
        int64_t winner = best;
        float reached = score(best);
        for (int64_t i = 0; i < count_; i += 16) {
            const Mask here = mask(i);
            const Floats x = load(logits_ + i, here);
            const Ints id = ids_ ? tokens(i, here) : splat(i) + lane_numbers();
            const Floats noise = gather(logarithms_, id >> 5, here);
            const Floats bound = scaled(x) - noise;
            Mask open = here & (bound > splat(reached)) & kept(x, i, floor, last);
            for (; open; open &= open - 1) {
                const int64_t index = i + __builtin_ctz(open);
                const float result = score(index);
                if (result > reached) reached = result, winner = index;
            }
        }
        return winner;
    }

    // The weight of all tokens before one in descending order; `all`: of all tokens.
    double before(float value, int64_t index, bool all) const {
        double sums[8] = {};
        alignas(64) float weights[16];
        for (int64_t i = 0; i < count_; i += 16) {
            const Floats x = load(logits_ + i, mask(i));
            const Mask counted = all ? mask(i) : mask(i) & kept(x, i, value, index - 1);
            if (!counted) continue;
            store(weights, keep(counted, exp(scaled(x))));
            for (int lane = 0; lane < 8; lane++) sums[lane] = sums[lane] + weights[lane] + weights[8 + lane];
        }
        return std::accumulate(sums, sums + 8, 0.0);
    }

    // Finds the last token that top-k keeps, or top-p among those.
    void cut(float& floor, int64_t& last) const {
        if (draw_.top_k >= count_ && draw_.top_p >= 1) return;
        const int64_t kept_count = std::min(draw_.top_k, count_);
        // The k-th largest of the blocks' maxima is a lower bound of the k-th largest logit.
        thread_local std::vector<float> largest;
        thread_local std::vector<std::pair<float, int64_t>> head;
        largest.clear(), head.clear();
        for (int64_t i = 0; i < count_; i += 16)
            largest.push_back(max_all(select(mask(i), load(logits_ + i, mask(i)), splat(-INFINITY))));
        float bound = -INFINITY;
        if (kept_count <= static_cast<int64_t>(largest.size())) {
            std::nth_element(largest.begin(), largest.begin() + kept_count - 1, largest.end(), std::greater<float>());
            bound = largest[kept_count - 1];
        }
        for (int64_t i = 0; i < count_; i += 16) {
            Mask result = mask(i) & (load(logits_ + i, mask(i)) >= splat(bound));
            for (; result; result &= result - 1) head.emplace_back(-value(i + __builtin_ctz(result)), i + __builtin_ctz(result));
        }
        std::partial_sort(head.begin(), head.begin() + kept_count, head.end());
        head.resize(kept_count);
        size_t kept = head.size();
        if (draw_.top_p < 1) {
            double total = 0, above = 0;
            for (const auto& [negative, index] : head) total += weight(negative);
            for (kept = 0; kept < head.size() && (!kept || above < draw_.top_p * total); kept++) above += weight(head[kept].first);
        }
        floor = -head[kept - 1].first, last = head[kept - 1].second;
    }

    double weight(float negative) const { return std::exp((-negative - top_) / draw_.temperature); }

    Mask mask(int64_t i) const { return first_lanes(count_ - i); }

    Floats scaled(Floats x) const { return (x - splat(top_)) / splat(draw_.temperature); }

    // Which of the sixteen from `i` are above `floor`, or equal to it with an index up to `last`.
    Mask kept(Floats x, int64_t i, float floor, int64_t last) const {
        const Floats threshold = splat(floor);
        const Ints index = splat(i) + lane_numbers();
        const Mask equal = x == threshold;
        return (x > threshold) | (equal & (index <= splat(last)));
    }

    Ints tokens(int64_t i, Mask here) const {
        alignas(64) int32_t result[16] = {};
        for (int lane = 0; lane < std::bit_width(here); lane++) result[lane] = static_cast<int32_t>(ids_[i + lane]);
        return load_line(result);
    }

    const bf16* logits_;
    int64_t count_;
    const int64_t* ids_;
    const Draw& draw_;
    uint32_t first_key_, second_key_;
    float top_ = 0;
    const Block* blocks_;
    const float* logarithms_;
};

}  // namespace troupe
