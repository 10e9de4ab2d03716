"""Connections between nodes: which are accepted, and how one that breaks a rule ends."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.options import Arguments
from actors.workers.launchers.local import LocalLauncher
from actors.workers.nodes import handshake, hub, messages
from actors.workers.nodes.agent import NodeAgent, NodeError
from actors.workers.nodes.handshake import HandshakeError, Purpose, admit, introduce
from actors.workers.nodes.hub import Hub
from actors.workers.placement import Placement
from kernels.contract.topology import WorkerId
from tests.kits.addresses import held_address
from tests.kits.waiting import until

SECRET = b"the secret of these tests"
CONTROL = Purpose("control", 1)


def arguments(address: str, **keywords: object) -> Arguments:
    given: dict[str, Any] = {"tp": 2, "nnodes": 2, "dist_init_addr": address, "dist_timeout": 30}
    return Arguments.from_keywords(**{"model": "m", **given, **keywords})


@asynccontextmanager
async def hub_at(address: str) -> AsyncIterator[Hub]:
    async with Hub(arguments(address), version="1", device="cpu", secret=SECRET, local=LocalLauncher()) as made:
        yield made


def agent_of(
    address: str,
    *,
    device: str = "cpu",
    version: str = "1",
    secret: bytes = SECRET,
    weights: str = "same",
    **keywords: object,
) -> NodeAgent:
    given = arguments(address, node_rank=1, **keywords)
    return NodeAgent(given, Placement(device), version=version, secret=secret, model={"weights": weights})


async def both(ours: bytes, theirs: bytes, purpose: Purpose = CONTROL) -> list[object]:
    """The results of the hub's side, with the secret ``ours``, and of the agent's side."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)

        async def other() -> None:
            try:
                await introduce(right, theirs, purpose)
            finally:
                right.close()

        async def own() -> Purpose:
            try:
                return await admit(left, ours)
            finally:
                left.close()

        return list(await asyncio.gather(own(), other(), return_exceptions=True))


async def test_both_ends_prove_the_secret() -> None:
    assert await both(SECRET, SECRET, Purpose("thread", 3, 7)) == [Purpose("thread", 3, 7), None]
    hub_side, agent_side = await both(SECRET, b"another secret")
    assert isinstance(hub_side, HandshakeError)
    assert isinstance(agent_side, HandshakeError)
    assert "another secret" in str(agent_side)


async def test_a_proof_is_worth_one_connection_and_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed proof of an agent is refused, because the hub's nonce is new. It is no proof of the hub either."""
    loop = asyncio.get_running_loop()
    nonces = [secrets.token_bytes(32), secrets.token_bytes(32)]
    encoded = b'{"kind":"control","node":1}'
    other = secrets.token_bytes(32)
    proof = handshake._mac(SECRET, b"agent", nonces[0], other, encoded)
    assert proof != handshake._mac(SECRET, b"hub  ", nonces[0], other, encoded)
    for nonce, admitted in ((nonces[0], True), (nonces[1], False)):
        monkeypatch.setattr(secrets, "token_bytes", lambda size, nonce=nonce: nonce)
        left, right = socket.socketpair()
        with left, right:
            left.setblocking(False)
            right.setblocking(False)
            await loop.sock_sendall(right, other + bytes([len(encoded)]) + encoded + proof)
            if admitted:
                assert await admit(left, SECRET) == CONTROL
            else:
                with pytest.raises(HandshakeError):
                    await admit(left, SECRET)


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.05)
    with held_address() as address:
        async with hub_at(address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await reader.read()  # its end comes
            writer.close()


async def test_only_so_many_handshakes_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SPARE_HANDSHAKES", 2)
    most = 2 + 4 * 2  # both workers and their standbys may connect at once
    with held_address() as address:
        async with hub_at(address) as made:
            host, _, port = address.rpartition(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(most)]
            await until(lambda: made._handshakes == most, "no handshake began")
            reader, writer = await asyncio.open_connection(host, int(port))
            assert await reader.read() == b""
            for _, each in [*held, (reader, writer)]:
                each.close()


@pytest.mark.parametrize("sent", ["a frame that is too large", "no message", "two greetings"])
async def test_a_node_that_breaks_the_protocol_is_dropped(sent: str) -> None:
    loop = asyncio.get_running_loop()
    with held_address() as address:
        async with hub_at(address) as made:
            agent = agent_of(address)
            with await agent.connect(CONTROL) as sock:
                greeting = messages.pack(agent.hello())
                await loop.sock_sendall(sock, hub_frame(greeting))
                await until(lambda: not made.missing, "it has not joined")
                broken = {
                    "a frame that is too large": (messages.CONTROL_LIMIT + 1).to_bytes(4, "little") + bytes(9),
                    "no message": hub_frame(b"\xc1"),
                    "two greetings": hub_frame(greeting),
                }[sent]
                await loop.sock_sendall(sock, broken)
                await until(lambda: made.missing == [1], "it was kept")


def hub_frame(body: bytes) -> bytes:
    return (9 + len(body)).to_bytes(4, "little") + bytes(9) + body


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"device": "cuda"}, "its device is cuda, that of node 0 is cpu"),
        ({"version": "2"}, "its version is 2, that of node 0 is 1"),
        ({"tp": 4}, r"its layout is --tp-size 4, --pp-size 1, --dp-size 1, that of node 0 is --tp-size 2"),
        ({"nnodes": 4, "tp": 4}, "its --nnodes is 4, that of node 0 is 2"),
        ({"weights": "others"}, "weights: others, not same; give all nodes the same model at the same path"),
    ],
)
async def test_a_node_of_another_kind_is_refused(wrong: Mapping[str, Any], reason: str) -> None:
    with held_address() as address:
        async with hub_at(address) as made:
            made.compare({"weights": "same"})
            with pytest.raises(NodeError, match=reason) as caught:
                await agent_of(address, **wrong).run()
            assert caught.value.permanent
            assert made.missing == [1]


