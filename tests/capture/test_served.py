"""A server's own acceptance, read from the counters of vLLM and of SGLang; refused without them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_pipeline.capture import counters, served
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.evaluation import is_result
from dflash_pipeline.configs.schema import EvalConfig, Run, TargetConfig
from places import cpu_place

# tokens, verifications and accepted drafts by slot of one answer in each domain
ANSWERS = {"math": (10, 3, (3, 2, 1)), "chat": (7, 6, (0, 0, 0))}


class Stub:
    """Answers chats and counts as a server of `kind` does; it has answered others before."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokens, self.cycles, self.by_slot = 500, 200, [90, 40, 10]
        self.requests: list[dict[str, Any]] = []
        self.strange_tokens = 0
        stub, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.send(200, json.dumps({"data": [{"id": "stub"}]}))
                    return
                text = stub.page(self.path)
                self.send(404 if text is None else 200, text or "no")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                domain = body["messages"][-1]["content"].split()[0]
                tokens, cycles, by_slot = ANSWERS[domain]
                with lock:
                    stub.requests.append(body)
                    stub.tokens += tokens + stub.strange_tokens
                    stub.cycles += cycles
                    stub.by_slot = [a + b for a, b in zip(stub.by_slot, by_slot, strict=True)]
                choice = {"message": {"content": "so"}, "finish_reason": "stop"}
                self.send(
                    200, json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}})
                )

            def send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def page(self, path: str) -> str | None:
        """What stands at a path; None: nothing."""
        label = 'engine="0",model_name="a,b=\\"c\\" position=\\"9\\""'
        if path == "/metrics" and self.kind == "vllm":
            # two engines share the counts
            return "\n".join(
                f"{name}{{{label.replace('0', str(engine), 1)}{more}}} {float(value)}"
                for engine, part in ((0, 0.25), (1, 0.75))
                for name, more, value in (
                    ("# HELP vllm:spec_decode_num_drafts_total", "", 1),
                    ("vllm:generation_tokens_total", "", self.tokens * part),
                    ("vllm:spec_decode_num_drafts_total", "", self.cycles * part),
                    ("vllm:spec_decode_num_drafts_created", "", 1.7e9),
                    ("vllm:spec_decode_num_draft_tokens_total", "", 3 * self.cycles * part),
                    ("vllm:spec_decode_num_accepted_tokens_total", "", sum(self.by_slot) * part),
                    *(
                        (
                            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                            f',position="{slot}"',
                            count * part,
                        )
                        for slot, count in enumerate(self.by_slot)
                    ),
                )
            )
        if path == "/metrics" and self.kind == "sglang":
            return (
                f"sglang:generation_tokens_total{{{label}}} {self.tokens}\n"
                f"sglang:spec_verify_calls_total{{{label}}} {self.cycles}\n"
                f"sglang:spec_accept_length{{{label}}} 2.5\n"
            )
        if path == "/metrics" and self.kind == "vllm without a drafter":
            return f"vllm:generation_tokens_total{{{label}}} {self.tokens}\n"
        if path == "/get_server_info" and self.kind == "sglang without metrics":
            state = {} if self.tokens == 500 else {"avg_spec_accept_length": 1.75}
            return json.dumps({"speculative_algorithm": "DFLASH", "internal_states": [state]})
        if path == "/server_info" and self.kind == "sglang without a drafter":
            return json.dumps({"speculative_algorithm": None, "internal_states": [{}]})
        return None

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def make_stub() -> Iterator[Callable[[str], Stub]]:
    made: list[Stub] = []

    def make(kind: str) -> Stub:
        made.append(Stub(kind))
        return made[-1]

    yield make
    for stub in made:
        stub.stop()


