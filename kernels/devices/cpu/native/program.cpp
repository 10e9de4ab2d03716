// Runs programs of operators: see program.h for what they are, and kernels/devices/cpu/program.py for where they come from.
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>

#include "attention.h"
#include "decode_loop.h"
#include "draft_chains.h"
#include "draft_cycle.h"
#include "experts.h"
#include "gemm_bf16.h"
#include "gemm_fp8.h"
#include "gemm_gguf_blocks.h"
#include "gemm_grouped.h"
#include "gemm_int8.h"
#include "heads.h"
#include "kv_cache_8bit.h"
#include "low_rank.h"
#include "prefill.h"
#include "program.h"
#include "short_prefill.h"
#include "rows.h"
#include "sampling.h"
#include "thread_team.h"

namespace troupe {

struct Engine {
    explicit Engine(int threads) : team(threads), panels(team.size()), scores(team.size()), spaces(team.size()) {}
    Team team;
    std::vector<Panel> panels;
    std::vector<Scratch<float>> scores;
    std::vector<Workspace> spaces;
    Scratch<bf16> laid_out;
    Tokens8 tokens;
    Planes planes;
    std::vector<bf16> ordered;
    StepMemory memory;
    Experts experts;
    RowPlaces places;
};

struct Rows {
    const Op* op;
    const Step* step;
    void (*call)(const Op&, const Step&, int64_t);
    int64_t each;
};

void rows_chunk(void* context, int64_t chunk, int) {
    const Rows& rows = *static_cast<const Rows*>(context);
    const int64_t end = std::min(rows.step->rows, (chunk + 1) * rows.each);
    for (int64_t row = chunk * rows.each; row < end; row++) rows.call(*rows.op, *rows.step, row);
}

template <class T>
T* at(void* base, int64_t row, int64_t stride) {
    return static_cast<T*>(base) + row * stride;
}

void embed(const Op& op, const Step& step, int64_t row) {
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    if (op.i1 == 2) {
        unpack_blocks(static_cast<uint8_t*>(op.a), step.ids[row], op.i0, out);
    } else if (op.i1) {
        unpack(static_cast<bf16*>(op.a), step.ids[row], op.i0, out);
    } else {
        std::memcpy(out, at<bf16>(op.a, step.ids[row], op.i0), 2 * op.i0);
    }
}

void angles(const Op& op, const Step& step, int64_t row) {
    const float* frequencies = static_cast<const float*>(op.a);
    const float position = static_cast<float>(step.positions[row]), scale = static_cast<float>(op.f0);
    for (int64_t i = 0; i < op.i0 / 2; i++) {  // the halves differ in the sign of their sines
        const float angle = position * frequencies[i + op.i0 / 2];
        const bf16 cosine = to_bf16(std::cos(angle) * scale), sine = to_bf16(std::sin(angle) * scale);
        at<bf16>(op.out, row, op.i0)[i] = at<bf16>(op.out, row, op.i0)[i + op.i0 / 2] = cosine;
        at<bf16>(op.b, row, op.i0)[i] = sine ^ 0x8000;
        at<bf16>(op.b, row, op.i0)[i + op.i0 / 2] = sine;
    }
}

// out = norm(residual + x) * weight, of `dim` numbers; `x` or null is added to the residual.
void norm_head(const bf16* x, bf16* residual, const float* weight, int64_t dim, double eps, bf16* out) {
    Floats squares = Floats{};
    for (int64_t i = 0; i < dim; i += 16) {
        Floats value = load(residual + i);
        if (x) {
            store(residual + i, value + load(x + i));
            value = load(residual + i);
        }
        squares = fma(value, value, squares);
    }
    const float mean = add_all(squares) / static_cast<float>(dim);
    const Floats factor = splat(1.0f / std::sqrt(mean + static_cast<float>(eps)));
    for (int64_t i = 0; i < dim; i += 16) store(out + i, load(residual + i) * factor * load(weight + i));
}

void norm(const Op& op, const Step&, int64_t row) {
    const bf16* x = op.a ? at<bf16>(op.a, row, op.stride_a) : nullptr;
    bf16* residual = at<bf16>(op.b, row, op.stride_b);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    const float* weight = static_cast<const float*>(op.c);
    for (int64_t head = 0; head < op.i1; head++) {
        norm_head(x, residual, weight, op.i0, op.f0, out);
        residual += op.i0, out += op.i0, weight += op.i0;
        if (x) x += op.i0;
    }
}

// Rotates the halves of `dim` numbers against one another.
void rotate_head(const bf16* x, const bf16* cos, const bf16* sin, int64_t dim, bf16* out) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const Floats low = load(x + i), high = load(x + half + i);
        store(out + i, fma(low, load(cos + i), high * load(sin + i)));
        store(out + half + i, fma(high, load(cos + half + i), low * load(sin + half + i)));
    }
}

