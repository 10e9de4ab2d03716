"""The command lines of the benchmarks."""

from __future__ import annotations

import argparse

__all__ = ["command_line", "server_command_line"]


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help with the default, where there is one."""
        return super()._get_help_string(action) if action.default else action.help


def command_line(module: str, doc: str | None, records: bool = False) -> argparse.ArgumentParser:
    """The parser of a benchmark with this ``__name__`` and ``__doc__``; --help prints the latter as it stands.

    With ``records`` it has --record, which `tests.bench.__main__` reads: the benchmark calls `record` for its rows.
    """
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench {name}", description=doc, formatter_class=_Formatter)
    if records:
        parser.add_argument(
            "--record", action="store_true", help=f"append the rows to tests/bench/results/{name}.jsonl"
        )
    return parser


def server_command_line(module: str, doc: str | None, points: str, rounds: int) -> argparse.ArgumentParser:
    """The parser of a benchmark that asks a server, with its default ``points`` and ``rounds``."""
    parser = command_line(module, doc, records=True)
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--model", help="directory for the server that is started; without it the included model")
    parser.add_argument("--model-name", help="the API's model name; without it the first of /v1/models")
    parser.add_argument("--points", default=points, help="streams:prompt tokens:output tokens, separated by commas")
    parser.add_argument("--requests", type=int, default=4, help="requests a stream in each round")
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each point")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--token-ids", default="300:3000", help="LOW:HIGH of the random prompt's token ids")
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds that a server may take to start")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server that is started")
    return parser
