"""The study's best drafter under `dflash eval`, and whether it beats prompt lookup as it should.

Greedy answers to all held-out prompts with the target in fp32, where they must be plain decoding's
own; then a few sampled ones. One process at a time: each also tells how fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_pipeline.train.results import LOOKUP, TRAINED, read_results
from studies.paired import Score, Unpaired, relative
from studies.sizes import DOMAINS, TEMPERATURE, Size

ALL = "all"
BOUND = 0.15
"""How far tau is to be above prompt lookup's, as a share, in every domain."""
BATCH = 90
# of another one near-ties differ, and eval does not judge
FP32 = "target.dtype=fp32"


@dataclass(frozen=True, slots=True)
class Way:
    """How answers are chosen."""

    name: str
    words: tuple[str, ...]
    limit: int
    """Prompts of a domain at most; 0: all."""


GREEDY = Way("greedy", (), 0)
SAMPLED = Way("sampled", ("--temperature", str(TEMPERATURE), "--limit", "30"), 30)
WAYS = (GREEDY, SAMPLED)


def job_name(run: str, way: Way) -> str:
    """Of its process; another run is decoded anew."""
    return f"decode-{run}-{way.name}"


def words(size: Size, run: str, way: Way) -> list[str]:
    """The command, run in the study's folder."""
    found = ["eval", "--drafter", f"arms/{run}/last", "--set", FP32]
    for domain in DOMAINS:
        found += ["--prompts", f"prompts/eval_{domain}.jsonl"]
    # answers as long as those that it was trained on
    length = size.settings["generate.max_new_tokens"]
    found += ["--batch-size", str(BATCH), "--max-new-tokens", str(length), *way.words]
    return [*found, "--json", f"decodes/{run}-{way.name}.json"]


def left(folder: Path, run: str) -> list[Way]:
    """The ways in which a run is not decoded yet."""
    return [way for way in WAYS if not (folder / "done" / job_name(run, way)).exists()]


def result_path(folder: Path, run: str, way: Way) -> Path:
    """Where `dflash eval` writes what it found."""
    return folder / "decodes" / f"{run}-{way.name}.json"


def gathered(folder: Path, run: str) -> dict[str, Any]:
    """What is decoded by now of a run, each way: by domain beside lookup, and eval's own result;
    empty where nothing is."""
    found: dict[str, Any] = {}
    for way in WAYS:
        path = result_path(folder, run, way)
        if path.exists():
            result = read_results(path)
            found[way.name] = {
                "identical": result["identical"],
                "domains": beside_lookup(result),
                "result": result,
            }
    return {"run": run} | found if found else {}


def beside_lookup(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By domain, `all` first: tau of both, the trained one's gain, and whether BOUND holds."""
    found: dict[str, dict[str, Any]] = {}
    trained, lookup = (result["arms"][name] for name in (TRAINED, LOOKUP))
    for domain in [ALL, *sorted(set(trained) - {ALL, "seconds"})]:
        scores = [_score(name, result["per_prompt"][name]) for name in (TRAINED, LOOKUP)]
        keys = [key for key, of in scores[0].domain.items() if domain in (ALL, of)]
        try:
            difference = asdict(relative([scores[0]], [scores[1]], keys))
        except Unpaired as error:
            difference = {"none": str(error)}
        found[domain] = {
            "prompts": trained[domain]["prompts"],
            "tau": trained[domain]["tau"],
            "tau_interval": trained[domain]["tau_interval"],
            "tau_loop_free": trained[domain]["tau_loop_free"],
            "gain": trained[domain]["gain"],
            "lookup_tau": lookup[domain]["tau"],
            "lookup_tau_loop_free": lookup[domain]["tau_loop_free"],
            "over_lookup": difference,
            "holds": difference.get("mean", -1.0) >= BOUND,
        }
    return found


def _score(name: str, prompts: Sequence[Mapping[str, Any]]) -> Score:
    return Score(
        arm=name,
        seed=0,
        data="",
        kept={one["key"]: one["kept"] for one in prompts},
        cycles={one["key"]: one["cycles"] for one in prompts},
        domain={one["key"]: one["domain"] for one in prompts},
    )


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people: a line a domain, and whether all of them hold."""
    told = list[str]()
    for way in WAYS:
        if way.name not in found:
            told.append(f"{found['run']}, {way.name}: not decoded yet")
            continue
        one = found[way.name]
        for domain, of in one["domains"].items():
            over = of["over_lookup"]
            shown = over.get("none") or (
                f"{over['mean']:+.1%} over lookup ({over['low']:+.1%} to {over['high']:+.1%})"
            )
            told.append(
                f"{found['run']}, {way.name}, {domain}: tau {of['tau']:.3f} (loop-free "
                f"{of['tau_loop_free']:.3f}) of {of['prompts']} prompts, lookup "
                f"{of['lookup_tau']:.3f} ({of['lookup_tau_loop_free']:.3f}): {shown}, "
                f"{'at least' if of['holds'] else 'NOT'} {BOUND:.0%}"
            )
        if one["identical"] is not None:
            verdict = "yes" if one["identical"] else "NO"
            told.append(f"{found['run']}, {way.name}: outputs are plain decoding's own: {verdict}")
    return told
