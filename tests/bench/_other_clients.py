"""The ways of clients of Anthropic's and Ollama's APIs and of evaluators, for ``python -m tests.bench clients``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import app.understudy
from tests.kits.real_server import running
from tests.kits.tiny_encoder import make_tiny_encoder

__all__ = [
    "anthropic_ways",
    "guidellm_ways",
    "langchain_anthropic_ways",
    "langchain_ollama_ways",
    "litellm_encoder_ways",
    "litellm_other_ways",
    "lm_eval_ways",
    "ollama_ways",
]

Way = tuple[str, Callable[[], object]]


def _root(url: str) -> str:
    return url.removesuffix("/v1")


def anthropic_ways(url: str, model: str) -> Iterator[Way]:
    from anthropic import Anthropic

    from tests.bench.clients import MAX_TOKENS, PATIENCE, PERSON, TOOL, WEATHER, Person, need, user

    client = Anthropic(base_url=_root(url), api_key="none", max_retries=0, timeout=PATIENCE)
    function = TOOL["function"]
    assert isinstance(function, dict)
    tool: Any = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    options: Any = {"model": model, "max_tokens": MAX_TOKENS}

    def called(text: str, choice: Any) -> object:
        answer = client.messages.create(**options, messages=user(text), tools=[tool], tool_choice=choice)
        return next(block for block in answer.content if block.type == "tool_use").input["city"]

    def streamed() -> object:
        with client.messages.stream(**options, messages=user(WEATHER), tools=[tool]) as stream:
            final = stream.get_final_message()
        return next(block for block in final.content if block.type == "tool_use").input["city"]

    def formed() -> object:
        return need(client.messages.parse(**options, messages=user(PERSON), output_format=Person).parsed_output, Person)

    def counted() -> object:
        return need(client.messages.count_tokens(model=model, messages=user(WEATHER), tools=[tool]).input_tokens, int)

    yield "parse(output_format=)", formed
    yield "tools, auto", lambda: called(WEATHER, {"type": "auto"})
    yield "tools, any", lambda: called("Hello!", {"type": "any"})
    yield "tools, tool", lambda: called("Hello!", {"type": "tool", "name": "get_weather"})
    yield "tools in a stream", streamed
    yield "count_tokens", counted
    yield "models.list", lambda: next(iter(client.models.list())).id


def ollama_ways(url: str, model: str) -> Iterator[Way]:
    import ollama

    from tests.bench.clients import MAX_TOKENS, PERSON, TOOL, WEATHER, Person, user

    client = ollama.Client(host=_root(url))
    options: Any = {"num_predict": MAX_TOKENS}

    def formed(form: Any) -> object:
        return client.chat(model, user(PERSON), format=form, options=options).message.content

    def called() -> object:
        answer = client.chat(model, user(WEATHER), tools=[TOOL], options=options)
        return (answer.message.tool_calls or [])[0].function.arguments["city"]

    def streamed() -> object:
        parts = list(client.chat(model, user(WEATHER), tools=[TOOL], options=options, stream=True))
        return next(call for part in parts for call in part.message.tool_calls or ()).function.arguments["city"]

    def thinking() -> object:
        return client.chat(model, user("Is 7 more than 5?"), think=True, options=options).message.thinking

    yield "format=schema", lambda: Person.model_validate_json(str(formed(Person.model_json_schema())))
    yield "format=json", lambda: formed("json")
    yield "tools", called
    yield "tools in a stream", streamed
    yield "think", thinking
    yield "generate", lambda: client.generate(model, "Hello!", options=options).response
    yield "list, ps and show", lambda: (client.list().models[0], client.ps().models[0], client.show(model).capabilities)


def langchain_anthropic_ways(url: str, model: str) -> Iterator[Way]:
    from langchain_anthropic import ChatAnthropic
    from pydantic import SecretStr

    from tests.bench.clients import PATIENCE, PERSON, WEATHER, GetWeather, Person, need

    made: Any = ChatAnthropic
    chat = made(
        base_url=_root(url),
        api_key=SecretStr("none"),
        model=model,
        max_retries=0,
        timeout=PATIENCE,
        max_tokens=256,
    )
    for method in ("json_schema", "function_calling"):
        yield (
            f"with_structured_output({method})",
            lambda method=method: need(  # type: ignore[misc]
                chat.with_structured_output(Person, method=method).invoke(PERSON), Person
            ),
        )
    yield "bind_tools", lambda: chat.bind_tools([GetWeather]).invoke(WEATHER).tool_calls[0]["args"]["city"]
    yield (
        "bind_tools(tool_choice=any)",
        lambda: chat.bind_tools([GetWeather], tool_choice="any").invoke("Hello!").tool_calls[0]["args"]["city"],
    )
    yield "stream", lambda: "".join(str(part.content) for part in chat.stream(WEATHER))


def langchain_ollama_ways(url: str, model: str) -> Iterator[Way]:
    from langchain_ollama import ChatOllama

    from tests.bench.clients import PERSON, WEATHER, GetWeather, Person, need

    chat = ChatOllama(base_url=_root(url), model=model, num_predict=256)
    for method in ("json_schema", "json_mode"):
        text = PERSON + (" Answer in JSON with name and age." if method == "json_mode" else "")
        kind: Any = method
        yield (
            f"with_structured_output({method})",
            lambda kind=kind, text=text: need(  # type: ignore[misc]
                chat.with_structured_output(Person, method=kind).invoke(text), Person
            ),
        )
    yield "bind_tools", lambda: chat.bind_tools([GetWeather]).invoke(WEATHER).tool_calls[0]["args"]["city"]  # type: ignore[attr-defined]
    yield "stream", lambda: "".join(str(part.content) for part in chat.stream(WEATHER))


def litellm_other_ways(url: str, model: str) -> Iterator[Way]:
    """litellm over completions, responses, and Anthropic's and Ollama's APIs."""
    import litellm

    from tests.bench.clients import MAX_TOKENS, TOOL, WEATHER, need, user

    ours: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}

    def respond() -> object:
        answer: Any = litellm.responses(**ours, input="Hello!", max_output_tokens=MAX_TOKENS)
        return need(answer.output[-1].content[0].text, str)

    def complete_text() -> object:
        named = {**ours, "model": f"text-completion-openai/{model}"}
        answer: Any = litellm.text_completion(**named, prompt="Hello!", max_tokens=16)
        return need(answer.choices[0].text, str)

    def stream() -> object:
        parts: Any = litellm.completion(**ours, messages=user("Hello!"), stream=True, max_tokens=MAX_TOKENS)
        return "".join(part.choices[0].delta.content or "" for part in parts)

    yield "a stream", stream
    yield "text_completion", complete_text
    yield "responses", respond

    for provider, base in (("anthropic", _root(url)), ("ollama_chat", _root(url))):
        options: dict[str, Any] = {
            "model": f"{provider}/{model}", "api_base": base, "api_key": "none", "max_tokens": MAX_TOKENS,
        }  # fmt: skip

        def complete(options: dict[str, Any] = options) -> object:
            answer: Any = litellm.completion(**options, messages=user("Hello!"))
            return answer.choices[0].message.content

        def called(options: dict[str, Any] = options) -> object:
            answer: Any = litellm.completion(**options, messages=user(WEATHER), tools=[TOOL])
            return answer.choices[0].message.tool_calls[0].function.arguments

        def streamed(options: dict[str, Any] = options) -> object:
            parts: Any = litellm.completion(**options, messages=user("Hello!"), stream=True)
            return "".join(part.choices[0].delta.content or "" for part in parts)

        yield f"{provider}, text", complete
        yield f"{provider}, tools", called
        yield f"{provider}, a stream", streamed


@contextmanager
def _encoder(labels: int) -> Iterator[str]:
    """The URL of a server of a tiny encoder with random weights: it embeds, or with ``labels`` it scores pairs."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_encoder(Path(folder) / "encoder", labels=labels)
        with running(Path(folder) / "log", str(Path(folder) / "encoder"), "--served-model-name", "encoder") as server:
            yield server.url


