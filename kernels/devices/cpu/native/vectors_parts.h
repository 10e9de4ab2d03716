// Vectors of 16 lanes in parts, each in a register of fewer lanes. Includes none: vectors_avx2.h and vectors_neon.h say what a part is,
// what depends on the processor, and then include this.
//
// A part is a vector of the compiler's (GCC's vector extension). Whole vectors are none: GCC passes those that are longer than a
// register through memory.
#pragma once
namespace troupe {

constexpr int PARTS = 16 / PART;

struct Floats {
    FloatPart part[PARTS];
};

struct Ints {
    IntPart part[PARTS];
};

constexpr int64_t REGISTERS = 8;  // how many vectors fit into registers

typedef uint32_t UnsignedPart __attribute__((vector_size(4 * PART)));
typedef int16_t WordsPart __attribute__((vector_size(4 * PART)));
typedef int8_t BytesPart __attribute__((vector_size(4 * PART)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * PART)));
typedef uint8_t FourthBytes __attribute__((vector_size(PART)));
typedef int8_t FourthSigned __attribute__((vector_size(PART)));

// {call(0), call(1), ...}
template <class Out, class Call>
[[gnu::always_inline]] inline Out by_index(const Call& call) {
    return [&]<int... I>(std::integer_sequence<int, I...>) ALWAYS_INLINE {
        return Out{{call(I)...}};
    }(std::make_integer_sequence<int, PARTS>());
}

// {call(first parts), call(second parts), ...}
template <class Out = Floats, class Call, class... In>
[[gnu::always_inline]] inline Out by_part(const Call& call, const In&... x) {
    return by_index<Out>([&](int i) { return call(x.part[i]...); });
}
template <class... In, class Call>
[[gnu::always_inline]] inline Ints ints(const Call& call, const In&... x) {
    return by_part<Ints>(call, x...);
}

template <class Part>
inline Part load_part(const void* from) {
    Part x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats splat(float x) { return by_index<Floats>([&](int) { return FloatPart{} + x; }); }
inline Ints splat(int32_t x) { return by_index<Ints>([&](int) { return IntPart{} + x; }); }
inline Ints splat_at(const void* from) { return by_index<Ints>([&](int) { return splat_part_at(from); }); }
inline Ints splat_words(int x) { return splat(static_cast<int32_t>(0x10001u * static_cast<uint16_t>(x))); }
inline Ints splat_bytes(int x) { return splat(static_cast<int32_t>(0x1010101u * static_cast<uint8_t>(x))); }

inline Floats operator+(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x + y; }, a, b); }
inline Floats operator-(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x - y; }, a, b); }
inline Floats operator*(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x * y; }, a, b); }
inline Floats operator/(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x / y; }, a, b); }
inline Floats fma(Floats a, Floats b, Floats c) {
    return by_part([](FloatPart x, FloatPart y, FloatPart z) { return fma_part(x, y, z); }, a, b, c);
}
inline Floats fms(Floats a, Floats b, Floats c) {
    return by_part([](FloatPart x, FloatPart y, FloatPart z) { return fma_part(x, y, -z); }, a, b, c);
}
inline Floats fnma(Floats a, Floats b, Floats c) {
    return by_part([](FloatPart x, FloatPart y, FloatPart z) { return fma_part(-x, y, z); }, a, b, c);
}
inline Floats max(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x > y ? x : y; }, a, b); }
inline Floats min(Floats a, Floats b) { return by_part([](FloatPart x, FloatPart y) { return x < y ? x : y; }, a, b); }
inline Floats round(Floats x) { return by_part([](FloatPart y) { return round_part(y); }, x); }
inline Floats floor(Floats x) { return by_part([](FloatPart y) { return floor_part(y); }, x); }
inline Floats fraction(Floats x) { return x - floor(x); }

