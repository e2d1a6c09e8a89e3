"""The command `eval`: its three arms, its table and JSON, its verdict, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.evaluation import is_result
from dflash_pipeline.configs.place import Place
from dflash_pipeline.configs.schema import EvalConfig, Run, StoreConfig
from dflash_pipeline.configs.status import find_statuses
from dflash_pipeline.store.calibration import Calibrated
from dflash_pipeline.store.rows import encode
from dflash_pipeline.store.spec import ShardId
from dflash_pipeline.store.table import HELD_OUT, TRAIN
from dflash_pipeline.train import evaluate, replaying
from dflash_pipeline.train.drafter import Drafter
from dflash_pipeline.train.export import write_zlab
from dflash_pipeline.train.fits import check_fits
from dflash_pipeline.train.loading import read_checkpoint
from dflash_pipeline.train.remembered import embedding_hash
from places import cpu_place
from shapes import small_shape

VOCAB, WIDTH = 24, 16
RENDERING = {"tokenizer_hash": "t1", "template_hash": "c1", "template_args": "{}"}
SHAPE = small_shape(
    hidden_size=WIDTH,
    intermediate_size=24,
    num_layers=1,
    vocab_size=VOCAB,
    mask_token_id=23,
    layer_ids=(0, 2),
    num_target_layers=5,
    max_position_embeddings=64,
    init_std=0.3,
)


class CountingTarget:
    """Token t is followed by t + 1, up to 19, then by 5 again; `slip` makes one token differ.

    `slip` is (tokens read together, place): when so many are verified together, the token
    after that place is another one; `gap` is how far the best two are apart everywhere.
    """

    def __init__(self, slip: tuple[int, int] | None, gap: float) -> None:
        self.slip, self.gap = slip, gap
        self.lengths: list[int] = []
        self.num_together: list[int] = []

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        self.lengths = [0] * len(prompts)
        self.num_together.append(len(prompts))
        read = [self._read(row, ids_T) for row, ids_T in enumerate(prompts)]
        return torch.stack([logits_TV[-1] for logits_TV, _ in read]), [f for _, f in read]

    def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        read = [self._read(row, ids_S) for row, ids_S in enumerate(ids_BS)]
        return torch.stack([logits_SV for logits_SV, _ in read]), torch.stack([f for _, f in read])

    def crop(self, prompts: Sequence[int], num_tokens: Sequence[int]) -> None:
        assert all(
            num <= self.lengths[prompt] for prompt, num in zip(prompts, num_tokens, strict=True)
        )
        self.lengths = list(num_tokens)

    def _read(self, row: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(len(ids), VOCAB)
        for place, token in enumerate(ids.tolist()):
            logits[place, token + 1 if token < 19 else 5] = self.gap
            if self.slip == (len(ids), self.lengths[row] + place):
                logits[place, 2] = 2 * self.gap
        self.lengths[row] += len(ids)
        return logits, torch.ones(len(ids), 2, WIDTH) * ids[:, None, None]


@dataclass(frozen=True)
class Prompt:
    key: str
    domain: str
    ids: tuple[int, ...]
    max_new_tokens: int = 30


def opened(slip: tuple[int, int] | None = None, gap: float = 1.0, **changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    loaded = SimpleNamespace(
        target=CountingTarget(slip, gap),
        layer_ids=SHAPE.layer_ids,
        embed_VH=torch.randn(VOCAB, WIDTH, generator=generator),
        head_VH=torch.randn(VOCAB, WIDTH, generator=generator),
    )
    fields: dict[str, Any] = {
        "prompts": (
            Prompt("a", "math", (5, 6, 7)),
            Prompt("b", "math", (9,)),
            Prompt("c", "all", (6, 7)),
        ),
        "dropped": ("2 x tool turn (p.jsonl:1, p.jsonl:4)",),
        "eos_ids": frozenset({18}),
        "reserved_ids": frozenset({18, 0}),
        "num_layers": 5,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "rendering": RENDERING,
        "load": lambda: loaded,
        "load_twin": lambda _say: loaded,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    drafter = Drafter(SHAPE)
    drafter.initialise(seed=5)
    write_zlab(tmp_path / "drafter", SHAPE, dict(drafter.named_parameters()), RENDERING)
    return tmp_path / "drafter"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return cpu_place(tmp_path / "logs", "eval")


def settings(checkpoint: Path, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "drafter": str(checkpoint),
        "prompts": ("p.jsonl",),
        "max_new_tokens": 30,
        "json": str(checkpoint.parent / "found" / "eval.json"),
        "plot": str(checkpoint.parent / "found" / "eval.png"),
    }
    return Run(eval=EvalConfig(**(fields | changes)))


def found(checkpoint: Path) -> Any:
    return json.loads((checkpoint.parent / "found" / "eval.json").read_text())


def test_three_arms_are_measured_and_compared_with_plain_decoding(
    checkpoint: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def open_target(run: Run, where: Place, layer_ids: Any) -> Any:
        asked.append((run.eval.drafter, where.kind, layer_ids))
        return opened()

    evaluate.main(settings(checkpoint, as_stored=True), place, {}, open_target)
    assert asked == [(str(checkpoint), "cpu", (0, 2))]
    results = found(checkpoint)
    assert results["mode"] == "decode"
    assert results["identical"] is results["judged"] is True
    assert (results["num_prompts"], results["mismatches"]) == (3, [])
    # up to the end token 18: 11, 9 and 11 tokens
    assert results["plain"]["tokens"] == 31
    assert list(results["arms"]) == ["trained", "untrained", "lookup"]
    for arm in results["arms"].values():
        # a domain of the name of the pooled row keeps a row of its own
        assert set(arm) == {"all", "all_", "math", "seconds"}
        pooled = arm["all"]
        assert pooled["prompts"] == 3
        assert pooled["kept"] == 31 - 3
        assert pooled["tau"] == pytest.approx(pooled["kept"] / pooled["cycles"])
        assert pooled["cycles"] == arm["all_"]["cycles"] + arm["math"]["cycles"]
        assert len(pooled["accepted_by_slot"]) == 3
        for name in ("tau", "tau_per_prompt", "tau_loop_free"):
            low, high = pooled[f"{name}_interval"]
            assert 1 <= low <= pooled[name] <= high <= 4
        # no 4-gram comes twice in counting
        assert pooled["loop_free_kept"] == pooled["kept"]
        assert pooled["gain"] > 0
    # what is shown as progress names each arm, pooled over domains
    (told,) = find_statuses(Path(place.log_dir))
    assert told.numbers == {f"tau_{n}": a["all"]["tau"] for n, a in results["arms"].items()}
    output = capsys.readouterr().out
    assert "outputs identical to plain greedy decoding: yes" in output
    assert "not used: 2 x tool turn" in output
    heads = next(line for line in output.splitlines() if "per prompt" in line)
    assert heads.split()[-3:] == ["loop-free", "gain", "accepted"]
    (figure,) = (line for line in output.splitlines() if line.startswith("figure is in "))
    assert Path(figure.removeprefix("figure is in ")).read_bytes().startswith(b"\x89PNG")
    for prompt in results["per_prompt"]["lookup"]:
        assert prompt["kept"] == prompt["tokens"] - 1


def test_prompts_are_decoded_together_by_domain_and_length(checkpoint: Path, place: Place) -> None:
    prompts = tuple(
        Prompt(f"{domain}{size}", domain, tuple(range(4, 4 + size)))
        for size in (3, 1, 5, 2)
        for domain in ("math", "chat")
    )
    one_by_one, together = opened(prompts=prompts), opened(prompts=prompts)
    evaluate.main(settings(checkpoint), place, {}, lambda *_: one_by_one)
    alone = found(checkpoint)
    evaluate.main(settings(checkpoint, batch_size=3), place, {}, lambda *_: together)
    batched = found(checkpoint)
    # 4 prompts of each domain: 3 and 1, and the first batch once more before the clock starts
    assert together.load().target.num_together[-16:] == [3, 1, 3, 1] * 4
    for name, arm in batched["arms"].items():
        for domain in ("all", "chat", "math"):
            for key in ("tau", "cycles", "kept", "accepted_by_slot", "tau_interval"):
                assert arm[domain][key] == alone["arms"][name][domain][key]
    assert batched["identical"] is True


def test_sampled_answers_are_measured_and_not_compared(
    checkpoint: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = {"temperature": 0.9, "top_k": 4, "seed": 3}
    evaluate.main(settings(checkpoint, **warm), place, {}, lambda *_: opened())
    first = found(checkpoint)
    assert (first["identical"], first["mismatches"]) == (None, [])
    assert first["settings"]["temperature"] == 0.9
    assert "sampled, each arm with draws of its own" in capsys.readouterr().out
    evaluate.main(settings(checkpoint, **warm), place, {}, lambda *_: opened())
    again = found(checkpoint)
    assert again["per_prompt"] == first["per_prompt"]
    evaluate.main(settings(checkpoint, **warm | {"seed": 4}), place, {}, lambda *_: opened())
    assert found(checkpoint)["per_prompt"]["lookup"] != first["per_prompt"]["lookup"]


def test_a_loop_flatters_tau_and_not_the_loop_free_part(checkpoint: Path, place: Place) -> None:
    # 5..19 and again: the second round is a loop, which lookup follows
    endless = opened(eos_ids=frozenset(), prompts=(Prompt("a", "math", (5,), 60),))
    evaluate.main(settings(checkpoint, max_new_tokens=60), place, {}, lambda *_: endless)
    pooled = found(checkpoint)["arms"]["lookup"]["all"]
    assert pooled["loop_free_kept"] == 14
    assert pooled["tau_loop_free"] < 1.5 < 2 < pooled["tau"]


def test_a_replay_is_greedy(checkpoint: Path, place: Place) -> None:
    run = dataclasses.replace(
        settings(checkpoint, prompts=(), temperature=0.5), store=StoreConfig(path="s")
    )
    with pytest.raises(UsageError, match=r"eval.temperature is 0.5: a replay .* --prompts"):
        evaluate.main(run, place, {}, lambda *_: None)


def test_an_output_that_differs_in_fp32_fails_after_the_results_are_written(
    checkpoint: Path, place: Place
) -> None:
    # blocks of 4: plain decoding reads one token at a time and never slips
    with pytest.raises(ValueError, match=r"trained on prompt . at new token \d, .* gap is 1.0000"):
        evaluate.main(settings(checkpoint), place, {}, lambda *_: opened(slip=(4, 3)))
    results = found(checkpoint)
    assert results["identical"] is False
    assert {(m["arm"], m["key"]) for m in results["mismatches"]} >= {("trained", "a")}


def test_a_tie_that_rounding_decides_is_exempt_and_listed(
    checkpoint: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main(settings(checkpoint), place, {}, lambda *_: opened(slip=(4, 3), gap=1e-3))
    results = found(checkpoint)
    assert results["identical"] is True
    assert all(mismatch["is_exempt"] for mismatch in results["mismatches"])
    assert "differs: trained, prompt a, new token 1, top-2 gap 1.00e-03 (exempt)" in (
        capsys.readouterr().out
    )


def test_bf16_outputs_are_reported_and_not_judged(
    checkpoint: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    half = opened(slip=(4, 3), dtype=torch.bfloat16)
    loaded = half.load()
    loaded.embed_VH, loaded.head_VH = loaded.embed_VH.bfloat16(), loaded.head_VH.bfloat16()
    half.load_twin = lambda _say: None
    evaluate.main(settings(checkpoint), place, {}, lambda *_: half)
    assert (found(checkpoint)["identical"], found(checkpoint)["judged"]) == (False, False)
    assert "no (not fp32: reported, not judged)" in capsys.readouterr().out


class FakeStore:
    """Six samples of counting tokens in two domains, four held out, one of those unreadable."""

    path = "s"

    def __init__(self) -> None:
        self.spec = SimpleNamespace(
            layer_ids=(0, 1, 2),
            num_target_layers=5,
            hidden_size=WIDTH,
            vocab_size=VOCAB,
            hidden_mode="bf16",
            **RENDERING,
        )
        self.calibration = Calibrated()
        self.table = SimpleNamespace(
            domains=("code", "math"),
            domain=np.array([0, 1, 0, 1, 1, 1]),
            split=np.array([HELD_OUT, HELD_OUT, TRAIN, HELD_OUT, HELD_OUT, TRAIN]),
            sample_id=np.array([4, 9, 1, 2, 7, 3], np.uint64),
            key=lambda index: f"sample {index}",
            shard_id=lambda _index: ShardId(0, 0),
        )
        self.readable_N = np.array([True, True, True, True, False, True])

    def commit_of(self, _shard_id: ShardId) -> Any:
        return SimpleNamespace(amax=[9.0, 9.0, 9.0])

    def tokens(self, _index: int) -> tuple[np.ndarray, np.ndarray]:
        ids_T = np.arange(4, 20, dtype=np.uint32)
        return ids_T, (np.arange(16) >= 3).astype(np.uint8)

    def hidden(self, index: int) -> np.ndarray:
        hidden_TKH = np.random.default_rng(index).normal(size=(16, 3, WIDTH)).astype(np.float32)
        return encode(hidden_TKH, "bf16")

    def embed(self) -> np.ndarray:
        return np.full((VOCAB, WIDTH), 0x3F80, np.uint16)

    head = embed
    is_tied = True


def test_without_prompts_held_out_samples_are_replayed(
    checkpoint: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(replaying, "open_store", lambda _path: FakeStore())
    run = dataclasses.replace(settings(checkpoint, prompts=()), store=StoreConfig(path="s"))
    evaluate.main(run, place, {}, lambda *_: pytest.fail("replay needs no target"))
    results = found(checkpoint)
    assert (results["mode"], results["identical"], results["num_prompts"]) == ("replay", None, 3)
    for arm in results["arms"].values():
        assert (arm["code"]["prompts"], arm["math"]["prompts"]) == (1, 2)
        assert arm["all"]["kept"] == 3 * 12
    said = capsys.readouterr().out
    assert "replayed 3 held-out samples" in said
    assert f"results are in {run.eval.json}" in said
    # which the same line may replace
    assert is_result(Path(run.eval.json))
    # a file that is gone at the end of the line is not named
    one_each = dataclasses.replace(run, eval=dataclasses.replace(run.eval, limit=1))
    evaluate.main(one_each, place, {"passing": True}, lambda *_: None)
    assert "results are in" not in capsys.readouterr().out
    assert found(checkpoint)["num_prompts"] == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"template_args": '{"enable_thinking":true}'},
        {"template_hash": "c2"},
        {"tokenizer_hash": ""},
    ],
)
def test_prompts_made_in_another_way_than_the_store_s_are_refused(
    changed: dict[str, str], checkpoint: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = changed
    words = f"was trained on a store of {name} {RENDERING[name]!r}, (this command|store s) has"
    other = opened(rendering=RENDERING | changed, load=lambda: pytest.fail("the weights loaded"))
    with pytest.raises(UsageError, match=words):
        evaluate.main(settings(checkpoint), place, {}, lambda *_: other)
    store = FakeStore()
    vars(store.spec).update(changed)
    monkeypatch.setattr(replaying, "open_store", lambda _path: store)
    run = dataclasses.replace(settings(checkpoint, prompts=()), store=StoreConfig(path="s"))
    with pytest.raises(UsageError, match=words):
        evaluate.main(run, place, {}, lambda *_: None)


def test_another_target_of_the_same_dimensions_is_named(
    checkpoint: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Everything fits, and tau would be taken for the drafter's own."""
    store = FakeStore()
    run = dataclasses.replace(settings(checkpoint, prompts=()), store=StoreConfig(path="s"))
    monkeypatch.setattr(replaying, "open_store", lambda _path: store)
    embed_bits_VH = opened().load().embed_VH.bfloat16().view(torch.int16).numpy().view(np.uint16)
    for bits_VH, is_decoded_foreign in ((embed_bits_VH, False), (store.embed(), True)):
        told = RENDERING | {"target_id": "theirs", "embedding_hash": embedding_hash(bits_VH)}
        (checkpoint / "trained_on.json").write_text(json.dumps(told))
        for started, is_foreign in (
            (settings(checkpoint), is_decoded_foreign),
            (run, not is_decoded_foreign),
        ):
            evaluate.main(started, place, {}, lambda *_: opened())
            said = "was trained for target theirs" in capsys.readouterr().out
            assert said is is_foreign