async def test_a_node_that_joined_before_the_model_was_opened_is_compared() -> None:
    with held_address() as address:
        async with hub_at(address) as made:
            agent = asyncio.create_task(agent_of(address).run())
            await until(lambda: not made.missing, "it did not join")
            made.compare({"weights": "others"})
            assert made.missing == [1]
            with pytest.raises(NodeError, match="differs from node 0 in weights: same, not others"):
                await agent


async def test_an_agent_gives_up_without_a_node_0_that_admits_it() -> None:
    with held_address() as address:
        with pytest.raises(NodeError, match="gave up after 1 s"):
            await agent_of(address, dist_timeout=1).run()
        async with hub_at(address):
            with pytest.raises(NodeError, match="another secret") as caught:
                await agent_of(address, dist_timeout=1, secret=b"another secret").run()
            assert not caught.value.permanent


async def test_a_second_node_of_one_rank_waits_for_the_end_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "troupe.nodes")
    with held_address() as address:
        async with hub_at(address) as made:
            first = asyncio.create_task(agent_of(address).run())
            await until(lambda: not made.missing, "it has not joined")
            await until(lambda: "Joined" in caplog.text, "it does not know that it has joined")
            caplog.clear()
            with pytest.raises(NodeError, match="node 1 is already connected"):
                await agent_of(address, dist_timeout=1).run()
            assert "Joined" not in caplog.text
        assert await first


@pytest.mark.parametrize("failed", [False, True])
async def test_nodes_end_with_the_hub(failed: bool) -> None:
    with held_address() as address:
        async with hub_at(address) as made:
            agent = asyncio.create_task(agent_of(address).run())
            await until(lambda: not made.missing, "it has not joined")
            made.failed = failed
        assert await agent is not failed


async def test_a_launch_waits_for_its_node_and_reports_each_exit() -> None:
    loop = asyncio.get_running_loop()
    with held_address() as address:
        async with hub_at(address) as made:
            waiting = asyncio.create_task(made.launch(WorkerId(1), {}))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            agent = asyncio.create_task(agent_of(address).run())
            process = await waiting
            exited = asyncio.Event()
            process.watch_exit(loop, exited.set)
            await asyncio.sleep(0.3)  # longer than its interpreter takes to start
            assert not exited.is_set(), "it did not wait for its first bytes"
            process.kill()
            await exited.wait()
            assert process.returncode == -9
            for sock in (process.sock, process.thread_sock):
                sock.close()
            with pytest.raises(OSError, match="worker 0 is not one of node 1"):
                await made._launch(made._nodes[1], 0)
        assert await agent


async def test_a_node_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hub, messages):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
        monkeypatch.setattr(module, "SILENT_BEATS", 3)
    loop = asyncio.get_running_loop()
    with held_address() as address:
        async with hub_at(address) as made:
            agent = agent_of(address)
            with await agent.connect(CONTROL) as sock:
                await loop.sock_sendall(sock, hub_frame(messages.pack(agent.hello())))
                await until(lambda: not made.missing, "it has not joined")
                await until(lambda: made.missing == [1], "it was kept")
