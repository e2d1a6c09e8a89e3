"""A few values that are dear to make, the ones used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """The values used last, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not kept; two threads may make it both."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        return value

    def drop(self, is_unwanted: Callable[[Key], bool]) -> None:
        """Forget values by their keys."""
        with self._lock:
            for key in [key for key in self._values if is_unwanted(key)]:
                del self._values[key]