inline Ints operator+(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x + y; }, a, b); }
inline Ints operator-(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x - y; }, a, b); }
inline Ints operator&(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x & y; }, a, b); }
inline Ints operator|(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x | y; }, a, b); }
inline Ints operator^(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x ^ y; }, a, b); }
inline Ints operator<<(Ints x, int bits) { return ints([=](IntPart y) { return y << bits; }, x); }
inline Ints operator>>(Ints x, int bits) { return ints([=](IntPart y) { return (IntPart)((UnsignedPart)y >> bits); }, x); }
inline Ints signed_right(Ints x, int bits) { return ints([=](IntPart y) { return y >> bits; }, x); }
inline Ints max(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x > y ? x : y; }, a, b); }
inline Ints min(Ints a, Ints b) { return ints([](IntPart x, IntPart y) { return x < y ? x : y; }, a, b); }
inline Ints select_bits(Ints where, Ints a, Ints b) {
    return ints([](IntPart w, IntPart x, IntPart y) { return (w & x) | (~w & y); }, where, a, b);
}
inline Ints and_or(Ints a, Ints b, Ints c) { return (a & b) | c; }
inline Ints add_words(Ints a, Ints b) {
    return ints([](IntPart x, IntPart y) { return (IntPart)((WordsPart)x + (WordsPart)y); }, a, b);
}
inline Ints words_left(Ints x, int bits) { return ints([=](IntPart y) { return (IntPart)((WordsPart)y << bits); }, x); }
inline Ints words_signed_right(Ints x, int bits) { return ints([=](IntPart y) { return (IntPart)((WordsPart)y >> bits); }, x); }
inline Ints words_right(Ints x, int bits) {
    typedef uint16_t Words __attribute__((vector_size(4 * PART)));
    return ints([=](IntPart y) { return (IntPart)((Words)y >> bits); }, x);
}
inline Ints abs_bytes(Ints x) {
    return ints([](IntPart y) { return (IntPart)((BytesPart)y < 0 ? -(BytesPart)y : (BytesPart)y); }, x);
}
inline Ints select_bytes(Ints equal, Ints to, Ints a, Ints b) {
    const auto one = [](IntPart w, IntPart v, IntPart x, IntPart y) {
        return (IntPart)((BytesPart)w == (BytesPart)v ? (BytesPart)x : (BytesPart)y);
    };
    return ints(one, equal, to, a, b);
}
inline Ints select_words(Ints x, Ints clear, Ints a, Ints b) {
    const auto one = [](IntPart w, IntPart x, IntPart y) { return (IntPart)((WordsPart)w == 0 ? (WordsPart)x : (WordsPart)y); };
    return ints(one, x & clear, a, b);
}

inline Floats to_floats(Ints x) { return by_part([](IntPart y) { return __builtin_convertvector(y, FloatPart); }, x); }
inline Ints to_ints(Floats x) { return ints([](FloatPart y) { return nearest_part(y); }, x); }
inline Ints bits_of(Floats x) { return ints([](FloatPart y) { return (IntPart)y; }, x); }
inline Floats from_bits(Ints x) { return by_part([](IntPart y) { return (FloatPart)y; }, x); }
inline Floats abs(Floats x) { return from_bits(bits_of(x) & splat(0x7fffffff)); }

