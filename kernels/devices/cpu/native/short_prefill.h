// Ends of prompts, and decodes beside them: every sequence of the step is run up to its last known token. The model runs all
// of these tokens, its head the last of each sequence; in one call, of the tables of the requests' slots, as decode_loop.h does
// for plain decodes.
#pragma once
#include <cstring>

#include "decode_loop.h"
#include "draft_chains.h"
#include "program.h"

namespace troupe {

// `Head` of library.py mirrors this: the program `ops` is run on `last` [rows, width], which are brought there from what the
// model leaves of each sequence's last token in `hidden` [tokens, stride].
struct Head {
    const Op* ops;
    int64_t count;
    const uint16_t* hidden;
    int64_t stride;
    uint16_t* last;
    int64_t width;
};

// Each row knows one token more, as `result`: `argmax` [rows], or what `draw` (or null) finds. NON_FINITE, and nothing is kept,
// when one is not to be used. `running(ops, step)`: runs them.
template <class Running>
StepStatus run_prefill(const Running& running, StepMemory& memory, const Ops& ops, const SlotTable& table, const RowTokens& rows,
               const Head& head, const int64_t* argmax, const uint8_t* nonfinite, const Op* draw, int32_t* result) {
    Step step;
    prepare(table, rows, memory, step);
    for (int64_t row = 0; row < rows.rows; row++)
        std::memcpy(&memory.ids[memory.offsets[row]],
                    table.tokens + rows.slots[row] * table.tokens_stride + rows.starts[row],
                    rows.counts[row] * sizeof(int32_t));
    running(ops, step);
    for (int64_t row = 0; row < rows.rows; row++) {
        const int64_t last = memory.offsets[row + 1] - 1;
        std::memcpy(head.last + row * head.width, head.hidden + last * head.stride, head.width * sizeof(uint16_t));
        memory.index[row] = memory.index[last];  // of a row's place, for adapters
    }
    step.rows = step.sequences = step.decodes = rows.rows, step.offsets = nullptr;
    step.positions = step.lengths;  // where the sampled token will stand
    running(Ops{head.ops, head.count}, step);
    if (draw) {
        running(Ops{draw, 1}, step);
        argmax = static_cast<const int64_t*>(draw->out);
    }
    return keep(table, rows.slots, rows.rows, argmax, nonfinite, result);
}

}  // namespace troupe
