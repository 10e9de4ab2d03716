"""vLLM's arguments of several nodes are those of --nnodes, --node-rank and --dist-init-addr."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.options import ArgumentError
from app.cli.arguments import load_arguments

FOUR = "--data-parallel-size 4 --tp 2"
ADDRESS = "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13389"


def nodes(words: str) -> tuple[int, int, str | None]:
    arguments = load_arguments(["m", *words.split()], {})
    return arguments.nnodes, arguments.node_rank, arguments.dist_init_addr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{FOUR} --data-parallel-size-local 2 {ADDRESS}", (2, 0, "10.0.0.1:13389")),
        (f"{FOUR} -dpl 2 -dpr 2 -dpa 10.0.0.1 --headless", (2, 1, "10.0.0.1:29550")),
        (f"{FOUR} -dpl 1 -dpr 3 {ADDRESS} --headless", (4, 3, "10.0.0.1:13389")),
        (f"{FOUR} -dpl 4 -dpr 0 {ADDRESS}", (1, 0, None)),  # replicas of one node need no address
        (f"{FOUR} -dpl 2 -dpa fd00::1 --no-headless", (2, 0, "[fd00::1]:29550")),
        ("--tp 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless", (2, 1, "10.0.0.1:29501")),
        ("--tp 4 --nnodes 2 --master-addr 10.0.0.1 --master-port 5", (2, 0, "10.0.0.1:5")),
        ("--tp 4 --nnodes 2 --node-rank 1 -dpl 1 --master-addr h --headless", (2, 1, "h:29501")),  # no replica is whole
        (f"{FOUR} -dpl 2 --nnodes 2 --node-rank 1 --master-addr h --headless", (2, 1, "h:29501")),
        (f"{FOUR} -dpl 2 --node-rank 1 --dist-init-addr h:5", (2, 1, "h:5")),
        (f"{FOUR} -dpl 2 {ADDRESS} --no-data-parallel-hybrid-lb", (2, 0, "10.0.0.1:13389")),
    ],
)
def test_nodes_are_those_of_vllm(words: str, expected: tuple[int, int, str | None]) -> None:
    assert nodes(words) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"{FOUR} -dpl 3 {ADDRESS}", "--data-parallel-size-local 3 must divide --data-parallel-size 4"),
        (f"{FOUR} -dpl 0 {ADDRESS}", "--data-parallel-size-local 0 must divide"),
        (f"{FOUR} -dpl 2 -dpr 1 {ADDRESS} --headless", "must be a multiple of --data-parallel-size-local 2"),
        (f"{FOUR} -dpl 2 -dpr 4 {ADDRESS} --headless", "below --data-parallel-size 4"),
        (f"{FOUR} -dpl 2 -dpr 2 {ADDRESS}", "--data-parallel-start-rank 2 needs --headless"),
        (f"{FOUR} -dpl 2 {ADDRESS} --headless", "--headless: node 0 runs the HTTP server"),
        (f"{FOUR} -dpl 2", "--data-parallel-size-local needs --data-parallel-address"),
        (f"{FOUR} -dpl two", "--data-parallel-size-local must be an integer, not 'two'"),
        (f"{FOUR} -dpl 2 {ADDRESS} --nnodes 4", "-dpl: contradicts --nnodes"),
        (f"{FOUR} -dpl 4 --nnodes 2 --dist-init-addr h:1", "-dpl: contradicts --nnodes"),
        (f"{FOUR} -dpl 2 -dpr 2 {ADDRESS} --headless --node-rank 0", "-dpr: contradicts --node-rank"),
        (f"{FOUR} -dpl 2 -dpp 5 --master-addr h", "--data-parallel-rpc-port needs --data-parallel-address"),
        (f"{FOUR} -dpl 2 -dpa h:5", "--data-parallel-address must be a host without a port"),
        (f"{FOUR} -dpl 2 -dpa h -dpp 0", "--data-parallel-rpc-port must be an integer from 1 to 65535, not 0"),
        ("--tp 4 --nnodes 2 --master-addr h --master-port 65536", "--master-port must be an integer from 1 to 65535"),
    ],
)
def test_nodes_that_cannot_be_are_refused(words: str, reason: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        nodes(words)
    assert reason in str(caught.value)


def test_a_headless_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--headless must be true or false, not 'maybe'"):
        load_arguments(["m"], {}, {"headless": "maybe"})


def test_the_replicas_may_be_in_a_file_for_all_nodes(tmp_path: Path) -> None:
    file = tmp_path / "troupe.yaml"
    file.write_text("data-parallel-size: 4\ntensor-parallel-size: 2\n")
    assert nodes(f"--config {file} -dpl 2 -dpr 2 -dpa h --headless") == (2, 1, "h:29550")


def test_a_server_beside_others_is_refused_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        nodes(f"{FOUR} -dpn 1 {ADDRESS}")
    assert len(caught.value.problems) == 1