def litellm_encoder_ways(url: str, model: str) -> Iterator[Way]:
    """litellm over the APIs of models that generate no text."""
    import litellm

    from tests.bench.clients import need_equal

    texts = ["one two three", "the lazy dog"]

    def embed(provider: str, path: str, **options: Any) -> object:
        with _encoder(0) as base:
            answer: Any = litellm.embedding(
                f"{provider}/encoder", texts, api_base=f"{base}{path}", api_key="none", **options
            )
        return need_equal([len(item["embedding"]) for item in answer.data], [options.get("dimensions", 32)] * 2)

    def rerank(provider: str, path: str) -> object:
        with _encoder(1) as base:
            answer: Any = litellm.rerank(
                f"{provider}/encoder", "the capital", texts, api_base=f"{base}{path}", api_key="none", top_n=2
            )
        return need_equal({item["index"] for item in answer.results}, {0, 1})

    yield "embedding", lambda: embed("openai", "/v1")
    yield "embedding, hosted_vllm", lambda: embed("hosted_vllm", "/v1")
    yield "embedding, ollama", lambda: embed("ollama", "")
    yield "embedding, jina_ai", lambda: embed("jina_ai", "/v1/embeddings")
    yield "rerank, hosted_vllm", lambda: rerank("hosted_vllm", "")
    yield "rerank, jina_ai", lambda: rerank("jina_ai", "/v1/rerank")
    yield "rerank, cohere", lambda: rerank("cohere", "")