def asked(tmp_path: Path, url: str, **changes: Any) -> dict[str, Any]:
    """Evaluate two prompts of math and one of chat; what was written."""
    file = tmp_path / "prompts.jsonl"
    rows = [("a", "math"), ("b", "chat"), ("c", "math"), ("d", "chat")]
    file.write_text(
        "".join(
            json.dumps({"id": key, "domain": domain, "prompt": f"{domain} {key}"}) + "\n"
            for key, domain in rows[:3]
        )
    )
    out = tmp_path / "out" / "served.json"
    config = {"prompts": (str(file),), "endpoint": url, "json": str(out)} | changes
    place = cpu_place(tmp_path / "logs", "eval")
    run = Run(target=TargetConfig(thinking="off"), eval=EvalConfig(**config))
    served.main(run, place, {})
    # which the same line may replace
    assert is_result(out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_vllm_counts_by_slot(
    tmp_path: Path, make_stub: Callable[[str], Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    stub = make_stub("vllm")
    found = asked(tmp_path, stub.url, max_new_tokens=33, temperature=0.5)
    assert found["server"] == "vllm"
    math, chat = found["domains"]["math"], found["domains"]["chat"]
    assert (math["prompts"], math["tokens"], chat["prompts"], chat["tokens"]) == (2, 20, 1, 7)
    assert math["served"]["tau"] == pytest.approx(1 + 6 / 3)
    assert math["served"]["cycles"] == 6
    assert math["served"]["accepted_by_slot"] == pytest.approx([1, 2 / 3, 1 / 3])
    assert chat["served"]["tau"] == pytest.approx(1)
    request = next(one for one in stub.requests if one["messages"][-1]["content"] == "math a")
    assert (request["max_tokens"], request["temperature"]) == (33, 0.5)
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    output = capsys.readouterr().out
    assert "1.00 0.67 0.33" in output
    assert "a cycle is not cut" in output


def test_sglang_counts_verifications(tmp_path: Path, make_stub: Callable[[str], Stub]) -> None:
    found = asked(tmp_path, make_stub("sglang").url)
    assert found["server"] == "sglang"
    # an answer's first token is the prefill's
    assert found["domains"]["math"]["served"]["tau"] == pytest.approx((20 - 2) / 6)
    assert found["domains"]["chat"]["served"]["tau"] == pytest.approx((7 - 1) / 6)


def test_an_average_since_the_start_is_a_fresh_servers_alone(
    tmp_path: Path, make_stub: Callable[[str], Stub]
) -> None:
    stub = make_stub("sglang without metrics")
    found = asked(tmp_path, stub.url)
    assert {name: one["served"]["tau"] for name, one in found["domains"].items()} == {"all": 1.75}
    with pytest.raises(ValueError, match=r"only an average .* start it anew, or with --enable-met"):
        asked(tmp_path, stub.url)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm without a drafter", "/metrics has no spec_decode counters"),
        ("sglang without a drafter", "runs without a drafter"),
        ("something else", "/metrics does not answer"),
    ],
)
def test_a_server_without_counters_is_refused_before_it_is_asked(
    kind: str, words: str, tmp_path: Path, make_stub: Callable[[str], Stub]
) -> None:
    stub = make_stub(kind)
    with pytest.raises(UsageError, match=rf"{words}.*--speculative-config.*--enable-metrics"):
        asked(tmp_path, stub.url)
    assert stub.requests == []


def test_tokens_of_others_in_the_counts_are_refused(
    tmp_path: Path, make_stub: Callable[[str], Stub]
) -> None:
    stub = make_stub("vllm")
    stub.strange_tokens = 5
    with pytest.raises(ValueError, match=r"counts 12 tokens, its answers here have 7: somebody"):
        asked(tmp_path, stub.url)


def test_a_server_that_drafts_nothing_or_began_anew_is_told(
    tmp_path: Path, make_stub: Callable[[str], Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = make_stub("vllm")
    monkeypatch.setitem(ANSWERS, "chat", (7, 0, (0, 0, 0)))
    with pytest.raises(ValueError, match="verified nothing while it wrote 7 tokens"):
        asked(tmp_path, stub.url)
    monkeypatch.setitem(ANSWERS, "chat", (7, -300, (0, 0, 0)))
    with pytest.raises(ValueError, match="counters fell: it was started anew"):
        asked(tmp_path, stub.url)


def test_no_server_is_no_silence(tmp_path: Path, make_stub: Callable[[str], Stub]) -> None:
    stub = make_stub("vllm")
    stub.server.server_close()
    with pytest.raises(ValueError, match="no server answers at"):
        counters.read("http://127.0.0.1:9/v1")
