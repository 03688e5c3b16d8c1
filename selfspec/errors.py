"""Errors that a person can act on: one line that says what is wrong, where, and what would be right."""


class SelfspecError(ValueError):
    """Something the caller gave cannot be used. The command line prints the message and exits with code 2."""


class UnsupportedModelError(SelfspecError):
    """The model is of a kind that the runtime does not serve; the message names it, and what is served."""


class BusyError(SelfspecError):
    """A second stream was started on a runtime whose first stream has not ended."""
