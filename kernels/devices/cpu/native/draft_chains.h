// Draft tokens: a draft sees what was computed, makes chains of draft tokens, and the model verifies them; each in one call, of the
// tables of the requests' slots, as decode_loop.h does for plain decodes.
#pragma once
#include <algorithm>
#include <cstring>

#include "decode_loop.h"
#include "program.h"

namespace troupe {

// `RowTokens` of library.py mirrors this: `counts[r]` tokens of slot `slots[r]` from position `starts[r]` on.
struct RowTokens {
    int64_t rows;
    const int64_t *slots, *starts, *counts;
};

// Their step, but for its `ids`.
inline void prepare(const SlotTable& table, const RowTokens& batch, StepMemory& memory, Step& step) {
    int64_t tokens = 0, columns = 0;
    memory.offsets.resize(batch.rows + 1), memory.lengths.resize(batch.rows);
    for (int64_t row = 0; row < batch.rows; row++) {
        memory.offsets[row] = tokens, tokens += batch.counts[row];
        memory.lengths[row] = batch.starts[row] + batch.counts[row];
        columns = std::max(columns, (memory.lengths[row] - 1) / table.page_size + 1);
    }
    memory.offsets[batch.rows] = tokens;
    memory.ids.resize(tokens), memory.positions.resize(tokens), memory.index.resize(tokens);
    memory.pages.resize(batch.rows * columns);
    for (int64_t row = 0; row < batch.rows; row++) {
        const int32_t* pages = table.pages + batch.slots[row] * table.columns;
        std::memcpy(&memory.pages[row * columns], pages, columns * sizeof(int32_t));
        for (int64_t i = 0, at = memory.offsets[row]; i < batch.counts[row]; i++, at++) {
            const int64_t position = batch.starts[row] + i;
            memory.positions[at] = position;
            memory.index[at] = pages[position / table.page_size] * table.page_size + position % table.page_size;
        }
    }
    step = {};
    step.rows = tokens, step.sequences = batch.rows;
    step.ids = memory.ids.data(), step.positions = memory.positions.data(), step.index = memory.index.data();
    step.pages = memory.pages.data(), step.pages_stride = columns, step.lengths = memory.lengths.data();
    step.offsets = memory.offsets.data();
}

// `Observation` of library.py mirrors this. The token that goes with a position is `ahead` behind it. Of features [.., stride]
// (or null) the tokens' are at `places`, and go to `inputs` [tokens, width]. What the last token of each row left, of `left`
// [tokens, kept] (or null), goes to its slot's of `states`.
struct Observation {
    int64_t ahead;
    const uint16_t* features;
    int64_t stride;
    const int64_t* places;
    uint16_t* inputs;
    int64_t width;
    const uint16_t* left;
    uint16_t* states;
    int64_t kept;
};

inline void gather(const SlotTable& table, const RowTokens& rows, const Observation& seen, StepMemory& memory) {
    for (int64_t row = 0; row < rows.rows; row++)
        std::memcpy(&memory.ids[memory.offsets[row]],
                    table.tokens + rows.slots[row] * table.tokens_stride + rows.starts[row] + seen.ahead,
                    rows.counts[row] * sizeof(int32_t));
    const int64_t bytes = seen.width * sizeof(uint16_t);
    for (int64_t i = 0; seen.features && i < memory.offsets[rows.rows]; i++)
        std::memcpy(seen.inputs + i * seen.width, seen.features + seen.places[i] * seen.stride, bytes);
}

inline void leave(const RowTokens& rows, const Observation& seen, const StepMemory& memory) {
    for (int64_t row = 0; seen.states && row < rows.rows; row++)
        std::memcpy(seen.states + rows.slots[row] * seen.kept, seen.left + (memory.offsets[row + 1] - 1) * seen.kept,
                    seen.kept * sizeof(uint16_t));
}

// `Chain` of library.py mirrors this. Of two programs the first drafts from `headed` [rows, width], the states of the slots,
// the other from `before` [rows, width] and the tokens drafted last, and leaves what is next there. `chosen`: what each of
// them finds argmax, of which `stands_for` (or null) says the token; `draws` (or null): a DRAW for each that finds others.
struct Chain {
    const Op* ops[2];
    int64_t counts[2];
    const int64_t* chosen[2];
    const Op* draws[2];
    const int64_t* stands_for;
    const uint16_t* states;
    uint16_t *headed, *before;
    int64_t width;
};

// Rows whose last known tokens are at `roots`, and whose draft tokens take the places
// `starts ..` of a draft's cache, by pages [rows, columns].
struct Behind {
    int64_t rows;
    const int64_t *slots, *roots, *starts;
    const int32_t* pages;
    int64_t columns, page_size;
};

// `running(ops, step)`: runs them.
template <class Running>
void observe(const Running& running, StepMemory& memory, const Ops& ops, const SlotTable& table, const RowTokens& rows,
             const Observation& seen) {
    Step step;
    prepare(table, rows, memory, step);
    gather(table, rows, seen, memory);
    running(ops, step);
    leave(rows, seen, memory);
}

// Draft tokens are made in up to `steps` levels, `result` [levels, rows], of which `lengths` of each row are of use: none from one on
// that ends the sequence.
template <class Running>
void draft_chains(const Running& running, StepMemory& memory, const Chain& chain, const SlotTable& table, const Behind& behind,
           int64_t steps, int64_t* result, int64_t* lengths) {
    const int64_t rows = behind.rows, size = behind.page_size;
    memory.ids.assign(rows, 0), memory.positions.resize(rows), memory.index.resize(rows), memory.lengths.resize(rows);
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t* state = chain.states + behind.slots[row] * chain.width;
        for (uint16_t* into : {chain.headed, chain.before})
            std::memcpy(into + row * chain.width, state, chain.width * sizeof(uint16_t));
    }
    Step step = {};
    step.rows = step.sequences = step.decodes = rows;
    step.ids = memory.ids.data(), step.positions = memory.positions.data(), step.index = memory.index.data();
    step.pages = behind.pages, step.pages_stride = behind.columns, step.lengths = memory.lengths.data();
    std::fill_n(lengths, rows, steps);
    int64_t open = rows;
    for (int64_t level = 0; level < steps && open; level++, result += rows) {
        const bool then = level > 0;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t position = behind.starts[row] + std::max<int64_t>(level - 1, 0);
            memory.positions[row] = position, memory.lengths[row] = position + 1;
            memory.index[row] = behind.pages[row * behind.columns + position / size] * size + position % size;
        }
        running(Ops{chain.ops[then], chain.counts[then]}, step);
        const int64_t* chosen = chain.chosen[then];
        if (const Op* draw = chain.draws[then]) {
            for (int64_t row = 0; row < rows; row++) memory.positions[row] = behind.roots[row] + 1 + level;
            running(Ops{draw, 1}, step);
            chosen = static_cast<const int64_t*>(draw->out);
        }
        for (int64_t row = 0; row < rows; row++) {
            result[row] = chain.stands_for ? chain.stands_for[chosen[row]] : chosen[row];
            memory.ids[row] = static_cast<int32_t>(result[row]);
            if (lengths[row] == steps && table.ends(behind.slots[row], behind.roots[row] + 1 + level, result[row]))
                lengths[row] = level, open--;
        }
    }
}

