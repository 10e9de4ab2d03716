"""Fields of speculative decoding: how a request asks, and what its answer tells."""

import msgspec
import pytest

from actors.protocol.requests import Acceptance, Usage
from app.apis.openai.answers import usage_answer
from app.apis.openai.parameters import chat_params, completion_params
from app.apis.openai.requests import ChatRequest, CompletionRequest
from app.apis.sglang.requests import GenerateRequest, batch_of


@pytest.mark.parametrize(
    ("fields", "expected", "tokens"),
    [({}, True, None), ({"speculative": False}, False, None), ({"speculative_num_draft_tokens": 5}, True, 5)],
)
def test_every_api_takes_the_switch_and_the_number(
    fields: dict[str, object], expected: bool, tokens: int | None
) -> None:
    chat = msgspec.convert({"messages": [{"role": "user", "content": "a"}], **fields}, ChatRequest)
    completion = msgspec.convert({"prompt": "a", **fields}, CompletionRequest)
    native = msgspec.convert({"text": "a", "sampling_params": fields}, GenerateRequest)
    for params in (chat_params(chat), completion_params(completion), batch_of(native).items[0].params):
        assert params.speculative is expected
        assert params.speculative_num_draft_tokens == tokens


def test_usage_reports_accepted_and_rejected_draft_tokens_if_any() -> None:
    guesses = Acceptance().and_step(7, 2).and_step(3, 0)
    assert guesses == Acceptance(steps=2, drafted=10, accepted=2, histogram=(1, 0, 1))
    answer = usage_answer([[Usage(3, 5, 0, guesses), Usage(3, 4)]], cache_report=False)
    assert msgspec.to_builtins(answer)["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 8,
    }
    assert b"completion_tokens_details" not in msgspec.json.encode(usage_answer([[Usage(3, 4)]], cache_report=False))
