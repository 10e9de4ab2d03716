// Products with weights of few bits. Up to MAX_QUANTIZED_TOKENS tokens are quantized, if the weights are integers
// (gemm_superblocks.h). Up to 32 are multiplied
// with weights that are unpacked line by line: to scaled bf16 (gemm_scaled.h), or to bf16 whose sums are scaled (gemm_superblocks.h). For more tokens
// blocks of weights are unpacked to bf16 in the order of gemm_bf16.h, while the tokens are multiplied with the block before.
//
// gemm_scaled.h needs AVX-512 FP16, which every processor with AMX has. Without AMX up to 32 tokens are quantized and weights are unpacked
// by way of float32.
//
// A kind of product `P` has `with_supers(block, call)`, which calls with a block's description (gemm_superblocks.h). `integer_codes()`: its codes
// are integers (packed_codes.h). `Maker(p, block)` unpacks: `part<0>(line, out)` and then `part<1>(line, out)` give the 32 inputs of a line.
// `shares()`: inputs that share a scale; `by_shares()` and `by_scaled()`: whether MAX_QUANTIZED_TOKENS to 32 tokens are multiplied
// as in gemm_superblocks.h or as in gemm_scaled.h.
#pragma once
#include <optional>

#include "gguf_block_layout.h"
#ifdef __AMX_TILE__
#include "gemm_scaled.h"
#endif
#include "gemm_superblocks.h"
#include "scratch.h"

namespace troupe {

inline thread_local Scratch<bf16> widened;  // unpacked weights of blocks

struct Widened : Product {
    std::optional<Int16Tokens> quantized = {};    // its tokens, if they are quantized
    std::optional<Shared> shared = {};  // if they are not
    uint64_t number = ++numbered;       // identifies the product

    static inline std::atomic<uint64_t> numbered{0};

    static constexpr bool made = true;
    static constexpr bool opens = AMX;  // whether `by_shares()` may be true
    static constexpr bool sums = true;  // whether it needs the sums of tokens

#ifdef __AMX_TILE__
    static inline thread_local Scratch<float> factors_of_all;  // of the outputs whose weights this thread unpacked

    struct Rounded {
        Product::Rounded plain;
        Floats low, high;

        Rounded(const Widened& p, int64_t output)
            : plain(p, output), low(load(factors_of_all.of(0) + output)),
              high(load(factors_of_all.of(0) + output + TILE)) {}

        Ints operator()(const float* sums, int64_t) const {
            return to_bf16(fma(load(sums), low, plain.low), fma(load(sums + TILE), high, plain.high));
        }
    };
#endif
};

#ifdef __AMX_TILE__

// Unpacks a block's weights as shares of its outputs' factors.
template <class P>
class ScaledMaker {
  public:
    ScaledMaker(const P& p, int64_t block) : p_(p), block_(block) {
        float* to = Widened::factors_of_all.of(blocks(p.outputs) * WIDE) + block * WIDE;
        p.with_supers(block, [&]<class S>(const S& supers) {
            for (int64_t half = 0; half < 2; half++) {
                const Floats factor = Scaling<S, true>::factor(supers, p.lines, half);
                store(to + half * TILE, factor);
                shares_[half] = Scaling<S, true>::share(factor);
            }
        });
    }

    // Half of the outputs.
    template <int SECOND>
    void part(int64_t line, bf16* out) {
        p_.with_supers(block_, [&]<class S>(const S& supers) {
            if (!SECOND) supers.fetch(line);
            Scaling<S, true>(supers, shares_).half(line, SECOND, out + SECOND * CELL / 2);
        });
    }

  private:
    const P& p_;
    const int64_t block_;
    Floats shares_[2];
};

#endif

// What unpacks the weights of P for more than 32 tokens.
template <class P, bool = AMX && P::integer_codes()>
struct MakerOf {
    using Maker = typename P::Maker;
};

#ifdef __AMX_TILE__
template <class P>
struct MakerOf<P, true> {
    using Maker = ScaledMaker<P>;
};
#endif

template <class M>
void make_line(M& maker, int64_t line, bf16* out) {
    maker.template part<0>(line, out);
    maker.template part<1>(line, out);
}

// All of a block.
template <class P>
const char* widen_block(const P& p, int64_t block, bf16* out) {
    typename MakerOf<P>::Maker maker(p, block);
    for (int64_t line = 0; line < p.lines; line++) make_line(maker, line, out + line * CELL);
    written();
    return reinterpret_cast<const char*>(out);
}

// Unpacks blocks of weights, half a line at a time, while others are multiplied.
template <class P>
class Made {
  public:
    static constexpr bool fetched = false;

