"""``python -m telemetry.dashboards`` writes the boards' JSON from their descriptions. With ``--check`` it lists the
files that differ, and exits with 1 if there are any."""

from __future__ import annotations

import argparse
import sys

from telemetry.dashboards import stale_boards, write_boards


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m telemetry.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is stale")
    options = parser.parse_args()
    stale = stale_boards()
    if not options.check:
        write_boards()
    for path in stale:
        print(f"{'stale' if options.check else 'written'}: {path}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
