"""Work on arrays in several threads, whose results do not depend on how many; numpy lets other
threads run. The caller's own thread waits, and gives a sign of life meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_BEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Threads:
    """How many a process may keep busy, and what its main thread does again and again meanwhile."""

    num: int = 1
    beat: Callable[[], None] | None = None
    """May raise: what has not begun then does not."""

    def sign(self) -> None:
        """One beat, where there is one."""
        if self.beat is not None:
            self.beat()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """`work` of each item, in their order; raises the error of the first one that failed."""
        if self.num == 1 and self.beat is None:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self.num, thread_name_prefix="arrays") as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in futures:
                    while wait([future], _BEAT_S).not_done:
                        self.sign()
                    self.sign()
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]