// Which lanes of part `i` are set in a mask.
inline IntPart lanes_of(Mask mask, int i) {
    IntPart bits;
    for (int lane = 0; lane < PART; lane++) bits[lane] = 1 << lane;
    return ((IntPart{} + (mask >> (i * PART))) & bits) == bits;
}
template <class Call, class V>
[[gnu::always_inline]] inline Mask mask_of(const Call& call, const V& a, const V& b) {
    int result = 0;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) result |= signs((IntPart)call(a.part[i], b.part[i])) << (i * PART);
    return static_cast<Mask>(result);
}
inline Mask operator>(Floats a, Floats b) { return mask_of([](FloatPart x, FloatPart y) { return x > y; }, a, b); }
inline Mask operator>=(Floats a, Floats b) { return mask_of([](FloatPart x, FloatPart y) { return x >= y; }, a, b); }
inline Mask operator<(Floats a, Floats b) { return mask_of([](FloatPart x, FloatPart y) { return x < y; }, a, b); }
inline Mask operator==(Floats a, Floats b) { return mask_of([](FloatPart x, FloatPart y) { return x == y; }, a, b); }
inline Mask operator>(Ints a, Ints b) { return mask_of([](IntPart x, IntPart y) { return x > y; }, a, b); }
inline Mask operator<=(Ints a, Ints b) { return mask_of([](IntPart x, IntPart y) { return x <= y; }, a, b); }
inline Mask operator==(Ints a, Ints b) { return mask_of([](IntPart x, IntPart y) { return x == y; }, a, b); }
inline Floats select(Mask mask, Floats a, Floats b) {
    return by_index<Floats>([&](int i) { return lanes_of(mask, i) ? a.part[i] : b.part[i]; });
}
inline Ints select(Mask mask, Ints a, Ints b) {
    return by_index<Ints>([&](int i) { return lanes_of(mask, i) ? a.part[i] : b.part[i]; });
}
inline Floats keep(Mask mask, Floats x) {
    return by_index<Floats>([&](int i) { return (FloatPart)((IntPart)x.part[i] & lanes_of(mask, i)); });
}

// A number of all lanes.
template <class V, class Call>
[[gnu::always_inline]] inline auto of_lanes(const V& x, const Call& call) {
    if constexpr (PARTS == 2) return fold(call(x.part[0], x.part[1]), call)[0];
    else return fold(call(call(x.part[0], x.part[1]), call(x.part[2], x.part[3])), call)[0];
}
inline float add_all(Floats x) { return of_lanes(x, [](FloatPart a, FloatPart b) { return a + b; }); }
inline float max_all(Floats x) { return of_lanes(x, [](FloatPart a, FloatPart b) { return a > b ? a : b; }); }
inline int32_t add_all(Ints x) { return of_lanes(x, [](IntPart a, IntPart b) { return a + b; }); }
inline int32_t max_all(Ints x) { return of_lanes(x, [](IntPart a, IntPart b) { return a > b ? a : b; }); }
inline int32_t min_all(Ints x) { return of_lanes(x, [](IntPart a, IntPart b) { return a < b ? a : b; }); }
inline float first_lane(Floats x) { return x.part[0][0]; }

// x times 2 to a power. At most 2^128, which is infinity.
inline Floats scale(Floats x, Floats power) {
    const Ints integers = to_ints(min(splat(128.0f), max(splat(-127.0f), floor(power))));
    return x * from_bits((integers + splat(127)) << 23);
}
inline Floats bounded_power(Floats x) { return min(splat(200.0f), max(splat(-200.0f), x)); }  // a NaN stays one

inline Floats load(const float* from) { return by_index<Floats>([&](int i) { return load_part<FloatPart>(from + i * PART); }); }
inline Ints load_line(const void* from) {
    return by_index<Ints>([&](int i) { return load_part<IntPart>(static_cast<const char*>(from) + i * 4 * PART); });
}
inline Ints load_half_line(const void* from) {
    Ints x = {};
    std::memcpy(&x, from, 32);
    return x;
}
template <class From, class T>
[[gnu::always_inline]] inline Ints load_wider(const T* from) {
    return by_index<Ints>([&](int i) { return __builtin_convertvector(load_part<From>(from + i * PART), IntPart); });
}
inline Ints load_signed(const void* from) { return load_wider<FourthSigned>(static_cast<const char*>(from)); }
inline Ints load_unsigned(const void* from) { return load_wider<FourthBytes>(static_cast<const char*>(from)); }
inline Floats load(const bf16* from) { return from_bits(load_wider<HalfWords>(from) << 16); }
inline Floats load(const bf16* from, Mask mask) {
    if (mask == 0xffff) return load(from);
    bf16 some[16] = {};
    std::memcpy(some, from, std::bit_width(mask) * sizeof(bf16));
    return load(some);
}
inline Floats from_halves(Ints x) { return by_part([](IntPart y) { return from_halves_part(y); }, x); }
inline Ints to_halves(Floats x) { return ints([](FloatPart y) { return to_halves_part(y); }, x); }
inline Floats load_halves(const void* from) { return from_halves(load_wider<HalfWords>(static_cast<const bf16*>(from))); }
inline Ints lane_numbers() {
    static constexpr uint8_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_unsigned(all);
}

