"""What a caller of the engine sends and receives: sampling parameters, prompts, deltas and errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors.runtime import RequestError
from kernels.contract.grammar import Grammar
from kernels.contract.step import ThoughtBudget
from kernels.contract.tasks import TaskResult

__all__ = [
    "LIMITS",
    "Acceptance",
    "Chat",
    "CompilerBusy",
    "Delta",
    "EngineDraining",
    "EngineFailed",
    "EngineNotReady",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "Limits",
    "QueueFull",
    "RequestAborted",
    "RequestFailed",
    "RequestTimeout",
    "SamplingParams",
    "Thought",
    "ThoughtBudget",
    "TokenLogprob",
    "Usage",
    "WaitedTooLong",
]

FinishReason = Literal["stop", "length"]


class Limits(msgspec.Struct, frozen=True):
    """The largest value of everything a user may send."""

    n: int = 128
    stop_strings: int = 16
    stop_string_chars: int = 256
    stop_patterns: int = 8
    stop_token_ids: int = 128
    shown_special_tokens: int = 64
    bad_words: int = 128
    bad_words_tokens: int = 1024
    logprobs: int = 20
    logprob_entries: int = 1 << 20  # of one answer: tokens times choices times (1 + alternatives)
    state_numbers: int = 1 << 22  # of one answer: tokens times choices times the size of a hidden state
    expert_numbers: int = 1 << 23  # of one answer: tokens times choices times layers times experts of a token
    logit_bias: int = 1024
    allowed_token_ids: int = 65536
    prompts: int = 2048
    messages: int = 4096
    tools: int = 512
    tool_name_chars: int = 128  # Anthropic's limit; OpenAI's is 64
    metadata_pairs: int = 16
    metadata_key_chars: int = 64
    metadata_value_chars: int = 512
    cache_salt_chars: int = 256
    adapter_name_chars: int = 256
    path_chars: int = 4096
    template_chars: int = 65536  # of a request's own chat template
    template_kwargs_bytes: int = 65536  # as JSON
    grammar_bytes: int = 65536  # of a grammar's text
    grammar_depth: int = 64  # of its brackets
    grammar_choices: int = 1024
    grammar_seconds: float = 10.0  # to compile it
    schema_bytes: int = 65536  # of one tool's parameters, as JSON
    tools_bytes: int = 1 << 20  # of all tools, and of all tool calls in a conversation, as JSON
    text_requests: int = 64  # tokenizing, detokenizing and the like at a time, which take no permit
    request_id_chars: int = 256
    draft_tokens: int = 64
    penalty: float = 2.0
    temperature: float = 100.0  # OpenAI's own API stops at 2; other engines' users go higher


LIMITS = Limits()


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """The marks around a model's thought, which no grammar constrains.

    ``always``: the answer begins in a thought unless the prompt has ended it; otherwise only where the prompt ends with
    ``begin``, or the model starts with it.
    """

    begin: str
    end: str
    always: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a request ends. The engine checks every field
    (``actors.requests.sampling_rules``).

    Names are vLLM's and OpenAI's; the HTTP layer maps SGLang's (``max_new_tokens``, ``sampling_seed`` ...) onto them.
    ``None`` means "the model's generation_config.json, else the field's neutral value".
    """

    max_tokens: int | None = None  # None: default_max_tokens, or less where the context ends before
    default_max_tokens: int | None = None  # an API's own limit; None: up to the context length
    min_tokens: int = 0
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    thought_budget: ThoughtBudget | None = None  # the output tokens after which a thought is ended
    seed: int | None = None  # None: drawn once per request
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()  # actors.text.stop_patterns
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()  # not skipped all the same
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: and the k most likely
    prompt_logprobs: int | None = None
    hidden_states: bool = False  # return the final hidden states of all tokens; nothing is drafted then
    routed_experts: bool = False  # return the experts that all tokens took; nothing is drafted then
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None  # what the text must match
    thought: Thought | None = None  # the grammar begins after it
    speculative: bool = True  # whether tokens may be drafted ahead, where the engine does; the output is the same
    speculative_num_draft_tokens: int | None = None  # verified in one pass, the last known one among them; None: all
    prediction: str = ""  # a text that the output is expected to repeat: NGRAM drafts from it


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be rendered by the model's chat template.

    ``template`` is the caller's own instead, which the engine takes with ``trust_request_chat_template`` only.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}  # e.g. enable_thinking
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its log-probability (natural logarithm; None for the first prompt token) and the most likely others."""

    token_id: int
    token: str
    bytes_: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


class Acceptance(msgspec.Struct, frozen=True):
    """What became of a request's draft tokens (speculative decoding): in ``steps`` that verified some, ``drafted`` of
    them, ``accepted`` were right. ``histogram[n]``: steps that accepted n.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()

    def and_step(self, drafted: int, accepted: int) -> Acceptance:
        """With another step's."""
        counts = [*self.histogram, *[0] * (accepted + 1 - len(self.histogram))]
        counts[accepted] += 1
        return Acceptance(self.steps + 1, self.drafted + drafted, self.accepted + accepted, tuple(counts))


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of one request; ``cached_tokens`` of the prompt were not computed again. ``acceptance``: None while
    no draft token was verified."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    acceptance: Acceptance | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of one choice. Deltas that wait for a slow reader are merged, so their number is not the tokens'
    number."""

    request_id: str
    index: int = 0  # which of the n choices
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with the first delta of a choice
    prompt_token_ids: tuple[int, ...] | None = None  # with the first delta of a choice
    # float32 [tokens, hidden]: the final hidden states that these tokens were sampled from; with the first one, those
    # of all prompt tokens
    hidden_states: bytes = b""
    routed_experts: bytes = b""  # int32 [tokens, layers, chosen]: of the same tokens, the experts that they took
    finish_reason: FinishReason | None = None  # set on the last delta of a choice, never else
    matched_stop: str | int | None = None  # the stop string, regular expression or token id that ended it
    usage: Usage = Usage()  # so far, for this choice
    result: TaskResult | None = None  # of a task that is not Generate, on its last delta


class InvalidRequest(RequestError):
    """The request is wrong in itself: HTTP 400, or 422 if that shows in the middle of its answer. ``param`` names the
    field."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RequestError):
    """The engine is full: HTTP 429. ``retry_after`` in seconds, at most 120."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CompilerBusy(QueueFull):
    """Other requests' grammars are being compiled: HTTP 503. ``retry_after`` in seconds."""


class EngineNotReady(RequestError):
    """Still starting: HTTP 503."""


class EngineDraining(RequestError):
    """Shutting down: HTTP 503."""


class EngineFailed(RequestError):
    """The engine gave up after too many restarts: HTTP 503; only a new process helps."""


class RequestFailed(RequestError):
    """This request met an error inside the engine: HTTP 500, or an error chunk in a stream."""


class RequestTimeout(RequestError):
    """The request's deadline passed: HTTP 504 (408 is retried by clients), or an error chunk."""


class WaitedTooLong(RequestError):
    """The request had not started when --request-waiting-timeout was over: HTTP 503."""


class RequestAborted(RequestError):
    """The request was aborted by its id."""
