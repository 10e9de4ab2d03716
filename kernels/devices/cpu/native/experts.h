// Layers of experts: the router chooses a few experts for each token, and each chosen expert multiplies all of its tokens once, by
// the products of dense layers. The chunks of all experts' products are in one queue, so that threads synchronize twice a layer.
//
// Pairs of a token and a chosen expert are sorted by expert, then by token. A token's results are added in float32 in the order of
// the experts, so that they do not depend on the other tokens.
#pragma once
#include <variant>

#include "attention.h"
#include "gemm_fp8.h"
#include "gemm_gguf_blocks.h"
#include "gemm_grouped.h"
#include "gemm_int8.h"
#include "program.h"
#include "rows.h"

namespace troupe {

// One expert: its gate and up projections, and its down projections. Their `out` is the first column of the result.
// `clip`: the share of its largest magnitude that a token is clipped to before each, 0: not clipped. `fake_quantized`: whether
// inputs are then rounded. Without `ups` the expert is on another rank: nothing is read for it, and its results are 0.
struct Expert {
    const Op *up, *down;
    int64_t ups, downs, fake_quantized_up, fake_quantized_down;
    double clip_up, clip_down;
};

// A choice that is more than a softmax (`Routing` of kernels/devices/experts.py). `bias`, `correction` [experts]: or null.
struct Choice {
    const float *bias, *correction;
    int64_t is_sigmoid, groups, top_groups, is_pair_sum;
    double scale;
};

using AnyProduct = std::variant<Product, Product8, Grouped<4>, Grouped<8>, BlockProduct<2>, BlockProduct<3>, BlockProduct<4>,
                                BlockProduct<5>, BlockProduct<6>, BlockProduct<8>, Fp8Product>;

struct Job {
    AnyProduct product;
    int64_t first;  // its first token among those of all jobs
    int64_t begin;  // its first chunk
};

// Memory that layers reuse: inputs of pairs, gates and ups, inner activations, results.
struct Experts {
    std::vector<float> weights;  // [tokens, chosen], in the order of the experts
    std::vector<float> logits;   // [tokens, experts], of a Choice
    std::vector<int32_t> ids, places, tokens, active;
    std::vector<int64_t> begins;  // the first pair of each expert, and the number of pairs
    Scratch<bf16> inputs, both, inner, results, ordered;
    Tokens8 rounded;
    Planes planes;
    std::vector<Job> jobs;
    std::vector<Job*> large;
};

struct Layer {
    Team& team;
    std::vector<Panel>& panels;
    Experts& memory;
    const Op& op;
    const Step& step;

    int64_t hidden() const { return op.i0; }
    int64_t count() const { return op.i1; }
    int64_t chosen() const { return op.i2; }
    int64_t inner() const { return op.i3; }
    int64_t places() const { return op.i5; }
    int64_t pairs() const { return step.rows * chosen(); }
    const Expert& expert(int64_t index) const { return static_cast<const Expert*>(op.c)[index]; }
};

// exp, with 0 far below zero and NaN for a NaN: `max` returns its second operand then.
inline Floats share_of(Floats below) { return exp(max(splat(-200.0f), below)); }

constexpr int64_t ROUTED = 8, ROUTED_ROWS = 16;  // experts and rows whose logits a thread computes at a time
constexpr int ABREAST = LARGE ? 4 : 2;           // rows and experts whose sums are in registers
constexpr double CHOICE_EPSILON = 1e-20;  // EPSILON of kernels/devices/experts.py

// The logits of `ROWS` rows for `EXPERTS` experts, in float32: each in the same order of sums, whatever their numbers.
template <int ROWS, int EXPERTS>
void route_block(const Layer& layer, int64_t row, int64_t expert) {
    const float* weight = static_cast<const float*>(layer.op.b) + expert * layer.op.stride_b;
    const bf16* x = static_cast<const bf16*>(layer.op.a) + row * layer.op.stride_a;
    const float* bias = static_cast<const Choice*>(layer.op.by_head)->bias;
    Floats sums[ROWS][EXPERTS] = {};
    for (int64_t i = 0; i < layer.hidden(); i += TILE) {
        Floats weights[EXPERTS];
        unrolled<EXPERTS>([&](auto e) ALWAYS_INLINE { weights[e] = load(weight + e * layer.op.stride_b + i); });
        unrolled<ROWS>([&](auto r) ALWAYS_INLINE {
            const Floats value = load(x + r * layer.op.stride_a + i);
            unrolled<EXPERTS>([&](auto e) ALWAYS_INLINE { sums[r][e] = fma(value, weights[e], sums[r][e]); });
        });
    }
    for (int r = 0; r < ROWS; r++)
        for (int e = 0; e < EXPERTS; e++)
            layer.memory.logits[(row + r) * layer.count() + expert + e] =
                add_all(sums[r][e]) + (bias ? bias[expert + e] : 0.0f);
}

template <int EXPERTS>
void route_experts(const Layer& layer, int64_t row, int64_t end, int64_t expert) {
    for (; row + ABREAST <= end; row += ABREAST) route_block<ABREAST, EXPERTS>(layer, row, expert);
    for (; row < end; row++) route_block<1, EXPERTS>(layer, row, expert);
}

// Rows of a block stay in the innermost cache while the experts pass by.
inline void route_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    const int64_t blocks = (layer.count() + ROUTED - 1) / ROUTED, first = chunk % blocks * ROUTED;
    const int64_t row = chunk / blocks * ROUTED_ROWS, last = std::min(layer.step.rows, row + ROUTED_ROWS);
    const int64_t end = std::min(layer.count(), first + ROUTED);
    int64_t expert = first;
    for (; expert + ABREAST <= end; expert += ABREAST) route_experts<ABREAST>(layer, row, last, expert);
    for (; expert < end; expert++) route_experts<1>(layer, row, last, expert);
}

