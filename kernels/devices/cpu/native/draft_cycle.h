// A step of draft tokens in one call: a draft makes a chain behind each slot's last token, the model verifies the chains, and
// the slots know what was right. What lies between takes Python as long as a draft takes for several draft tokens.
#pragma once
#include <time.h>

#include <algorithm>
#include <vector>

#include "decode_loop.h"
#include "draft_chains.h"
#include "program.h"
#include "sampling.h"

namespace troupe {

// `Cycle` of library.py mirrors this. `reached` [slot]: filled places of the draft's cache. The first draft token takes the place
// `first` after the root's. Where a sequence has no page, its slot has `spare` pages of its own from page `begin`. The model's `ops`
// write `argmax` and `nonfinite` [tokens], and `draw` samples. A row verifies up to `max_drafts` draft tokens, and sequences are shorter than
// `max_length`. `observing` observes up to `max_observed` tokens as `seen` describes, except for their places.
struct Cycle {
    Chain chain;
    int64_t* reached;
    int64_t first, begin, spare;
    const Op* ops;
    int64_t count;
    const int64_t* argmax;
    const uint8_t* nonfinite;
    const Op* draw;
    int64_t max_drafts, max_length;
    Ops observing;
    Observation seen;
    int64_t max_observed;
};

// `CycleOutput` of library.py mirrors this. For each row: the root's position, the number of accepted tokens (twice), the number of
// verified draft tokens, and the number whose correctness is known: one more where the first wrong one would have ended the
// sequence. For each accepted token: its id, and the place of its features. `drafted_at`: seconds of the clock that runs from the
// system's start. `ended`: which sequences have ended, `over`: whether all have. `seen`: whether tokens accepted before were observed.
struct CycleOutput {
    int64_t *roots, *accepted;
    int32_t *emitted, *drafted, *depths, *tokens;
    int64_t* places;
    double drafted_at;
    uint8_t* ended;
    int64_t over, seen;
};

inline double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The pages of `places` draft tokens behind each root, and of all before them: [rows, columns].
inline std::vector<int32_t> draft_pages(const SlotTable& table, const Cycle& cycle, const std::vector<int64_t>& slots,
                                        const std::vector<int64_t>& starts, int64_t places, int64_t& columns) {
    const int64_t last = *std::max_element(starts.begin(), starts.end()) + places - 1;
    columns = std::max<int64_t>(0, last) / table.page_size + 1;
    std::vector<int32_t> pages(slots.size() * columns);
    for (size_t row = 0; row < slots.size(); row++) {
        const int64_t held = table.page_count[slots[row]];
        for (int64_t column = 0; column < columns; column++) {
            const int64_t beyond = std::min(column - held, cycle.spare - 1);
            pages[row * columns + column] =
                column < held ? table.pages[slots[row] * table.columns + column]
                              : cycle.spare ? static_cast<int32_t>(cycle.begin + cycle.spare * slots[row] + beyond) : 0;
        }
    }
    return pages;
}

// The draft sees what the cycle before accepted of the same rows. -> whether it could.
template <class Running>
bool see(const Running& running, StepMemory& memory, const Cycle& cycle, const SlotTable& table, const int64_t* slots,
         int64_t rows, const CycleOutput& before) {
    std::vector<int64_t> starts(rows), counts(rows);
    int64_t tokens = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row], room = table.page_count[slot] * table.page_size;
        int64_t end = before.roots[row] + before.accepted[row];
        starts[row] = before.roots[row];
        if (cycle.first) starts[row] = cycle.reached[slot], end = std::min(end + 1, room);  // it goes on from where it is
        counts[row] = end - starts[row];
        if (counts[row] < 1) return false;
        tokens += counts[row];
    }
    if (tokens > cycle.max_observed) return false;
    Observation seen = cycle.seen;
    seen.places = before.places;
    observe(running, memory, cycle.observing, table, {rows, slots, starts.data(), counts.data()}, seen);
    for (int64_t row = 0; row < rows; row++) cycle.reached[slots[row]] = starts[row] + counts[row];
    return true;
}

