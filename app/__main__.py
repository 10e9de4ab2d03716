"""``python -m app``: the command ``troupe``."""

import sys

__all__ = ["main"]


def main() -> int:
    """See ``app.cli.command.main``. Exit status 2 also if another package stands in place of ours."""
    try:
        from app.cli.command import main as run
    except ImportError as error:
        if error.name != "kernels":
            raise
        print(f"troupe: {error}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