CAPITALS = ({"question": "The capital of France is", "choices": ["Paris", "Rome"], "answer": 0},
            {"question": "The capital of Japan is", "choices": ["Berlin", "Tokyo"], "answer": 1})  # fmt: skip

_MEAN = {"aggregation": "mean", "higher_is_better": True}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", **_MEAN}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", **_MEAN}],
    },
}


def lm_eval_ways(url: str, model: str) -> Iterator[Way]:
    """Tasks of its own: log-probabilities of choices, and texts."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tests.bench.clients import need

    def evaluate(api: str, task: str) -> object:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "capitals.jsonl"
            data.write_text("\n".join(map(json.dumps, CAPITALS)))
            source = {"data_files": {"test": str(data)}, "cache_dir": folder}
            config = {"task": task, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
            # YAML reads JSON.
            (Path(folder) / f"{task}.yaml").write_text(
                json.dumps(config | {"doc_to_text": "{{question}}"} | TASKS[task])
            )
            chats = api == "local-chat-completions"
            arguments: Any = {"base_url": f"{url}{'/chat' if chats else ''}/completions", "model": model}
            arguments |= {"max_length": 2048, **({} if chats else {"tokenizer_backend": "remote"})}
            found: Any = simple_evaluate(
                model=api,
                model_args=arguments,
                tasks=[task],
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                apply_chat_template=chats,
                bootstrap_iters=0,
            )
        if task == "choice":
            return need(found["results"][task]["acc,none"], float)
        return [need(sample["resps"][0][0], str) for sample in found["samples"][task]]

    yield "local-completions, choices", lambda: evaluate("local-completions", "choice")
    yield "local-completions, texts", lambda: evaluate("local-completions", "text")
    yield "local-chat-completions, texts", lambda: evaluate("local-chat-completions", "text")


def guidellm_ways(url: str, model: str) -> Iterator[Way]:
    """Its load over each API. The texts are synthetic, in the tokens of the included model."""

    from tests.bench.clients import need_equal

    tokenizer = Path(app.understudy.__file__).parent / "model"

    def run(path: str, profile: str) -> object:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = {
                "backend": f"kind=openai_http,target={_root(url)},model={model},request_format={path}",
                "profile": profile,
                "constraint": "kind=max_requests,count=4",
                "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
                "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
                "output": f"kind=json,path={report}",
            }
            words = [word for name, value in options.items() for word in (f"--{name}", value)]
            command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode or not report.exists():
                raise RuntimeError(" ".join(done.stderr.split())[-160:])
            [benchmark] = json.loads(report.read_text())["benchmarks"]
        return need_equal(benchmark["metrics"]["request_totals"]["successful"], 4)

    yield "chat, one at a time", lambda: run("/v1/chat/completions", "kind=synchronous")
    yield "completions, two at a time", lambda: run("/v1/completions", "kind=concurrent,streams=2")
