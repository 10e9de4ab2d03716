"""Run real client packages against a server and print which of their ways to answers, forms and tools work.

    python -m tests.bench clients                                  # its own server, the included model
    python -m tests.bench clients --url http://127.0.0.1:8000 --only instructor

A way works if the package returns what its documentation promises: an object of the requested type, a call of a given
tool, the score of a task, or the report of a load. Whether the answer is right is not asked. Packages of the extra
``clients`` that are missing are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from tests.bench._options import command_line
from tests.bench._other_clients import (
    anthropic_ways,
    guidellm_ways,
    langchain_anthropic_ways,
    langchain_ollama_ways,
    litellm_encoder_ways,
    litellm_other_ways,
    lm_eval_ways,
    ollama_ways,
)
from tests.bench._record import record
from tests.kits.real_server import running

PERSON = "Anna is 30 years old. Who is it?"
WEATHER = "What is the weather in Oslo?"
MAX_TOKENS = 256
PATIENCE = 120.0


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

Way = tuple[str, Callable[[], object]]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def openai_ways(url: str, model: str) -> Iterator[Way]:
    from openai import OpenAI, pydantic_function_tool

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
    create: Any = client.chat.completions.create
    options: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS}

    def parsed(**keywords: Any) -> Any:
        return client.chat.completions.parse(**options, **keywords).choices[0].message

    def called(choice: object, text: str = WEATHER, **keywords: Any) -> object:
        answer = create(**options, messages=user(text), tools=[TOOL], tool_choice=choice, **keywords)
        return answer.choices[0].message.tool_calls[0].function.arguments

    def streamed() -> object:
        with client.chat.completions.stream(**options, messages=user(WEATHER), tools=[TOOL]) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments

    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    strict: Any = [pydantic_function_tool(GetWeather)]
    yield "parse(response_format=)", lambda: need(parsed(messages=user(PERSON), response_format=Person).parsed, Person)
    yield (
        "parse(tools=), strict",
        lambda: need(
            parsed(messages=user(WEATHER), tools=strict, tool_choice="required")
            .tool_calls[0]
            .function.parsed_arguments,
            GetWeather,
        ),
    )
    yield "tools, auto", lambda: called("auto")
    yield "tools, required", lambda: called("required", "Hello!")
    yield "tools, named", lambda: called(named, "Hello!")
    yield "tools, allowed_tools", lambda: called(allowed, "Hello!")
    yield "tools in a stream", streamed
    yield (
        "json_object",
        lambda: json.loads(
            create(**options, messages=user(PERSON), response_format={"type": "json_object"}).choices[0].message.content
        ),
    )


def openai_responses_ways(url: str, model: str) -> Iterator[Way]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
    create: Any = client.responses.create
    options: dict[str, Any] = {"model": model, "max_output_tokens": MAX_TOKENS}
    tool = {"type": "function", "name": "get_weather", "parameters": TOOL["function"]["parameters"]}  # type: ignore[index]

    def called(choice: object, text: str = WEATHER) -> object:
        answer = create(**options, input=text, tools=[tool], tool_choice=choice)
        return next(item for item in answer.output if item.type == "function_call").arguments

    def answered() -> object:
        first = create(**options, input=WEATHER, tools=[tool], tool_choice="required")
        call = next(item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
        return need(create(**options, input=[output], previous_response_id=first.id, tools=[tool]).output_text, str)

    def streamed() -> object:
        with client.responses.stream(**options, input=PERSON, text_format=Person) as stream:
            for _ in stream:
                pass
            return need(stream.get_final_response().output_parsed, Person)

    def in_background() -> object:
        answer = create(**options, input=PERSON, background=True)
        while answer.status in ("queued", "in_progress"):
            time.sleep(0.1)
            answer = client.responses.retrieve(answer.id)
        return need(answer.output_text, str)

    def conversed() -> object:
        made = client.conversations.create()
        create(**options, input=PERSON, conversation=made.id)
        create(**options, input="And who else?", conversation=made.id)
        return client.conversations.items.list(made.id).data[3]

    def managed() -> object:
        answer = create(**options, input=PERSON)
        need(client.responses.retrieve(answer.id).output_text, str)
        need(client.responses.input_items.list(answer.id).data[0].content[0].text, str)
        return client.responses.delete(answer.id)

    yield "parse(text_format=)", lambda: need(
        client.responses.parse(**options, input=PERSON, text_format=Person).output_parsed, Person
    )  # fmt: skip
    yield "stream(text_format=)", streamed
    yield "tools, auto", lambda: called("auto")
    yield "tools, required", lambda: called("required", "Hello!")
    yield "tools, named", lambda: called({"type": "function", "name": "get_weather"}, "Hello!")
    yield "previous_response_id", answered
    yield "conversation", conversed
    yield "background", in_background
    yield "retrieve, input_items, delete", managed


def instructor_ways(url: str, model: str) -> Iterator[Way]:
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)

    def run_with(mode: Any) -> object:
        patched = instructor.from_openai(client, mode=mode)
        kind: Any = Person
        if mode.name == "PARALLEL_TOOLS":
            from collections.abc import Iterable

            kind = Iterable[Person]
        found = patched.chat.completions.create(
            model=model, messages=user(PERSON), response_model=kind, max_retries=0, max_tokens=MAX_TOKENS
        )
        return need(next(iter(found)) if mode.name == "PARALLEL_TOOLS" else found, Person)

    for name in ("TOOLS", "TOOLS_STRICT", "PARALLEL_TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON", "JSON_O1"):
        mode = getattr(instructor.Mode, name, None)
        if mode is not None:
            yield f"Mode.{name}", lambda mode=mode: run_with(mode)  # type: ignore[misc]


def pydantic_ai_ways(url: str, model: str) -> Iterator[Way]:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings: Any = {"max_tokens": MAX_TOKENS}

    def run_with(kind: Any) -> object:
        agent: Any = Agent(served, output_type=kind(Person), model_settings=settings)
        return need(asyncio.run(agent.run(PERSON)).output, Person)

    def with_tool() -> object:
        agent = Agent(served, model_settings=settings)
        cities: list[str] = []

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Get the weather of a city."""
            cities.append(city)
            return "It is sunny."

        asyncio.run(agent.run(WEATHER))
        return cities[0]

    yield "ToolOutput", lambda: run_with(ToolOutput)
    yield "NativeOutput", lambda: run_with(NativeOutput)
    yield "PromptedOutput", lambda: run_with(PromptedOutput)
    yield "a tool", with_tool


