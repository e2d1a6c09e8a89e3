"""The error that means: the command was asked for something it cannot do. Exit code 2."""

from __future__ import annotations


class UsageError(ValueError):
    """Wrong option, configuration or input; its text is one line that says what to do instead."""
