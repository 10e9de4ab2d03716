// Products of heads with a weight for each: the way of queries into the latent space, and of results out of it (MLA, DeepSeek-AI,
// arXiv 2405.04434, section 2.1).
#pragma once
#include "gemm_bf16.h"
#include "program.h"

namespace troupe {

struct Heads {
    const Op* op;
    Product first;   // of the first head
    int64_t parts;   // that each head is divided into
};

inline void heads_chunk(void* context, int64_t chunk, int thread) {
    const Heads& heads = *static_cast<const Heads*>(context);
    const Op& op = *heads.op;
    const int64_t head = chunk / heads.parts, part = chunk % heads.parts;
    Product p = heads.first;
    p.x += head * op.i3 * static_cast<int64_t>(sizeof(bf16));
    p.weight += head * blocks(op.i1) * WIDE * LINE * p.lines;
    p.out += head * op.i4;
    multiply_few<Product>(&p, part, thread);
    if (part || !op.i5) return;
    for (int64_t row = 0; row < p.rows; row++)
        std::memcpy(p.out + row * p.stride_out + op.i1, reinterpret_cast<const bf16*>(p.x + row * p.stride_x) + op.i0,
                    op.i5 * sizeof(bf16));
}

inline void multiply_heads(Team& team, const Op& op, const Product& first) {
    Heads heads = {&op, first, 1};
    const int64_t all = blocks(op.i1), wanted = (4 * team.size() + op.i2 - 1) / op.i2;
    heads.first.chunk = (all + wanted - 1) / wanted;
    heads.parts = (all + heads.first.chunk - 1) / heads.first.chunk;
    team.each(op.i2 * heads.parts, heads_chunk, &heads);
}

}  // namespace troupe