def langchain_ways(url: str, model: str) -> Iterator[Way]:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    options: dict[str, Any] = {
        "base_url": url, "api_key": SecretStr("none"), "model": model, "max_retries": 0, "timeout": PATIENCE,
        "max_completion_tokens": MAX_TOKENS,
    }  # fmt: skip
    chat = ChatOpenAI(**options)
    responses = ChatOpenAI(**options, use_responses_api=True)
    for method in ("json_schema", "function_calling", "json_mode"):
        text = PERSON + (" Answer in JSON with name and age." if method == "json_mode" else "")
        yield (
            f"with_structured_output({method})",
            lambda method=method, text=text: need(  # type: ignore[misc]
                chat.with_structured_output(Person, method=method).invoke(text), Person
            ),
        )
    yield "bind_tools", lambda: chat.bind_tools([GetWeather]).invoke(WEATHER).tool_calls[0]["args"]["city"]
    yield (
        "bind_tools(tool_choice=any)",
        lambda: chat.bind_tools([GetWeather], tool_choice="any").invoke("Hello!").tool_calls[0]["args"]["city"],
    )
    yield (
        "responses: with_structured_output",
        lambda: need(responses.with_structured_output(Person).invoke(PERSON), Person),
    )
    yield (
        "responses: bind_tools",
        lambda: responses.bind_tools([GetWeather]).invoke(WEATHER).tool_calls[0]["args"]["city"],
    )
    yield "responses: stream", lambda: "".join(str(part.content) for part in responses.stream(WEATHER))


def litellm_ways(url: str, model: str) -> Iterator[Way]:
    import litellm

    litellm.suppress_debug_info = True
    options: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": MAX_TOKENS, "num_retries": 0,
    }  # fmt: skip

    def called(choice: str, text: str) -> object:
        answer: Any = litellm.completion(**options, messages=user(text), tools=[TOOL], tool_choice=choice)
        return answer.choices[0].message.tool_calls[0].function.arguments

    def formed() -> object:
        answer: Any = litellm.completion(**options, messages=user(PERSON), response_format=Person)
        return Person.model_validate_json(answer.choices[0].message.content)

    yield "response_format=", formed
    yield "tools, auto", lambda: called("auto", WEATHER)
    yield "tools, required", lambda: called("required", "Hello!")


def llama_index_ways(url: str, model: str) -> Iterator[Way]:
    from llama_index.core.program import LLMTextCompletionProgram
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def made(functions: bool) -> Any:
        return OpenAILike(
            model=model, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=functions,
            max_tokens=MAX_TOKENS, max_retries=0, timeout=PATIENCE, context_window=2048,
        )  # fmt: skip

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"It is sunny in {city}."

    def called() -> object:
        return made(True).predict_and_call([FunctionTool.from_defaults(get_weather)], WEATHER).sources[0].tool_name

    yield (
        "structured_predict",
        lambda: need(made(True).structured_predict(Person, PromptTemplate(PERSON)), Person),
    )
    yield (
        "text completion program",
        lambda: need(
            LLMTextCompletionProgram.from_defaults(output_cls=Person, prompt=PromptTemplate(PERSON), llm=made(False))(),
            Person,
        ),
    )
    yield "predict_and_call", called


