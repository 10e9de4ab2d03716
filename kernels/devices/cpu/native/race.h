// Sampling: the race of clocks of kernels/core/noise.py among the tokens that top-k, top-p and min-p leave (kernels/sampling/nucleus.py).
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "vectors.h"

namespace troupe {

// How a row is sampled. kernels/core/operators.py's DRAWS mirrors it. temperature 0: the most likely; top_k 0, top_p 1 and
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

// One row's race. `ids`: the token that each logit is of, null: its index is.
class Race {
   public:
    static constexpr int BLOCK = 32;

    Race(const bf16* logits, int64_t count, const int64_t* ids, int64_t vocab, const Draw& draw, int64_t position)
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

    // -> the index of the winner. `best`: the index and the value of the most likely.
    int64_t run(int64_t best, float most) {
        top_ = most;
        float floor = -INFINITY;
        int64_t last = count_;
        if (draw_.top_k > 0) cut(floor, last);
        const float least = most + draw_.temperature * draw_.log_min_p;
        if (least > floor) floor = least, last = count_;
        int64_t winner = among(best, floor, last);
        if (draw_.top_k > 0 || draw_.top_p >= 1) return winner;
        const double goal = draw_.top_p * before(INFINITY, 0, true);
        // Most winners are likely tokens. Where the nucleus ends before one, the race is run again before it.
        while (before(value(winner), winner, false) >= goal) winner = among(best, value(winner), winner - 1);
        return winner;
    }

   private:
    struct Block {
        float first;  // its first clock
        uint32_t hash;
    };

    uint32_t hash(uint32_t counter) const { return mix(mix(counter + first_key_) + second_key_); }

    float value(int64_t index) const {
        const uint32_t bits = static_cast<uint32_t>(logits_[index]) << 16;
        float found;
        std::memcpy(&found, &bits, sizeof found);
        return found;
    }

    float score(int64_t index) const {
        const uint32_t id = ids_ ? ids_[index] : index;
        const Block& block = blocks_[id / BLOCK];
        const float scaled = (value(index) - top_) / draw_.temperature;
        if (id % BLOCK == (mix(block.hash ^ 0x5BD1E995) & (BLOCK - 1))) return scaled - logarithms_[id / BLOCK];
        return scaled - std::log(block.first + exponential(hash(id)));
    }

    // The winner of those above `floor`, and of those equal to it up to `last`. `best` is one of them.
    int64_t among(int64_t best, float floor, int64_t last) const {
        int64_t winner = best;
        float reached = score(best);
        for (int64_t i = 0; i < count_; i += 16) {
            const __mmask16 here = mask(i);
            const __m512 x = load(logits_ + i, here);
            const __m512i id = ids_ ? tokens(i, here) : _mm512_add_epi32(_mm512_set1_epi32(i), lanes());
            const __m512 clocks = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), here, _mm512_srli_epi32(id, 5), logarithms_, 4);
            const __m512 bound = _mm512_sub_ps(scaled(x), clocks);
            __mmask16 open = _mm512_mask_cmp_ps_mask(here, bound, _mm512_set1_ps(reached), _CMP_GT_OQ) & kept(x, i, floor, last);
            for (; open; open &= open - 1) {
                const int64_t index = i + __builtin_ctz(open);
                const float found = score(index);
                if (found > reached) reached = found, winner = index;
            }
        }
        return winner;
    }

    // What stands before a token weighs; `all`: what everything does.
    double before(float value, int64_t index, bool all) const {
        __m512d sum = _mm512_setzero_pd();
        for (int64_t i = 0; i < count_; i += 16) {
            const __m512 x = load(logits_ + i, mask(i));
            const __mmask16 counted = all ? mask(i) : mask(i) & kept(x, i, value, index - 1);
            if (!counted) continue;
            const __m512 weight = _mm512_maskz_mov_ps(counted, exp(scaled(x)));
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(weight)));
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1)));
        }
        return _mm512_reduce_add_pd(sum);
    }

    // The last token that top-k, and top-p among what it leaves, keep.
    void cut(float& floor, int64_t& last) const {
        if (draw_.top_k >= count_ && draw_.top_p >= 1) return;
        const int64_t most = std::min(draw_.top_k, count_);
        // The k-th largest of the blocks' largest is at most the k-th largest.
        thread_local std::vector<float> largest;
        thread_local std::vector<std::pair<float, int64_t>> head;
        largest.clear(), head.clear();
        for (int64_t i = 0; i < count_; i += 16)
            largest.push_back(_mm512_mask_reduce_max_ps(mask(i), load(logits_ + i, mask(i))));
        float least = -INFINITY;
        if (most <= static_cast<int64_t>(largest.size())) {
            std::nth_element(largest.begin(), largest.begin() + most - 1, largest.end(), std::greater<float>());
            least = largest[most - 1];
        }
        for (int64_t i = 0; i < count_; i += 16) {
            __mmask16 found = _mm512_mask_cmp_ps_mask(mask(i), load(logits_ + i, mask(i)), _mm512_set1_ps(least), _CMP_GE_OQ);
            for (; found; found &= found - 1) head.emplace_back(-value(i + __builtin_ctz(found)), i + __builtin_ctz(found));
        }
        std::partial_sort(head.begin(), head.begin() + most, head.end());
        head.resize(most);
        size_t kept = head.size();
        if (draw_.top_p < 1) {
            double total = 0, ahead = 0;
            for (const auto& [negative, index] : head) total += weight(negative);
            for (kept = 0; kept < head.size() && (!kept || ahead < draw_.top_p * total); kept++) ahead += weight(head[kept].first);
        }
        floor = -head[kept - 1].first, last = head[kept - 1].second;
    }

    double weight(float negative) const { return std::exp((-negative - top_) / draw_.temperature); }

    __mmask16 mask(int64_t i) const { return count_ - i >= 16 ? 0xffff : static_cast<__mmask16>((1 << (count_ - i)) - 1); }

    __m512 scaled(__m512 x) const { return _mm512_div_ps(_mm512_sub_ps(x, _mm512_set1_ps(top_)), _mm512_set1_ps(draw_.temperature)); }

    // Of the sixteen from `i` on those above `floor`, or equal to it and of an index up to `last`.
    __mmask16 kept(__m512 x, int64_t i, float floor, int64_t last) const {
        const __m512 least = _mm512_set1_ps(floor);
        const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(i), lanes());
        const __mmask16 equal = _mm512_cmp_ps_mask(x, least, _CMP_EQ_OQ);
        return _mm512_cmp_ps_mask(x, least, _CMP_GT_OQ) | (equal & _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(last)));
    }

    __m512i tokens(int64_t i, __mmask16 here) const {
        const __m256i low = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(here & 0xff, ids_ + i));
        const __m256i high = _mm512_cvtepi64_epi32(_mm512_maskz_loadu_epi64(here >> 8, ids_ + i + 8));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }

    static __m512i lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

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
