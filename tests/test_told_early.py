"""What a line contradicts is told before anything heavy loads, and before a process is launched."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_pipeline.configs.load import load, to_dict
from dflash_pipeline.store.documents import canonical
from dflash_pipeline.store.metadata import read_root, root_document
from dflash_pipeline.train import record

STORE = Path(__file__).parent / "golden" / "store-v1-bf16"
ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
# a process that is launched ends the line: nothing was told before
TYPED = """
import os, subprocess, sys

def ended(how):
    print("ended", how, "torch" in sys.modules or "transformers" in sys.modules, flush=True)
    os._exit(0)

def launched(*arguments, **keywords):
    ended("by a launch")

subprocess.Popen = launched
sys.argv = ["dflash", *sys.argv[1:]]
from dflash_pipeline.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    sys.stderr.flush()
    ended(end.code)
"""
TARGET = "--target toy --gpus cpu"


def _recorded(run_of: dict[str, object], name: str = "made") -> None:
    """A store captured without a thinking mode, by a run of this record."""
    shutil.copytree(STORE, name, symlinks=True)
    root, spec, _, attributes = read_root(Path(name))
    identity = replace(spec, template_args='{"arguments":{},"system_prompt":""}').to_dict()
    again = replace(root, identity=identity, attributes=replace(attributes, run=run_of).to_dict())
    Path(name, "zarr.json").write_bytes(canonical(root_document(again)))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores, answers, runs and drafters that lines may contradict."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_CONFIG", raising=False)
    # a line that is ended at its launch leaves its logs
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    Path("a.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("a.json").write_text('{"per_prompt": {"trained": []}, "settings": {}}')
    other = {"per_prompt": {"trained": []}, "settings": {"max_new_tokens": 48}, "mode": "replay"}
    Path("b.json").write_text(json.dumps(other))
    Path("bad.jsonl").write_text("no json\n" + json.dumps(ROW) + "\n")
    _recorded(dict(to_dict(load("", ["target.id=toy", "data.max_len=200"], {}))))
    shutil.copytree("made", "trained", symlinks=True)
    split = Path("trained/samples/split/c/0")
    split.write_bytes(bytes(len(split.read_bytes())))
    Path("answers.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("answers.jsonl.logs").mkdir()
    settings = {"template_args": '{"arguments":{},"system_prompt":""}', "max_new_tokens": 1024}
    Path("answers.jsonl.logs/settings.json").write_text(json.dumps(settings))
    run = load("", ["train.stores=['made']"], {"train.out": "run"})
    (root, *_) = read_root(Path("made"))
    record.begin(Path("run"), run, [root], resume=False)
    for name, changed in (("first", {}), ("second", {"drafter.num_layers": 3})):
        one = load("", ["train.stores=['made']"], {"train.out": f"swept/{name}", **changed})
        record.begin(Path("swept") / name, one, [root], resume=False)
    Path("sweep.toml").write_text("[first]\n[second]\ndrafter.num_layers = 4\n")
    Path("layers.toml").write_text("[first]\n[second]\ndrafter.layer_ids = [1, 4]\n")
    Path("dropping.toml").write_text('[first]\ntrain.drop_domains = ["nowhere"]\n')
    Path("drafter").mkdir()
    Path("drafter/config.json").write_text('{"architectures": ["DFlashDraftModel"]}')
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    _recorded({"merged": [dict(to_dict(load("", (), {})))]}, "merged")
    shutil.copytree("drafter", "forgetful")
    told = {"template_args": '{"arguments":{},"system_prompt":""}', "template_hash": "another"}
    Path("drafter/trained_on.json").write_text(json.dumps(told))


def _typed(line: str) -> tuple[str, str]:
    """(exit code and whether a heavy module was loaded, what was said)."""
    ended = subprocess.run(
        [sys.executable, "-c", TYPED, *line.split()], capture_output=True, text=True, check=True
    )
    *said, last = ended.stdout.splitlines()
    return last, "\n".join([*said, ended.stderr])


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            f"capture {TARGET} --data a.jsonl --store made --thinking on",
            2,
            'template_args: \'{"arguments":{},"system_prompt":""}\' and \'{"arguments":{"enabl',
        ),
        (
            f"capture {TARGET} --data a.jsonl --store made --hidden-mode int8",
            2,
            "hidden_mode: 'bf16' and 'int8'",
        ),
        (
            f"capture {TARGET} --data a.jsonl --store made --set data.heldout=0.5",
            2,
            "data.heldout: 0.02 and 0.5",
        ),
        (
            f"capture {TARGET} --data answers.jsonl --store new --thinking on",
            2,
            "answers.jsonl was generated with template_args",
        ),
        (
            f"generate {TARGET} --data a.jsonl --out answers.jsonl --thinking off",
            2,
            "answers.jsonl was generated with other settings: ",
        ),
        ("train --gpus cpu --store made --drop-domain cod", 2, "'cod'; did you mean 'code'?"),
        (
            "train --gpus cpu --store made --drop-sample k9",
            2,
            "no store has a sample 'k9'; there are '",
        ),
        (
            "train --gpus cpu --store made --out new --sweep dropping.toml",
            2,
            "no store has a domain 'nowhere'; there are 'chat', 'code'",
        ),
        (
            "train --gpus cpu --store made --out new --sweep layers.toml",
            2,
            "variant second: drafter.layer_ids asks for layers (4,), the store holds",
        ),
        (
            "train --gpus cpu --store made --out new --init-from nowhere",
            2,
            "--init-from nowhere: there is no such run, step or checkpoint directory",
        ),
        (
            "train --gpus cpu --store made --out new --init-from model",
            2,
            "model is not a drafter: architecture Qwen3ForCausalLM, expected DFlashDraftModel or",
        ),
        (
            "train --gpus cpu --store made --out new --init-from run",
            2,
            "run is a run without a checkpoint: its first is written after train.save_every",
        ),
        ("export run --out new", 2, "run is a run without a checkpoint"),
        ("eval --gpus cpu --drafter run --store made", 2, "run is a run without a checkpoint"),
        (
            "export made --out new",
            2,
            "made is a store, not a drafter: name a run, one of its steps",
        ),
        (f"eval {TARGET} --check --drafter made --prompts a.jsonl", 2, "made is a store, not a"),
        (
            "eval --gpus cpu --compare forgetful made --store made",
            2,
            "made is a store, not a drafter",
        ),
        (
            "eval --gpus cpu --drafter swept --store made",
            2,
            "swept is not a drafter, it holds no config.json, no best and no last step: name a run",
        ),
        (
            "train --gpus cpu --store made --out new --init-from made",
            2,
            "made is a store, not a drafter: name a run, one of its steps, or a checkpoint with",
        ),
        (
            "train --gpus cpu --store made --out new --set drafter.layer_ids=[1,4]",
            2,
            "drafter.layer_ids asks for layers (4,), the store holds (1, 3, 5): choose among them",
        ),
        (
            "export model --out new",
            2,
            "model is not a drafter: architecture Qwen3ForCausalLM, expected DFlashDraftModel or",
        ),
        (
            f"eval {TARGET} --drafter model --prompts a.jsonl",
            2,
            "model is not a drafter: architecture Qwen3ForCausalLM, expected DFlashDraftModel or",
        ),
        (
            f"eval {TARGET} --compare drafter model --prompts a.jsonl",
            2,
            "model is not a drafter: architecture Qwen3ForCausalLM, expected DFlashDraftModel or",
        ),
        (
            f"capture {TARGET} --data a.jsonl --store merged",
            2,
            "merged was made by dflash merge, nothing is captured into it",
        ),
        (
            "train --gpus cpu --store made,elsewhere --out new",
            2,
            "made is striped over no other directory, but ",
        ),
        (
            "train --gpus cpu --store made --out run --resume --set loss.gamma=4",
            2,
            "run was begun with other settings (loss.gamma: 7.0, now 4.0): set them back",
        ),
        (
            "train --gpus cpu --store made:0.5 --out run --resume",
            2,
            "store 0 (made): another share at made:0.5",
        ),
        (
            "train --gpus cpu --store made --out swept --resume --sweep sweep.toml",
            2,
            "swept/second was begun with other settings (drafter.num_layers: 3, now 4)",
        ),
        (
            f"eval {TARGET} --drafter drafter --prompts a.jsonl --thinking on",
            2,
            "drafter drafter was trained on a store of template_args",
        ),
        (
            f"eval {TARGET} --compare drafter drafter --prompts a.jsonl --thinking on",
            2,
            "drafter drafter was trained on a store of template_args",
        ),
        (
            f"eval {TARGET} --compare drafter a.jsonl --prompts a.jsonl",
            2,
            "a.jsonl is no result of an evaluation with per-prompt counts",
        ),
        (
            f"eval {TARGET} --compare b.json forgetful --prompts a.jsonl",
            2,
            "b.json was measured with max_new_tokens 48, here 256; mode 'replay', here 'decode'",
        ),
        ("eval --compare a.json b.json --json b.json", 2, "--json b.json is read by this line"),
        (
            "eval --gpus cpu --drafter drafter --store made",
            2,
            "template_hash 'another', store made has 't1'",
        ),
        (
            "eval --gpus cpu --drafter forgetful --store trained",
            2,
            "store trained has no held-out sample: set data.heldout at capture, or give --prompts",
        ),
        (
            "export drafter --out new --layout speculators",
            2,
            "--layout speculators carries the target's embedding and head, which a store holds",
        ),
        (f"capture {TARGET} --data bad.jsonl --store new --plan", 1, "1 of 2 rows are unusable"),
        (f"capture {TARGET} --data bad.jsonl --store new", 1, "1 x not JSON (bad.jsonl:1)"),
        (f"generate {TARGET} --data bad.jsonl --out o.jsonl", 1, "1 of 2 rows are unusable"),
        (f"plan {TARGET} --data bad.jsonl --store new", 1, "1 of 2 rows are unusable"),
        (f"eval {TARGET} --drafter drafter --prompts bad.jsonl", 1, "1 of 2 rows are unusable"),
    ],
)
def test_what_a_line_contradicts_is_told_before_anything_heavy_loads(
    line: str, code: int, message: str
) -> None:
    ended, said = _typed(line)
    assert ended == f"ended {code} False", said
    assert message in said


def test_a_run_that_is_at_work_is_not_gone_on_with() -> None:
    line = "train --gpus cpu --store made --out run --resume"
    with record.held(Path("run")):
        ended, said = _typed(line)
    assert ended == "ended 2 False", said
    assert "another process trains into run at this moment" in said
    ended, said = _typed(line)
    assert ended == "ended by a launch False", said


@pytest.mark.parametrize(
    "line",
    [
        f"capture {TARGET} --data a.jsonl --store made --max-len 200",
        f"capture {TARGET} --data answers.jsonl --store new",
        "eval --compare a.json a.json",
        "train --gpus cpu --store made --drop-domain code --out new",
        "train --gpus cpu --store made --out new --set drafter.layer_ids=[3]",
        "train --gpus cpu --store made --out run --resume --set train.log_every=3",
        f"eval {TARGET} --drafter drafter --prompts a.jsonl",
        f"capture {TARGET} --data bad.jsonl --store new --set data.max_bad_share=0.5",
    ],
)
def test_what_contradicts_nothing_is_launched(line: str) -> None:
    ended, said = _typed(line)
    assert ended == "ended by a launch False", said


def test_the_share_that_is_advised_is_the_least_where_only_the_rows_were_looked_at() -> None:
    """The tokenizer found more of them, and the advice that had been followed was refused."""
    lines = ["no json", "no json", *(json.dumps({**ROW, "id": f"{n}"}) for n in range(3))]
    Path("five.jsonl").write_text("\n".join(lines) + "\n")
    _, said = _typed(f"capture {TARGET} --data five.jsonl --store new")
    assert "2 of 5 rows are unusable" in said
    assert "--set data.max_bad_share=0.4 at least (what its template and length leave out" in said
    # no share is larger than all of them
    Path("none.jsonl").write_text("no json\n")
    _, said = _typed(f"capture {TARGET} --data none.jsonl --store new")
    assert "--set data.max_bad_share=1\n" in said


def test_of_a_longer_file_it_is_said_what_its_first_rows_are() -> None:
    text = json.dumps(ROW) + "\n"
    Path("long.jsonl").write_text(100 * "no json\n" + 2000 * text)
    ended, said = _typed(f"capture {TARGET} --data long.jsonl --store new")
    assert ended == "ended by a launch False"
    # the other 901 have no id: each is one of its own
    assert "of the first 1000 rows 100 are unusable: 100 x not JSON (long.jsonl:1, " in said
