// Products of tokens with packed weights, of any kind of numbers that tiles.h multiplies. A row's result is the same bits
// whatever rows are beside it.
//
// A kind of product declares `Sum`, the type of its sums, which decides the type of its numbers (tiles.h), and
// `Rounded(product, output)`, which rounds the sums of 32 outputs from `output` on to bf16.
//
// Few rows: weights are read once, and each block of 32 outputs is multiplied with all rows. Many rows are divided into
// panels, whose tokens are copied in the order of the steps and stay in a core's second cache. As many lines of a block's
// weights as the first cache holds are multiplied with all rows of the panel and added to their sums; on AMX tokens are
// loaded past the first cache. Threads claim panels, and share the outputs of the last ones.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <new>
#include <vector>

#include "thread_team.h"
#include "tiles.h"
#include "vectors.h"

namespace troupe {

constexpr int64_t PANEL_MIN_ROWS = 128;    // from so many rows on a panel is worth copying tokens
constexpr int64_t L1_SLICE_LINES = 12;   // lines of a block's weights, 24 kB, that the first cache holds beside tokens and sums
// The same for at least LONG_SLICE_MIN_BLOCKS blocks of rows, so that sums are loaded less often.
constexpr int64_t L1_LONG_SLICE_LINES = 16;
constexpr int64_t LONG_SLICE_MIN_BLOCKS = 12;
constexpr int64_t REGISTER_LINES = 8;    // lines that few rows are multiplied with while their sums are in registers, without AMX
constexpr int64_t PREFETCH_BYTES = (AMX ? 4 : LARGE ? 8 : 2) << 10;  // bytes by which weights of few rows are prefetched (AMX: of few bits)
constexpr int64_t L2_BYTES = (AMX ? 2048 : 1024) << 10;  // bytes of a core's second cache
constexpr int64_t PANEL_TOKEN_BYTES = L2_BYTES / 16 * 9;            // bytes of a panel's tokens that it holds beside weights
constexpr int64_t PANEL_MAX_ROWS = 576;                          // rows of a panel

// One thread's memory for a panel, in large pages if the system has them. It is mapped for this purpose: memory of the
// allocator may have been written to before, and then keeps its small pages.
class Panel {
  public:
    Panel() = default;
    Panel(const Panel&) = delete;
    ~Panel() {
        if (size_) munmap(memory_, size_);
    }

    char* reserve(int64_t bytes) {
        constexpr int64_t page = 2 << 20;
        if (bytes + page > size_) {
            if (size_) munmap(memory_, size_);
            size_ = (bytes + 2 * page - 1) / page * page;
            memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory_ == MAP_FAILED) size_ = 0, throw std::bad_alloc();
            madvise(memory_, size_, MADV_HUGEPAGE);
        }
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_) + page - 1) / page * page);
    }

  private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

// What all kinds of products have. `gated`: the outputs are gates and as many others, and the result is silu(gate) * other.
struct Operands {
    const char* x;
    int64_t stride_x;  // bytes from one token to the next
    const char* weight;
    const bf16* bias;
    bf16* out;
    int64_t stride_out, rows, lines, outputs;
    bool gated;
    std::vector<Panel>* panels;  // by thread
    int64_t chunk = 1;           // blocks of outputs, or of gates, in a chunk of work
    bool past = false;           // whether results are written past the caches

    static constexpr bool made = false;  // whether weights are unpacked before they are multiplied

    int64_t wide() const { return gated ? outputs / 2 : outputs; }  // columns of the result
    const char* block(int64_t output) const { return weight + output * LINE * lines; }
    const char* coming(int64_t output) const { return block(output); }         // the first memory that 32 outputs need
    const char* ready(int64_t output, char*) const { return block(output); }  // the weights of 32 outputs for panels
};

// Sums [rows][32] of a block that are not yet rounded and stored.
template <class Sum>
struct Pending {
    const Sum *sums = nullptr, *gates = nullptr;
    int64_t row = 0, rows = 0, output = 0;
};

// Prefetches the next block's weights: a core that waits for memory at the start of each block would wait half its time.
struct Ahead {
    static constexpr bool fetched = true;
    const char* from = nullptr;
    int64_t lines = 0;  // of memory at each step

    void fetch() {
        for (int64_t line = 0; line < lines; line++, from += LINE) prefetch_second(from);
    }
};

// silu(gate) * other of 32 bf16 each: the result of a product that was stored and then gated.
inline Ints gated(Ints gate, Ints other) {
    const Floats first = silu(widen<0>(gate)) * widen<0>(other);
    const Floats second = silu(widen<1>(gate)) * widen<1>(other);
    return to_bf16(first, second);
}