def agents_ways(url: str, model: str) -> Iterator[Way]:
    """With the Responses API, which is the package's default, and with the chat API."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def run(text: str, api: Any, hands_off: bool = False, streamed: bool = False, **keywords: Any) -> Any:
        async def once() -> Any:
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
                served = api(model=model, openai_client=client)
                agent: Any = Agent(name="a", model=served, **keywords)
                if hands_off:
                    settings = ModelSettings(max_tokens=MAX_TOKENS, tool_choice="required")
                    agent = Agent(name="first", model=served, handoffs=[agent], model_settings=settings)
                if not streamed:
                    return await Runner.run(agent, text, max_turns=4)
                result = Runner.run_streamed(agent, text, max_turns=4)
                async for _ in result.stream_events():
                    pass
                return result

        return asyncio.run(once())

    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return "It is sunny."

    def with_tool(api: Any, choice: str | None) -> object:
        cities.clear()
        settings = ModelSettings(tool_choice=choice, max_tokens=MAX_TOKENS)
        run(WEATHER, api, tools=[get_weather], model_settings=settings)
        return cities[0]

    settings = ModelSettings(max_tokens=MAX_TOKENS)
    apis: dict[str, Any] = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
    for name, api in apis.items():
        yield (
            f"{name}: output_type",
            lambda api=api: need(  # type: ignore[misc]
                run(PERSON, api, output_type=Person, model_settings=settings).final_output, Person
            ),
        )
        yield f"{name}: a tool, auto", lambda api=api: with_tool(api, None)  # type: ignore[misc]
        yield f"{name}: a tool, required", lambda api=api: with_tool(api, "required")  # type: ignore[misc]
        yield (
            f"{name}: streamed",
            lambda api=api: need(  # type: ignore[misc]
                run(PERSON, api, streamed=True, model_settings=settings).final_output, str
            ),
        )
        yield (
            f"{name}: a handoff",
            lambda api=api: need_equal(  # type: ignore[misc]
                run(PERSON, api, hands_off=True, model_settings=settings).last_agent.name, "a"
            ),
        )


PACKAGES: dict[str, Callable[[str, str], Iterator[Way]]] = {
    "openai": openai_ways,
    "openai (responses)": openai_responses_ways,
    "instructor": instructor_ways,
    "pydantic-ai-slim": pydantic_ai_ways,
    "langchain-openai": langchain_ways,
    "litellm": lambda url, model: chain(
        litellm_ways(url, model), litellm_other_ways(url, model), litellm_encoder_ways(url, model)
    ),
    "llama-index-llms-openai-like": llama_index_ways,
    "openai-agents": agents_ways,
    "anthropic": anthropic_ways,
    "langchain-anthropic": langchain_anthropic_ways,
    "ollama": ollama_ways,
    "langchain-ollama": langchain_ollama_ways,
    "lm_eval": lm_eval_ways,
    "guidellm": guidellm_ways,
}


def need(value: object, kind: type[object]) -> object:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}: {str(value)[:100]}")
    return value


def need_equal(value: object, expected: object) -> object:
    if value != expected:
        raise ValueError(f"{value} instead of {expected}")
    return value


def tried(way: Callable[[], object]) -> str:
    """Empty if the way works, else the first line of the error."""
    try:
        way()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return ""


def run(url: str, only: Sequence[str]) -> int:
    """Print the table; returns the number of ways that do not work."""
    base = f"{url.rstrip('/')}/v1"
    model = httpx.get(f"{base}/models", timeout=60).json()["data"][0]["id"]
    failed = 0
    for package, ways in PACKAGES.items():
        if only and package not in only:
            continue
        try:
            distribution = package.partition(" ")[0]
            name = package.replace(distribution, f"{distribution} {version(distribution)}")
            found = list(ways(base, model))
        except (PackageNotFoundError, ImportError) as error:
            print(f"{package:34}  skipped: {error}", flush=True)
            continue
        works = 0
        for label, way in found:
            begun = time.perf_counter()
            wrong = tried(way)
            works += not wrong
            print(
                f"{name:34}  {label:38} {wrong or 'works'}  {time.perf_counter() - begun:.1f} s",
                flush=True,
            )
        record(package, "ways that work", works)
        record(package, "ways", len(found))
        failed += len(found) - works
    return failed


@contextmanager
def served(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log") as server:
        yield server.url


def main(words: Sequence[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--url", help="a running server; without it one is started with the included model")
    parser.add_argument("--only", nargs="*", default=[], choices=PACKAGES, help="packages; without it all")
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "OPENAI_API_KEY": "none",
            "TQDM_DISABLE": "1",
        }
    )
    with served(arguments.url) as url:
        failed = run(url, arguments.only)
    print(f"{failed} ways do not work" if failed else "All ways work.")