// Up to `drafts` [rows] draft tokens, in `steps` levels, of slots whose sequences may have `left` [rows] tokens more, drawn as `how`
// [rows] says (or null). `unseen`: the draft is to see what `result` holds first; where `left` is null, that also says what is
// left. IDLE when there are none to make; otherwise an StepStatus, with nothing kept but when it is DONE.
template <class Running>
StepStatus cycle(const Running& running, StepMemory& memory, const Cycle& cycle, const SlotTable& table, const int64_t* slots,
               int64_t rows, const int32_t* drafts, const int64_t* left, int64_t steps, const Draw* how, bool unseen,
               CycleOutput& result) {
    result.seen = unseen && see(running, memory, cycle, table, slots, rows, result);
    if (unseen && !result.seen) return NOT_APPLICABLE;
    std::vector<int64_t> limits(rows), chosen, drafting, roots, starts;
    std::vector<Draw> draws;
    int64_t max_drafts = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row], known = table.known[slot], room = table.page_count[slot] * table.page_size;
        if (table.computed[slot] + 1 != known || known > room || known >= cycle.max_length) return NOT_APPLICABLE;
        result.roots[row] = known - 1;
        const int64_t still = left ? left[row] : result.ended[row] ? 0 : table.targets[slot] - known;
        result.ended[row] = still <= 0;
        limits[row] = std::min({static_cast<int64_t>(drafts[row]), room - known, still - 1, cycle.max_drafts});
        max_drafts = std::max(max_drafts, limits[row]);
        if (limits[row] <= 0) continue;
        if (cycle.reached[slot] != known - 1 + cycle.first) return NOT_APPLICABLE;
        chosen.push_back(row), drafting.push_back(slot), roots.push_back(known - 1), starts.push_back(known - 1 + cycle.first);
        if (how) draws.push_back(how[row]);
    }
    if (chosen.empty()) return IDLE;
    const int64_t some = chosen.size();
    steps = std::min(steps, max_drafts);
    int64_t columns;
    const std::vector<int32_t> pages = draft_pages(table, cycle, drafting, starts, std::max<int64_t>(1, steps - 1), columns);
    const Behind behind = {some, drafting.data(), roots.data(), starts.data(), pages.data(), columns, table.page_size};
    Chain chain = cycle.chain;
    Op drawing[2];
    for (int64_t then = 0; then < 2; then++) {
        if (how) drawing[then] = *chain.draws[then], drawing[then].b = draws.data();
        chain.draws[then] = how ? &drawing[then] : nullptr;
    }
    std::vector<int64_t> drafted(steps * some), lengths(some);
    draft_chains(running, memory, chain, table, behind, steps, drafted.data(), lengths.data());
    result.drafted_at = seconds();

    const int64_t stride = steps + 1;
    std::vector<int64_t> counts(rows, 1), tokens(rows * stride);
    for (int64_t i = 0; i < some; i++) {
        counts[chosen[i]] = std::min(limits[chosen[i]], lengths[i]) + 1;
        for (int64_t level = 0; level < steps; level++) tokens[chosen[i] * stride + 1 + level] = drafted[level * some + i];
    }
    for (int64_t row = 0; row < rows; row++) tokens[row * stride] = table.tokens[slots[row] * table.tokens_stride + result.roots[row]];
    draws.clear();
    for (int64_t row = 0; how && row < rows; row++) draws.insert(draws.end(), counts[row], how[row]);
    Op draw;
    if (how) draw = *cycle.draw, draw.b = draws.data();
    const RowTokens verified = {rows, slots, result.roots, counts.data()};
    const int64_t* said = verify(running, memory, Ops{cycle.ops, cycle.count}, table, verified, tokens.data(), stride,
                                 cycle.argmax, how ? &draw : nullptr);
    const StepStatus kept = accept(table, verified, said, cycle.nonfinite, memory, result.accepted);
    if (kept != DONE) return kept;
    result.over = true;
    for (int64_t row = 0, at = 0; row < rows; row++) {
        const int64_t first = memory.offsets[row];
        bool ends = result.ended[row] || table.known[slots[row]] >= table.targets[slots[row]];
        result.emitted[row] = static_cast<int32_t>(result.accepted[row]);
        result.drafted[row] = result.depths[row] = static_cast<int32_t>(counts[row] - 1);
        for (int64_t i = 0; i < result.accepted[row]; i++, at++) {
            result.tokens[at] = static_cast<int32_t>(said[first + i]), result.places[at] = first + i;
            ends |= table.ends(slots[row], result.roots[row] + 1 + i, said[first + i]);
        }
        result.ended[row] = ends, result.over &= ends;
    }
    for (int64_t i = 0; i < some; i++) {
        const int64_t row = chosen[i], right = result.accepted[row] - 1;
        const bool reached = lengths[i] < std::min(steps, limits[row]) && right == lengths[i];
        result.depths[row] += reached && said[memory.offsets[row] + right] != drafted[right * some + i];
    }
    return DONE;
}

}  // namespace troupe
