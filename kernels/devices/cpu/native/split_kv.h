// Sums of pieces of a sequence: tokens are summed by piece, whatever number of threads share them. Pieces end at multiples of PIECE,
// except among the last tokens, which a draft may see in another order than its decode does.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "program.h"
#include "scratch.h"
#include "tiles.h"
#include "vectors.h"

namespace troupe {

constexpr int64_t PIECE = 256;   // tokens
constexpr int64_t MAX_DRAFT_TOKENS = 64;  // the most tokens of a draft
constexpr int64_t MIN_READ_BYTES = 256;    // bytes of kv heads of a token that one core should read together

// Whether the tokens of a sequence of `length` before `position`, a multiple of PIECE, are a piece apart from those behind it.
inline bool apart(int64_t position, int64_t length) { return position + MAX_DRAFT_TOKENS <= length; }

// Where the cache of an ATTENTION has what a head reads of a token, in elements.
struct TokenLayout {
    int64_t token, values;  // from one token to the next, and from the keys of a token to its values
    int64_t value_dim;

    explicit TokenLayout(const Op& op)
        : token(op.i5 ? op.i0 : 2 * op.i2 * op.i0), values(op.i5 ? 0 : op.i2 * op.i0), value_dim(op.i5 ? op.i5 : op.i0) {}
};

struct CachePages {
    const bf16* keys;     // of the first of some kv heads, in page 0
    int64_t token;        // elements from one token to the next
    const int32_t* pages;
    int64_t page_size;

    const bf16* at(int64_t position) const { return keys + place(position) * token; }
    int64_t place(int64_t position) const { return pages[position / page_size] * page_size + position % page_size; }
};

// What the queries of one row see.
struct VisibleTokens {
    int64_t first, count, end;  // its tokens in the step, and its tokens in the cache
    int64_t root;               // each query sees all tokens before this position
    const uint64_t* bits;       // what each query sees from there on; null: all up to its own position

    VisibleTokens(const Step& step, int64_t row) {
        first = step.offsets ? step.offsets[row] : row;
        count = step.offsets ? step.offsets[row + 1] - first : 1;
        end = step.lengths[row];
        const int64_t draft = row - step.decodes;
        const bool tree = step.bits && draft >= 0;
        root = tree && step.roots ? step.roots[draft] : end - count;
        bits = tree ? step.bits + draft * step.bits_stride : nullptr;
    }

    // The query's bits; a window keeps the last ones.
    uint64_t of(int64_t query, int64_t window) const {
        uint64_t result = bits ? bits[query] : ~uint64_t{0} >> (63 - query);
        if (window)
            while (__builtin_popcountll(result) > window) result &= result - 1;
        return result;
    }
};

// A column's sums [dim] and the sum of its weights, relative to 2 to a power.
struct Partial {
    float* sums;
    float weight_sum, power;

    void add(const Partial& other, int64_t dim) {
        const float max_power = std::max(power, other.power);
        const auto factor_of = [&](float from) {
            return scale(splat(1.0f), splat(from - max_power));
        };
        const Floats first = factor_of(power), second = factor_of(other.power);
        for (int64_t d = 0; d < dim; d += TILE)
            store(sums + d, fma(load(other.sums + d), second, load(sums + d) * first));
        weight_sum = weight_sum * first_lane(first) + other.weight_sum * first_lane(second), power = max_power;
    }
};

// Weights of `scores` of a token without a value, relative to 2 to powers.
inline Floats sink_weights(Floats scores, Floats powers) { return exp2(scores * splat(LOG2_E) - powers); }

// `sink`: the score of one more token, whose value is 0, or null.
inline void finish(const Partial& partial, int64_t dim, const float* sink, bf16* out) {
    const float more = sink ? first_lane(sink_weights(splat(*sink), splat(partial.power))) : 0;
    const Floats scale = splat(1 / (partial.weight_sum + more));
    for (int64_t d = 0; d < dim; d += TILE) store(out + d, load(partial.sums + d) * scale);
}

// Of an ATTENTION's head.
inline const float* sink_of(const Op& op, int64_t head) { return op.c ? static_cast<const float*>(op.c) + head : nullptr; }

// Pieces of rows of one query each: [row][piece][head of queries][sums, and 16 for the others].
class Pieces {
  public:
    // There are none where a row has more queries.
    Pieces(const Op& op, const Step& step, int64_t rows, Scratch<float>& memory) : heads_(op.i1), dim_(TokenLayout(op).value_dim) {
        for (int64_t row = 0; row < rows; row++) {
            const VisibleTokens seen(step, row);
            if (seen.count != 1) {
                starts_.resize(1);
                return;
            }
            const int64_t first = op.i3 ? std::max<int64_t>(0, seen.end - op.i3) : 0;
            const int64_t last = std::max<int64_t>(0, seen.end - MAX_DRAFT_TOKENS) / PIECE;
            firsts_.push_back(std::min(first / PIECE, last)), lasts_.push_back(last);
            starts_.push_back(starts_.back() + last + 1 - firsts_.back());
        }
        memory_ = memory.of(count() * heads_ * each());
    }

    int64_t count() const { return starts_.back(); }

    // Row and piece.
    std::pair<int64_t, int64_t> of(int64_t chunk) const {
        int64_t row = 0;
        while (starts_[row + 1] <= chunk) row++;
        return {row, firsts_[row] + chunk - starts_[row]};
    }

    int64_t begin(int64_t piece) const { return piece * PIECE; }
    int64_t end(int64_t row, int64_t piece) const { return piece == lasts_[row] ? INT64_MAX : (piece + 1) * PIECE; }

    void keep(int64_t row, int64_t piece, int64_t head, const Partial& partial) const {
        float* to = at(starts_[row] + piece - firsts_[row], head);
        std::memcpy(to, partial.sums, dim_ * sizeof(float));
        to[dim_] = partial.weight_sum, to[dim_ + 1] = partial.power;
    }

    // Adds the pieces of a row's head, in the memory of the first one.
    Partial all(int64_t row, int64_t head) const {
        const auto result = [&](int64_t chunk) {
            float* from = at(chunk, head);
            return Partial{from, from[dim_], from[dim_ + 1]};
        };
        Partial sum = result(starts_[row]);
        for (int64_t chunk = starts_[row] + 1; chunk < starts_[row + 1]; chunk++) sum.add(result(chunk), dim_);
        return sum;
    }

  private:
    int64_t each() const { return dim_ + TILE; }
    float* at(int64_t chunk, int64_t head) const { return memory_ + (chunk * heads_ + head) * each(); }

    const int64_t heads_, dim_;
    std::vector<int64_t> firsts_, lasts_, starts_ = {0};  // of a row: its pieces, and where they begin
    float* memory_ = nullptr;
};

}  // namespace troupe