void rotary(const Op& op, const Step&, int64_t row) {
    const bf16 *x = at<bf16>(op.a, row, op.stride_a), *cos = at<bf16>(op.b, row, op.i0), *sin = at<bf16>(op.c, row, op.i0);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    for (int64_t head = 0; head < op.i1; head++, x += op.i0, out += op.i0) rotate_head(x, cos, sin, op.i0, out);
}

void place_latent(const Op& op, const Step& step, int64_t row) {
    const int64_t rope = op.i2, rank = op.i3;
    const bf16 *cos = at<bf16>(op.c, row, rope), *sin = at<bf16>(op.fixed, row, rope);
    bf16* query = at<bf16>(op.a, row, op.stride_a) + op.i0 - rope;
    for (int64_t head = 0; head < op.i1; head++, query += op.i0) rotate_head(query, cos, sin, rope, query);
    bf16 *vector = at<bf16>(op.b, row, op.stride_b), *cached = at<bf16>(op.out, step.index[row], rank + rope);
    norm_head(nullptr, vector, reinterpret_cast<const float*>(op.i4), rank, op.f0, cached);
    rotate_head(vector + rank, cos, sin, rope, cached + rank);
}

void norm_rope_cache(const Op& op, const Step& step, int64_t row) {
    const int64_t dim = op.i0, half = dim / 2, heads = op.i1, kv_heads = op.i2;
    const Cache8bit kept(op, op.out, dim, kv_heads);
    bf16 *x = at<bf16>(op.a, row, op.stride_a), *cached = at<bf16>(op.out, step.index[row], 2 * kv_heads * dim);
    alignas(64) bf16 key[256];
    const float* weight = reinterpret_cast<const float*>(op.i4);
    alignas(64) float cos[256], sin[256], part[256];
    for (int64_t i = 0; i < dim; i += 16) {
        store(cos + i, load(at<bf16>(op.b, row, dim) + i));
        store(sin + i, load(at<bf16>(op.c, row, dim) + i));
    }
    for (int64_t head = 0; head < heads; head++, x += dim) {
        Floats squares = Floats{};
        for (int64_t i = 0; i < dim; i += 16) {
            const Floats value = load(x + i);
            store(part + i, value);
            squares = fma(value, value, squares);
        }
        if (weight) {
            const float mean = add_all(squares) / static_cast<float>(dim);
            const Floats factor = splat(1.0f / std::sqrt(mean + static_cast<float>(op.f0)));
            for (int64_t i = 0; i < dim; i += 16) {
                const Floats scaled = load(part + i) * factor;
                store(part + i, round_bf16(scaled * load(weight + i)));
            }
            weight += dim;
        }
        const int64_t kept_head = head - heads + kv_heads;
        bf16* out = kept_head < 0 ? x : op.cache_type ? key : cached + kept_head * dim;
        for (int64_t i = 0; i < half; i += 16) {
            const Floats low = load(part + i), high = load(part + half + i);
            store(out + i, fma(low, load(cos + i), high * load(sin + i)));
            store(out + half + i, fma(high, load(cos + half + i), low * load(sin + half + i)));
        }
        if (op.cache_type && kept_head >= 0) kept.store(step.index[row], kept_head, key);
    }
    if (!op.cache_type) std::memcpy(cached + kv_heads * dim, x, 2 * kv_heads * dim);
    for (int64_t head = 0; op.cache_type && head < kv_heads; head++) kept.store(step.index[row], kv_heads + head, x + head * dim);
}

