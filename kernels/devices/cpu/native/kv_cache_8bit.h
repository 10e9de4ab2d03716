// Keys and values of 8 bits: quantized when they are written to the cache, widened to bf16 in a core's cache when they are read.
#pragma once
#include <bit>
#include <cmath>

#include "program.h"
#include "tiles.h"
#include "vectors.h"

namespace troupe {

enum CacheType : int64_t { BF16, INT8, E4M3, E5M2 };  // bf16, int8 and floats of 8 bits

constexpr float LARGEST[] = {0.0f, 127.0f, 448.0f, 57344.0f};
constexpr float MIN_SCALE = 0x1p-126f;
constexpr int32_t NONE = 0x80;  // among int8 with scales that are fixed beforehand: a value that was not finite

inline Floats widen(const uint8_t* x, int64_t kind) {
    if (kind == INT8) return to_floats(load_signed(x));
    const Ints bits = load_unsigned(x);
    if (kind == E5M2) return from_halves(bits << 8);  // the upper half of a binary16
    const Ints magnitude = bits & splat(0x7f), sign = (bits & splat(0x80)) << 8;
    // As binary16, whose exponent bias is 8 larger.
    const Floats scaled = from_halves(sign | magnitude << 7);
    return select(magnitude == splat(0x7f), splat(NAN), scaled * splat(256.0f));
}

// Rounds to the nearest; values too large become the largest, and a NaN stays one, or becomes 0 where the type has none.
inline Ints quantize_8bit(Floats x, int64_t kind) {
    x = min(splat(LARGEST[kind]), max(splat(-LARGEST[kind]), x));
    if (kind == INT8) return to_ints(x);
    const int bits = kind == E4M3 ? 7 : 8;
    if (kind == E4M3) x = x * splat(0x1p-8f);
    const Ints half = to_halves(x), magnitude = half & splat(0x7fff), even = magnitude >> bits & splat(1);
    const Ints result = (magnitude + even + splat((1 << (bits - 1)) - 1)) >> bits;
    return select(magnitude > splat(0x7c00), splat(0x7f), result) | (half >> 8 & splat(0x80));
}

// A cache of 8 bits: [token][head of keys, then of values][dim].
struct Cache8bit {
    uint8_t* values;
    bf16* scales;                   // [token][head], or null
    const float *fixed, *offsets;   // scales and offsets of all tokens [head][dim]; offsets may be null, and with `scales` both are
    const float* by_head;           // fixed scales [head], if all dims of a head share one and there are no offsets
    int64_t kind, dim, heads;

    Cache8bit(const Op& op, void* values, int64_t dim, int64_t kv_heads)
        : values(static_cast<uint8_t*>(values)), scales(static_cast<bf16*>(op.scales)),
          fixed(static_cast<const float*>(op.fixed)), offsets(static_cast<const float*>(op.offsets)),
          by_head(static_cast<const float*>(op.by_head)), kind(op.cache_type), dim(dim), heads(2 * kv_heads) {}

    // Stores x [dim] of a head of token `place`.
    void store(int64_t place, int64_t head, const bf16* x) const {
        const int64_t at = place * heads + head;
        uint8_t* out = values + at * dim;
        if (scales) {
            Ints bits = Ints{};  // compared so, a NaN is larger than infinity
            for (int64_t i = 0; i < dim; i += 16)
                bits = max(bits, bits_of(abs(load(x + i))));
            const float size = std::bit_cast<float>(max_all(bits)) / LARGEST[kind];
            scales[at] = to_bf16(size < MIN_SCALE ? MIN_SCALE : size);
            const Floats divisor = splat(to_float(scales[at]));
            for (int64_t i = 0; i < dim; i += 16) store_bytes(out + i, quantize_8bit(load(x + i) / divisor, kind));
            return;
        }
        for (int64_t i = 0; i < dim; i += 16) {
            Floats value = load(x + i);
            const Mask nonfinite = bits_of(abs(value)) > splat(0x7f7fffff);  // infinities and NaNs, which no scale expresses
            value = value / load(fixed + head * dim + i);
            if (offsets) value = value + load(offsets + head * dim + i);
            const Ints code = quantize_8bit(select(nonfinite, splat(NAN), value), kind);
            store_bytes(out + i, kind == INT8 ? select(nonfinite, splat(NONE), code) : code);
        }
    }

