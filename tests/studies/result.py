"""What was found: study.json, a markdown table for the README, and a figure."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_pipeline.train.segments import ORDER_FILE
from studies import decoding
from studies.arms import (
    BASE_STORE,
    EVAL_STORE,
    FOLLOWED,
    Arm,
    needed_stores,
    objective_arms,
    rate_arms,
)
from studies.paired import Difference, Score, Unpaired, relative, smallest_mode
from studies.scoring import LOOKUP, UNTRAINED, score_path
from studies.sizes import is_sampled
from studies.stages import Study, read_score

ALL = "all"


def write(study: Study, command: str) -> None:
    """Everything that is scored by now, into $OUT and FOLDER/report; the figure last of all."""
    found = gathered(study, command)
    texts = {"study.json": json.dumps(found, indent=1) + "\n", "study.md": markdown(found)}
    print(texts["study.md"], flush=True)
    if decoded := decodes(study, command):
        texts["decode.json"] = json.dumps(decoded, indent=1) + "\n"
        print("\n".join(decoding.lines(decoded)), flush=True)
    # what comes back first: the disk of the other may be full of stores
    places = [Path(os.environ["OUT"])] if "OUT" in os.environ else []
    for out in (*places, study.folder / "report"):
        out.mkdir(exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    for out in (*places, study.folder / "report"):
        draw(out / "study.png", found)


def decodes(study: Study, command: str) -> dict[str, Any]:
    """What the best run was found to decode; empty before anything is."""
    found = decoding.gathered(study.folder, study.best_run())
    if not found:
        return {}
    about = {"what": "dflash eval of the study's best run", "command": command}
    about |= {"date": time.strftime("%Y-%m-%d")}
    return about | {"machine": machine()} | found


def gathered(study: Study, command: str) -> dict[str, Any]:
    """Plain JSON values."""
    decision = study.decision()
    arms = study.all_wanted()
    paired_with = {arm.against for arm in arms}
    # scored by a call that named other arms, or none
    others = (*objective_arms(study.seeds), *study.long_arms, *rate_arms(study.seeds))
    bases = [arm for arm in others if arm.name in paired_with]
    scores = {arm.name: study.scores(arm) for arm in (*arms, *bases) if study.is_known(arm.store)}
    told = {arm.name: _arm(study, arm, scores) for arm in arms if scores.get(arm.name)}
    left = [
        arm.run_name(seed)
        for arm in arms
        for seed in arm.seeds
        if not score_path(study.folder, arm.run_name(seed)).exists()
    ]
    stores = [name for name in [*needed_stores(arms), EVAL_STORE] if study.is_known(name)]
    facts = {name: study.facts(name) for name in stores}
    found: dict[str, Any] = {
        "what": "tests/bench/study.py: losses, weights, CAP, logits, store modes, order and shape",
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "settings": json.loads((study.folder / "settings.json").read_text(encoding="utf-8")),
        "stores": {name: asdict(one) for name, one in facts.items()},
        "answers": _answers(scores),
        "beside": {
            name: _taus([read_score(study.folder, name, name, 0, "")])
            for name in (LOOKUP, UNTRAINED)
            if score_path(study.folder, name).exists()
        },
        "arms": told,
        "not_run": left,
    }
    return found | {"decision": _decided(decision, told, scores, found["stores"])}


def _answers(scores: Mapping[str, Sequence[Score]]) -> dict[str, int]:
    """How many held-out answers the scores are of."""
    first = next((found[0] for found in scores.values() if found), None)
    keys = list(first.kept) if first else []
    return {
        "greedy": sum(not is_sampled(key) for key in keys),
        "sampled": sum(map(is_sampled, keys)),
    }


def parts_of(scores: Sequence[Score]) -> dict[str, list[str]]:
    """The answers that are told of together: all, greedy, sampled, and each domain."""
    keys, domain = list(scores[0].kept), scores[0].domain
    found = {
        ALL: keys,
        "greedy": [key for key in keys if not is_sampled(key)],
        "sampled": [key for key in keys if is_sampled(key)],
    }
    for name in sorted(set(domain.values())):
        found[name] = [key for key in keys if domain[key] == name]
    return {name: part for name, part in found.items() if part}


def _taus(scores: Sequence[Score]) -> dict[str, list[float]]:
    """By part, one number a seed."""
    return {name: [one.tau(keys) for one in scores] for name, keys in parts_of(scores).items()}


def _arm(study: Study, arm: Arm, scores: Mapping[str, Sequence[Score]]) -> dict[str, Any]:
    own = scores[arm.name]
    names = [arm.run_name(score.seed) for score in own]
    found: dict[str, Any] = {
        "question": arm.question,
        "store": arm.store,
        "seeds": [score.seed for score in own],
        "commands": [arm.command(score.seed) for score in own],
        "tau": _taus(own),
        "curve": {name: curve(study.folder / "arms" / name) for name in names},
        "against": arm.against,
    }
    if arm.follows:
        found["segments_of_first_epoch"] = [
            _segments(study.folder / "arms" / name) for name in names
        ]
    if arm.against:
        found["difference"] = differences(own, scores.get(arm.against, []))
    if arm.follows and min(found["segments_of_first_epoch"]) < 2:
        # trained on a store that was whole, it is its pair once more
        found["difference"] = {"none": "a run of it found its store whole: it followed nothing"}
    return found


def differences(own: Sequence[Score], base: Sequence[Score]) -> dict[str, Any]:
    """By part, over the seeds that both have; why there is none where there is none."""
    shared = {one.seed for one in own} & {one.seed for one in base}
    pairs = [[one for one in scores if one.seed in shared] for scores in (own, base)]
    try:
        return {name: asdict(relative(*pairs, keys)) for name, keys in parts_of(own).items()}
    except Unpaired as error:
        return {"none": str(error)}


def _segments(run: Path) -> int:
    """Parts that the first epoch was made of: one or none is no following."""
    path = run / ORDER_FILE
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def curve(run: Path) -> dict[str, list[float]]:
    """Of the log lines of a run: step, loss, tau_tf; and the seconds since the first."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    return {
        "step": [record["step"] for record in records],
        "loss": [round(record["loss"], 4) for record in records],
        "tau_tf": [round(record["tau_tf"], 4) for record in records],
        "seconds": [round(record["time"] - records[0]["time"], 1) for record in records],
    }


