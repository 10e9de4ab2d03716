// What adapters add to the outputs of linear layers (LoRA, Hu et al., arXiv 2106.09685): to each row `x . down . up` of the
// place of its own adapter. A row's result is the same bits whatever rows are beside it.
//
// The rows of a pass are grouped by place once, up to eight of one place in a group. A thread takes a group at a time through
// both products, so that it reads the place's matrices once for the group, and the row's few numbers between the products
// stay in its first cache.
#pragma once
#include <algorithm>
#include <vector>

#include "prefill.h"
#include "program.h"
#include "thread_team.h"
#include "vectors.h"

namespace troupe {

constexpr int64_t PLACE_ROWS = 8;                          // rows of a group
constexpr int64_t LOW_RANK_ROWS = LARGE ? PLACE_ROWS : 2;  // rows whose sums are in registers at a time
constexpr int64_t PANEL = 16;                              // columns of `down`, or outputs of `up`, that lie together
constexpr int64_t MATRIX_AHEAD = 1024;                     // numbers by which matrices are prefetched

// Which rows of a pass use an adapter, by its place; place 0 is of none.
struct RowPlaces {
    struct Group {
        int64_t place, begin, rows;  // of `order`
    };
    std::vector<int64_t> order, counts;
    std::vector<Group> groups;

    // place_of(row) < places
    template <class PlaceOf>
    void assign(int64_t rows, int64_t places, const PlaceOf& place_of) {
        counts.assign(places + 1, 0), groups.clear();
        for (int64_t row = 0; row < rows; row++) counts[place_of(row) + 1]++;
        counts[1] = 0;  // rows of place 0 are left out; from here on, where rows of a place begin
        for (int64_t place = 1; place < places; place++) {
            const int64_t begin = counts[place], end = begin + counts[place + 1];
            for (int64_t at = begin; at < end; at += PLACE_ROWS) groups.push_back({place, at, std::min(PLACE_ROWS, end - at)});
            counts[place + 1] = end;
        }
        order.resize(counts[places]);
        for (int64_t row = 0; row < rows; row++)
            if (const int64_t place = place_of(row)) order[counts[place]++] = row;
    }
};

// low[row][16] = x . panel, [four inputs][two of them][16 columns][two inputs]. The sums of even and odd pairs are apart, for
// fewer of them in a row.
template <int ROWS>
void shrink(const bf16* const* x, const bf16* panel, int64_t inputs, bf16* low, int64_t stride) {
    Floats sums[ROWS][2] = {};
    for (int64_t i = 0; i < inputs; i += 4, panel += 4 * PANEL) {
        const Ints even = load_line(panel), odd = load_line(panel + 2 * PANEL);
        prefetch(panel + MATRIX_AHEAD);
        prefetch(panel + MATRIX_AHEAD + 2 * PANEL);
        unrolled<ROWS>([&](auto row) {
            sums[row][0] = dot(sums[row][0], splat_at(x[row] + i), even);
            sums[row][1] = dot(sums[row][1], splat_at(x[row] + i + 2), odd);
        });
    }
    unrolled<ROWS>([&](auto row) { store(low + row * stride, sums[row][0] + sums[row][1]); });
}

// out[row][16] += low . panel, [pair of ranks][16 outputs][two ranks]
template <int ROWS>
void expand(const bf16* low, int64_t stride, const bf16* panel, int64_t rank, bf16* const* out, int64_t output) {
    Floats sums[ROWS] = {};
    for (int64_t i = 0; i < rank; i += 2, panel += 2 * PANEL) {
        const Ints pair = load_line(panel);
        prefetch(panel + MATRIX_AHEAD);
        unrolled<ROWS>([&](auto row) { sums[row] = dot(sums[row], splat_at(low + row * stride + i), pair); });
    }
    unrolled<ROWS>([&](auto row) { store(out[row] + output, load(out[row] + output) + sums[row]); });
}

// call<ROWS>() for 1 to LOW_RANK_ROWS rows.
template <int ROWS = LOW_RANK_ROWS, class Call>
inline void with_some_rows(int64_t rows, const Call& call) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_some_rows<ROWS - 1>(rows, call);
    call.template operator()<ROWS>();
}

struct LowRank {
    const Op& op;
    const RowPlaces& rows;
    std::vector<Workspace>& spaces;  // by thread

    int64_t columns() const { return op.i2 * op.i3; }

    // call<ROWS>(x, out, row): the rows of a group, `row` is the first of them.
    template <class Call>
    void each(int64_t group, const Call& call) const {
        const auto [place, begin, count] = rows.groups[group];
        for (int64_t first = 0; first < count; first += LOW_RANK_ROWS)
            with_some_rows(std::min(LOW_RANK_ROWS, count - first), [&]<int ROWS>() {
                const bf16* x[ROWS];
                bf16* out[ROWS];
                for (int row = 0; row < ROWS; row++) {
                    const int64_t at = rows.order[begin + first + row];
                    x[row] = static_cast<const bf16*>(op.a) + at * op.stride_a;
                    out[row] = static_cast<bf16*>(op.out) + at * op.stride_out;
                }
                call.template operator()<ROWS>(x, out, first);
            });
    }

    const bf16* down(int64_t group) const { return static_cast<const bf16*>(op.b) + rows.groups[group].place * columns() * op.i0; }
    const bf16* up(int64_t group) const { return static_cast<const bf16*>(op.c) + rows.groups[group].place * op.i2 * op.i1; }

    void run(int64_t group, int thread) const {
        bf16* low = spaces[thread].halves.of(PLACE_ROWS * columns());
        for (int64_t i = 0; i < std::min(MATRIX_AHEAD, op.i2 * op.i1); i += 2 * PANEL) prefetch(up(group) + i);
        each(group, [&]<int ROWS>(const bf16* const* x, bf16* const*, int64_t row) {
            for (int64_t column = 0; column < columns(); column += PANEL)
                shrink<ROWS>(x, down(group) + column * op.i0, op.i0, low + row * columns() + column, columns());
        });
        const auto* ends = reinterpret_cast<const int64_t*>(op.i4);
        each(group, [&]<int ROWS>(const bf16* const*, bf16* const* out, int64_t row) {
            for (int64_t module = 0, output = 0; output < op.i1; module++)
                for (; output < ends[module]; output += PANEL)
                    expand<ROWS>(low + row * columns() + module * op.i2, columns(), up(group) + output * op.i2, op.i2, out, output);
        });
    }
};

inline void add_low_rank(Team& team, LowRank task) {
    team.each(static_cast<int64_t>(task.rows.groups.size()), [](void* context, int64_t group, int thread) {
        static_cast<const LowRank*>(context)->run(group, thread);
    }, &task);
}

// The places of a step's rows: see PLACES of program.h.
inline void find_places(RowPlaces& rows, const Op& op, const Step& step) {
    const auto* places = static_cast<const int64_t*>(op.a);
    const int64_t page = op.i0;
    rows.assign(step.rows, op.i1, [&](int64_t row) { return places[page ? step.index[row] / page : row]; });
}

}  // namespace troupe
