// Decodes of one token a row that follow one another: what a step needs to know is read from the tables of the requests'
// slots, and what it finds is put there. Python between two passes would run with cold caches, which makes each of its lines
// several times slower.
#pragma once
#include <cstring>
#include <vector>

#include "program.h"

namespace troupe {

// `Table` of library.py mirrors this. By slot: tokens int32 [slots, stride], pages int32 [slots, columns], and ids that end
// its sequence, [slots, max_stops] and -1 where there are no more, from position `stops_from` on.
struct SlotTable {
    int32_t* tokens;
    int64_t tokens_stride;
    int64_t *known, *computed;
    const int64_t *page_count, *targets;
    const int32_t* pages;
    int64_t columns, page_size;
    const int32_t* stops;
    int64_t max_stops;
    const int64_t* stops_from;

    bool ends(int64_t slot, int64_t position, int64_t token) const {
        if (position < stops_from[slot]) return false;
        const int32_t* ids = stops + slot * max_stops;
        for (int64_t i = 0; i < max_stops && ids[i] >= 0; i++)
            if (ids[i] == token) return true;
        return false;
    }
};

// How a step ended. But for DONE nothing has changed: the row does not fit, its logits are not finite, all sequences have
// ended, or there is nothing to draft.
enum StepStatus : int64_t { DONE, NOT_APPLICABLE, NON_FINITE, ALL_FINISHED, IDLE };

struct StepMemory {
    std::vector<int32_t> ids, pages;
    std::vector<int64_t> positions, index, lengths, offsets;
};

// The step of `rows` slots; NOT_APPLICABLE when one of them has no decode to run, ALL_FINISHED when all are at their end.
inline StepStatus prepare(const SlotTable& table, const int64_t* slots, int64_t rows, StepMemory& memory, Step& step) {
    memory.ids.resize(rows), memory.positions.resize(rows), memory.index.resize(rows), memory.lengths.resize(rows);
    int64_t columns = 0;
    bool over = true;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row], length = table.known[slot], position = length - 1;
        if (length < 1 || table.computed[slot] != position || length > table.page_count[slot] * table.page_size ||
            length >= table.tokens_stride)
            return NOT_APPLICABLE;
        const int64_t column = position / table.page_size;
        over &= length >= table.targets[slot];
        columns = column + 1 > columns ? column + 1 : columns;
        memory.ids[row] = table.tokens[slot * table.tokens_stride + position];
        memory.positions[row] = position;
        memory.index[row] =
            table.pages[slot * table.columns + column] * table.page_size + position % table.page_size;
        memory.lengths[row] = length;
    }
    if (over) return ALL_FINISHED;
    memory.pages.resize(rows * columns);
    for (int64_t row = 0; row < rows; row++)
        std::memcpy(&memory.pages[row * columns], table.pages + slots[row] * table.columns, columns * sizeof(int32_t));
    step = {};
    step.rows = step.sequences = step.decodes = rows;
    step.ids = memory.ids.data(), step.positions = memory.positions.data(), step.index = memory.index.data();
    step.pages = memory.pages.data(), step.pages_stride = columns, step.lengths = memory.lengths.data();
    return DONE;
}

// Each row knows one token more: `argmax`, as `result`. NON_FINITE, and nothing is kept, when one is not to be used.
inline StepStatus keep(const SlotTable& table, const int64_t* slots, int64_t rows, const int64_t* argmax,
                     const uint8_t* nonfinite, int32_t* result) {
    for (int64_t row = 0; row < rows; row++)
        if (nonfinite[row]) return NON_FINITE;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = slots[row], length = table.known[slot];
        result[row] = static_cast<int32_t>(argmax[row]);
        table.tokens[slot * table.tokens_stride + length] = result[row];
        table.computed[slot] = length, table.known[slot] = length + 1;
    }
    return DONE;
}

}  // namespace troupe
