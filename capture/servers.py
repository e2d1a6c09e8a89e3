"""OpenAI-compatible servers: which is asked next, what is tried again, which is given up."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import GenerateConfig

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_HEALTH_TIMEOUT_S = 10.0
_BUSY = (408, 409, 425, 429)


class Refused(ValueError):
    """A server will not answer this request, however often it is asked."""


class _Failed(OSError):
    """A request that may succeed when it is tried again."""


@dataclass(slots=True)
class _Server:
    url: str
    model: str = ""
    num_in_flight: int = 0
    is_alive: bool = True
    returns_ids: bool = True
    """False after it refused a request for token ids."""


class Servers:
    """The servers of a run; `complete` may be called from many threads."""

    def __init__(self, config: GenerateConfig, say: Callable[[str], None]) -> None:
        """`say` is told about servers that are set aside."""
        self._config, self._say = config, say
        self._servers = [_Server(url.rstrip("/")) for url in config.endpoints]
        self._changed = threading.Condition()
        self._connections: set[http.client.HTTPConnection] = set()
        self._is_closed = False
        # a server started with a key expects it; a key has no place in a configuration
        self._key = os.environ.get("OPENAI_API_KEY", "")

    def start(self) -> None:
        """Ask every server for its model; those that do not answer are set aside.

        Raises ValueError when none answers, UsageError for a wrong URL or different models.
        """
        for server in self._servers:
            _split(server.url)
            self._check(server)
        alive = [server for server in self._servers if server.is_alive]
        if not alive:
            raise ValueError(f"no server answers: {self._names()}")
        models = {server.model for server in alive}
        if len(models) > 1:
            raise UsageError(f"the servers run different models: {sorted(models)}")

    @property
    def num_alive(self) -> int:
        """Servers that have not been set aside."""
        return sum(server.is_alive for server in self._servers)

    def close(self) -> None:
        """Break off what is in flight; every waiting thread ends with an error."""
        with self._changed:
            self._is_closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        for connection in connections:
            if connection.sock is not None:
                # close alone would leave a thread in recv
                _shut(connection)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a chat completion, from the least busy server.

        A server that fails is asked for its health before it is asked again. Raises Refused for a
        request that no repetition helps, ValueError when all servers are set aside.
        """
        for attempt in range(self._config.retries + 1):
            server = self._taken()
            try:
                reply = self._post(server, request)
            except _Failed as error:
                last_error = str(error)
            else:
                return reply
            finally:
                with self._changed:
                    server.num_in_flight -= 1
                    self._changed.notify_all()
            if server.is_alive:
                self._check(server)
            self._pause(attempt)
        raise Refused(f"{self._config.retries + 1} attempts failed, the last with {last_error}")

    def _taken(self) -> _Server:
        """A server with a free place, counted as taken."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise ValueError("stopped")
                alive = [server for server in self._servers if server.is_alive]
                if not alive:
                    raise ValueError(
                        f"no server is left: {self._names()}; run the same command again to go on"
                    )
                server = min(alive, key=lambda one: one.num_in_flight)
                if server.num_in_flight < self._config.concurrency:
                    server.num_in_flight += 1
                    return server
                self._changed.wait()

    def _post(self, server: _Server, request: dict[str, Any]) -> dict[str, Any]:
        body = request | {"model": server.model}
        if server.returns_ids:
            # vLLM's; others ignore it or refuse it once
            body["return_token_ids"] = True
        timeout_s, path = self._config.timeout_s, "/chat/completions"
        status, found = self._exchange(server, "POST", path, body, timeout_s)
        if status == 400 and body.pop("return_token_ids", False):
            status, found = self._exchange(server, "POST", path, body, timeout_s)
            server.returns_ids = status != 200
        if status == 200 and isinstance(found, dict):
            return found
        if status >= 500 or status in _BUSY or status == 200:
            raise _Failed(f"{server.url}: HTTP {status}")
        if status in (401, 403, 404):
            self._set_aside(server, f"HTTP {status} for /chat/completions")
            raise _Failed(f"{server.url}: HTTP {status}")
        raise Refused(f"a server refuses with HTTP {status}")

    def _exchange(
        self, server: _Server, method: str, path: str, body: object, timeout_s: float
    ) -> tuple[int, object]:
        """Status and parsed body (None if it is no JSON). Raises _Failed without a reply."""
        scheme, host, prefix = _split(server.url)
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        connection = kind(host, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            # connected first: `close` breaks off what it finds in the set
            connection.connect()
            with self._changed:
                if self._is_closed:
                    raise ValueError("stopped")
                self._connections.add(connection)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, prefix + path, data, headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise _Failed(f"{server.url}: {reason}") from error
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, None

    def _check(self, server: _Server) -> None:
        """Set a server aside unless it names a model now."""
        try:
            status, found = self._exchange(server, "GET", "/models", None, _HEALTH_TIMEOUT_S)
        except _Failed as error:
            self._set_aside(server, str(error).removeprefix(f"{server.url}: "))
            return
        models = found.get("data") if isinstance(found, dict) else None
        if status != 200 or not isinstance(models, list) or not models:
            self._set_aside(server, f"HTTP {status} and no model at /models")
            return
        server.model = str(models[0].get("id"))

    def _set_aside(self, server: _Server, reason: str) -> None:
        with self._changed:
            is_news, server.is_alive = server.is_alive, False
            self._changed.notify_all()
        if is_news and not self._is_closed:
            self._say(f"server {server.url} is set aside: {reason}")

    def _pause(self, attempt: int) -> None:
        # spread out, so that a server that comes back is not met by all at once
        longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, longest * random.uniform(0.5, 1))

    def _names(self) -> str:
        return ", ".join(server.url for server in self._servers)


def _split(url: str) -> tuple[str, str, str]:
    """Scheme, host with port, and path of a server's URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"endpoint {url!r} is no server: write http://host:port/v1")
    return parts.scheme, parts.netloc, parts.path


def _shut(connection: http.client.HTTPConnection) -> None:
    try:
        connection.sock.shutdown(2)
    except OSError:
        # closed in the meantime
        return