def _decided(
    objective: str,
    arms: Mapping[str, Any],
    scores: Mapping[str, Sequence[Score]],
    stores: Mapping[str, Any],
) -> dict[str, Any]:
    """What the result makes a default; empty strings where it is not known yet."""
    losses: dict[str, Difference] = {}
    for name, one in arms.items():
        if one["question"] == "modes":
            try:
                losses[name] = relative(
                    scores[name], scores.get(objective, ()), parts_of(scores[name])[ALL]
                )
            except Unpaired:
                continue
    sizes = {
        name: stores[name]["bytes_per_token"] for name in [BASE_STORE, *losses] if name in stores
    }
    return {
        "objective": objective,
        "objective_settings": arms[objective]["commands"][0] if objective in arms else "",
        "against_base": arms[objective].get("difference", {}).get(ALL)
        if objective in arms
        else None,
        "mode": smallest_mode(sizes, losses, BASE_STORE) if losses else "",
        "rule": "the smallest mode whose 95 % interval of tau ends above -1.5 %",
    }


def machine() -> dict[str, Any]:
    """The card, the versions, and the commit that ran."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    number = torch.cuda.device_count()
    root = Path(__file__).parents[2]
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "card": f"{number} x {card}" if number else f"no GPU, {card}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "zarr")},
        "commit": commit.stdout.strip(),
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The table that the README takes over."""
    answers, stores = found["answers"], found["stores"]
    base = stores.get(BASE_STORE, {})
    parts = [
        name
        for name in ("math", "code", "chat")
        if any(name in one["tau"] for one in found["arms"].values())
    ]
    heads = ["arm", "seeds", "tau", *parts, "greedy answers", "against", "difference, 95 %"]
    lines = [
        f"{base.get('num_supervised', 0):,} generated tokens of {base.get('num_samples', 0):,} "
        f"answers ({base.get('num_distinct', 0):,} of them different); "
        f"tau by replay of {answers['greedy']:,} greedy and {answers['sampled']:,} sampled "
        f"held-out answers, mean of seeds; {found['machine']['card']}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for name, one in found["arms"].items():
        cells = [name, str(len(one["seeds"]))]
        cells += [_mean(one["tau"], part) for part in (ALL, *parts, "greedy")]
        cells += [one["against"] or "-", _shown(one.get("difference", {}))]
        lines.append("| " + " | ".join(cells) + " |")
    for name, taus in found["beside"].items():
        cells = [name, "", *(_mean(taus, part) for part in (ALL, *parts, "greedy")), "-", ""]
        lines.append("| " + " | ".join(cells) + " |")
    decided = found["decision"]
    lines += [
        "",
        f"Best objective: {decided['objective'] or 'not known yet'}; store mode: "
        f"{decided['mode'] or 'not known yet'} ({decided['rule']}).",
    ]
    if found["not_run"]:
        lines.append(f"Not run: {', '.join(found['not_run'])}.")
    return "\n".join(lines) + "\n"


def _mean(taus: Mapping[str, Sequence[float]], part: str) -> str:
    values = taus.get(part)
    return f"{sum(values) / len(values):.3f}" if values else ""


def _shown(one: Mapping[str, Any]) -> str:
    if "none" in one:
        return str(one["none"])
    found = one.get(ALL)
    if not found:
        return ""
    note = " (one seed)" if found["is_of_prompts_alone"] else ""
    return f"{found['mean']:+.1%} ({found['low']:+.1%} to {found['high']:+.1%}){note}"


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """tau_tf over steps for the objectives, and each arm's difference with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, one in found["arms"].items():
        if one["question"] in ("objective", "length", "rate"):
            curves = list(one["curve"].values())
            steps = curves[0]["step"]
            length = min(len(each["step"]) for each in curves)
            means = [sum(each["tau_tf"][i] for each in curves) / len(curves) for i in range(length)]
            left.plot(steps[:length], means, label=name)
    left.set(xlabel="optimizer step", ylabel="tau_tf on training blocks, mean of seeds")
    if found["arms"]:
        left.legend(fontsize=7)
    shown = {
        name: one["difference"][ALL]
        for name, one in found["arms"].items()
        if ALL in one.get("difference", {})
    }
    for place, one in enumerate(shown.values()):
        right.plot([100 * one["low"], 100 * one["high"]], [place, place], color="tab:blue")
        right.plot([100 * one["mean"]], [place], "o", color="tab:blue")
    right.set_yticks(
        range(len(shown)), [f"{name} / {found['arms'][name]['against']}" for name in shown]
    )
    right.tick_params(axis="y", labelsize=7)
    right.axvline(0, color="grey", linewidth=0.8)
    right.invert_yaxis()
    right.set(xlabel=f"tau against its pair, % (95 %; {FOLLOWED} is the papers' objective)")
    figure.savefig(path, dpi=110)
