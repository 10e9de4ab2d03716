"""The ways of clients of Anthropic's and Ollama's APIs, for ``python -m tests.bench clients``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["anthropic_ways", "langchain_anthropic_ways", "langchain_ollama_ways", "litellm_other_ways", "ollama_ways"]

Way = tuple[str, Callable[[], object]]


def _root(url: str) -> str:
    return url.removesuffix("/v1")


def anthropic_ways(url: str, model: str) -> Iterator[Way]:
    from anthropic import Anthropic

    from tests.bench.clients import MOST_TOKENS, PATIENCE, PERSON, TOOL, WEATHER, Person, need, user

    client = Anthropic(base_url=_root(url), api_key="none", max_retries=0, timeout=PATIENCE)
    function = TOOL["function"]
    assert isinstance(function, dict)
    tool: Any = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    options: Any = {"model": model, "max_tokens": MOST_TOKENS}

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

    from tests.bench.clients import MOST_TOKENS, PERSON, TOOL, WEATHER, Person, user

    client = ollama.Client(host=_root(url))
    options: Any = {"num_predict": MOST_TOKENS}

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
    """litellm over Anthropic's and Ollama's APIs."""
    import litellm

    from tests.bench.clients import MOST_TOKENS, TOOL, WEATHER, user

    for provider, base in (("anthropic", _root(url)), ("ollama_chat", _root(url))):
        options: dict[str, Any] = {
            "model": f"{provider}/{model}", "api_base": base, "api_key": "none", "max_tokens": MOST_TOKENS,
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
