"""Rows of any shape become conversations; hostile ones are counted, never fatal by themselves."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_pipeline.capture import sources
from dflash_pipeline.capture.samples import Conversation, Dropped, read
from dflash_pipeline.configs.errors import UsageError

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def written(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def conversations(*files: str, limit: int = 0) -> tuple[list[Conversation], Dropped]:
    dropped = Dropped()
    return list(read(files, limit, dropped)), dropped


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "response": "a"},
        {"prompt": [TALK[0]], "completion": [TALK[1]]},
        {"instruction": "q", "input": "", "output": "a"},
        {"question": "q", "answer": "a"},
    ],
)
def test_every_shape_of_a_dialogue_reads_as_the_same_turns(
    tmp_path: Path, row: dict[str, object]
) -> None:
    (found,), dropped = conversations(written(tmp_path / "x.jsonl", row))
    assert list(found.messages) == TALK
    assert (found.key, found.domain, found.row) == ("x/1", "x", 1)
    assert dropped.counts == {}


def test_other_fields_are_kept(tmp_path: Path) -> None:
    rows = (
        {"id": 7, "domain": "math", "instruction": "q", "input": "data", "output": "a"},
        {"id": "s", "system": "Be brief.", "messages": TALK},
        {"text": "A document."},
        {"messages": [TALK[0], {**TALK[1], "reasoning_content": "hm"}]},
        {"prompt": "q"},
    )
    found, _ = conversations(written(tmp_path / "x.jsonl", *rows))
    assert [(one.key, one.domain) for one in found[:2]] == [("7", "math"), ("s", "x")]
    assert found[0].messages[0]["content"] == "q\n\ndata"
    assert [turn["role"] for turn in found[1].messages] == ["system", "user", "assistant"]
    assert (found[2].text, found[2].messages) == ("A document.", ())
    assert found[3].messages[1]["reasoning_content"] == "hm"
    assert found[4].prompt_messages() == [TALK[0]]
    assert [one.first_prompt for one in found] == ["q\n\ndata", "q", "A document.", "q", "q"]


def test_answers_of_generate_come_with_their_tokens(tmp_path: Path) -> None:
    good = {"messages": TALK, "token_ids": [1, 2, 3], "loss_spans": [[1, 3]]}
    empty = {**good, "messages": [TALK[0], {"role": "assistant", "content": ""}]}
    bad = [
        {**good, "loss_spans": [[1, 4]]},
        {**good, "loss_spans": [[2, 3], [1, 2]]},
        {**good, "token_ids": [1, -2, 3]},
        {**good, "token_ids": [1, True, 3]},
        {"messages": TALK, "token_ids": [1, 2]},
    ]
    found, dropped = conversations(written(tmp_path / "x.jsonl", good, empty, *bad))
    assert [(one.token_ids, one.loss_spans) for one in found] == [((1, 2, 3), ((1, 3),))] * 2
    assert dropped.counts == {"token_ids and loss_spans do not fit": 5}


HOSTILE: list[tuple[bytes, str]] = [
    (b'{"messages": [{"role": "user", "content": null}]}', "content is null"),
    (b'{"messages": [{"role": "user", "content": ["a"]}]}', "content is a list of parts"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "content is no text"),
    (b'{"messages": [{"role": "user", "content": " "}]}', "content is empty"),
    (b'{"messages": [{"role": "tool", "content": "x"}]}', "tool turn"),
    (
        b'{"messages": [{"role": "assistant", "content": null, "tool_calls": [{}]}]}',
        "tool turn",
    ),
    (b'{"messages": [{"role": "critic", "content": "x"}]}', "unknown role"),
    (b'{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role"),
    (b'{"messages": ["x"]}', "a turn is no object"),
    (b'{"messages": []}', "no turns"),
    (b'{"messages": "x"}', "messages is no list of turns"),
    (b'{"prompt": "q", "response": ""}', "response is empty"),
    (b'{"text": null}', "text is null"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b'{"else": 1}', "no messages, prompt or text"),
    (b"[1]", "not a JSON object"),
    (b'{"text": ', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "\xff\xfe"}', "not UTF-8"),
    (b'{"id": "same", "text": "again"}', "id seen before"),
]


def test_hostile_rows_are_counted_under_their_reason_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "hostile.jsonl"
    lines = [b'\xef\xbb\xbf{"id": "same", "text": "bom"}', b"", b'{"text": "crlf"}\r']
    path.write_bytes(b"\n".join([*lines, *(line for line, _ in HOSTILE)]))
    found, dropped = conversations(str(path))
    assert [one.text for one in found] == ["bom", "crlf"]
    assert dropped.num_rows == 2 + len(HOSTILE)
    for number, (_, reason) in enumerate(HOSTILE, 4):
        assert f"hostile.jsonl:{number}" in dropped.examples[reason]
    assert sum(dropped.counts.values()) == dropped.num_bad == len(HOSTILE)
    with pytest.raises(ValueError, match=r"20 of 22 rows are unusable.*2 x not JSON \(hostile"):
        dropped.check(0.9)
    dropped.check(0.95)


def test_a_ten_megabyte_line_is_passed_over_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "' + b"x" * (20 << 20) + b'"}\n{"text": "short"}\n')
    tracemalloc.start()
    found, dropped = conversations(str(path))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.text for one in found] == ["short"]
    assert dropped.counts == {"line longer than 8.39 MB": 1}
    assert peak_bytes < 2.5 * sources.LONGEST_LINE_BYTES


def test_an_empty_file_is_counted(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    found, dropped = conversations(str(tmp_path / "empty.jsonl"))
    assert (found, dropped.counts) == ([], {"file without rows": 1})


def test_gzip_and_parquet_read_as_jsonl_does(tmp_path: Path) -> None:
    rows = [{"id": str(i), "messages": TALK} for i in range(600)]
    plain = written(tmp_path / "x.jsonl", *rows)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    first, _ = conversations(plain)
    assert conversations(str(tmp_path / "x.jsonl.gz"))[0] == first
    assert conversations(str(tmp_path / "x.parquet"))[0] == first
    assert {sources.stem(str(tmp_path / name)) for name in ("x.jsonl.gz", "x.parquet")} == {"x"}


def test_files_of_the_same_name_keep_their_rows_apart(tmp_path: Path) -> None:
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(written(tmp_path / folder / "train.jsonl", {"text": folder}))
    found, dropped = conversations(*files)
    assert [(one.key, one.source) for one in found] == [("train/1", 0), ("train-2/1", 1)]
    assert dropped.counts == {}


def test_the_limit_counts_rows_read(tmp_path: Path) -> None:
    file = written(tmp_path / "x.jsonl", {"text": "a"}, [], {"text": "b"}, {"text": "c"})
    found, dropped = conversations(file, limit=3)
    assert [one.text for one in found] == ["a", "b"]
    assert dropped.num_rows == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "data.files is empty"),
        (("nowhere.jsonl",), "nowhere.jsonl does not exist"),
        (("hf:",), "names no data set"),
    ],
)
def test_sources_that_are_not_there_are_refused(files: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        conversations(*files)


def test_a_file_of_another_kind_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(UsageError, match=r"x\.csv: expected \.jsonl"):
        conversations(str(tmp_path / "x.csv"))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:40])
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz is damaged at line"):
        conversations(str(tmp_path / "x.jsonl.gz"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"x\.parquet is damaged after row 0"):
        conversations(str(tmp_path / "x.parquet"))


def test_a_data_set_of_the_hub_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'dflash-pipeline\[datasets\]'"):
        conversations("hf:org/name:test")


def test_a_data_set_of_the_hub_is_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(name: str, split: str) -> list[dict[str, str]]:
            return [{"text": f"{name} {split}"}]

    monkeypatch.setitem(__import__("sys").modules, "datasets", Library)
    (found,), _ = conversations("hf:org/name:test")
    assert (found.text, found.key) == ("org/name test", "name/1")