// Part by part: of a copy of 64 bytes GCC 12 makes a move in one piece, for which eight registers only are right.
inline void store_line(void* to, Ints x) {
    unrolled<PARTS>([&](auto i) { std::memcpy(static_cast<char*>(to) + i * 4 * PART, &x.part[i], 4 * PART); });
}
inline void store(float* to, Floats x) { store_line(to, bits_of(x)); }
inline void store_words(void* to, Ints x, int64_t count) {
    if (count >= 32) return store_line(to, x);
    char some[64];
    store_line(some, x);
    std::memcpy(to, some, 2 * count);
}
// The lowest byte of each lane; store_fours: of four the second and third swapped.
inline void store_bytes(void* to, Ints x) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
        const FourthBytes bytes = __builtin_convertvector(x.part[i], FourthBytes);
        std::memcpy(static_cast<char*>(to) + i * PART, &bytes, PART);
    }
}

template <class T>
inline auto gathered(const T* from, Ints at, Mask mask) {
    alignas(64) int32_t places[16];
    alignas(64) T result[16];
    store_line(places, at);
    for (int lane = 0; lane < 16; lane++) result[lane] = mask >> lane & 1 ? from[places[lane]] : T{};
    return std::bit_cast<std::conditional_t<std::is_same_v<T, float>, Floats, Ints>>(result);
}
inline Floats gather(const float* from, Ints at, Mask mask) { return gathered(from, at, mask); }
inline Ints gather(const int32_t* from, Ints at) { return gathered(from, at, 0xffff); }
inline Floats pick(const bf16* from, int64_t count, Ints at) {
    alignas(64) uint32_t places[16], result[16];
    store_line(places, at);
    for (int lane = 0; lane < 16; lane++)
        result[lane] = places[lane] >> 16 < count ? static_cast<uint32_t>(from[places[lane] >> 16]) << 16 : 0;
    return from_bits(load_line(result));
}
inline Ints table_of_bytes(const void* from) {
    Ints x;
    for (int i = 0; i < 4; i++) std::memcpy(reinterpret_cast<char*>(&x) + 16 * i, from, 16);
    return x;
}
inline Ints look_up_bytes(Ints table, Ints at) { return ints([](IntPart t, IntPart x) { return look_up_part(t, x); }, table, at); }
inline Ints look_up_words(Ints table, Ints at) {  // each of up to eight, as two bytes
    const auto one = [](IntPart t, IntPart x) {
        return look_up_part(t, (IntPart)(((WordsPart)x & 7) * 0x202 + 0x100));
    };
    return ints(one, table, at);
}

// Rounds to bf16, in the upper halves; the lower ones are of no use.
inline Ints round_upper(Floats x) {
    const auto one = [](FloatPart y) {
        const IntPart bits = (IntPart)y, nearest = bits + 0x7fff + ((bits >> 16) & 1);
        return (y != y) ? (bits | 0x400000) : nearest;
    };
    return ints(one, x);
}
inline Floats round_bf16(Floats x) { return from_bits(round_upper(x) & splat(static_cast<int32_t>(0xffff0000))); }
inline bf16 to_bf16(float x) { return static_cast<bf16>(static_cast<uint32_t>(round_upper(splat(x)).part[0][0]) >> 16); }

