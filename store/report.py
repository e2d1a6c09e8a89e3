"""The text of `dflash inspect`, from what `describe` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_pipeline.configs.screen import duration
from dflash_pipeline.configs.sizes import size_text
from dflash_pipeline.store.consumers import consumer_line
from dflash_pipeline.store.guard import report_lines
from dflash_pipeline.store.spec import QUANTISED_MODES


def render(found: Mapping[str, Any]) -> str:
    """Lines for a person."""
    if "identity" not in found:
        return "\n".join([f"store {found['path']}", *_problems(found)])
    parts = (
        _head,
        _buckets,
        _lengths,
        _layers,
        _calibration,
        _sample,
        _consumers,
        _leftovers,
        _problems,
        _notebook,
    )
    return "\n".join(line for part in parts for line in part(found))


def sample_text(found: Mapping[str, Any]) -> str:
    """The sample that was asked for, alone."""
    return "\n".join([*_sample(found), *_problems(found)])


def _head(found: Mapping[str, Any]) -> list[str]:
    identity, samples, total = found["identity"], found["samples"], found["total"]
    progress = found["progress"]
    lines = [
        f"store {found['path']}: {found['state']}, "
        f"{total['committed_shards']} of {total['shards']} shards",
        f"target {identity['target_id']} ({identity['target_dtype']}), layers "
        f"{' '.join(map(str, identity['layer_ids']))} of {identity['num_target_layers']}, "
        f"hidden size {identity['hidden_size']}, modes {identity['hidden_mode']} / "
        f"{identity['last_mode']} ({identity['last_rows']} rows)",
        f"samples {samples['all']} ({samples['held_out']} held out, {samples['readable']} "
        f"readable): " + _counts(samples["domains"]),
        f"tokens {total['committed_tokens']} of {total['tokens']}, {size_text(total['bytes'])}, "
        f"{total['bytes_per_token']:.0f} bytes a token{_ratio(identity, total)}",
    ]
    if found["mounts"]:
        lines.insert(1, f"shards lie in it and on {', '.join(found['mounts'])}")
    if total["released_shards"]:
        lines.append(
            f"released: {total['released_shards']} shards ({size_text(total['released_bytes'])}), "
            "used by every training run and deleted"
        )
    if total["compiled_shards"]:
        lines.append(compiled_text(total["compiled_shards"], total["committed_shards"]))
    if progress["tokens_left"]:
        lines.append(_rate(found))
    named = [name for name in ("dropped", "bad") if found[name]]
    return lines + [f"{name}: {_counts(found[name])}" for name in named]


def progress_text(found: Mapping[str, Any]) -> str:
    """A line of `inspect --follow`."""
    total, progress = found["total"], found["progress"]
    rate = f", {_rate(found)}" if progress["tokens_left"] else ""
    waiting = f"; the capture waits: {found['waiting']}" if found["waiting"] else ""
    return (
        f"{found['state']}: {total['committed_shards']} of {total['shards']} shards, "
        f"{total['committed_tokens']} of {total['tokens']} tokens, "
        f"{size_text(total['bytes'])}{rate}{waiting}"
    )


def compiled_text(num_compiled: int, num_committed: int) -> str:
    """Which of the committed shards hold rows by compiled layers, where some do."""
    if num_compiled == num_committed:
        return "rows by compiled layers: all shards"
    return (
        f"rows by compiled layers: {num_compiled} of {num_committed} shards; those of the others "
        "by plain ones, which round otherwise (the gate judged both)"
    )


def _ratio(identity: Mapping[str, Any], total: Mapping[str, Any]) -> str:
    """What quantising saves; empty as well of a store so small that its indices outweigh that."""
    is_quantised = not {identity["hidden_mode"], identity["last_mode"]}.isdisjoint(QUANTISED_MODES)
    if not is_quantised or total["ratio_to_bf16"] <= 1:
        return ""
    return f", {total['ratio_to_bf16']:.2f}x smaller than bf16 with `last` of every token"


def _rate(found: Mapping[str, Any]) -> str:
    progress = found["progress"]
    if "stopped" in found["state"]:
        return "no capture is at work"
    if progress["eta_s"] is None:
        # the first shard alone tells no speed
        return "speed and time left not known yet"
    left = duration(progress["eta_s"])
    return f"captured at {progress['tokens_per_s']:,.0f} tokens/s, {left} left"


def _buckets(found: Mapping[str, Any]) -> list[str]:
    names = ("max_len", "samples", "tokens", "shards", "committed_shards", "fill", "bytes")
    titles = ("bucket", "max len", "samples", "tokens", "shards", "committed", "fill", "bytes")
    rows = [
        [str(b["bucket"]), *(_cell(b[name]) for name in names), f"{b['bytes_per_token']:.0f}"]
        for b in found["buckets"]
    ]
    return _table((*titles, "a token"), rows)


def _lengths(found: Mapping[str, Any]) -> list[str]:
    most = max(b["samples"] for b in found["lengths"])
    rows = [
        [f"{b['from']}-{b['to'] - 1}", str(b["samples"]), "#" * -(-40 * b["samples"] // most)]
        for b in found["lengths"]
    ]
    return _table(("tokens", "samples", ""), rows)


def _layers(found: Mapping[str, Any]) -> list[str]:
    seen = {str(row["layer"]): row for row in (found["sample"] or {"layers": []})["layers"]}
    rows = []
    for row in found["layers"]:
        one = seen.get(row["layer"])
        more = [f"{one[k]:.4g}" for k in ("median_abs", "rms_p50", "rms_p99")] if one else ["-"] * 3
        rows.append([row["layer"], f"{row['amax']:.4g}", str(row["clipped"]), *more])
    lines = _table(("layer", "amax", "clipped", "median |x|", "rms p50", "rms p99"), rows)
    one = found["sample"]
    whose = f"the others sample {one['sample']}'s alone" if one else "the others one sample's alone"
    return [*lines, f"amax and clipped: of all committed rows; {whose}"]


def _calibration(found: Mapping[str, Any]) -> list[str]:
    try:
        lines = report_lines(found["calibration"])
    except (KeyError, TypeError, ValueError, AttributeError):
        # written by another version
        lines = [str(found["calibration"])]
    return ["", "at calibration:", *lines] if lines else []


def _sample(found: Mapping[str, Any]) -> list[str]:
    sample = found["sample"]
    if sample is None:
        return ["no sample can be read yet"]
    text = sample["text"]
    shown = repr(text) if text is not None else " ".join(map(str, sample["ids"]))
    return [
        f"sample {sample['sample']} {sample['key']!r} ({sample['domain']}): "
        f"{sample['num_tokens']} tokens, {sample['num_supervised']} supervised",
        f"  {shown}{' ...' * (len(sample['ids']) < sample['num_tokens'])}",
        *(
            f"  supervised {span['from']}-{span['to'] - 1}: {span['text']!r}"
            for span in sample["supervised"]
            if span["text"] is not None and len(sample["ids"]) == sample["num_tokens"]
        ),
    ]


def _consumers(found: Mapping[str, Any]) -> list[str]:
    lines = [
        consumer_line(one["name"], one["used_shards"], found["total"]["shards"], one["presence"])
        for one in found["consumers"]
    ]
    return [*lines, found["awaited"]] if found["awaited"] else lines


def _leftovers(found: Mapping[str, Any]) -> list[str]:
    return [f"left by an interrupted capture: {name}" for name in found["leftovers"]]


def _problems(found: Mapping[str, Any]) -> list[str]:
    return [f"problem: {text}" for text in found["problems"]]


def _notebook(found: Mapping[str, Any]) -> list[str]:
    return ["", "in a notebook:", *(f"  {line}" for line in found["snippet"].splitlines())]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "",
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (titles, *rows)
        ),
    ]
