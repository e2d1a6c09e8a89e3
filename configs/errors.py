"""The error for people, exit code 2, and what of a library's message is for them."""

from __future__ import annotations


class UsageError(ValueError):
    """Wrong option, configuration or input; its text is one line that says what to do instead."""


def first_line(error: BaseException) -> str:
    """The first line of a library's message, the next too where it only announces that one: the
    rest is advice for its own users."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
