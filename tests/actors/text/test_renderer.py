"""Conversations rendered in a process that may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from actors.engine.engine import Engine
from actors.protocol import Render, RendererConfig, RendererProtocol
from actors.protocol.requests import LIMITS, Chat, InvalidRequest, RequestFailed, SamplingParams
from actors.runtime import ActorDied, ActorSystem, ChildCrash
from actors.runtime.process.blank_process import launch_blank
from actors.text import rendering
from actors.text.rendering import Rendering
from tests.kits.waiting import until

pytestmark = pytest.mark.usefixtures("warm_workers")

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ bos_token }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def chat(content: object = "hi", **options: object) -> Chat:
    return Chat(messages=[{"role": "user", "content": content}], **options)  # type: ignore[arg-type]


@asynccontextmanager
async def started(
    template: str | None = TEMPLATE, *, guests: bool = False
) -> AsyncIterator[tuple[Rendering, ActorSystem]]:
    async with ActorSystem() as system:
        yield (
            await Rendering.start(system, template=template, variables={"bos_token": "<s>"}, count=1, guests=guests),
            system,
        )


def lives(system: ActorSystem) -> dict[str, int | None]:
    return {status.name: status.incarnation for status in system.describe()}


async def test_a_conversation_is_rendered_elsewhere() -> None:
    async with started() as (rendering_, system):
        assert await rendering_.render(chat()) == "[user]hi<s>"
        [status] = system.describe()
        assert status.pid not in (None, os.getpid())


async def test_what_a_template_refuses_is_the_requests_own() -> None:
    async with started("{{ raise_exception('no ' ~ messages[0].role) }}") as (rendering_, system):
        with pytest.raises(InvalidRequest, match="no user") as caught:
            await rendering_.render(chat())
        assert caught.value.param == "messages"
        assert lives(system) == {"renderer-0": 0}


@pytest.mark.parametrize("content", ["\ud800", object(), 2**70])
async def test_what_no_process_can_be_sent_is_refused(content: object) -> None:
    async with started() as (rendering_, system):
        with pytest.raises(InvalidRequest):
            await rendering_.render(chat(content))
        assert await rendering_.render(chat()) == "[user]hi<s>"
        assert lives(system) == {"renderer-0": 0}


async def test_a_tenants_conversation_passes_the_queue_of_another() -> None:
    slow = "{% if messages[0].content == 'slow' %}{% for i in range(90000) %}{% endfor %}{% endif %}" + TEMPLATE
    async with started(slow) as (rendering_, _):
        ended = []

        async def render(content: str, tenant: str) -> None:
            await rendering_.render(chat(content), tenant)
            ended.append(tenant)

        flood = [asyncio.create_task(render("slow", "flood")) for _ in range(8)]
        await asyncio.sleep(0)
        await render("hi", "other")
        await asyncio.gather(*flood)
        assert ended.index("other") <= 1


async def test_a_template_that_loops_is_stopped_and_only_its_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "PROCESSOR_SECONDS", 0.4)
    looping = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + TEMPLATE
    async with started(looping) as (rendering_, system):
        contents = ("a", "loop", "b", "loop", "c")
        outcomes = await asyncio.gather(*(rendering_.render(chat(c)) for c in contents), return_exceptions=True)
        assert [o for o in outcomes if isinstance(o, str)] == ["[user]a<s>", "[user]b<s>", "[user]c<s>"]
        for outcome in (outcomes[1], outcomes[3]):
            assert isinstance(outcome, InvalidRequest)
            assert (outcome.param, outcome.code) == ("messages", "template_timeout")
        assert lives(system) == {"renderer-0": 2}


async def test_no_number_of_loops_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "PROCESSOR_SECONDS", 0.01)
    async with started(ENDLESS) as (rendering_, system):
        for _ in range(7):  # more than the runtime's own limit on restarts
            with pytest.raises(InvalidRequest, match="stopped"):
                await rendering_.render(chat())
        assert not system.failed.is_set()


async def test_constants_that_take_for_ever_to_compute_end_in_the_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "PROCESSOR_SECONDS", 0.2)
    async with started("{{ 9 ** (9 ** 9) }}") as (rendering_, _):
        with pytest.raises(InvalidRequest, match="stopped"):
            await rendering_.render(chat())


async def test_memory_is_bounded() -> None:
    async with started("{{ messages[0].content * (2 ** 33) }}") as (rendering_, system):
        with pytest.raises(InvalidRequest, match="512 MiB"):
            await rendering_.render(chat())
        assert lives(system) == {"renderer-0": 0}


async def test_a_killed_renderer_is_replaced_and_its_request_rendered_once_more() -> None:
    async with started() as (rendering_, system):
        await rendering_.render(chat())
        [status] = system.describe()
        assert status.pid is not None
        os.kill(status.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(rendering_.render(chat("again")))
        await until(lambda: system.describe()[0].message)
        os.kill(status.pid, signal.SIGKILL)
        assert await waiting == "[user]again<s>"
        assert lives(system) == {"renderer-0": 1}


async def test_two_deaths_fail_the_request() -> None:
    class Dying:
        lives = 0

        async def ask(self, message: Render, *, timeout: float) -> str:
            self.lives += 1
            raise ActorDied("renderer-0", ChildCrash("killed by SIGKILL", "", -signal.SIGKILL))

        def is_alive(self) -> bool:
            return True

    dying = Dying()
    with pytest.raises(RequestFailed, match="process ended"):
        await Rendering([dying], None).render(chat())  # type: ignore[list-item]
    assert dying.lives == 2


async def test_a_requests_own_template_needs_the_switch() -> None:
    own = chat(template="{{ messages | length }}")
    async with started() as (rendering_, _):
        with pytest.raises(InvalidRequest, match="trust-request-chat-template") as caught:
            await rendering_.render(own)
        assert caught.value.param == "chat_template"
    async with started(None, guests=True) as (rendering_, system):
        assert await rendering_.render(own) == "1"
        with pytest.raises(InvalidRequest, match="line 1") as caught:
            await rendering_.render(chat(template="{% if %}"))
        assert caught.value.param == "chat_template"
        with pytest.raises(InvalidRequest, match="characters"):
            await rendering_.render(chat(template="x" * (LIMITS.template_chars + 1)))
        with pytest.raises(InvalidRequest, match="no chat template"):
            await rendering_.render(chat())
        assert lives(system) == {"renderer-guests": 0}


async def test_a_guests_loop_delays_no_one_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "PROCESSOR_SECONDS", 1.0)
    async with started(guests=True) as (rendering_, system):
        await rendering_.render(chat())  # it has started
        looping = asyncio.create_task(rendering_.render(chat(template=ENDLESS)))
        guests = {actor.name: actor for actor in system.describe()}["renderer-guests"].pid
        assert guests is not None
        await until(lambda: {actor.name: actor.message for actor in system.describe()}["renderer-guests"])
        os.kill(guests, signal.SIGSTOP)  # so that it has time enough left, however busy the machine is
        assert await rendering_.render(chat()) == "[user]hi<s>"
        assert not looping.done()
        os.kill(guests, signal.SIGCONT)
        with pytest.raises(InvalidRequest, match="stopped"):
            await looping
        assert await rendering_.render(chat(template="next")) == "next"
        assert lives(system) == {"renderer-0": 0, "renderer-guests": 1}


async def test_the_process_is_small_and_has_no_library_of_models() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn_process(
            RendererProtocol,
            name="renderer",
            target="actors.text.renderer:Renderer",
            config=RendererConfig(template=TEMPLATE, variables={}, processor_seconds=5.0, memory=rendering.MEMORY),
            launcher=launch_blank,
        )
        await ref.ask(Render(chat=chat()), timeout=60)
        [status] = system.describe()
        process = psutil.Process(status.pid)
        assert process.memory_info().rss < 64 << 20
        mapped = " ".join(region.path for region in process.memory_maps())
        assert not any(name in mapped for name in ("torch", "tokenizers", "numpy"))


@pytest.mark.parametrize("trusted", [False, True])
async def test_the_switch_of_an_engine(tiny_model: Path, trusted: bool) -> None:
    options = {"dtype": "float32", "cpu_threads": 1, "max_total_tokens": 1024}
    async with Engine(model=str(tiny_model), trust_request_chat_template=trusted, **options) as engine:
        own = chat(template="{{ messages[0].content }} the fox")
        names = {actor.name for actor in engine.actors() if actor.name.startswith("renderer")}
        if trusted:
            assert names == {"renderer-0", "renderer-guests"}
            assert await engine.tokenize(own) == await engine.tokenize("hi the fox", add_special_tokens=False)
        else:
            assert names == {"renderer-0"}
            with pytest.raises(InvalidRequest, match="trust-request-chat-template"):
                await engine.generate(own, SamplingParams(max_tokens=1)).ready()
        assert (await engine.render(chat())).startswith("<|im_start|>user")
        renderer = next(actor for actor in engine.actors() if actor.name == "renderer-0")
        assert renderer.pid is not None
        os.kill(renderer.pid, signal.SIGKILL)
        assert (await engine.render(chat())).startswith("<|im_start|>user")
        assert engine.status.phase == "ready"


async def test_what_a_template_makes_of_little_is_measured_before_it_is_encoded(
    tiny_model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "long.jinja"
    template.write_text("{{ messages[0].content * 1000000 }}")
    options = {"dtype": "float32", "cpu_threads": 1, "max_total_tokens": 1024, "chat_template": str(template)}
    async with Engine(model=str(tiny_model), **options) as engine:
        with pytest.raises(InvalidRequest, match="2000000 characters"):
            await engine.tokenize(chat())


async def test_renderers_take_turns_and_are_few() -> None:
    async with ActorSystem() as system:
        rendering_ = await Rendering.start(system, template=TEMPLATE, variables={}, count=9, guests=False)
        turns: set[str] = set()
        system.events.handled = lambda cell, *_: turns.add(cell.name)
        assert len(system.describe()) == rendering.MAX_RENDERERS
        for _ in range(rendering.MAX_RENDERERS):
            await rendering_.render(chat())
        assert turns == {f"renderer-{number}" for number in range(rendering.MAX_RENDERERS)}
