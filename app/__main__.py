"""``python -m app``: the command ``troupe``."""

import sys

__all__ = ["main"]


def main() -> int:
    """See ``app.cli.main``. Exit status 2, too, where another package's module stands in the place of ours."""
    try:
        from app.cli import main as run
    except ImportError as error:
        if error.name != "kernels":
            raise
        print(f"troupe: {error}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