void write(const Op& op, const Step& step, int64_t row) {
    std::memcpy(at<bf16>(op.out, step.index[row], op.i0), at<bf16>(op.a, row, op.stride_a), 2 * op.i0);
}

void fake_quantize(const Op& op, const Step&, int64_t row) {
    fake_quantize_row(at<bf16>(op.a, row, op.stride_a), at<bf16>(op.out, row, op.stride_out), op.i0);
}

void silu_and_mul(const Op& op, const Step&, int64_t row) {
    silu_row(at<bf16>(op.a, row, op.stride_a), at<bf16>(op.out, row, op.stride_out), op.i0);
}

void add(const Op& op, const Step&, int64_t row) {
    const bf16* x = at<bf16>(op.a, row, op.stride_a);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    if (!op.b) {
        std::memcpy(out, x, 2 * op.i0);
        return;
    }
    const bf16* y = at<bf16>(op.b, row, op.stride_b);
    if (op.c) return add_weighted(x, y, *at<bf16>(op.c, row, op.i1), out, op.i0);
    for (int64_t i = 0; i < op.i0; i += 16) store(out + i, load(x + i) + load(y + i));
}

// The first of the largest: lanes keep their first, then the least id of the best lanes wins. -> whether a value is NaN or
// +inf, or all are -inf.
bool argmax_of(const bf16* logits, int64_t count, int64_t& id, float& top) {
    const Ints sixteen = splat(16);
    const Floats none = splat(-INFINITY);
    Floats largest_value = none;
    Ints ids = lane_numbers(), best = ids;
    Mask nonfinite = 0;
    for (int64_t i = 0; i < count; i += 16) {
        const Mask here = first_lanes(count - i);
        const Floats value = select(here, load(logits + i, here), none);
        const Mask more = value > largest_value;
        nonfinite |= static_cast<Mask>(~(value < splat(INFINITY)));
        largest_value = select(more, value, largest_value);
        best = select(more, ids, best);
        ids = ids + sixteen;
    }
    top = max_all(largest_value);
    const Mask winners = largest_value == splat(top);
    const bool failed = nonfinite || top == -INFINITY;
    id = failed ? 0 : min_all(select(winners, best, splat(INT32_MAX)));
    return failed;
}

void greedy(const Op& op, const Step&, int64_t row) {
    float top;
    const bf16* logits = at<bf16>(op.a, row, op.stride_a);
    static_cast<uint8_t*>(op.b)[row] = argmax_of(logits, op.i0, static_cast<int64_t*>(op.out)[row], top);
}

// Tokens whose bit is not set are never drawn: their logits become -inf.
void forbid(bf16* logits, const uint32_t* allowed, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
        const Mask here = first_lanes(count - i), never = static_cast<Mask>(~(allowed[i / 32] >> i % 32));
        if (never) store(logits + i, select(never, splat(-INFINITY), load(logits + i, here)), here);
    }
}

void draw(const Op& op, const Step& step, int64_t row) {
    float top;
    bf16* logits = at<bf16>(op.a, op.offsets ? static_cast<const int64_t*>(op.offsets)[row] : row, op.stride_a);
    if (op.i2) forbid(logits, reinterpret_cast<const uint32_t*>(op.i2) + row * op.i3, op.i0);
    int64_t& id = static_cast<int64_t*>(op.out)[row];
    const bool failed = argmax_of(logits, op.i0, id, top);
    reinterpret_cast<uint8_t*>(op.i4)[row] = failed;
    const Draw& how = static_cast<const Draw*>(op.b)[row];
    if (!failed && how.temperature > 0)
        id = GumbelArgmax(logits, op.i0, static_cast<const int64_t*>(op.c), op.i1, how, step.positions[row]).run(id, top);
}