// Rounds and stores rows `begin` to `end`.
template <class P>
void finish(const P& p, const Pending<typename P::Sum>& of, int64_t begin, int64_t end) {
    if (begin == end) return;  // without rows the factors may not be there
    const int64_t left = p.wide() - of.output;
    bf16* out = p.out + (of.row + begin) * p.stride_out + of.output;
    const auto put = [&](const auto& line) {
        for (int64_t i = begin; i < end; i++, out += p.stride_out) {
            if (p.past && left >= WIDE) {
                stream_line(out, line(i));
            } else {
                store_words(out, line(i), left);
            }
        }
    };
    const typename P::Rounded rounded(p, of.output);
    if (of.gates) {
        const typename P::Rounded other(p, of.output + p.wide());
        put([&](int64_t i) {
            return gated(rounded(of.gates + i * WIDE, of.row + i), other(of.sums + i * WIDE, of.row + i));
        });
    } else {
        put([&](int64_t i) { return rounded(of.sums + i * WIDE, of.row + i); });
    }
}

// Products of up to 32 rows with one block. `before`: sums that are finished meanwhile, by vectors beside the tiles. `ahead`: the
// next weights, which are prefetched (`fetched`) or unpacked. `then`: the weights that this thread needs after the block, for up
// to 16 rows.
template <class P, class A>
void multiply_block(const P& p, const char* weight, int64_t row, int64_t rows, typename P::Sum* sums,
                    const Pending<typename P::Sum>& before, A& ahead, const char* then = nullptr) {
    const char* x = p.x + row * p.stride_x;
    TileSums<typename P::Sum> tiles(rows, sums);
    tiles.begin();
    if constexpr (!AMX) {
        finish(p, before, 0, before.rows);
        for (int64_t line = 0; line < p.lines; line += REGISTER_LINES, weight += REGISTER_LINES * BLOCK_LINE_BYTES) {
            const int64_t lines = std::min(REGISTER_LINES, p.lines - line);
            tiles.add(x + line * LINE, p.stride_x, LINE, weight, lines, A::fetched ? PREFETCH_BYTES : 0);
            if (!A::fetched)
                for (int64_t i = 0; i < lines; i++) ahead.fetch();
        }
    } else if (rows > TILE) {
        const int64_t each = (before.rows + p.lines - 1) / p.lines;
        for (int64_t line = 0, done = 0; line < p.lines; line++, weight += BLOCK_LINE_BYTES) {
            if (done < before.rows) {
                const int64_t end = std::min(done + each, before.rows);
                finish(p, before, done, end);
                done = end;
            }
            tiles.add(x + line * LINE, p.stride_x, weight, [&] { ahead.fetch(); });
        }
    } else {
        finish(p, before, 0, before.rows);
        // The processor prefetches by itself, but only once a block has begun, and a short one is soon over. Memory is fastest
        // when it is prefetched 1 KiB ahead into the second cache.
        const bool brief = p.lines < 24;
        for (int64_t line = 0; line < p.lines; line++, weight += BLOCK_LINE_BYTES) {
            if (A::fetched && brief) {
                const int64_t beyond = line + 4 - p.lines;
                const char* next = beyond < 0 ? weight + 4 * BLOCK_LINE_BYTES : then + beyond * BLOCK_LINE_BYTES;
                for (int64_t i = 0; i < BLOCK_LINE_BYTES; i += LINE) prefetch(next + i);
            } else if (A::fetched) {
                for (int64_t i = 0; i < BLOCK_LINE_BYTES / 2; i += LINE) prefetch_third(weight + BLOCK_LINE_BYTES / 2 + i);
                const char* next = line + 1 < p.lines ? weight + BLOCK_LINE_BYTES : then;
                for (int64_t i = 0; i < BLOCK_LINE_BYTES / 2; i += LINE) prefetch_third(next + i);
            }
            tiles.add(x + line * LINE, p.stride_x, weight, [&] {
                if (!A::fetched) ahead.fetch();
            });
        }
    }
    tiles.end();
}

template <class P>
void multiply_few(void* context, int64_t chunk, int) {
    const P& p = *static_cast<const P*>(context);
    const int64_t threads = static_cast<int64_t>(p.panels->size());
    const int64_t all = blocks(p.wide()), first = chunk * p.chunk, end = std::min(first + p.chunk, all);
    const int64_t each = (WIDE + blocks(p.rows) - 1) / blocks(p.rows);
    alignas(64) typename P::Sum sums[2][2][WIDE * WIDE];
    Pending<typename P::Sum> pending;
    int turn = 0;
    for (int64_t block = first; block < end; block++) {
        const int64_t output = block * WIDE;
        const int64_t later = block + 1 < end ? block + 1 : first + threads * p.chunk;  // threads take turns, as a rule
        const char* then = p.block((later < all ? later : block) * WIDE);
        Ahead ahead = {p.block(output + (p.gated ? p.wide() : WIDE)), each};
        for (int64_t row = 0; row < p.rows; row += WIDE, turn ^= 1) {
            const int64_t rows = std::min(WIDE, p.rows - row);
            multiply_block(p, p.block(output), row, rows, sums[turn][0], pending, ahead,
                           p.gated ? p.block(output + p.wide()) : then);
            pending = {sums[turn][0], nullptr, row, rows, output};
            if (!p.gated) continue;
            Ahead next = {p.block(output + WIDE) + (ahead.from - p.block(output + p.wide())), each};
            multiply_block(p, p.block(output + p.wide()), row, rows, sums[turn][1], {}, next, then);
            pending = {sums[turn][1], sums[turn][0], row, rows, output};
        }
    }
    finish(p, pending, 0, pending.rows);
}

