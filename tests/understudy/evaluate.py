"""Score the understudy on its test set: `python -m tests.understudy.evaluate` or `python -m tests.bench understudy`.

With plain transformers on the weights of a directory, or with --url against a running OpenAI-compatible server.
"""

import argparse
import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR
from kernels.contract.environment import hide_broken_npu
from tests.understudy.examination import Question, listed_rightly, questions

__all__ = ["Reply", "add_arguments", "evaluate", "main", "score", "with_server", "with_transformers"]

CAPITALS = ("capital of a country", "country of a capital", "lists")
LIMIT = 220


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote, markers of thoughts and tools included, and whether it ended its turn itself."""

    text: str
    ended: bool


Answerer = Callable[[Sequence[Question]], list[Reply]]


def with_transformers(directory: Path, device: str = "cpu", batch: int = 64, sample: bool = False) -> Answerer:
    """An answerer with transformers' own model class in bfloat16: greedy, or with the generation defaults."""
    hide_broken_npu()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    ends = set(model.generation_config.eos_token_id)
    options: dict[str, Any] = {} if sample else {"do_sample": False, "temperature": None, "top_p": None}

    def answer(asked: Sequence[Question]) -> list[Reply]:
        torch.manual_seed(0)
        prompts = [
            tokenizer.apply_chat_template(
                question.messages,
                tools=question.tools or None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=question.thinking,
            )
            for question in asked
        ]
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        replies: dict[int, Reply] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = tokenizer([prompts[at] for at in chosen], return_tensors="pt", padding=True).to(device)
            with torch.inference_mode():
                rows = model.generate(**inputs, max_new_tokens=LIMIT, **options)[:, inputs["input_ids"].shape[1] :]
            for at, row in zip(chosen, rows.tolist(), strict=True):
                length = next((i for i, token in enumerate(row) if token in ends), None)
                replies[at] = Reply(tokenizer.decode(row[:length], skip_special_tokens=True), length is not None)
        return [replies[at] for at in range(len(prompts))]

    return answer


def with_server(url: str, model: str = "", key: str = "", concurrency: int = 16) -> Answerer:
    """An answerer over POST {url}/v1/chat/completions, greedy. Raises urllib.error.URLError when the server fails."""

    def post(path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url.rstrip("/") + path, data, headers), timeout=120) as got:
            answer: dict[str, Any] = json.load(got)
        return answer

    name = model or post("/v1/models", None)["data"][0]["id"]

    def one(question: Question) -> Reply:
        body: dict[str, Any] = {"model": name, "messages": question.messages, "temperature": 0, "max_tokens": LIMIT}
        if question.tools:
            body["tools"] = question.tools
        if question.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        choice = post("/v1/chat/completions", body)["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        if message.get("reasoning_content"):
            text = f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            written = {"name": function["name"], "arguments": json.loads(function["arguments"])}
            text += f"<tool_call>{json.dumps(written)}</tool_call>"
        return Reply(text, choice["finish_reason"] != "length")

    def answer(asked: Sequence[Question]) -> list[Reply]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, asked))

    return answer


def score(asked: Sequence[Question], replies: Sequence[Reply]) -> dict[str, tuple[int, int]]:
    """(right, asked) of every subject, of the capital questions together, and of ended turns."""
    table: dict[str, tuple[int, int]] = {}

    def count(row: str, right: bool) -> None:
        rights, total = table.get(row, (0, 0))
        table[row] = (rights + right, total + 1)

    for question, reply in zip(asked, replies, strict=True):
        right = question.right(reply.text)
        if question.subject in CAPITALS:
            count("held-out capital questions", right)
        count(question.subject, right)
        count("ends its turn", reply.ended)
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `evaluate` reads."""
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="model directory")
    parser.add_argument("--device", default="cpu", help="that runs the model")
    parser.add_argument("--batch", type=int, default=64, help="questions at once")
    parser.add_argument("--url", help="score a running server instead, for example http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="", help="of the running server")
    parser.add_argument("--wrong", type=int, default=0, help="wrong answers to print for each subject")


def evaluate(given: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Ask all questions and print the table of scores; (right, asked) of every subject."""
    asked = questions()
    if given.url:
        replies = with_server(given.url, key=given.api_key)(asked)
    else:
        replies = with_transformers(given.model, given.device, given.batch)(asked)
    table = score(asked, replies)
    shown: dict[str, int] = {}
    for question, reply in zip(asked, replies, strict=True):
        if shown.get(question.subject, 0) < given.wrong and not question.right(reply.text):
            shown[question.subject] = shown.get(question.subject, 0) + 1
            print(f"[{question.subject}] {question.messages[-1]['content']!r} -> {reply.text!r}")
    if not given.url:
        first = Question("", [{"role": "user", "content": "List 3 countries and their capitals."}], lambda _: True)
        drawn = with_transformers(given.model, given.device, given.batch, sample=True)([first] * 100)
        table['"List 3 countries and their capitals.", sampled'] = (sum(listed_rightly(r.text, 3) for r in drawn), 100)
    print(f"{'subject':<50} {'right':>6} {'asked':>6} {'share':>7}")
    for row, (right, total) in table.items():
        print(f"{row:<50} {right:>6} {total:>6} {right / total:>7.1%}")
    return table


def main(argv: list[str] | None = None) -> int:
    """Print the table of scores; 0 when at least 95 % of the held-out capital questions are right, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.understudy.evaluate", description=(__doc__ or "").split("\n")[0]
    )
    add_arguments(parser)
    right, total = evaluate(parser.parse_args(argv))["held-out capital questions"]
    return 0 if right >= 0.95 * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
