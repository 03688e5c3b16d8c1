"""The command of lm-evaluation-harness, with the model `selfspec` registered."""

from __future__ import annotations

import sys


def main() -> None:
    """Run lm-evaluation-harness; exit with code 2 and one line for a `SelfspecError`, or if it is not installed."""
    from selfspec.basics.errors import SelfspecError

    try:
        from lm_eval.__main__ import cli_evaluate

        import selfspec.lm_eval.model  # noqa: F401  (registers the model)
    except ImportError as error:
        sys.exit(_print_error(f"lm-evaluation-harness cannot be imported ({error}); pip install lm_eval"))
    try:
        cli_evaluate()
    except SelfspecError as error:
        sys.exit(_print_error(str(error)))


def _print_error(what: str) -> int:
    print(f"error: {what}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