def test_a_drafter_of_nobody_knows_what_store_is_measured(checkpoint: Path, place: Place) -> None:
    (checkpoint / "trained_on.json").unlink()
    evaluate.main(
        settings(checkpoint), place, {}, lambda *_: opened(rendering=dict.fromkeys(RENDERING, "x"))
    )
    assert found(checkpoint)["num_prompts"] == 3


def test_all_is_tried_on_a_twin_before_the_weights_load(checkpoint: Path, place: Place) -> None:
    class Twin(CountingTarget):
        def verify(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
            raise ValueError(f"no {ids_BS.shape[1]} tokens at once")

    real = opened()
    twin = SimpleNamespace(**(vars(real.load()) | {"target": Twin(None, 1.0)}))
    tried = opened(load_twin=lambda _say: twin, load=lambda: pytest.fail("the weights loaded"))
    with pytest.raises(ValueError, match="no 1 tokens at once"):
        evaluate.main(settings(checkpoint), place, {}, lambda *_: tried)


def test_each_answer_has_the_room_of_its_prompt(checkpoint: Path, place: Place) -> None:
    prompts = (Prompt("a", "math", (5, 6, 7), 4), Prompt("b", "math", (9,), 2))
    evaluate.main(settings(checkpoint), place, {}, lambda *_: opened(prompts=prompts))
    assert found(checkpoint)["plain"]["tokens"] == 4 + 2
    assert found(checkpoint)["arms"]["trained"]["all"]["kept"] == 3 + 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ((5, 32, VOCAB, frozenset()), "hidden size 16, the target's is 32"),
        ((5, WIDTH, 30, frozenset()), "vocabulary 24, the target's is 30"),
        ((6, WIDTH, VOCAB, frozenset()), "number of target layers 5, the target's is 6"),
        ((3, WIDTH, VOCAB, frozenset()), r"layers \(0, 2\), the target has 3"),
        ((5, WIDTH, VOCAB, frozenset({23})), "mask token 23, an end or padding token"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    checkpoint: Path, target: tuple[int, int, int, frozenset[int]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_fits(read_checkpoint(checkpoint), *target)


def test_what_is_missing_is_said(checkpoint: Path, place: Place) -> None:
    def fail(changes: dict[str, Any], where: Place) -> str:
        with pytest.raises(UsageError) as error:
            evaluate.main(settings(checkpoint, **changes), where, {}, lambda *_: None)
        return str(error.value)

    assert "--drafter" in fail({"drafter": ""}, place)
    assert "--prompts" in fail({"prompts": ()}, place)
    assert "one device" in fail({}, dataclasses.replace(place, world=2))
