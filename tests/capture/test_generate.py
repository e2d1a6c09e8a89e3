"""Answers are the target's own, each once, whatever stops a run in between."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_pipeline.capture import generate
from dflash_pipeline.capture.answer_file import AnswerFile
from dflash_pipeline.capture.answerer import Answerer, end_ids
from dflash_pipeline.capture.answers import Dialogue
from dflash_pipeline.capture.model import TargetFiles, resolve
from dflash_pipeline.capture.samples import Dropped, read
from dflash_pipeline.capture.target import Target
from dflash_pipeline.capture.template import prompt_ids
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import DataConfig, GenerateConfig, Run, TargetConfig
from dflash_pipeline.store.runlog import RunLog
from places import cpu_place

NUM_PROMPTS = 7


@pytest.fixture(scope="module")
def target(make_target_dir: Callable[..., Path]) -> str:
    # two layers decode faster; the range makes them say more than one token
    return str(make_target_dir("qwen3", num_hidden_layers=2))


def run_of(tmp_path: Path, target: str, **changes: Any) -> Run:
    rows = [
        {
            "id": f"p{i}",
            "domain": "math",
            "messages": [
                {"role": "user", "content": "What is " + "so " * i + "big?"},
                {"role": "assistant", "content": "Not the target's answer."},
            ],
        }
        for i in range(NUM_PROMPTS - 1)
    ]
    turns = [{"role": "user", "content": text} for text in ("One?", "Two?")]
    rows.append({"id": "two", "domain": "chat", "messages": turns})
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"out": str(tmp_path / "answers.jsonl"), "max_new_tokens": 12, "batch_size": 3}
    return Run(
        target=TargetConfig(id=target),
        data=DataConfig(files=(str(data),)),
        generate=GenerateConfig(**(settings | changes)),
    )


def place_of(tmp_path: Path, rank: int = 0, world: int = 1) -> Place:
    return cpu_place(tmp_path / "answers.jsonl.logs", "generate", rank, world)


def answers(run: Run) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run.generate.out).read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def test_answers_equal_greedy_decoding_one_by_one(tmp_path: Path, target: str) -> None:
    run = run_of(tmp_path, target)
    generate.main(run, place_of(tmp_path), {})
    files = resolve(run.target)
    model = Answerer(
        files, run.target, run.generate, DataConfig(max_len=512), place_of(tmp_path)
    )._model
    found = answers(run)
    assert len(found) == NUM_PROMPTS
    for line in found.values():
        for begin, end in line["loss_spans"]:
            ids = torch.tensor([line["token_ids"][:end]])
            with torch.inference_mode():
                predicted = model(ids).logits[0].argmax(-1)
            assert predicted[begin - 1 : end - 1].tolist() == line["token_ids"][begin:end]
    assert len({tuple(line["token_ids"][-6:]) for line in found.values()}) > 1


def test_a_command_that_cannot_work_leaves_no_file(tmp_path: Path, target: str) -> None:
    run = run_of(tmp_path, target)
    Path(run.data.files[0]).write_text('{"id": "a"}\n')
    with pytest.raises(ValueError, match=r"1 of 1 rows are unusable.*--set data.max_bad_share=1"):
        generate.main(run, place_of(tmp_path), {})
    assert not Path(run.generate.out).exists()
    assert not (tmp_path / "answers.jsonl.logs" / "settings.json").exists()


def test_the_line_reads_back_as_a_conversation(tmp_path: Path, target: str) -> None:
    run = run_of(tmp_path, target)
    generate.main(run, place_of(tmp_path), {})
    dropped = Dropped()
    conversations = list(read((run.generate.out,), 0, dropped))
    assert (len(conversations), dropped.counts) == (NUM_PROMPTS, {})
    first = next(one for one in conversations if one.key == "p0")
    assert first.domain == "math"
    assert [turn["role"] for turn in first.messages] == ["user", "assistant"]
    assert first.messages[1]["content"] != "Not the target's answer."
    tokenizer = resolve(run.target).tokenizer()
    (begin, end) = first.loss_spans[-1]
    assert tokenizer.decode(first.token_ids[:begin]).endswith("<|im_start|>assistant\n")
    assert end == len(first.token_ids)
    assert answers(run)["p0"]["sampling"]["temperature"] == 0


def test_every_user_turn_is_answered_in_order(tmp_path: Path, target: str) -> None:
    # any byte ends an answer, so none is cut by the limit
    run = run_of(tmp_path, target)
    files = resolve(run.target)
    answerer = Answerer(
        files, run.target, run.generate, DataConfig(max_len=512), place_of(tmp_path)
    )
    answerer._ends = frozenset(range(272))
    dialogue = Dialogue("two", "chat", [], ["One?", "Two?"])
    assert answerer.answer([dialogue], print) == 2
    assert [turn["role"] for turn in dialogue.messages] == ["user", "assistant"] * 2
    assert dialogue.messages[2]["content"] == "Two?"
    assert dialogue.finishes == ["stop", "stop"]
    answerer._ends = frozenset()
    cut = Dialogue("two", "chat", [], ["One?", "Two?"])
    answerer.answer([cut], print)
    assert (cut.finishes, len(cut.messages)) == (["length"], 2)


def test_earlier_answers_stay_supervised_only_where_their_tokens_are(
    target: str,
) -> None:
    config = TargetConfig(id=target)
    tokenizer = resolve(config).tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    dialogue = Dialogue("k", "d", [], ["a", "b"])
    for text in ("A", "B"):
        prompt = prompt_ids(tokenizer, dialogue.ask(), config)
        dialogue.answer({"role": "assistant", "content": text}, "stop")
        dialogue.answer_tokens(prompt, [*tokenizer.encode(text), end], tokenizer, config)
    spans = [tokenizer.decode(dialogue.token_ids[a:b]) for a, b in dialogue.loss_spans]
    assert spans == ["A<|im_end|>", "B<|im_end|>"]
    other = Dialogue("k", "d", [], [], [1, 2, 3], [(1, 3)])
    other.answer_tokens([1, 9, 9], [4], None, config)
    assert other.loss_spans == [(3, 4)]


def test_a_second_run_adds_what_a_killed_one_left_out(tmp_path: Path, target: str) -> None:
    whole = run_of(tmp_path, target)
    generate.main(whole, place_of(tmp_path), {})
    lines = Path(whole.generate.out).read_text().splitlines(keepends=True)
    wanted = answers(whole)
    # killed in the middle of a line
    Path(whole.generate.out).write_text("".join(lines[:3]) + lines[3][:20])
    generate.main(whole, place_of(tmp_path), {})
    assert answers(whole) == wanted


@pytest.mark.parametrize(
    "line",
    [b"not json", b'{"id": "x"}', b'{"messages": []}', b"[1]", b'\xff\xfe{"id"', b"", b"[" * 9999],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: bytes) -> None:
    out = tmp_path / "answers.jsonl"
    good = b'{"id": "a", "messages": []}\n'
    out.write_bytes(good + line + b"\n" + good)
    file = AnswerFile(str(out))
    with pytest.raises(ValueError, match=r"answers\.jsonl:2 is no answer of generate") as caught:
        file.ids()
    file.close()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["refused", "short"])
def test_a_full_disk_is_named_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    out = tmp_path / "answers.jsonl"
    file = AnswerFile(str(out))
    file.append([{"id": "a", "messages": []}])
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if how == "refused":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ValueError, match=r"answers\.jsonl: .*free some.*run the same command"):
        file.append([{"id": "b", "messages": []}])
    monkeypatch.undo()
    assert file.ids() == {"a"}
    file.append([{"id": "c", "messages": []}])
    assert file.ids() == {"a", "c"}
    file.close()


def test_two_ranks_share_the_prompts_and_the_file(tmp_path: Path, target: str) -> None:
    alone = run_of(tmp_path, target)
    generate.main(alone, place_of(tmp_path), {})
    wanted = answers(alone)
    Path(alone.generate.out).unlink()
    sizes = []
    for rank in range(2):
        generate.main(alone, place_of(tmp_path, rank, 2), {})
        sizes.append(len(answers(alone)))
    assert 0 < sizes[0] < sizes[1] == NUM_PROMPTS
    assert answers(alone).keys() == wanted.keys()


def test_other_settings_are_refused_by_name(tmp_path: Path, target: str) -> None:
    generate.main(run_of(tmp_path, target), place_of(tmp_path), {})
    with pytest.raises(UsageError, match="max_new_tokens: 12, now 13"):
        generate.main(run_of(tmp_path, target, max_new_tokens=13), place_of(tmp_path), {})
    (tmp_path / "answers.jsonl.logs" / "settings.json").unlink()
    with pytest.raises(UsageError, match="exists, but not what it was generated with"):
        generate.main(run_of(tmp_path, target), place_of(tmp_path), {})


def test_samples_are_numbered_and_differ_and_do_not_depend_on_the_batch(
    tmp_path: Path, target: str
) -> None:
    sampled = {"samples": 2, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
    run = run_of(tmp_path, target, batch_size=5, **sampled)
    generate.main(run, place_of(tmp_path), {})
    found = answers(run)
    assert {f"p{i}#{k}" for i in range(NUM_PROMPTS - 1) for k in range(2)} < found.keys()
    assert found["p0#0"]["token_ids"] != found["p0#1"]["token_ids"]
    other = tmp_path / "other"
    other.mkdir()
    run = run_of(other, target, batch_size=1, **sampled)
    generate.main(run, place_of(other), {})
    assert {key: line["token_ids"] for key, line in answers(run).items()} == {
        key: line["token_ids"] for key, line in found.items()
    }


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError()])
def test_a_batch_that_does_not_fit_is_halved(
    error: Exception, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, target, batch_size=4)
    generate.main(run, place_of(tmp_path), {})
    wanted = answers(run)
    Path(run.generate.out).unlink()
    sizes = []
    original = Answerer._generate_part

    def small_only(
        self: Answerer,
        keys: list[str],
        prompts: list[list[int]],
        seeds: list[int],
        tell: Callable[[int], None],
    ) -> list[list[int]]:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise error
        return original(self, keys, prompts, seeds, tell)

    monkeypatch.setattr(Answerer, "_generate_part", small_only)
    generate.main(run, place_of(tmp_path), {})
    # the first is the rehearsal's
    assert (sizes[1], max(sizes[2:])) == (4, 2)
    assert answers(run) == wanted


@pytest.mark.parametrize(
    ("num_batches", "wanted"),
    [
        # memory that will not do is found out at once
        (16, [["p5", "p4", "p3"], ["p2", "p1", "p0"], ["two"]]),
        (1, [["p2", "p1", "p0"], ["p5", "p4", "p3"], ["two"]]),
    ],
)
def test_the_longest_prompts_of_a_window_come_first(
    num_batches: int,
    wanted: list[list[str]],
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []
    before = Answerer.answer

    def answer(self: Answerer, batch: list[Dialogue], tell: Callable[[int], None]) -> int:
        asked.append([dialogue.key for dialogue in batch])
        return before(self, batch, tell)

    monkeypatch.setattr(generate, "_WINDOW_BATCHES", num_batches)
    monkeypatch.setattr(Answerer, "answer", answer)
    generate.main(run_of(tmp_path, target), place_of(tmp_path), {})
    # the first is the rehearsal's
    assert asked[1:] == wanted


def test_prompts_that_are_too_long_or_have_no_question_are_left_out(
    tmp_path: Path, target: str
) -> None:
    run = run_of(tmp_path, target)
    data = Path(run.data.files[0])
    data.write_text(json.dumps({"id": "long", "prompt": "x" * 600}) + "\n" + data.read_text())
    generate.main(run, place_of(tmp_path), {})
    assert "long" not in answers(run)
    data.write_text('{"text": "no question"}\n')
    with pytest.raises(ValueError, match=r"1 of 1 rows are unusable.*no user turn"):
        generate.main(run, place_of(tmp_path), {})


def test_an_answer_ends_at_the_longest_conversation_or_its_prompt_is_left_out(
    tmp_path: Path, target: str
) -> None:
    run = run_of(tmp_path, target)
    generate.main(run, place_of(tmp_path), {})
    whole = answers(run)
    # between the longest prompt alone and with its answer
    max_len = 1 + max(line["loss_spans"][0][0] for line in whole.values())
    for overlong in ("truncate", "drop"):
        out = str(tmp_path / f"{overlong}.jsonl")
        data = DataConfig(files=run.data.files, max_len=max_len, overlong=overlong)
        cut = replace(run, data=data, generate=replace(run.generate, out=out))
        generate.main(cut, place_of(tmp_path), {})
        found = answers(cut)
        has_room = {key for key, line in whole.items() if line["loss_spans"][0][0] + 12 <= max_len}
        assert len(has_room) < len(whole)
        if overlong == "drop":
            assert set(found) == has_room
            continue
        for key, line in whole.items():
            assert (
                found[key]["token_ids"]
                == line["token_ids"][:max_len][: len(found[key]["token_ids"])]
            )
            assert len(found[key]["token_ids"]) <= max_len
        assert any(line["finish"] == ["length"] for line in found.values())


def test_a_batch_tells_how_many_tokens_it_has_while_it_is_under_way(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_pipeline.capture.answerer.TELL_EVERY_S", 0.0)
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(
        RunLog,
        "part",
        lambda _log, done, _all, _unit, tokens_written: told.append((done, tokens_written)),
    )
    generate.main(run_of(tmp_path, target, batch_size=NUM_PROMPTS), place_of(tmp_path), {})
    assert told[0] == (0, 0)
    under_way = [tokens for done, tokens in told[1:] if done == 0]
    assert len(under_way) > 10
    assert under_way == sorted(under_way)
    assert 0 < under_way[0] <= NUM_PROMPTS < under_way[-1] <= told[-1][1]


def test_the_path_is_tried_on_a_twin_before_the_weights_load(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(files: TargetFiles, *_others: object) -> None:
        loaded.append(files.name)
        raise ValueError("stop here")

    monkeypatch.setattr(Target, "load", load)
    with pytest.raises(ValueError, match="stop here"):
        generate.main(run_of(tmp_path, target), place_of(tmp_path), {})
    assert [Path(name).name for name in loaded] == ["twin"]
    assert not (tmp_path / "answers.jsonl").exists()


def test_every_end_token_of_the_target_stops_an_answer(
    make_target_dir: Callable[..., Path],
) -> None:
    directory = make_target_dir("qwen3", eos_token_id=[5, 6])
    config = TargetConfig(id=str(directory))
    assert end_ids(resolve(config), config) >= {5, 6, 258}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_no_answer(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, temperature: float, value: float
) -> None:
    """Their largest is token 0: an answer of nothing but that would be written as the target's."""
    run = run_of(tmp_path, target, temperature=temperature)
    load = Target.load

    def damaged(*arguments: Any) -> Target:
        loaded = load(*arguments)
        with torch.no_grad():
            loaded.head.weight[3] = value
        return loaded

    monkeypatch.setattr(Target, "load", damaged)
    with pytest.raises(ValueError, match=r"gives NaN or Inf for token 0 of the answer to \w+: its"):
        generate.main(run, place_of(tmp_path), {})
    out = Path(run.generate.out)
    assert not out.exists() or not answers(run)


def test_no_answer_is_lost_or_doubled_when_writers_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    script = textwrap.dedent(
        """
        import fcntl, os, sys
        from dflash_pipeline.capture.answer_file import AnswerFile
        out = AnswerFile(sys.argv[1])
        while True:
            for i in range(40):
                ids = [f"{os.getpid()}-{i}-{j}" for j in range(9)]
                out.append([{"id": one, "messages": "x" * 3000} for one in ids])
            # dies in the middle of a line, so with the lock that every write is made under
            fcntl.flock(out._descriptor, fcntl.LOCK_EX)
            os.write(out._descriptor, b'{"id": "torn')
            os.kill(os.getpid(), 9)
        """
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(out)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [-9, -9]
    file = AnswerFile(str(out))
    found = file.ids()
    file.append([{"id": "last"}])
    file.close()
    lines = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(lines) == sorted({*found, "last"})
    assert len(lines) == 2 * 40 * 9 + 1
