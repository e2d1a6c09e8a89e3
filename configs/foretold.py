"""A prediction of `dflash plan` in lines for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from dflash_pipeline.configs.costs import CPU, Mount
from dflash_pipeline.configs.prediction import Prediction, Stage, Way
from dflash_pipeline.configs.sizes import size_text

_RATES = {"capture": "tok/s", "train": "steps/s"}


def lines(found: Prediction, epochs: int, price: float, quota_bytes: int = 0) -> list[str]:
    """All of it; quota_bytes: the most that the store may take at a time, 0: no bound."""
    work, capture = found.work, found.capture
    devices = "CPU workers" if capture.device == CPU else "GPUs"
    is_captured = not found.ways[0].capture_ids
    told = [
        f"{work.num_samples:,} samples ({work.num_heldout:,} held out), {work.num_tokens:,} "
        f"tokens, {work.num_supervised:,} supervised, "
        f"{100 * (1 - work.num_tokens / work.num_padded):.1f} % padding, a store of "
        f"{size_text(work.store_bytes)}",
        f"measured on {capture.device}: disk {_speeds(found.disk.write_bytes_per_s)} written, "
        f"{_speeds(found.disk.read_bytes_per_s)} read",
    ]
    told += [] if is_captured else room_lines(work.mounts, quota_bytes)
    if found.generate is not None:
        told.append(
            f"{_stage_text(found.generate, devices)}; not counted below: the answers are there"
        )
    for way in found.ways:
        cost = f", cost {way.cost:,.2f}" if price else ""
        told.append(
            f"{way.name}: {_hours(way.hours)}, {_hours(way.device_hours)} of {devices}{cost}"
        )
        told += [f"  {_stage_text(stage, devices)}" for stage in way.stages]
    told.append(f"{epochs} epochs are {found.num_steps:,} steps at most")
    if found.not_measured:
        told.append(f"not measured: {'; '.join(found.not_measured)}")
    return told


def command_lines(best: Way, commands: Sequence[str], store: str) -> list[str]:
    """The lines to type for the better way: capture's and train's, or train's alone."""
    if not best.capture_ids:
        return [f"{store} is captured whole, only the training is left:", f"  {commands[0]}"]
    how = "in two terminals" if best.name == "side by side" else "the second after the first"
    told = [f"the better way is {best.name}; its commands, {how}:"]
    return told + [f"  {command}" for command in commands]


def json_text(found: Prediction, commands: Sequence[str]) -> str:
    """All of it, with the lines to type."""
    return json.dumps({**asdict(found), "commands": list(commands)}, indent=1)


def room_lines(mounts: Sequence[Mount], quota_bytes: int) -> list[str]:
    """A line for each file system that has no room for its part of the store."""
    by_device: dict[int, list[Mount]] = {}
    for mount in mounts:
        by_device.setdefault(mount.device_id, []).append(mount)
    told = []
    for own in by_device.values():
        needed = sum(mount.needed_bytes for mount in own)
        if quota_bytes:
            # shards take turns, so no mount holds more than its part of a quota
            needed = min(needed, quota_bytes * len(own) // len(mounts))
        free = min(mount.free_bytes for mount in own)
        if needed > free:
            names = ", ".join(mount.path for mount in own)
            told.append(
                f"no room: {names} would take {size_text(needed)} and has {size_text(free)} free; "
                "share the store out over more mounts (--store A,B), store int8 or int4 rows "
                "(--hidden-mode), or give a --quota"
            )
    return told


def _speeds(bytes_per_s: Sequence[float]) -> str:
    return " + ".join(f"{size_text(speed)}/s" for speed in bytes_per_s)


def _stage_text(stage: Stage, devices: str) -> str:
    rate = f" ({stage.rate:,.3g} {_RATES[stage.name]})" if stage.rate else ""
    if stage.rate >= 1000:
        rate = f" ({stage.rate:,.0f} {_RATES[stage.name]})"
    disk = ", the disk binds" if stage.bound == "disk" else ""
    return (
        f"{stage.name:9}{stage.num_devices} x {_hours(stage.hours)} = "
        f"{_hours(stage.device_hours)} of {devices}{rate}{disk}"
    )


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.3g} min"
    return f"{hours:,.1f} h" if hours >= 10 else f"{hours:.3g} h"