// Takes the greatest of `wide` numbers, the first of equals, and leaves NaN, which is never taken.
inline int64_t take_best(float* from, int64_t wide) {
    Floats highest = splat(-INFINITY);
    for (int64_t i = 0; i < wide; i += TILE) highest = max(load(from + i), highest);
    const float value = max_all(highest);
    int64_t at = 0;
    while (at < wide && from[at] != value) at++;
    from[at] = NAN;
    return at;
}

inline int64_t whole_tiles(int64_t count) { return (count + TILE - 1) / TILE * TILE; }

// -inf for all experts but those of the best groups.
inline void keep_groups(const Choice& choice, float* ranked, int64_t count) {
    thread_local std::vector<float> best;
    const int64_t groups = choice.groups, size = count / groups, wide = whole_tiles(groups);
    best.assign(wide, NAN);
    for (int64_t g = 0; g < groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float* one = ranked + g * size; one < ranked + (g + 1) * size; one++) {
            second = std::max(second, std::min(first, *one));
            first = std::max(first, *one);
        }
        best[g] = choice.is_pair_sum ? first + second : first;
    }
    for (int64_t taken = 0; taken < choice.top_groups; taken++) take_best(best.data(), wide);
    for (int64_t g = 0; g < groups; g++)
        if (!std::isnan(best[g])) std::fill_n(ranked + g * size, size, -INFINITY);
}

// Notes the next expert of a token among the `taken` ones before, in the order of the experts.
inline void insert(int32_t* ids, float* weights, int64_t taken, int64_t expert, float weight) {
    int64_t place = taken;
    for (; place > 0 && ids[place - 1] > expert; place--) ids[place] = ids[place - 1], weights[place] = weights[place - 1];
    ids[place] = static_cast<int32_t>(expert), weights[place] = weight;
}

inline void to_places(const Layer& layer, int64_t row, int32_t* ids) {
    if (const auto* table = static_cast<const int32_t*>(layer.op.offsets))
        for (int64_t i = 0; i < layer.chosen(); i++) ids[i] = table[row % layer.op.i6 * layer.count() + ids[i]];
}