// A product's panels. Threads claim them one by one and share the last ones.
template <class P>
struct Panels {
    struct alignas(64) Turn {
        std::atomic<int64_t> next{0}, threads{0};  // the first range that no thread claimed; threads in this panel
    };
    const P* p;
    int64_t count;
    std::vector<Turn> turns{static_cast<size_t>(count)};
    std::atomic<int64_t> begun{0};

    int64_t ranges() const { return (blocks(p->wide()) + p->chunk - 1) / p->chunk; }
    int64_t row(int64_t panel) const { return panel * blocks(p->rows) / count * WIDE; }

    // The next panel with work left; -1: none.
    int64_t take() {
        if (const int64_t panel = begun.fetch_add(1); panel < count) return panel;
        for (int64_t panel = 0; panel < count; panel++)
            if (turns[panel].next.load() + 1 < ranges()) return panel;  // one range is not worth laying out tokens
        return -1;
    }
};

// Tokens [rows][lines] -> [32 rows][line][row][64 bytes], zeros beyond the last row.
inline void lay_out(const char* x, int64_t stride, int64_t rows, int64_t lines, char* tiles) {
    for (int64_t row = 0; row < blocks(rows) * WIDE; row++) {
        char* to = tiles + row / WIDE * lines * BLOCK_LINE_BYTES + row % WIDE * LINE;
        for (int64_t line = 0; line < lines; line++)
            store_line(to + line * BLOCK_LINE_BYTES, row < rows ? load_line(x + row * stride + line * LINE) : Ints{});
    }
    written();
}

// Adds `lines` lines to the sums of 32 rows and a block, which start from zero if `first`. `next`: the sums that are needed after
// these.
template <class P>
void add_lines(const P& p, const char* tokens, const char* weight, int64_t lines, bool first, typename P::Sum* sums,
               const void* next, const Pending<typename P::Sum>& before, Ahead& ahead) {
    TileSums<typename P::Sum> tiles(WIDE, sums);
    first ? tiles.begin() : tiles.resume();
    if constexpr (!AMX) {
        finish(p, before, 0, before.rows);
        for (int64_t line = 0; line < lines; line++) ahead.fetch();
        tiles.add(tokens, LINE, BLOCK_LINE_BYTES, weight, lines);
    } else {
        const int64_t each = (before.rows + lines - 1) / lines, sooner = (2 * WIDE + lines - 1) / lines * LINE;
        const char* coming = static_cast<const char*>(next);
        for (int64_t line = 0, done = 0; line < lines; line++, tokens += BLOCK_LINE_BYTES, weight += BLOCK_LINE_BYTES)
            tiles.template add<true>(tokens, LINE, weight, [&] {
                ahead.fetch();
                for (int64_t i = 0; i < sooner; i += LINE) prefetch(coming + i);
                coming += sooner;
                if (done < before.rows) {
                    const int64_t end = std::min(done + each, before.rows);
                    finish(p, before, done, end);
                    done = end;
                }
            });
    }
    tiles.end();
}

// A panel's work: blocks of weights, each with all rows. The sums of the last 32 rows stay pending.
template <class P>
struct Passing {
    const P& p;
    int64_t row, rows;
    const char* tokens;
    char* space;  // for unpacked weights
    Pending<typename P::Sum> pending;

    // The 32 outputs from `output` on; `next`: those after them. `last`: whether their sums are then rounded and stored, with those
    // of their gates, if any.
    void multiply(int64_t output, int64_t next, typename P::Sum* to, bool last, const typename P::Sum* of_gates) {
        const int64_t count = blocks(rows), size = WIDE * WIDE;
        const int64_t max_lines = count < LONG_SLICE_MIN_BLOCKS ? L1_SLICE_LINES : L1_LONG_SLICE_LINES;
        const int64_t slices = (p.lines + max_lines - 1) / max_lines, each = (p.lines + slices - 1) / slices;
        const char* all = p.ready(output, space);
        for (int64_t line = 0; line < p.lines; line += each) {
            const char* weight = all + line * BLOCK_LINE_BYTES;
            Ahead ahead = {line + each < p.lines ? weight + each * BLOCK_LINE_BYTES : p.coming(next), (WIDE + count - 1) / count};
            for (int64_t i = 0; i < count; i++) {
                add_lines(p, tokens + (i * p.lines + line) * BLOCK_LINE_BYTES, weight, std::min(each, p.lines - line), line == 0,
                          to + i * size, to + (i + 1 < count ? i + 1 : 0) * size, pending, ahead);
                pending = {};
                if (last && line + each >= p.lines)
                    pending = {to + i * size, of_gates ? of_gates + i * size : nullptr, row + i * WIDE,
                               std::min(WIDE, rows - i * WIDE), output - (of_gates ? p.wide() : 0)};
            }
        }
    }
};

