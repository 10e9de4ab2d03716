// What a program of the CPU's native operators is made of. kernels/devices/cpu/native/library.py mirrors these structs.
#pragma once
#include <cstdint>

namespace troupe {

enum Kind : int64_t { EMBED, ANGLES, NORM, LINEAR, ROTARY, WRITE, ATTENTION, SILU, EXPERTS, GREEDY, ADD, LINEAR8, GROUPED, BLOCKS,
                      WRITE_8BIT, FAKE_QUANTIZE, NORM_ROPE_CACHE, DRAW, FP8, PLACES, LOW_RANK,
                      PLACE_LATENT, HEADS };

// Tensors are bf16 unless said otherwise, row-major, their rows (tokens) `stride` elements apart.
//   EMBED      a table [vocab, i0] -> out; i1: whether it is packed as the weight of a LINEAR
//   ANGLES     a frequencies float [i0], f0 scale -> out cosines, b sines [rows, i0]
//   NORM       a x or null, b residual: residual += x; out = norm(residual) * c, c float [i1, i0]: i1 heads of i0, f0 eps
//   LINEAR     a x, b packed weight, c bias or null -> out; i0 inputs, i1 outputs; gated: those are gates and as many
//              others, out is silu(gate) * other, i1 a multiple of 64
//   LINEAR8    as LINEAR with b a weight of int8 (gemm_int8.h); f0 scale of every token, 0: each its own; i2 offset
//   GROUPED    as LINEAR with b a weight of groups (gemm_grouped.h); i2 inputs of a group, i3 bits, i4 address of the inputs'
//              order int64 [i0], 0: as they come; f0: whether zeros are others than the middle
//   FP8        as LINEAR with b a weight of e4m3 (gemm_fp8.h); i2 inputs that have a scale of their own
//   BLOCKS     as LINEAR with b a weight in blocks (gemm_gguf_blocks.h)
//              Where `invariant` is set, the result of a row of GROUPED, FP8 and BLOCKS depends on no other row.
//   ROTARY     a x, b cosines, c sines -> out; i0 dim, i1 heads
//   NORM_ROPE_CACHE      a queries, keys and values: NORM and ROTARY of the first two, in one pass, and WRITE; b cosines, c sines, out
//              cache; i0 dim, i1 heads of queries and keys, i2 kv heads, i4 address of the norm's weight or 0, f0 eps
//   WRITE      a keys and values -> out cache; i0 elements of a token
//   WRITE_8BIT a keys and values -> out cache of 8 bits (kv_cache_8bit.h); i0 dim, i1 heads of a token
//   PLACE_LATENT      a queries, i1 heads of i0, whose last i2 numbers are rotated in place; b latent vectors [rows, i3 + i2] -> out cache:
//              their first i3 numbers after NORM, the last ones rotated; c cosines, fixed sines; i4 address of the norm's weight, f0 eps
//   HEADS      a x, i2 heads that are i3 elements apart, b a packed weight for each -> out, of which heads are i4 elements apart; i0
//              inputs, i1 outputs of a head; the i5 elements of x after the inputs are copied after the outputs
//   ATTENTION  a queries, b cache [pages, i4, 2, i2, i0], c sinks float [i1] or null -> out; i0 dim, i1 heads, i2 kv
//              heads, i3 window, f0 scale. Or with i5, the dim of values, and one kv head: b latent vectors [pages, i4, i0],
//              whose first i5 numbers are the token's value -> out [rows, i1 * i5], of no prompts
//   FAKE_QUANTIZE     a x -> out, each row rounded to multiples of its largest magnitude over 127; i0 elements of a row, a multiple of 16
//   SILU       a gate | up [rows, 2 * i0] -> out [rows, i0]
//   ADD        a x, b y or null -> out = x + y; i0 elements of a row. c logits or null: out = x + sigmoid(logit) * y, i1 from
//              one to the next
//   EXPERTS    a x, b logits [rows, i1] of a router, c Expert[i5] (experts.h) -> out; i0 elements of a row, i2 experts that a row
//              takes, i3 inner dimension, i4: whether their weights add up to one. offsets int32 [i6, i1] or null: where in
//              c the experts of row r are: row r % i6. by_head Choice (experts.h): b is then the router's weight
//              float32 [i1, i0]
//   GREEDY     a logits [rows, i0] -> out int64 [rows] the most likely ids, b bool [rows]: a NaN, +inf or nothing but -inf
//   DRAW       as GREEDY with i4 for b, and b Draw[rows] (sampling.h): sampled for the step's positions. c int64 [i0] or null: the
//              tokens that the logits are of, of i1 in all. i2 address of bits uint32 [rows, i3] of the tokens that may be
//              drawn, or 0: every one; the logits of the others are overwritten. offsets int64 [rows] or null: the row of a
//              that each draws from
//   PLACES     a places of adapters int64, below i1: by page of the cache, of i0 tokens, or i0 = 0: by row. LOW_RANK reads them
//   LOW_RANK   a x, b down [places][columns / 16][i0 / 2][16][2], c up [places][i1 / 16][i2 / 2][16][2]: out += x . down . up of
//              each row's place (low_rank.h); i0 inputs, i1 outputs, i2 rank, i3 modules, of which each has i2 columns and the
//              outputs up to its end; i4 address of the ends int64 [i3]
// NORM_ROPE_CACHE, WRITE_8BIT and ATTENTION know caches of 8 bits: `cache_type` is a CacheType (kv_cache_8bit.h). `scales` bf16
// [pages, tokens, 2, kv heads], or `fixed` float [2, kv heads, dim] with `offsets` or null; `by_head` float [2, kv heads] where
// these are the same for all dims.
struct Op {
    int64_t kind;
    void *a, *b, *c, *out;
    int64_t stride_a, stride_b, stride_out;
    int64_t i0, i1, i2, i3, i4, i5, i6, gated;
    double f0;
    int64_t cache_type, invariant;
    void *scales, *fixed, *offsets, *by_head;
};

// One step's inputs. ATTENTION alone knows `sequences`: row r of `pages` holds the page ids of sequence r, `lengths` its
// tokens in the cache, the step's included. The step's rows `offsets[r] .. offsets[r + 1]` are its queries (null: one
// each). Behind the first `decodes`, drafts may be trees: `bits` of each query [.., bits_stride] say what it sees from
// position `roots[r - decodes]` on, of which it sees all before (null: from its first query's position on). The last
// `prompts` sequences are chunks of prompts, which are attended to in blocks.
struct Step {
    int64_t rows;
    const int32_t* ids;
    const int64_t* positions;
    const int64_t* index;
    const int32_t* pages;
    int64_t pages_stride;
    const int64_t* lengths;
    int64_t sequences, decodes;
    const int64_t* offsets;
    const int64_t* roots;
    const uint64_t* bits;
    int64_t bits_stride;
    int64_t prompts;
};

struct Ops {
    const Op* first;
    int64_t count;
};

}  // namespace troupe