// Chooses the experts of a token by a Choice. A NaN logit makes all weights NaN.
inline void choose_by(const Choice& choice, const Layer& layer, int64_t row) {
    thread_local std::vector<float> scores, ranked;
    const int64_t count = layer.count(), chosen = layer.chosen(), wide = whole_tiles(count);
    scores.assign(wide, -INFINITY), ranked.assign(wide, NAN);
    const float* logits = layer.memory.logits.data() + row * count;
    bool is_nan = false;
    float top = -FLT_MAX, total = 1;
    for (int64_t e = 0; e < count; e++) is_nan |= std::isnan(logits[e]), top = std::max(top, logits[e]);
    if (!is_nan) std::copy_n(logits, count, scores.data());
    const Floats one = splat(1.0f);
    Floats sums = Floats{};
    for (int64_t i = 0; i < wide; i += TILE) {
        const Floats x = load(scores.data() + i);
        const Floats value = choice.is_sigmoid ? one / (one + exp(Floats{} - x)) : share_of(x - splat(top));
        sums = select(first_lanes(count - i), sums + value, sums);
        store(scores.data() + i, value);
    }
    if (!choice.is_sigmoid) total = add_all(sums);
    for (int64_t e = 0; e < count; e++) {
        scores[e] /= total;
        ranked[e] = choice.correction ? scores[e] + choice.correction[e] : scores[e];
        if (std::isnan(ranked[e])) is_nan = true, ranked[e] = -INFINITY;
    }
    if (choice.groups > 1) keep_groups(choice, ranked.data(), count);
    int32_t* ids = layer.memory.ids.data() + row * chosen;
    float* weights = layer.memory.weights.data() + row * chosen;
    float sum = 0;
    for (int64_t taken = 0; taken < chosen; taken++) {
        const int64_t expert = take_best(ranked.data(), wide);
        sum += scores[expert];
        insert(ids, weights, taken, expert, is_nan ? NAN : scores[expert]);
    }
    const float divisor = layer.op.i4 ? sum + static_cast<float>(CHOICE_EPSILON) : 1.0f;
    for (int64_t i = 0; i < chosen; i++) weights[i] = weights[i] / divisor * static_cast<float>(choice.scale);
    to_places(layer, row, ids);
}

// Chooses the most likely experts of a token and their weights: a softmax over all experts, or over the chosen ones. NaN logits are
// chosen last and make all weights NaN.
inline void choose(const Layer& layer, int64_t row) {
    if (layer.op.scales) {  // chosen before: `b` are their ids int32 [rows, chosen], in order, and `scales` their weights
        const int64_t first = row * layer.chosen();
        std::copy_n(static_cast<const int32_t*>(layer.op.b) + first, layer.chosen(), layer.memory.ids.data() + first);
        std::copy_n(static_cast<const float*>(layer.op.scales) + first, layer.chosen(), layer.memory.weights.data() + first);
        return;
    }
    if (layer.op.by_head) return choose_by(*static_cast<const Choice*>(layer.op.by_head), layer, row);
    thread_local std::vector<float> scores;
    const int64_t count = layer.count(), chosen = layer.chosen(), wide = whole_tiles(count);
    if (static_cast<int64_t>(scores.size()) < wide) scores.resize(wide);
    const bf16* logits = static_cast<const bf16*>(layer.op.b) + row * layer.op.stride_b;
    const Floats lowest = splat(-FLT_MAX), none = splat(-INFINITY);
    const auto mask = [&](int64_t i) { return first_lanes(count - i); };
    Floats highest = lowest;
    for (int64_t i = 0; i < wide; i += TILE) {
        const Floats value = select(mask(i), max(load(logits + i, mask(i)), lowest), none);
        store(scores.data() + i, value);
        highest = max(highest, value);
    }
    const Floats top = splat(max_all(highest));
    Floats sums = Floats{};
    for (int64_t i = 0; i < wide; i += TILE)
        sums = select(mask(i), sums + share_of(load(logits + i, mask(i)) - top), sums);
    const float total = add_all(sums);
    float chosen_total = 0;
    int32_t* ids = layer.memory.ids.data() + row * chosen;
    float* weights = layer.memory.weights.data() + row * chosen;
    for (int64_t taken = 0; taken < chosen; taken++) {
        highest = none;
        for (int64_t i = 0; i < wide; i += TILE) highest = max(highest, load(scores.data() + i));
        const float value = max_all(highest);
        int64_t at = 0;
        while (scores[at] != value) at++;
        scores[at] = -INFINITY;
        const float share = first_lane(share_of(splat(value) - top));
        chosen_total += share;
        insert(ids, weights, taken, at, share);
    }
    to_places(layer, row, ids);
    if (!layer.op.i4 || std::isnan(total)) chosen_total = total;
    for (int64_t i = 0; i < chosen; i++) weights[i] /= chosen_total;
}

