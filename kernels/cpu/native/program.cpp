// Runs programs of operators: see program.h for what they are, and kernels/cpu/program.py for where they come from.
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>

#include "attention.h"
#include "matrix.h"
#include "program.h"
#include "team.h"

namespace troupe {

struct Engine {
    explicit Engine(int threads) : team(threads), scores(team.size()) {}
    Team team;
    std::vector<std::vector<float>> scores;
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
    std::memcpy(at<bf16>(op.out, row, op.stride_out), at<bf16>(op.a, step.ids[row], op.i0), 2 * op.i0);
}

bf16 rounded(float x) {
    return static_cast<bf16>(_mm_cvtsi128_si32(reinterpret_cast<__m128i>(_mm_cvtneps_pbh(_mm_set_ss(x)))));
}

void angles(const Op& op, const Step& step, int64_t row) {
    const float* frequencies = static_cast<const float*>(op.a);
    const float position = static_cast<float>(step.positions[row]), scale = static_cast<float>(op.f0);
    for (int64_t i = 0; i < op.i0 / 2; i++) {  // the halves differ in the sign of their sines
        const float angle = position * frequencies[i + op.i0 / 2];
        const bf16 cosine = rounded(std::cos(angle) * scale), sine = rounded(std::sin(angle) * scale);
        at<bf16>(op.out, row, op.i0)[i] = at<bf16>(op.out, row, op.i0)[i + op.i0 / 2] = cosine;
        at<bf16>(op.b, row, op.i0)[i] = sine ^ 0x8000;
        at<bf16>(op.b, row, op.i0)[i + op.i0 / 2] = sine;
    }
}

void norm(const Op& op, const Step&, int64_t row) {
    const bf16* x = op.a ? at<bf16>(op.a, row, op.stride_a) : nullptr;
    bf16* residual = at<bf16>(op.b, row, op.stride_b);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    const float* weight = static_cast<const float*>(op.c);
    for (int64_t head = 0; head < op.i1; head++) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < op.i0; i += 16) {
            __m512 value = load(residual + i);
            if (x) {
                store(residual + i, _mm512_add_ps(value, load(x + i)));
                value = load(residual + i);
            }
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(op.i0);
        const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + static_cast<float>(op.f0)));
        for (int64_t i = 0; i < op.i0; i += 16)
            store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(residual + i), factor), _mm512_loadu_ps(weight + i)));
        residual += op.i0, out += op.i0, weight += op.i0;
        if (x) x += op.i0;
    }
}

void rotary(const Op& op, const Step&, int64_t row) {
    const bf16 *x = at<bf16>(op.a, row, op.stride_a), *cos = at<bf16>(op.b, row, op.i0), *sin = at<bf16>(op.c, row, op.i0);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    const int64_t half = op.i0 / 2;
    for (int64_t head = 0; head < op.i1; head++, x += op.i0, out += op.i0)
        for (int64_t i = 0; i < half; i += 16) {
            __m512 low = load(x + i), high = load(x + half + i);
            store(out + i, _mm512_fmadd_ps(low, load(cos + i), _mm512_mul_ps(high, load(sin + i))));
            store(out + half + i,
                  _mm512_fmadd_ps(high, load(cos + half + i), _mm512_mul_ps(low, load(sin + half + i))));
        }
}

void write(const Op& op, const Step& step, int64_t row) {
    std::memcpy(at<bf16>(op.out, step.index[row], op.i0), at<bf16>(op.a, row, op.stride_a), 2 * op.i0);
}

void silu(const Op& op, const Step&, int64_t row) {
    const bf16* gate = at<bf16>(op.a, row, op.stride_a);
    bf16* out = at<bf16>(op.out, row, op.stride_out);
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < op.i0; i += 16) {
        __m512 x = load(gate + i);
        __m512 value = _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(zero, x))));
        store(out + i, _mm512_mul_ps(value, load(gate + op.i0 + i)));
    }
}

void run(Engine& engine, const Op& op, const Step& step) {
    Rows rows = {&op, &step, nullptr, 1};
    switch (op.kind) {
        case LINEAR:
            multiply(engine.team, {static_cast<bf16*>(op.a), static_cast<bf16*>(op.b), static_cast<bf16*>(op.c),
                                   static_cast<bf16*>(op.out), step.rows, op.i0, op.i1, op.stride_a, op.stride_out, 1});
            return;
        case ATTENTION: {
            Attending task = {&op, &step, &engine.scores};
            engine.team.each(step.rows * op.i2, attend_chunk, &task);
            return;
        }
        case EMBED: rows.call = embed; break;
        case ANGLES: rows.call = angles; break;
        case NORM: rows.call = norm; break;
        case ROTARY: rows.call = rotary; break;
        case WRITE: rows.call = write; break;
        case SILU: rows.call = silu; break;
        default: return;
    }
    rows.each = 8;  // fewer are not worth a claim
    engine.team.each((step.rows + 7) / 8, rows_chunk, &rows);
}

}  // namespace troupe

using namespace troupe;

extern "C" {

// Whether the processor has what this was compiled for, and the system lends its tiles to this process.
int troupe_ready() {
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("amx-bf16"))
        return 0;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void* troupe_open(int threads) { return new Engine(threads); }

void troupe_close(void* engine) { delete static_cast<Engine*>(engine); }

int64_t troupe_packed(int64_t outputs, int64_t inputs) { return blocks(outputs) * WIDE * inputs; }

void troupe_pack(const void* weight, int64_t outputs, int64_t inputs, void* packed) {
    pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
}

void troupe_run(void* engine, const Op* ops, int64_t count, const Step* step) {
    Engine& on = *static_cast<Engine*>(engine);
    on.team.begin();
    for (int64_t i = 0; i < count; i++) run(on, ops[i], *step);
    on.team.end();
    release_tiles();
}
}
