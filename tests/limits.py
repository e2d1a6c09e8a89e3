"""Limits of the system that a test sets for a moment."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: the system then answers nearly as a
    full disk does. For a call, never for a whole test: what pytest prints may go to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