// `bytes`: of an input.
Operands operands(Engine& engine, const Op& op, const Step& step, int64_t bytes) {
    return {static_cast<char*>(op.a), op.stride_a * static_cast<int64_t>(sizeof(bf16)), static_cast<char*>(op.b),
            static_cast<bf16*>(op.c), static_cast<bf16*>(op.out), op.stride_out, step.rows, op.i0 * bytes / LINE, op.i1,
            op.gated != 0, &engine.panels};
}

// The most rows that a product with weights of few bits treats in one way; any other: 0.
int64_t invariant_rows(const Op& op) {
    if (op.kind == FP8) return std::min(WIDE, op.i2 / 2);
    return op.kind == GROUPED || op.kind == BLOCKS ? MAX_QUANTIZED_TOKENS : 0;
}

void run(Engine& engine, const Op& op, const Step& step) {
    if (const int64_t max_rows = op.invariant ? invariant_rows(op) : 0; max_rows && step.rows > max_rows) {
        Op part = op;
        Step part_step = step;
        for (int64_t row = 0; row < step.rows; row += max_rows) {
            part.a = at<bf16>(op.a, row, op.stride_a), part.out = at<bf16>(op.out, row, op.stride_out);
            part_step.rows = std::min(max_rows, step.rows - row);
            run(engine, part, part_step);
        }
        return;
    }
    Rows rows = {&op, &step, nullptr, 8};  // fewer are not worth a claim
    switch (op.kind) {
        case LINEAR: return multiply(engine.team, Product{operands(engine, op, step, sizeof(bf16))});
        case LINEAR8:
            return multiply(engine.team, Product8{operands(engine, op, step, sizeof(int8_t)), static_cast<bf16*>(op.a),
                                                  op.stride_a, &engine.tokens, static_cast<float>(op.f0), op.i2});
        case GROUPED: {
            const Widened of = {{operands(engine, op, step, sizeof(bf16))}};
            const auto* order = reinterpret_cast<const int64_t*>(op.i4);
            const bool zeroed = op.f0 != 0;
            if (op.i3 == 4) return multiply(engine.team, Grouped<4>{of, order, &engine.ordered, op.i2, zeroed}, engine.planes);
            return multiply(engine.team, Grouped<8>{of, order, &engine.ordered, op.i2, zeroed}, engine.planes);
        }
        case FP8: return multiply_made(engine.team, Fp8Product{{{operands(engine, op, step, sizeof(bf16))}}, op.i2}, engine.planes);
        case BLOCKS:
            return with_bits(*static_cast<const Layout*>(op.b), [&]<int BITS>() {
                multiply_made(engine.team, BlockProduct<BITS>{{{operands(engine, op, step, sizeof(bf16))}}}, engine.planes);
            });
        case PLACES: return find_places(engine.places, op, step);
        case LOW_RANK: return add_low_rank(engine.team, {op, engine.places, engine.spaces});
        case HEADS: return multiply_heads(engine.team, op, Product{operands(engine, op, step, sizeof(bf16))});
        case EXPERTS: return run_experts({engine.team, engine.panels, engine.experts, op, step});
        case ATTENTION:
            attention(engine.team, engine.scores, op, step);
            for (int64_t sequence = step.sequences - step.prompts; sequence < step.sequences; sequence++)
                prefill(engine.team, engine.spaces, engine.laid_out, op, step, sequence);
            return;
        case EMBED: rows.call = embed; break;
        case ANGLES: rows.call = angles; break;
        case NORM: rows.call = norm; break;
        case ROTARY: rows.call = rotary; break;
        case WRITE: rows.call = write; break;
        case PLACE_LATENT: rows.call = place_latent; break;
        case NORM_ROPE_CACHE: rows.call = norm_rope_cache; break;
        case WRITE_8BIT: rows.call = write_8bit; break;
        case SILU: rows.call = silu_and_mul; break;
        case FAKE_QUANTIZE: rows.call = fake_quantize; break;
        case GREEDY: rows.call = greedy; break;
        case DRAW: rows.call = draw; rows.each = 1; break;
        case ADD: rows.call = add; break;
        default: return;
    }
    engine.team.each((step.rows + rows.each - 1) / rows.each, rows_chunk, &rows);
}

