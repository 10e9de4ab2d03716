// Elementwise operations on one row.
#pragma once
#include <bit>
#include <cfloat>

#include "vectors.h"

namespace troupe {

// The row's largest magnitude; NaN if the row has one.
inline float largest(const bf16* x, int64_t size) {
    Ints bits = Ints{};  // of magnitudes, compared as integers: a NaN is above infinity
    for (int64_t i = 0; i < size; i += 16)
        bits = max(bits, bits_of(abs(load(x + i))));
    return std::bit_cast<float>(max_all(bits));
}

// Clips a row to `share` of its largest magnitude, rounded to bf16; `x` may be `out`. With a NaN, min and max return their second
// operand.
inline void clip_row(const bf16* x, bf16* out, int64_t size, float share) {
    const Floats high = round_bf16(splat(largest(x, size) * share)), low = Floats{} - high;
    for (int64_t i = 0; i < size; i += 16) store(out + i, min(max(load(x + i), low), high));
}

// Rounds to multiples of the row's largest magnitude over 127; `x` may be `out`.
inline void fake_quantize_row(const bf16* x, bf16* out, int64_t size) {
    float scale = largest(x, size) / 127.0f;
    if (scale < FLT_MIN) scale = FLT_MIN;
    const Floats wide = splat(scale);
    for (int64_t i = 0; i < size; i += 16) {
        const Floats share = load(x + i) / wide;
        const Floats integers = round(share);
        store(out + i, integers * wide);
    }
}

// silu(gate) * up, with `size` gates and then `size` ups.
inline void silu_row(const bf16* gate, bf16* out, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) store(out + i, silu(load(gate + i)) * load(gate + size + i));
}

// (up + 1) * gate * sigmoid(alpha * gate) of gate | up, gates of at most `limit` and others within it.
inline void clamped_gate_row(const bf16* gate, bf16* out, int64_t size, float alpha, float limit) {
    const Floats one = splat(1.0f), zero = Floats{}, low = splat(-limit), high = splat(limit);
    for (int64_t i = 0; i < size; i += 16) {
        const Floats clamped_gate = min(high, load(gate + i)), up = max(low, min(high, load(gate + size + i)));
        store(out + i, (up + one) * clamped_gate / (one + exp(zero - splat(alpha) * clamped_gate)));
    }
}

// x + sigmoid(logit) * y; `x` may be `out`.
inline void add_weighted(const bf16* x, const bf16* y, bf16 logit, bf16* out, int64_t size) {
    const Floats one = splat(1.0f), wide = splat(to_float(logit));
    const Floats share = one / (one + exp(Floats{} - wide));
    for (int64_t i = 0; i < size; i += 16) store(out + i, fma(share, load(y + i), load(x + i)));
}

}  // namespace troupe