    explicit Made(const P& p) : p_(p) {}

    // Begins a block; of a gated product the gates come first.
    void begin(int64_t block, bf16* out) {
        maker_.emplace(p_, block), out_ = out, block_ = block, line_ = 0, left_ = p_.gated;
    }

    void fetch() {
        if (!maker_) return;
        second_ ? maker_->template part<1>(line_, out_) : maker_->template part<0>(line_, out_);
        written();
        second_ = !second_;
        if (second_) return;
        out_ += CELL;
        if (++line_ < p_.lines) return;
        if (!left_) return maker_.reset();
        left_ = false, line_ = 0;
        maker_.emplace(p_, block_ + blocks(p_.wide()));
    }

    void finish() {
        while (maker_) fetch();
    }

  private:
    const P& p_;
    std::optional<typename MakerOf<P>::Maker> maker_;
    bf16* out_ = nullptr;
    int64_t block_ = 0, line_ = 0;
    bool left_ = false, second_ = false;
};

// Blocks `first` to `end` for more than 32 rows: while one is multiplied, the next is unpacked.
template <class P>
void multiply_made_blocks(const P& p, int64_t first, int64_t end) {
    const int64_t size = p.inputs() * WIDE, all = size * (1 + p.gated);
    bf16* space = widened.of(2 * all);
    alignas(64) float sums[2][2][WIDE * WIDE];
    Pending<float> pending;
    Made<P> next(p);
    next.begin(first, space);
    next.finish();
    for (int64_t block = first, turn = 0; block < end; block++) {
        const char* weight = reinterpret_cast<const char*>(space + (block - first) % 2 * all);
        if (block + 1 < end) next.begin(block + 1, space + (block + 1 - first) % 2 * all);
        for (int64_t row = 0; row < p.rows; row += WIDE, turn ^= 1) {
            const int64_t rows = std::min(WIDE, p.rows - row);
            multiply_block(p, weight, row, rows, sums[turn][0], pending, next);
            pending = {sums[turn][0], nullptr, row, rows, block * WIDE};
            if (!p.gated) continue;
            multiply_block(p, weight + size * sizeof(bf16), row, rows, sums[turn][1], {}, next);
            pending = {sums[turn][1], sums[turn][0], row, rows, block * WIDE};
        }
        next.finish();
    }
    finish(p, pending, 0, pending.rows);
}

// Up to 32 rows: each line is multiplied once it is unpacked.
template <class P>
void multiply_widened(const P& p, int64_t block, int64_t row, int64_t rows, float* sums) {
    alignas(64) bf16 wide[2][CELL];
    const char* x = p.x + row * p.stride_x;
    TileSums<float> tiles(rows, sums);
    tiles.begin();
    typename P::Maker maker(p, block);
    make_line(maker, 0, wide[0]);
    for (int64_t line = 0, turn = 0; line < p.lines; line++, turn ^= 1, x += LINE) {
        // A load of what was stored just now would wait for the store, so the next line is unpacked first.
        if (line + 1 < p.lines) make_line(maker, line + 1, wide[turn ^ 1]);
        written();
        tiles.add(x, p.stride_x, wide[turn], [] {});
    }
    tiles.end();
}

template <class P>
void multiply_rounded(const P& p, int64_t block, int64_t rows, float* sums) {
    p.with_supers(block, [&](const auto& supers) {
        const int64_t groups = (rows + QUANTIZED_ROWS - 1) / QUANTIZED_ROWS;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * rows / groups, end = (group + 1) * rows / groups;
            with_rows(end - row, [&]<int ROWS>() {
                if constexpr (ROWS <= QUANTIZED_ROWS) multiply_vectors<ROWS>(supers, p.quantized->from(row), sums + row * WIDE);
            });
        }
    });
}