// tokens [rows, stride]: of each row those that it runs. -> what follows each; `argmax` is what the program finds.
template <class Running>
const int64_t* verify(const Running& running, StepMemory& memory, const Ops& ops, const SlotTable& table,
                      const RowTokens& rows, const int64_t* tokens, int64_t stride, const int64_t* argmax,
                      const Op* draw) {
    Step step;
    prepare(table, rows, memory, step);
    for (int64_t row = 0; row < rows.rows; row++)
        for (int64_t i = 0; i < rows.counts[row]; i++)
            memory.ids[memory.offsets[row] + i] = static_cast<int32_t>(tokens[row * stride + i]);
    running(ops, step);
    if (!draw) return argmax;
    for (int64_t& position : memory.positions) position++;  // where what is drawn will stand
    running(Ops{draw, 1}, step);
    return static_cast<const int64_t*>(draw->out);
}

// Each row knows the tokens more that follow its root and the draft tokens that were right, `accepted` [rows] in all. NON_FINITE, and
// nothing is kept, when one is not to be used. argmax, nonfinite [tokens]: what the model says. The rows' roots and draft tokens
// are in `memory`.
inline StepStatus accept(const SlotTable& table, const RowTokens& rows, const int64_t* argmax, const uint8_t* nonfinite,
                       const StepMemory& memory, int64_t* accepted) {
    for (int64_t i = 0; i < memory.offsets[rows.rows]; i++)
        if (nonfinite[i]) return NON_FINITE;
    for (int64_t row = 0; row < rows.rows; row++) {
        const int64_t slot = rows.slots[row], root = rows.starts[row];
        const int64_t* said = argmax + memory.offsets[row];
        const int32_t* drafted = &memory.ids[memory.offsets[row]];
        int64_t right = 0;
        while (right + 1 < rows.counts[row] && drafted[right + 1] == said[right]) right++;
        accepted[row] = right + 1;
        for (int64_t i = 0; i <= right; i++)
            table.tokens[slot * table.tokens_stride + root + 1 + i] = static_cast<int32_t>(said[i]);
        table.known[slot] += right + 1, table.computed[slot] += right + 1;
    }
    return DONE;
}

}  // namespace troupe