inline void choose_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    for (int64_t row = 8 * chunk; row < std::min(layer.step.rows, 8 * chunk + 8); row++) choose(layer, row);
}

// Sorts the pairs by expert.
inline void arrange(const Layer& layer) {
    Experts& at = layer.memory;
    at.begins.assign(layer.places() + 1, 0);
    at.places.resize(layer.pairs()), at.tokens.resize(layer.pairs()), at.active.clear();
    for (int64_t i = 0; i < layer.pairs(); i++)
        if (layer.expert(at.ids[i]).ups) at.begins[at.ids[i] + 1]++;
    for (int64_t e = 0; e < layer.places(); e++) {
        if (at.begins[e + 1]) at.active.push_back(static_cast<int32_t>(e));
        at.begins[e + 1] += at.begins[e];
    }
    thread_local std::vector<int64_t> next;
    next.assign(at.begins.begin(), at.begins.end() - 1);
    for (int64_t i = 0; i < layer.pairs(); i++) {
        if (!layer.expert(at.ids[i]).ups) {
            at.places[i] = -1;
            continue;
        }
        const int64_t place = next[at.ids[i]]++;
        at.places[i] = static_cast<int32_t>(place), at.tokens[place] = static_cast<int32_t>(i / layer.chosen());
    }
}

inline void prepare_row(bf16* x, int64_t size, double clip, int64_t fake_quantized) {
    if (clip != 0) clip_row(x, x, size, static_cast<float>(clip));
    if (fake_quantized) fake_quantize_row(x, x, size);
}

inline void gather_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    const Experts& at = layer.memory;
    const int64_t expert = at.active[chunk], hidden = layer.hidden();
    bf16* inputs = layer.memory.inputs.of(0);
    for (int64_t pair = at.begins[expert]; pair < at.begins[expert + 1]; pair++) {
        const bf16* x = static_cast<const bf16*>(layer.op.a) + at.tokens[pair] * layer.op.stride_a;
        std::memcpy(inputs + pair * hidden, x, 2 * hidden);
        prepare_row(inputs + pair * hidden, hidden, layer.expert(expert).clip_up, layer.expert(expert).fake_quantized_up);
    }
}

// Between an expert's products: activation, where the product has not applied it, and rounding.
inline void between_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    const Experts& at = layer.memory;
    const int64_t expert = at.active[chunk], width = layer.inner();
    const bf16* both = layer.memory.both.of(0);
    bf16* inner = layer.memory.inner.of(0);
    for (int64_t pair = at.begins[expert]; pair < at.begins[expert + 1]; pair++) {
        if (const auto* gate = static_cast<const float*>(layer.op.fixed))
            clamped_gate_row(both + 2 * pair * width, inner + pair * width, width, gate[0], gate[1]);
        else if (!layer.expert(expert).up->gated) silu_row(both + 2 * pair * width, inner + pair * width, width);
        prepare_row(inner + pair * width, width, layer.expert(expert).clip_down, layer.expert(expert).fake_quantized_down);
    }
}

inline int64_t rows_of(const Job& job) {
    return std::visit([](const auto& p) { return p.rows; }, job.product);
}

inline void add_job(Layer& layer, const Op& op, int64_t expert, const bf16* x, int64_t stride_x, bf16* out, int64_t stride) {
    Experts& at = layer.memory;
    const int64_t first = at.begins[expert], rows = at.begins[expert + 1] - first;
    const auto operands = [&](int64_t bytes) {
        return Operands{reinterpret_cast<const char*>(x), 2 * stride_x, static_cast<const char*>(op.b),
                        static_cast<const bf16*>(op.c), out + reinterpret_cast<int64_t>(op.out), stride, rows,
                        op.i0 * bytes / LINE, op.i1, op.gated != 0, &layer.panels};
    };
    const int64_t before = at.jobs.empty() ? 0 : at.jobs.back().first + rows_of(at.jobs.back());
    const auto add = [&]<class P>(const P& product) { at.jobs.push_back({AnyProduct(std::in_place_type<P>, product), before, 0}); };
    switch (op.kind) {
        case LINEAR: return add(Product{operands(sizeof(bf16))});
        case LINEAR8:
            return add(Product8{operands(sizeof(int8_t)), x, stride_x, &at.rounded, static_cast<float>(op.f0), op.i2, before});
        case GROUPED: {
            const Widened widened = {{operands(sizeof(bf16))}};
            const auto* order = reinterpret_cast<const int64_t*>(op.i4);
            const bool zeroed = op.f0 != 0;
            return op.i3 == 4 ? add(Grouped<4>{widened, order, nullptr, op.i2, zeroed})
                              : add(Grouped<8>{widened, order, nullptr, op.i2, zeroed});
        }
        case FP8: return add(Fp8Product{{{operands(sizeof(bf16))}}, op.i2});
        case BLOCKS:
            return with_bits(*static_cast<const Layout*>(op.b), [&]<int BITS>() {
                add(BlockProduct<BITS>{{{operands(sizeof(bf16))}}});
            });
    }
}

