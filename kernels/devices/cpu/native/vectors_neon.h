// What vectors are on NEON (aarch64): four registers each. See vectors.h. Products of bf16 and of bytes are instructions where the
// processor has them.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace troupe {

constexpr int PART = 4;  // lanes of a part
typedef float FloatPart __attribute__((vector_size(16)));
typedef int32_t IntPart __attribute__((vector_size(16)));

inline float32x4_t raw(FloatPart x) { return (float32x4_t)x; }
inline int32x4_t raw(IntPart x) { return (int32x4_t)x; }
inline uint8x16_t bytes(IntPart x) { return (uint8x16_t)x; }
inline uint16x8_t words(IntPart x) { return (uint16x8_t)x; }

inline FloatPart fma_part(FloatPart a, FloatPart b, FloatPart c) { return (FloatPart)vfmaq_f32(raw(c), raw(a), raw(b)); }
inline FloatPart round_part(FloatPart x) { return (FloatPart)vrndnq_f32(raw(x)); }
inline FloatPart floor_part(FloatPart x) { return (FloatPart)vrndmq_f32(raw(x)); }
inline IntPart nearest_part(FloatPart x) { return (IntPart)vcvtnq_s32_f32(raw(x)); }
inline IntPart splat_part_at(const void* from) { return (IntPart)vld1q_dup_s32(static_cast<const int32_t*>(from)); }
inline int signs(IntPart x) { return vaddvq_u32(vandq_u32((uint32x4_t)x, (uint32x4_t){1, 2, 4, 8})); }
inline IntPart add_dot_part(IntPart sum, IntPart a, IntPart b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + (IntPart)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
inline IntPart look_up_part(IntPart table, IntPart at) { return (IntPart)vqtbl1q_u8(bytes(table), bytes(at)); }

// Numbers of 16 bits in lanes.
inline FloatPart from_halves_part(IntPart x) { return (FloatPart)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)x))); }
inline IntPart to_halves_part(FloatPart x) { return (IntPart)vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(raw(x)))); }

inline IntPart pack_part(IntPart a, IntPart b) { return (IntPart)vuzp1q_u16(words(a), words(b)); }
inline IntPart low_words(IntPart a, IntPart b) { return (IntPart)vzip1q_u16(words(a), words(b)); }
inline IntPart high_words(IntPart a, IntPart b) { return (IntPart)vzip2q_u16(words(a), words(b)); }
inline IntPart low_bytes(IntPart a, IntPart b) { return (IntPart)vzip1q_u8(bytes(a), bytes(b)); }
inline IntPart high_bytes(IntPart a, IntPart b) { return (IntPart)vzip2q_u8(bytes(a), bytes(b)); }
inline IntPart low_lanes(IntPart a, IntPart b) { return (IntPart)vzip1q_s32(raw(a), raw(b)); }
inline IntPart high_lanes(IntPart a, IntPart b) { return (IntPart)vzip2q_s32(raw(a), raw(b)); }

// Reduces all lanes with `call`.
template <class Part, class Call>
[[gnu::always_inline]] inline Part fold(Part x, const Call& call) {
    x = call(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
    return call(x, __builtin_shufflevector(x, x, 1, 0, 3, 2));
}

inline void transpose_part(IntPart (&rows)[PART]) {
    const auto low = [](IntPart a, IntPart b) { return (IntPart)vzip1q_s64((int64x2_t)a, (int64x2_t)b); };
    const auto high = [](IntPart a, IntPart b) { return (IntPart)vzip2q_s64((int64x2_t)a, (int64x2_t)b); };
    const IntPart a = low_lanes(rows[0], rows[1]), b = high_lanes(rows[0], rows[1]);
    const IntPart c = low_lanes(rows[2], rows[3]), d = high_lanes(rows[2], rows[3]);
    rows[0] = low(a, c), rows[1] = high(a, c), rows[2] = low(b, d), rows[3] = high(b, d);
}

}  // namespace troupe

#include "vectors_parts.h"

namespace troupe {

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
inline Floats dot(Floats sum, Ints a, Ints b) {
    const auto one = [](FloatPart s, IntPart x, IntPart y) {
        return (FloatPart)vbfdotq_f32(raw(s), (bfloat16x8_t)x, (bfloat16x8_t)y);
    };
    return by_part(one, sum, a, b);
}
#else
inline Floats dot(Floats sum, Ints a, Ints b) { return dot_as_floats(sum, a, b); }
#endif

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool BYTE_DOTS = true;
inline Ints dot(Ints sum, Ints a, Ints b) {
    const auto one = [](IntPart s, IntPart x, IntPart y) { return (IntPart)vusdotq_s32(raw(s), bytes(x), (int8x16_t)y); };
    return ints(one, sum, a, b);
}
#else
constexpr bool BYTE_DOTS = false;
inline Ints dot(Ints sum, Ints a, Ints b) { return dot_as_words(sum, a, b); }
#endif

inline void stream_line(void* to, Ints x) { store_line(to, x); }
inline void finish_streams() {}
inline void pause() { asm volatile("yield"); }

class ByteTable {
  public:
    ByteTable() = default;
    explicit ByteTable(const uint8_t* from) : first_(vld1q_u8_x4(from)), second_(vld1q_u8_x4(from + 64)) {}
    Ints operator()(Ints at) const {  // an index beyond a table finds 0, or what was found before
        const auto one = [&](IntPart x) {
            const uint8x16_t place = vandq_u8(bytes(x), vdupq_n_u8(0x7f));
            return (IntPart)vqtbx4q_u8(vqtbl4q_u8(first_, place), second_, vsubq_u8(place, vdupq_n_u8(64)));
        };
        return ints(one, at);
    }

  private:
    uint8x16x4_t first_, second_;
};

inline Floats max_of_quarters(Floats x) {
    const Floats both = max(Floats{{x.part[0], x.part[1], x.part[0], x.part[1]}}, Floats{{x.part[2], x.part[3], x.part[2], x.part[3]}});
    const FloatPart larger = both.part[0] > both.part[1] ? both.part[0] : both.part[1];
    return {{larger, larger, larger, larger}};
}
inline Floats add_quarters(Floats sum, Floats x) {
    for (const FloatPart part : x.part) sum.part[0] = sum.part[0] + part;
    return sum;
}

[[gnu::always_inline]] inline Floats add_lanes(const Floats (&sums)[16]) {
    const auto all = [&](int n) { return raw(sums[n].part[0] + sums[n].part[1] + sums[n].part[2] + sums[n].part[3]); };
    return by_index<Floats>([&](int i) {
        const float32x4_t low = vpaddq_f32(all(4 * i), all(4 * i + 1)), high = vpaddq_f32(all(4 * i + 2), all(4 * i + 3));
        return (FloatPart)vpaddq_f32(low, high);
    });
}

}  // namespace troupe