// The lower halves of two vectors, as a line.
inline Ints pack(Ints a, Ints b) {
    return by_index<Ints>([&](int i) {
        const Ints& from = i < PARTS / 2 ? a : b;
        return pack_part(from.part[2 * i % PARTS], from.part[2 * i % PARTS + 1]);
    });
}
inline void store_lower(void* to, Ints x) {
    const Ints line = pack(x & splat(0xffff), x);
    std::memcpy(to, &line, 32);
}
inline void store_fours(void* to, Ints x) {
    uint8_t bytes[16];
    store_bytes(bytes, x);
    for (int four = 0; four < 16; four += 4) std::swap(bytes[four + 1], bytes[four + 2]);
    std::memcpy(to, bytes, sizeof bytes);
}
inline Ints to_bf16(Floats low, Floats high) { return pack(round_upper(low) >> 16, round_upper(high) >> 16); }
inline void store(bf16* to, Floats x) {
    const Ints line = to_bf16(x, x);
    std::memcpy(to, &line, 32);
}
inline Ints pair_words(Floats even, Floats odd) {
    return (round_upper(even) >> 16) | (round_upper(odd) & splat(static_cast<int32_t>(0xffff0000)));
}

// Interleaves one half of two vectors. low(a, b), high(a, b): of a part.
template <int HALF, class Low, class High>
[[gnu::always_inline]] inline Ints interleave(Ints a, Ints b, const Low& low, const High& high) {
    return by_index<Ints>([&](int i) {
        const int at = HALF * PARTS / 2 + i / 2;
        return i % 2 ? high(a.part[at], b.part[at]) : low(a.part[at], b.part[at]);
    });
}
template <int HALF>
inline Ints interleave_words(Ints a, Ints b) {
    return interleave<HALF>(a, b, low_words, high_words);
}
inline Ints order_bytes(Ints x) { return x; }
template <int HALF>
inline Ints interleave_ordered(Ints low, Ints high) {
    return interleave<HALF>(low, high, low_bytes, high_bytes);
}
template <int HALF>
inline Floats widen(Ints line) {
    return from_bits(interleave_words<HALF>(Ints{}, line));
}
inline void spread(Floats of, Floats* to) {
    to[0] = from_bits(interleave<0>(bits_of(of), bits_of(of), low_lanes, high_lanes));
    to[1] = from_bits(interleave<1>(bits_of(of), bits_of(of), low_lanes, high_lanes));
}

// The outputs of a half, each with two of its inputs: [pair][eight outputs].
struct PairOrder {
    Floats floats(Ints codes, int pair, int eight) const {
        const Ints words = pair ? words_right(codes, 8) : codes & splat_words(0xff);
        return to_floats(eight ? interleave_words<1>(words, Ints{}) : interleave_words<0>(words, Ints{}));
    }
};

// Adds the products of the two words of each lane.
inline Ints dot_words(Ints sum, Ints a, Ints b) {
    return ints([](IntPart s, IntPart x, IntPart y) { return add_dot_part(s, x, y); }, sum, a, b);
}

// Products of bf16 as floats, and of bytes as words: where the processor has none of its own.
inline Floats dot_as_floats(Floats sum, Ints a, Ints b) {
    const Ints odd = splat(static_cast<int32_t>(0xffff0000));
    sum = fma(from_bits(a << 16), from_bits(b << 16), sum);
    return fma(from_bits(a & odd), from_bits(b & odd), sum);
}
inline Ints dot_as_words(Ints sum, Ints a, Ints b) {
    sum = dot_words(sum, a & splat_words(0xff), words_signed_right(words_left(b, 8), 8));
    return dot_words(sum, words_right(a, 8), words_signed_right(b, 8));
}

inline void transpose(Ints* rows) {
    Ints result[16];
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; j++) {
            IntPart block[PART];
#pragma GCC unroll 8
            for (int row = 0; row < PART; row++) block[row] = rows[i * PART + row].part[j];
            transpose_part(block);
#pragma GCC unroll 8
            for (int row = 0; row < PART; row++) result[j * PART + row].part[i] = block[row];
        }
    for (int i = 0; i < 16; i++) rows[i] = result[i];
}

}  // namespace troupe