// Prepares a product's inputs for its weight: rounded, or reordered.
inline void prepare_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    Job& job = layer.memory.jobs[chunk];
    std::visit([&]<class P>(P& p) {
        if constexpr (requires { p.tokens; }) {
            for (int64_t row = 0; row < p.rows; row++) round_token(p, row);
            p.x = reinterpret_cast<const char*>(p.tokens->values.data() + job.first * p.inputs()), p.stride_x = p.inputs();
        }
        if constexpr (requires { p.order; }) {
            if (p.order) {
                bf16* ordered = layer.memory.ordered.of(0) + job.first * p.inputs();
                for (int64_t row = 0; row < p.rows; row++) order_inputs(p, row, ordered + row * p.inputs());
                p.x = reinterpret_cast<const char*>(ordered), p.stride_x = p.inputs() * sizeof(bf16);
            }
        }
        if constexpr (requires { p.quantized; })
            if (const Preparing<P> preparing = {p, layer.memory.planes, job.first}; preparing.wanted()) {
                for (int64_t row = 0; row < p.rows; row++) preparing.row(row);
                preparing.attach(p);
            }
    }, job.product);
}

inline void multiply_chunk(Product& p, int64_t chunk, int thread) { multiply_few<Product>(&p, chunk, thread); }
inline void multiply_chunk(Product8& p, int64_t chunk, int thread) { multiply_few<Product8>(&p, chunk, thread); }
template <class P>
void multiply_chunk(P& p, int64_t chunk, int thread) {
    multiply_widened_chunk<P>(&p, chunk, thread);
}

inline void shared_chunk(void* context, int64_t chunk, int thread) {
    auto& jobs = *static_cast<std::vector<Job>*>(context);
    const auto after = std::upper_bound(jobs.begin(), jobs.end(), chunk,
                                        [](int64_t one, const Job& job) { return one < job.begin; });
    Job& job = *(after - 1);  // a job without chunks begins where the next one does
    std::visit([&](auto& p) { multiply_chunk(p, chunk - job.begin, thread); }, job.product);
}

inline void alone_chunk(void* context, int64_t chunk, int thread) {
    std::visit([&]<class P>(P& p) {
        Panels<P> panels = divide_rows(p, 1);
        multiply_panels<P>(&panels, 0, thread);
    }, (*static_cast<std::vector<Job*>*>(context))[chunk]->product);
}

// Runs all jobs, those with many tokens last.
inline void run_jobs(Layer& layer) {
    Experts& at = layer.memory;
    if (at.jobs.empty()) return;
    const int64_t inputs = std::visit([](auto& p) { return p.inputs(); }, at.jobs[0].product);
    const int64_t tokens = at.jobs.back().first + rows_of(at.jobs.back());
    bool prepared = false;
    for (Job& job : at.jobs) {
        std::visit([&]<class P>(P& p) {
            if constexpr (requires { p.tokens; }) prepared = true, at.rounded.reserve(tokens, inputs);
            if constexpr (requires { p.order; })
                if (p.order) prepared = true, at.ordered.of(tokens * inputs);
            if constexpr (requires { p.quantized; })
                if (const Preparing<P> preparing = {p, at.planes}; preparing.wanted()) prepared = true, preparing.reserve(tokens);
                else preparing.attach(p);
        }, job.product);
    }
    if (prepared) layer.team.each(at.jobs.size(), prepare_chunk, &layer);
    int64_t chunks = 0;
    for (Job& job : at.jobs) {
        job.begin = chunks;
        std::visit([&](auto& p) {
            if (p.rows < PANEL_MIN_ROWS) chunks += divide(p, layer.team.size());
        }, job.product);
    }
    layer.team.each(chunks, shared_chunk, &at.jobs);
    at.large.clear();
    for (Job& job : at.jobs)
        if (rows_of(job) >= PANEL_MIN_ROWS) at.large.push_back(&job);
    if (static_cast<int>(at.large.size()) < 2 * layer.team.size()) {
        for (Job* job : at.large) std::visit([&](auto& p) { multiply_all(layer.team, p); }, job->product);
    } else {  // one thread a job, those with the most tokens first
        std::sort(at.large.begin(), at.large.end(), [](Job* one, Job* two) { return rows_of(*one) > rows_of(*two); });
        layer.team.each(at.large.size(), alone_chunk, &at.large);
    }
    at.jobs.clear();
}