#ifdef __AMX_TILE__
template <class P>
void multiply_scales(const P& p, int64_t block, int64_t rows, float* sums) {
    if constexpr (P::integer_codes())
        p.with_supers(block, [&]<class S>(const S& supers) {
            const bf16* of_groups = nullptr;
            if constexpr (S::ZEROS && S::GROUP != 0) of_groups = group_sums.of<S::GROUP>(p.number, p.x, p.stride_x, rows, p.lines);
            multiply_scaled(supers, {p.x, p.stride_x, rows, p.lines, of_groups}, sums);
        });
}

#endif

template <class P>
void multiply_widened_chunk(void* context, int64_t chunk, int) {
    const P& p = *static_cast<const P*>(context);
    const int64_t all = blocks(p.wide()), first = chunk * p.chunk, end = std::min(first + p.chunk, all);
    if (p.rows > WIDE) return multiply_made_blocks(p, first, end);
    alignas(64) float sums[2][WIDE * WIDE];
    for (int64_t block = first; block < end; block++) {
        const auto run = [&](int64_t of, float* to) {
            if constexpr (P::integer_codes())
                if (p.quantized) return multiply_rounded(p, of, p.rows, to);
#ifdef __AMX_TILE__
            if (p.by_scaled()) return multiply_scales(p, of, p.rows, to);
#endif
            if constexpr (P::opens)
                if (p.shared) return p.with_supers(of, [&](const auto& supers) { multiply_shared(supers, *p.shared, 0, p.rows, to); });
            if constexpr (!P::integer_codes()) multiply_widened(p, of, 0, p.rows, to);
        };
        if (p.gated) run(block, sums[1]);
        run(block + (p.gated ? all : 0), sums[0]);
        written();
        finish<Product>(p, {sums[0], p.gated ? sums[1] : nullptr, 0, p.rows, block * WIDE}, 0, p.rows);
    }
}

// What a product needs of its tokens beforehand. `first`: where its rows begin in `planes`.
template <class P>
struct Preparing {
    const P& p;
    Planes& planes;
    int64_t first = 0;

    bool rounded() const { return p.rows <= MAX_QUANTIZED_TOKENS && P::integer_codes(); }
    bool shared() const { return !rounded() && p.rows <= WIDE && p.by_shares(); }
    bool wanted() const { return rounded() || (P::sums && shared()); }
    int64_t parts() const { return p.inputs() / p.shares(); }
    float* shares() const { return planes.shares.of(0) + first * p.lines * HALVES * 2; }  // the parts of other products may be more
    void reserve(int64_t rows) const { planes.reserve(rows, p.lines, rounded()); }

    void row(int64_t row) const {
        const bf16* x = reinterpret_cast<const bf16*>(p.x + row * p.stride_x);
        if (rounded()) return round_planes(x, p.lines, p.offset(), first + row, planes);
        share_out(x, p.inputs(), p.shares(), static_cast<float>(128 + p.offset()), shares() + row * parts() * 2);
    }

    void attach(P& to) const {
        if (rounded()) to.quantized.emplace(planes, first, p.lines);
        if (shared()) to.shared = {p.x, p.stride_x, P::sums ? shares() : nullptr, parts(), p.lines};
    }
};

template <class P>
void prepare_rows_chunk(void* context, int64_t chunk, int) {
    const auto& of = *static_cast<const Preparing<P>*>(context);
    for (int64_t row = 4 * chunk; row < std::min(of.p.rows, 4 * chunk + 4); row++) of.row(row);
}

template <class P>
void multiply_made(Team& team, P p, Planes& planes) {
    if (p.rows >= PANEL_MIN_ROWS) return multiply_all(team, p);
    Preparing<P> preparing = {p, planes};
    if (preparing.wanted()) {
        preparing.reserve(p.rows);
        team.each((p.rows + 3) / 4, prepare_rows_chunk<P>, &preparing);
    }
    preparing.attach(p);
    team.each(divide(p, team.size()), multiply_widened_chunk<P>, &p);
}

}  // namespace troupe