    // 16 dims from `i` on of a head of token `place`, dequantized.
    Floats at(int64_t place, int64_t head, int64_t i) const {
        const uint8_t* x = values + (place * heads + head) * dim + i;
        Floats value = widen(x, kind);
        if (scales) return value * splat(to_float(scales[place * heads + head]));
        if (kind == INT8) value = select(load_unsigned(x) == splat(NONE), splat(NAN), value);
        if (offsets) value = value - load(offsets + head * dim + i);
        return value * load(fixed + head * dim + i);
    }

    // The same of 32 dims as bf16.
    Ints line(int64_t place, int64_t head, int64_t i) const {
        return to_bf16(at(place, head, i), at(place, head, i + 16));
    }
};

// WRITE_8BIT, one token.
inline void write_8bit(const Op& op, const Step& step, int64_t row) {
    const bf16* x = static_cast<const bf16*>(op.a) + row * op.stride_a;
    const Cache8bit kept(op, op.out, op.i0, op.i1 / 2);
    for (int64_t head = 0; head < op.i1; head++, x += op.i0) kept.store(step.index[row], head, x);
}

// The bytes of all magnitudes of 8 bits as bf16, which can express each.
struct alignas(64) Magnitudes {
    uint8_t upper[128], lower[128];

    explicit Magnitudes(int64_t kind) {
        for (int i = 0; i < 128; i++) {
            alignas(64) uint8_t code[16] = {static_cast<uint8_t>(i)};
            const uint32_t bits = std::bit_cast<uint32_t>(first_lane(widen(code, kind)));
            upper[i] = static_cast<uint8_t>(bits >> 24), lower[i] = static_cast<uint8_t>(bits >> 16);
        }
    }
};

// Widens numbers of 8 bits to bf16, without their scales. Exact.
class Widening {
  public:
    explicit Widening(const Cache8bit& kept) : int8_(kept.kind == INT8), broken_(int8_ && !kept.scales) {
        if (!kept.kind) return;
        static const Magnitudes all[] = {Magnitudes(INT8), Magnitudes(E4M3), Magnitudes(E5M2)};
        const Magnitudes& of = all[kept.kind - INT8];
        upper_ = ByteTable(of.upper), lower_ = ByteTable(of.lower);
    }

    // `count` numbers, a multiple of 32, of each of `rows` rows, `stride` bytes apart.
    void run(const uint8_t* from, int64_t stride, int64_t rows, int64_t count, bf16* to, int64_t stride_to) const {
        if (!int8_) return all<false, false>(from, stride, rows, count, to, stride_to);
        broken_ ? all<true, true>(from, stride, rows, count, to, stride_to)
                : all<true, false>(from, stride, rows, count, to, stride_to);
    }

  private:
    template <bool INTEGERS, bool BROKEN>
    void all(const uint8_t* first, int64_t stride, int64_t rows, int64_t each, bf16* to_first, int64_t stride_to) const {
        const Ints sign = splat_bytes(0x80);
        const ByteTable upper = upper_, lower = lower_;
        const auto part = [&](Ints x, Ints& low, Ints& high) {
            x = order_bytes(x);
            const Ints size = INTEGERS ? abs_bytes(x) : x;
            high = upper(size);
            low = lower(size);
            high = and_or(x, sign, high);  // high | x & sign
            if (BROKEN) {
                high = select_bytes(x, sign, splat_bytes(0x7f), high);
                low = select_bytes(x, sign, splat_bytes(0xc0), low);
            }
        };
        for (int64_t row = 0; row < rows; row++, first += stride, to_first += stride_to) {
            const uint8_t* from = first;
            bf16* to = to_first;
            int64_t count = each;
            Ints low, high;
            for (; count >= 64; count -= 64, from += 64, to += 64) {
                part(load_line(from), low, high);
                store_line(to, interleave_ordered<0>(low, high));
                store_line(to + 32, interleave_ordered<1>(low, high));
            }
            if (!count) continue;
            part(load_half_line(from), low, high);
            store_line(to, interleave_ordered<0>(low, high));
        }
    }

