"""Speculative decoding: a draft model proposes tokens; the target model verifies them in one pass and accepts a prefix.

A step of a speculating runner has four parts (``Speculator``):

1. The drafter *observes* the results of earlier steps: tokens, the target's hidden states, accepted draft tokens.
2. It *drafts* a tree of tokens for each row that may speculate.
3. The target runs the trees, and a token is sampled after every node.
4. The path of nodes that equal the sampled tokens is *accepted*. The output is the same as without a draft.

Modules:

    drafter.py          the contract of an algorithm: Drafter, its rows, trees and observations
    drafters/           one file an algorithm; heads.py: the common part of EAGLE's and MTP's heads
    draft_sampler.py    choosing draft tokens by logits; places in a draft's cache
    expansion.py        chains and trees from autoregressive drafts
    speculator.py       the work before and after the model in each step
    observe.py          results of steps that wait for observation
    verify.py           acceptance of draft tokens
    early_draft.py      drafting and verifying before the host knows the accepted tokens
    native_drafts.py      drafting on the CPU: one native call a pass
    native_loop.py        whole steps of drafting and verification on the CPU
    load.py             a draft's files, device and algorithm; token_map.py: heads with a reduced vocabulary
    division.py         how ranks divide a draft; stage_drafter.py: drafts in a pipeline
    warmup.py           warm-up steps at load

What a draft has observed
-------------------------

A drafter drafts only after tokens that it has observed. Observation costs time, so a step's tokens pass through these
states (``Speculator`` moves them, ``Observer`` keeps them):

                  a step ran,            begin_step(a row drafts) or flush_idle:
                  some row may draft     show it now
        computed ───────────────> PENDING ─────────────────────────────────────> OBSERVED
           │                         │                                              ^
           │ defer: a plain decode   │ begin_step(no row drafts)                    │ flush: a row drafts, a slot is
           │ on the host             v                                              │ released, or there is no room
           └────────────────────> DEFERRED ─────────────────────────────────────────┘
                                     │
             begin_step(unobserved): │ the scheduler lets the draft sleep
                                     v
                                  DROPPED: never observed; the draft observes some later steps before it drafts again

* PENDING: at most one step. On a device the host learns its outcome when ``begin_step`` counts it.
* DEFERRED: decodes of several steps, observed together at the cost of about one.
* A pass that drafts early (``early_draft``) observes the tokens that it drafts after: PENDING to OBSERVED without the
host.
* ``is_settled``: nothing is PENDING and one more decode of the same rows has room: such a step needs no call at all.
"""