// Runs programs by an engine. However a call ends, the helpers then sleep, and the tiles are free for other libraries.
struct Running {
    Engine& on;
    explicit Running(void* engine) : on(*static_cast<Engine*>(engine)) {}
    ~Running() {
        on.team.rest();
        release_tiles();
    }
    void operator()(const Ops& ops, const Step& step) const {
        for (int64_t i = 0; i < ops.count && step.rows > 0; i++) run(on, ops.first[i], step);
    }
};

}  // namespace troupe

using namespace troupe;

extern "C" {

// Whether the processor has every instruction set that this was compiled for, and the system lends AMX's tiles to this process.
int troupe_ready() {
#if defined(__AVX512VBMI__)
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi") ||
        !__builtin_cpu_supports("avx512vnni"))
        return 0;
#elif defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;  // and F16C, for which Clang does not ask
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    if (!(getauxval(AT_HWCAP2) & HWCAP2_BF16)) return 0;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    if (!(getauxval(AT_HWCAP2) & HWCAP2_I8MM)) return 0;
#endif
#ifdef __AMX_TILE__
    if (!__builtin_cpu_supports("avx512fp16") || !__builtin_cpu_supports("amx-bf16") || !__builtin_cpu_supports("amx-int8")) return 0;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 1;
#endif
}

// null: the system could not start so many threads.
void* troupe_open(int threads) try {
    return new Engine(threads);
} catch (const std::exception&) {
    return nullptr;
}

void troupe_close(void* engine) { delete static_cast<Engine*>(engine); }

int64_t troupe_packed(int64_t outputs, int64_t inputs) { return blocks(outputs) * WIDE * inputs; }