inline void add_up_chunk(void* context, int64_t chunk, int) {
    const Layer& layer = *static_cast<const Layer*>(context);
    const int64_t hidden = layer.hidden(), chosen = layer.chosen();
    const bf16* results = layer.memory.results.of(0);
    for (int64_t row = 8 * chunk; row < std::min(layer.step.rows, 8 * chunk + 8); row++) {
        const int32_t* places = layer.memory.places.data() + row * chosen;
        const float* weights = layer.memory.weights.data() + row * chosen;
        bf16* out = static_cast<bf16*>(layer.op.out) + row * layer.op.stride_out;
        for (int64_t i = 0; i < hidden; i += TILE) {
            Floats sum = Floats{};
            for (int64_t j = 0; j < chosen; j++)
                if (places[j] >= 0) sum = fma(splat(weights[j]), load(results + places[j] * hidden + i), sum);
            store(out + i, sum);
        }
    }
}

inline void run_experts(Layer layer) {
    Experts& at = layer.memory;
    const int64_t pairs = layer.pairs(), rows = layer.step.rows, hidden = layer.hidden(), width = layer.inner();
    at.jobs.clear();  // left by a call that ended early
    at.ids.resize(pairs), at.weights.resize(pairs);
    if (layer.op.by_head) {
        at.logits.resize(rows * layer.count());
        const int64_t blocks = (layer.count() + ROUTED - 1) / ROUTED * ((rows + ROUTED_ROWS - 1) / ROUTED_ROWS);
        layer.team.each(blocks, route_chunk, &layer);
    }
    layer.team.each((rows + 7) / 8, choose_chunk, &layer);
    arrange(layer);
    bool gather = rows > 1, between = false;
    for (int32_t e : at.active) {
        const Expert& expert = layer.expert(e);
        gather |= expert.fake_quantized_up || expert.clip_up != 0;
        between |= expert.fake_quantized_down || expert.clip_down != 0 || !expert.up->gated;
    }
    bf16 *inner = at.inner.of(pairs * width), *results = at.results.of(pairs * hidden);
    const bf16* inputs = static_cast<const bf16*>(layer.op.a);
    if (gather) {
        inputs = at.inputs.of(pairs * hidden);
        layer.team.each(at.active.size(), gather_chunk, &layer);
    }
    bf16* both = between ? at.both.of(2 * pairs * width) : nullptr;
    for (int32_t e : at.active) {
        const Expert& expert = layer.expert(e);
        const int64_t first = at.begins[e];
        for (const Op* op = expert.up; op < expert.up + expert.ups; op++)
            add_job(layer, *op, e, inputs + (gather ? first * hidden : 0), hidden,
                    op->gated ? inner + first * width : both + 2 * first * width, op->gated ? width : 2 * width);
    }
    run_jobs(layer);
    if (between) layer.team.each(at.active.size(), between_chunk, &layer);
    for (int32_t e : at.active) {
        const Expert& expert = layer.expert(e);
        const int64_t first = at.begins[e];
        for (const Op* op = expert.down; op < expert.down + expert.downs; op++)
            add_job(layer, *op, e, inner + first * width, width, results + first * hidden, hidden);
    }
    run_jobs(layer);
    layer.team.each((rows + 7) / 8, add_up_chunk, &layer);
}

}  // namespace troupe