    ByteTable upper_, lower_;
    bool int8_, broken_;
};

constexpr int64_t MAX_INT8_DIM = 512;  // dims of keys whose products with a query's integers fit into 32 bits

// Quantizes a query [dim] to integers of 16 bits, to a 65,000th of its largest: the upper bytes of four dims, `stride` apart, then
// the lower ones. Returns the scale, which is not finite if a value is not.
inline float round_query(const bf16* x, int64_t dim, uint32_t* to, int64_t stride) {
    const Ints sign = splat(0x7fffffff), half = splat(128);
    Ints bits = Ints{};  // compared so, a NaN is larger than infinity
    for (int64_t i = 0; i < dim; i += 16) bits = max(bits, bits_of(load(x + i)) & sign);
    const float amax = std::bit_cast<float>(max_all(bits));
    const bool finite = amax < INFINITY;
    const Floats inverse_scale = splat(finite && amax > 0x1p-100f ? 32512.0f / amax : 0.0f);
    for (int64_t i = 0; i < dim; i += 16) {
        const Ints integers = to_ints(load(x + i) * inverse_scale);
        alignas(16) uint32_t upper[4], lower[4];
        store_bytes(upper, signed_right(integers + half, 8));
        store_bytes(lower, integers);
        for (int64_t four = 0; four < 4; four++) {
            to[(i / 4 + four) * stride] = upper[four];
            to[((dim + i) / 4 + four) * stride] = lower[four];
        }
    }
    return finite ? amax / 32512.0f : amax;
}

// Reads 16 tokens at a time for attention: keys and values of some kv heads as bf16, or int8 unchanged.
class Sixteen {
  public:
    // `memory`: `size` elements.
    Sixteen(const Cache8bit& kept, int64_t head, int64_t heads, bf16* memory)
        : kept_(kept), widening_(kept), head_(head), heads_(heads), memory_(memory) {}

    static int64_t size(int64_t heads, int64_t dim) { return 2 * 16 * 2 * heads * dim; }
    bool int8_values() const { return kept_.kind == INT8 && kept_.scales; }  // whether values stay as they are
    bool int8_keys() const { return AMX && int8_values() && kept_.dim % 64 == 0 && kept_.dim <= MAX_INT8_DIM; }  // and keys
    int64_t token() const { return 2 * heads_ * kept_.dim; }            // elements from one to the next
    int64_t head() const { return head_; }
    int64_t place(int64_t turn) const { return places_[turn]; }
    const bf16* keys(int64_t turn) const { return memory_ + turn * 16 * token(); }
    const bf16* values(int64_t turn) const { return keys(turn) + heads_ * kept_.dim; }
    const int8_t* int8_at(int64_t turn, int64_t part) const {  // keys (part 0) or values (1)
        return reinterpret_cast<int8_t*>(kept_.values) + (places_[turn] * kept_.heads + part * kept_.heads / 2 + head_) * kept_.dim;
    }

    // Reads 16 tokens from `place` on into the half of the memory that `turn` selects.
    void widen(int64_t place, int64_t turn) {
        places_[turn] = place;
        if (int8_keys()) return;
        bf16* out = memory_ + turn * 16 * token();
        const int64_t dim = kept_.dim, all = kept_.heads / 2;
        const uint8_t* from = kept_.values + (place * kept_.heads + head_) * dim;
        const bool exact = kept_.scales || kept_.by_head;
        for (int64_t part = 0; part < 2 - int8_values(); part++, out += heads_ * dim, from += all * dim) {
            if (exact) {
                widening_.run(from, kept_.heads * dim, 16, heads_ * dim, out, token());
                continue;
            }
            for (int64_t i = 0; i < 16; i++)
                for (int64_t h = 0; h < heads_; h++)
                    for (int64_t d = 0; d < dim; d += 32)
                        store_line(out + i * token() + h * dim + d, kept_.line(place + i, part * all + head_ + h, d));
        }
    }

  private:
    const Cache8bit& kept_;
    Widening widening_;
    int64_t head_, heads_;
    bf16* memory_;
    int64_t places_[2] = {};
};

}  // namespace troupe