// `packed`: memory that is written to for the first time. Large pages, where it has room for them, are read faster.
static void in_large_pages(void* packed, int64_t bytes) {
    const uintptr_t page = sysconf(_SC_PAGESIZE), begin = (reinterpret_cast<uintptr_t>(packed) + page - 1) / page * page;
    uintptr_t end = reinterpret_cast<uintptr_t>(packed) + bytes;
    constexpr uintptr_t large = 2 << 20;
    if (begin % large == 0) end = end / large * large;  // memory of its own, whose last one would be mostly empty
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void troupe_pack(const void* weight, int64_t outputs, int64_t inputs, void* packed) {
    in_large_pages(packed, 2 * troupe_packed(outputs, inputs));
    pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
}

int64_t troupe_packed8(int64_t outputs, int64_t inputs) { return packed8(outputs, inputs); }

void troupe_pack8(const void* weight, const void* scales, const void* correction, int64_t outputs, int64_t inputs,
                  void* packed) {
    in_large_pages(packed, packed8(outputs, inputs));
    pack8(static_cast<const int8_t*>(weight), static_cast<const float*>(scales),
          static_cast<const int32_t*>(correction), outputs, inputs, static_cast<int8_t*>(packed));
}

int64_t troupe_packed_grouped(int64_t outputs, int64_t inputs, int64_t group, int64_t bits) {
    return packed_grouped(outputs, inputs, group, bits);
}

void troupe_pack_grouped(const void* values, const void* scales, const void* zeros, int64_t outputs, int64_t inputs,
                         int64_t group, int64_t bits, void* packed) {
    in_large_pages(packed, packed_grouped(outputs, inputs, group, bits));
    pack_grouped(static_cast<const uint8_t*>(values), static_cast<const float*>(scales),
                 static_cast<const uint8_t*>(zeros), outputs, inputs, group, bits, static_cast<uint8_t*>(packed));
}

int64_t troupe_packed_fp8(int64_t outputs, int64_t inputs, int64_t group) { return packed_fp8(outputs, inputs, group); }

void troupe_pack_fp8(const void* values, const void* scales, int64_t outputs, int64_t inputs, int64_t group, void* packed) {
    in_large_pages(packed, packed_fp8(outputs, inputs, group));
    pack_fp8(static_cast<const uint8_t*>(values), static_cast<const float*>(scales), outputs, inputs, group,
             static_cast<uint8_t*>(packed));
}

int64_t troupe_packed_blocks(const Layout* layout, int64_t outputs, int64_t inputs) {
    return packed_blocks(*layout, outputs, inputs);
}

void troupe_begin_blocks(const Layout* layout, int64_t outputs, int64_t inputs, void* packed) {
    in_large_pages(packed, packed_blocks(*layout, outputs, inputs));
    std::memcpy(packed, layout, sizeof(Layout));
}

void troupe_pack_blocks(const Blocks* from, int64_t first, int64_t outputs, int64_t inputs, void* packed) {
    pack_blocks(*from, first, outputs, inputs, static_cast<uint8_t*>(packed));
}

// -> whether there was memory for all of it.
int troupe_run(void* engine, const Op* ops, int64_t count, const Step* step) try {
    Running{engine}(Ops{ops, count}, *step);
    return true;
} catch (const std::exception&) {
    return false;
}

// One token more of each of the slots, by a program that leaves the most likely in `argmax`, and whether one is not to be
// used in `nonfinite`; `draw` (or null): a DRAW that finds others. -> an StepStatus.
int64_t troupe_advance(void* engine, const Op* ops, int64_t count, const SlotTable* table, const int64_t* slots, int64_t rows,
                       const int64_t* argmax, const uint8_t* nonfinite, const Op* draw, int32_t* result) try {
    const Running running(engine);
    Step step;
    const StepStatus prepared = prepare(*table, slots, rows, running.on.memory, step);
    if (prepared != DONE) return prepared;
    running(Ops{ops, count}, step);
    if (draw) {
        step.positions = step.lengths;  // where what is drawn will stand
        running(Ops{draw, 1}, step);
        argmax = static_cast<const int64_t*>(draw->out);
    }
    return keep(*table, slots, rows, argmax, nonfinite, result);
} catch (const std::exception&) {  // of memory: the step is left to others, who say so
    return NOT_APPLICABLE;
}

// Draft tokens: see draft_chains.h. A draft sees what was computed; -> whether there was memory for it. ...
int troupe_observe(void* engine, const Op* ops, int64_t count, const SlotTable* table, const RowTokens* rows,
                   const Observation* seen) try {
    const Running running(engine);
    observe(running, running.on.memory, Ops{ops, count}, *table, *rows, *seen);
    return true;
} catch (const std::exception&) {
    return false;
}

// ... Chains are drafted and verified: see draft_cycle.h. -> an StepStatus.
int64_t troupe_cycle(void* engine, const Cycle* settings, const SlotTable* table, const int64_t* slots, int64_t rows,
                     const int32_t* drafts, const int64_t* left, int64_t steps, const Draw* how, int unseen,
                     CycleOutput* result) try {
    result->seen = false;
    const Running running(engine);
    return cycle(running, running.on.memory, *settings, *table, slots, rows, drafts, left, steps, how, unseen, *result);
} catch (const std::exception&) {
    return NOT_APPLICABLE;
}

// ... The model verifies chains, tokens [rows, stride] with the roots first. -> an StepStatus.
int64_t troupe_verify(void* engine, const Op* ops, int64_t count, const SlotTable* table, const RowTokens* rows,
                      const int64_t* tokens, int64_t stride, const int64_t* argmax, const uint8_t* nonfinite, const Op* draw,
                      int64_t* accepted) try {
    const Running running(engine);
    StepMemory& memory = running.on.memory;
    argmax = verify(running, memory, Ops{ops, count}, *table, *rows, tokens, stride, argmax, draw);
    return accept(*table, *rows, argmax, nonfinite, memory, accepted);
} catch (const std::exception&) {
    return NOT_APPLICABLE;
}

// Sequences are run up to their last known tokens: see short_prefill.h. -> an StepStatus.
int64_t troupe_prefill(void* engine, const Op* ops, int64_t count, const SlotTable* table, const RowTokens* rows,
                     const Head* head, const int64_t* argmax, const uint8_t* nonfinite, const Op* draw, int32_t* result) try {
    const Running running(engine);
    return run_prefill(running, running.on.memory, Ops{ops, count}, *table, *rows, *head, argmax, nonfinite, draw, result);
} catch (const std::exception&) {
    return NOT_APPLICABLE;
}
}
