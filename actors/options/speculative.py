"""The arguments of speculative decoding. Names are SGLang's and TokenSpeed's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from actors.options.argument import Group
from actors.options.declaration import ArgumentSpec
from actors.options.grammar import GrammarArguments

__all__ = ["SpeculativeArguments"]

_GROUP: Group = "Speculative decoding"
_NOT_HERE = "this algorithm is not built; use EAGLE, EAGLE3, MTP, DFLASH, STANDALONE or NGRAM"
_OTHER_DEVICES = "attention kernels can be chosen on NPUs only (ascend or torch_native); leave it out"


_MTP_METHODS = tuple(
    f"{model}_mtp"
    for model in (
        *(
            "deepseek",
            "ernie",
            "exaone4_5",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "longcat_flash",
            "mimo",
            "mimo_v2",
        ),
        *("nemotron_h", "qwen3_5", "qwen3_next", "step3p5"),
    )
)
"""vLLM's names of a method by its model."""


class SpeculativeArguments(GrammarArguments, frozen=True, kw_only=True):
    """The arguments of speculative decoding. Names are SGLang's and TokenSpeed's."""

    speculative_config: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group=_GROUP,
            metavar="JSON",
            help="Arguments of this group as one JSON object: method, model and num_speculative_tokens, and any other "
            'argument by its name without the prefix speculative, as in {"method": "eagle3", "model": "path", '
            '"num_speculative_tokens": 3}.',
        ),
    ] = msgspec.field(default_factory=dict)

    speculative_algorithm: Annotated[
        Literal["EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"] | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="no speculation",
            synonyms={
                "eagle": "EAGLE",
                "eagle3": "EAGLE3",
                "mtp": "MTP",
                "dflash": "DFLASH",
                "standalone": "STANDALONE",
                "ngram": "NGRAM",
                "nextn": "EAGLE",
                "eagle2": "EAGLE",
                "draft_model": "STANDALONE",
                **dict.fromkeys(_MTP_METHODS, "MTP"),
            },
            unbuilt_choices=dict.fromkeys(("dspark", "medusa", "mlp_speculator", "suffix", "lookahead"), _NOT_HERE),
            help="Draft several tokens ahead and let the model verify them in one pass. The output stays the same. "
            "EAGLE (also NEXTN) and EAGLE3: a small head on the model's hidden states; MTP: the model's own "
            "multi-token heads, which EAGLE finds as well; DFLASH: a model that drafts a block at once; "
            "STANDALONE: a smaller model of the same vocabulary; NGRAM: tokens that followed the same n-gram "
            "before, and those that a grammar forces.",
        ),
    ] = None

    speculative_draft_model_path: Annotated[
        str | None,
        ArgumentSpec(
            group=_GROUP,
            aliases=("speculative-draft-model",),
            default_text="the heads in the model's own files, and the included drafts for the included model",
            metavar="PATH",
            help="Directory or hub repository of the draft model or head.",
        ),
    ] = None

    speculative_draft_model_revision: Annotated[
        str | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="the repository's main branch",
            metavar="REVISION",
            help="Branch, tag or commit of the draft's hub repository.",
        ),
    ] = None

    speculative_draft_load_format: Annotated[
        Literal["auto", "safetensors", "dummy"] | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="--load-format",
            help="Format of the draft's weights; dummy fills them with noise.",
        ),
    ] = None

    speculative_num_steps: Annotated[
        int | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="3",
            minimum=1,
            maximum=63,
            metavar="N",
            help="Passes of the draft model, each one token deeper.",
        ),
    ] = None

    speculative_eagle_topk: Annotated[
        int | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="1",
            minimum=1,
            maximum=32,
            metavar="N",
            help="Candidates after each draft token; 1 drafts a chain, more a tree.",
        ),
    ] = None

    speculative_num_draft_tokens: Annotated[
        int | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="4; NGRAM: 12; DFLASH: the draft's block size",
            minimum=2,
            maximum=64,
            metavar="N",
            help="Tokens that the model verifies in one pass, including the last known one.",
        ),
    ] = None

    speculative_dflash_block_size: Annotated[
        int | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="--speculative-num-draft-tokens",
            minimum=2,
            maximum=64,
            metavar="TOKENS",
            help="Another name of --speculative-num-draft-tokens for DFLASH.",
        ),
    ] = None

    speculative_dflash_draft_window_size: Annotated[
        int | None,
        ArgumentSpec(
            group=_GROUP,
            aliases=("speculative-draft-window-size",),
            default_text="all of the context",
            minimum=2,
            maximum=1_048_576,
            metavar="TOKENS",
            help="Number of last context tokens that a DFLASH draft attends to.",
        ),
    ] = None

    speculative_accept_threshold_single: Annotated[
        float,
        ArgumentSpec(
            group=_GROUP,
            minimum=0,
            above=True,
            maximum=1,
            metavar="P",
            help="Below 1, a draft token with at least this probability by the model is accepted even if another "
            "token was sampled: faster, but the output distribution changes. Greedy requests are not touched.",
        ),
    ] = 1.0

    speculative_accept_threshold_acc: Annotated[
        float,
        ArgumentSpec(
            group=_GROUP,
            minimum=0,
            above=True,
            maximum=1,
            metavar="P",
            help="The same for the summed probabilities of the candidates at one position; below 1 the output "
            "distribution changes.",
        ),
    ] = 1.0

    speculative_token_map: Annotated[
        str | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="the whole vocabulary; for the included drafts their list",
            metavar="FILE",
            help="Token ids, the most frequent first, as a JSON list, the only tensor of a safetensors file, or a "
            "list or tensor saved by torch (.pt), local or on the hub (owner/name/file): the draft's output layer is "
            "reduced to them (FR-Spec). For EAGLE, MTP and STANDALONE; an EAGLE-3 head has its own list.",
        ),
    ] = None

    speculative_attention_mode: Annotated[
        Literal["prefill", "decode"],
        ArgumentSpec(
            group=_GROUP,
            help="Attention backend that verifies on an NPU: that of prefills or that of decodes.",
        ),
    ] = "prefill"

    speculative_draft_attention_backend: Annotated[
        Literal["ascend", "torch_native"] | None,
        ArgumentSpec(
            group=_GROUP,
            aliases=("drafter-attention-backend",),
            default_text="--attention-backend",
            unbuilt_choices=dict.fromkeys(
                ("triton", "flashinfer", "fa3", "fa4", "flashmla", "trtllm_mha"), _OTHER_DEVICES
            ),
            help="The draft's attention kernels on an NPU.",
        ),
    ] = None

    speculative_enforce_eager: Annotated[
        bool,
        ArgumentSpec(
            group=_GROUP,
            help="Run the passes of the draft eagerly, on devices that could replay captured graphs; those of the "
            "model are captured. --enforce-eager captures neither.",
        ),
    ] = False

    speculative_moe_a2a_backend: Annotated[
        Literal["none", "deepep"],
        ArgumentSpec(
            group=_GROUP,
            unbuilt_choices={
                "ascend_fuseep": "torch_npu has no operator that dispatches tokens, runs their experts and combines; "
                "use deepep",
            }
            | dict.fromkeys(
                ("mooncake", "flashinfer"),
                "tokens travel by torch.distributed or the NPU's own operators; use deepep",
            ),
            help="Where the experts of a draft are with --enable-dp-attention. none: each part of attention has all. "
            "deepep: they are divided over all devices, and tokens travel as --deepep-mode says; the devices agree on "
            "each pass of the draft, for which the host waits. Needs --moe-a2a-backend deepep.",
        ),
    ] = "none"

    eagle3_layers_to_capture: Annotated[
        tuple[int, ...] | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="as in the draft's config.json",
            minimum=0,
            maximum=1023,
            metavar="N...",
            help="Layers of the model, counted from 0, whose hidden states an EAGLE-3 head reads.",
        ),
    ] = None

    enable_multi_layer_eagle: Annotated[
        bool,
        ArgumentSpec(
            group=_GROUP,
            help="Use a separate head for each step of MTP, if the checkpoint has several, instead of the first again.",
        ),
    ] = False

    speculative_adaptive: Annotated[
        bool,
        ArgumentSpec(
            group=_GROUP,
            help="Choose the number of draft tokens for each request and step by acceptance and by the cost of "
            "passes, down to none if drafting does not pay.",
        ),
    ] = False

    speculative_adaptive_config: Annotated[
        str | None,
        ArgumentSpec(
            group=_GROUP,
            default_text="the built-in settings",
            metavar="FILE",
            help="A JSON file of settings for --speculative-adaptive: candidate_steps, ema_alpha, warmup_batches, "
            "zero_step_probe_interval.",
        ),
    ] = None

    speculative_ngram_min_match_window_size: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            minimum=1,
            maximum=62,
            metavar="TOKENS",
            help="The shortest suffix of the sequence that is looked up.",
        ),
    ] = 1

    speculative_ngram_max_match_window_size: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            minimum=1,
            maximum=62,
            metavar="TOKENS",
            help="The longest suffix of the sequence that is looked up.",
        ),
    ] = 12

    speculative_ngram_min_bfs_breadth: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            minimum=1,
            maximum=63,
            metavar="N",
            help="The fewest followers of a token in a draft, after long matches and deep in the tree. BFS only.",
        ),
    ] = 1

    speculative_ngram_max_bfs_breadth: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            minimum=1,
            maximum=63,
            metavar="N",
            help="The most followers of a token in a draft; with BFS used after the shortest matches.",
        ),
    ] = 10

    speculative_ngram_match_type: Annotated[
        Literal["BFS", "PROB"],
        ArgumentSpec(
            group=_GROUP,
            synonyms={"bfs": "BFS", "prob": "PROB"},
            help="The followers in a draft: the most recent ones (BFS) or the most frequent (PROB).",
        ),
    ] = "BFS"

    speculative_ngram_max_trie_depth: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            aliases=("speculative-ngram-branch-length",),
            minimum=2,
            maximum=64,
            metavar="TOKENS",
            help="The longest stored sequence of tokens: a match and its continuation.",
        ),
    ] = 18

    speculative_ngram_capacity: Annotated[
        int,
        ArgumentSpec(
            group=_GROUP,
            minimum=1024,
            maximum=200_000_000,
            metavar="N",
            help="Entries of the store, about 20 bytes each when used; the least recently seen are evicted first.",
        ),
    ] = 10_000_000
