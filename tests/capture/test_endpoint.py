"""Servers answer, fail, come back or die; every prompt is answered once or the run says why not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.capture import generate, servers
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.schema import DataConfig, GenerateConfig, Run, TargetConfig
from places import cpu_place

NUM_PROMPTS = 12
Reply = Callable[[dict[str, Any], int], tuple[int, object]]


def echo(request: dict[str, Any], number: int) -> tuple[int, object]:
    text = f"You said {request['messages'][-1]['content']}"
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


class Stub:
    """A server whose replies a test decides; keeps what it was asked."""

    def __init__(self, reply: Reply, model: str = "stub") -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_now = self.num_most = 0
        self.is_healthy = True
        stub, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                good = stub.is_healthy and self.path == "/v1/models"
                self.send(200 if good else 503, {"data": [{"id": model}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.requests.append(body)
                    number = len(stub.requests)
                    stub.num_now += 1
                    stub.num_most = max(stub.num_most, stub.num_now)
                status, found = reply(body, number)
                with lock:
                    stub.num_now -= 1
                self.send(status, found)

            def send(self, status: int, found: object) -> None:
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    # the client went away
                    return

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()


@pytest.fixture
def make_stub() -> Iterator[Callable[..., Stub]]:
    made: list[Stub] = []

    def make(reply: Reply = echo, model: str = "stub") -> Stub:
        made.append(Stub(reply, model))
        return made[-1]

    yield make
    for stub in made:
        stub.stop()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_FIRST_WAIT_S", 0.002)
    monkeypatch.setattr(servers, "_HEALTH_TIMEOUT_S", 2.0)


def run_of(tmp_path: Path, *urls: str, target: TargetConfig | None = None, **changes: Any) -> Run:
    data = tmp_path / "prompts.jsonl"
    if not data.exists():
        rows = [
            {"id": f"p{i}", "domain": "chat", "prompt": f"word {i}"} for i in range(NUM_PROMPTS)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"out": str(tmp_path / "answers.jsonl"), "endpoints": urls, "concurrency": 3}
    return Run(
        target=target or TargetConfig(),
        data=DataConfig(files=(str(data),)),
        generate=GenerateConfig(**(settings | changes)),
    )


def answered(run: Run) -> dict[str, dict[str, Any]]:
    place = cpu_place(f"{run.generate.out}.logs", "generate")
    generate.main(run, place, {})
    lines = [json.loads(line) for line in Path(run.generate.out).read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def test_two_servers_share_the_prompts_within_their_concurrency(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    pause = threading.Event()

    def slow(request: dict[str, Any], number: int) -> tuple[int, object]:
        pause.wait(0.02)
        return echo(request, number)

    stubs = [make_stub(slow), make_stub(slow)]
    run = run_of(tmp_path, *(stub.url for stub in stubs), temperature=0.7, top_k=20)
    found = answered(run)
    assert len(found) == NUM_PROMPTS
    assert found["p3"]["messages"][1]["content"] == "You said word 3"
    assert "token_ids" not in found["p3"]
    assert all(stub.requests and stub.num_most <= 3 for stub in stubs)
    asked = stubs[0].requests[0]
    assert (asked["model"], asked["temperature"], asked["top_k"]) == ("stub", 0.7, 20)
    seeds = [request["seed"] for stub in stubs for request in stub.requests]
    assert len(set(seeds)) == NUM_PROMPTS
    conversations = list(read((run.generate.out,), 0, Dropped()))
    assert {one.key for one in conversations} == set(found)


def test_turns_follow_each_other_and_template_arguments_are_sent(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": text} for text in "ab"]}) + "\n"
    )
    stub = make_stub()
    target = TargetConfig(thinking="off", system_prompt="Be brief.")
    (line,) = answered(run_of(tmp_path, stub.url, target=target)).values()
    assert [turn["content"] for turn in line["messages"]] == ["a", "You said a", "b", "You said b"]
    second = stub.requests[1]
    assert [turn["role"] for turn in second["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert second["chat_template_kwargs"] == {"enable_thinking": False}


def test_token_ids_are_kept_where_the_server_returns_them(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    def with_ids(request: dict[str, Any], number: int) -> tuple[int, object]:
        assert request["return_token_ids"]
        choice = {
            "message": {"content": "A", "reasoning_content": "hm"},
            "finish_reason": "length",
            "token_ids": [7, 8],
        }
        return 200, {"choices": [choice], "prompt_token_ids": [1, 2, 3]}

    line = answered(run_of(tmp_path, make_stub(with_ids).url))["p0"]
    assert (line["token_ids"], line["loss_spans"]) == ([1, 2, 3, 7, 8], [[3, 5]])
    assert line["messages"][1]["reasoning_content"] == "hm"
    assert line["finish"] == ["length"]


def test_a_server_that_knows_no_token_ids_is_asked_without(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    def strict(request: dict[str, Any], number: int) -> tuple[int, object]:
        return (400, {}) if "return_token_ids" in request else echo(request, number)

    stub = make_stub(strict)
    assert len(answered(run_of(tmp_path, stub.url, concurrency=1))) == NUM_PROMPTS
    assert len(stub.requests) == NUM_PROMPTS + 1


@pytest.mark.parametrize("fault", [(429, {}), (503, {}), (200, b"no json")])
def test_a_busy_server_is_asked_again(
    tmp_path: Path, make_stub: Callable[..., Stub], fault: tuple[int, object]
) -> None:
    def busy(request: dict[str, Any], number: int) -> tuple[int, object]:
        return fault if number % 3 == 0 else echo(request, number)

    assert len(answered(run_of(tmp_path, make_stub(busy).url))) == NUM_PROMPTS


def test_a_dead_server_is_set_aside_by_name_and_the_other_goes_on(
    tmp_path: Path, make_stub: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(request: dict[str, Any], number: int) -> tuple[int, object]:
        dead.is_healthy = False
        return 500, {}

    dead, good = make_stub(dying), make_stub()
    run = run_of(tmp_path, dead.url, good.url, "http://127.0.0.1:9/v1", retries=1)
    assert len(answered(run)) == NUM_PROMPTS
    said = capsys.readouterr().out
    assert said.count(f"server {dead.url} is set aside: HTTP 503") == 1
    assert "server http://127.0.0.1:9/v1 is set aside" in said


def test_with_no_server_left_the_run_fails_and_goes_on_when_run_again(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    def dying(request: dict[str, Any], number: int) -> tuple[int, object]:
        if number <= 4:
            return echo(request, number)
        dead.is_healthy = False
        return 500, {}

    dead = make_stub(dying)
    run = run_of(tmp_path, dead.url)
    with pytest.raises(ValueError, match=f"no server is left: {dead.url}; run the same command"):
        answered(run)
    with pytest.raises(ValueError, match="no server answers"):
        answered(run)
    good = make_stub()
    found = answered(run_of(tmp_path, good.url))
    assert len(found) == NUM_PROMPTS
    assert len(good.requests) >= NUM_PROMPTS - 4


def test_an_error_does_not_wait_for_a_server_that_hangs(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    release = threading.Event()

    def hanging(request: dict[str, Any], number: int) -> tuple[int, object]:
        if "word 0" in request["messages"][-1]["content"]:
            return 200, {"choices": []}
        release.wait(20)
        return echo(request, number)

    run = run_of(tmp_path, make_stub(hanging).url, concurrency=12)
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dropped, "add", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            answered(run)
    assert time.monotonic() - begin < 10
    release.set()


def _interrupt(self: Dropped, reason: str, where: str, *, is_bad: bool = True) -> None:
    raise KeyboardInterrupt


def test_refused_prompts_are_counted_and_fail_the_run_above_the_share(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    def picky(request: dict[str, Any], number: int) -> tuple[int, object]:
        is_first = request["messages"][-1]["content"] == "word 0"
        return (422, {}) if is_first else echo(request, number)

    run = run_of(tmp_path, make_stub(picky).url)
    with pytest.raises(ValueError, match=r"refused 1 of 12 prompts.*HTTP 422 \(p0\)"):
        answered(run)
    # the others stand in the file all the same
    assert len(Path(run.generate.out).read_text().splitlines()) == NUM_PROMPTS - 1


def test_wrong_urls_and_different_models_are_refused(
    tmp_path: Path, make_stub: Callable[..., Stub]
) -> None:
    with pytest.raises(UsageError, match="'localhost:8000' is no server: write http://host"):
        answered(run_of(tmp_path, "localhost:8000"))
    stubs = make_stub(model="a"), make_stub(model="b")
    with pytest.raises(UsageError, match=r"different models: \['a', 'b'\]"):
        answered(run_of(tmp_path, *(stub.url for stub in stubs)))