template <class P>
void multiply_panels(void* context, int64_t, int thread) {
    Panels<P>& panels = *static_cast<Panels<P>*>(context);
    const P& p = *panels.p;
    const int64_t all = blocks(p.wide());
    for (int64_t panel; (panel = panels.take()) >= 0;) {
        auto& turn = panels.turns[panel];
        turn.threads.fetch_add(1);
        const int64_t row = panels.row(panel), rows = std::min(p.rows, panels.row(panel + 1)) - row, count = blocks(rows);
        const int64_t size = count * WIDE * WIDE * sizeof(typename P::Sum), bytes = count * p.lines * BLOCK_LINE_BYTES;
        char* tokens = (*p.panels)[thread].reserve(bytes + 2 * size + (P::made ? p.lines * BLOCK_LINE_BYTES : 0));
        auto* gates = reinterpret_cast<typename P::Sum*>(tokens + bytes);
        auto* sums = reinterpret_cast<typename P::Sum*>(tokens + bytes + size);
        lay_out(p.x + row * p.stride_x, p.stride_x, rows, p.lines, tokens);
        Passing<P> passing = {p, row, rows, tokens, tokens + bytes + 2 * size, {}};
        for (int64_t range; (range = turn.next.fetch_add(1)) * p.chunk < all;) {
            const int64_t end = std::min((range + 1) * p.chunk, all);
            for (int64_t block = range * p.chunk; block < end; block++) {
                // Threads that share a panel claim the ranges between this one and the next.
                const int64_t later = (block + 1 < end ? block + 1 : (range + turn.threads.load()) * p.chunk) * WIDE;
                const int64_t output = block * WIDE, other = output + p.wide();
                if (p.gated) passing.multiply(output, other, gates, false, nullptr);
                passing.multiply(p.gated ? other : output, later, sums, true, p.gated ? gates : nullptr);
            }
        }
        finish(p, passing.pending, 0, passing.pending.rows);
        if (p.past) finish_streams();
    }
}

// Chunks of a product of few rows, small enough to be shared and large enough for memory: about 1 MiB of weights, since the first ones of a
// chunk are not prefetched.
// Weights for more than 32 rows are unpacked while the block before is multiplied, so their chunks are as large as possible.
template <class P>
int64_t divide(P& p, int threads) {
    const int64_t all = blocks(p.wide());
    const int64_t min_chunk = std::max<int64_t>(1, std::min(all / (4 * threads), 1 + (1 << 20) / (BLOCK_LINE_BYTES * p.lines)));
    p.chunk = P::made && p.rows > WIDE ? (all + 2 * threads - 1) / (2 * threads) : min_chunk;
    return (all + p.chunk - 1) / p.chunk;
}

// The panels of a product of many rows, for `threads` threads.
template <class P>
Panels<P> divide_rows(P& p, int threads) {
    // Results that the second cache cannot hold, or that weights evict from it, are written past the caches, so that memory is not
    // read before it is written.
    const int64_t kept = p.outputs * p.lines * LINE > L2_BYTES ? 1 << 19 : 1 << 20;
    p.past = p.rows * p.wide() >= kept && p.stride_out % WIDE == 0 && reinterpret_cast<uintptr_t>(p.out) % LINE == 0;
    // At least three blocks of rows, so that panels of equal length have two: the sums of one are finished beside the other.
    const int64_t fitting_blocks = PANEL_TOKEN_BYTES / (BLOCK_LINE_BYTES * p.lines);
    const int64_t panel_blocks = std::clamp<int64_t>(fitting_blocks, 3, PANEL_MAX_ROWS / WIDE);
    p.chunk = std::max<int64_t>(1, blocks(p.wide()) / (8 * threads));
    return {&p, (blocks(p.rows) + panel_blocks - 1) / panel_blocks};
}

template <class P>
void multiply_all(Team& team, P p) {
    if (p.rows < PANEL_MIN_ROWS) {
        team.each(divide(p, team.size()), multiply_few<P>, &p);
        return;
    }
    Panels<P> panels = divide_rows(p, team.size());
    team.each(team.size(), multiply_panels<P>, &panels);
}

}  // namespace troupe
