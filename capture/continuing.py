"""Whether a store that is there is that of this run, as far as settings alone can tell.

Loads neither torch nor transformers: the command line asks before anything else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflash_pipeline.capture.arguments import template_arguments_text
from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.configs.load import to_dict
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.store.reader import open_store
from dflash_pipeline.store.spec import Attributes, StoreSpec

DATA_FIELDS = ("max_len", "overlong", "limit", "heldout")
"""Settings that say how the data files are read."""
_PLAN_FIELDS = {
    # max_len and overlong are part of the identity
    "data": ("limit", "heldout"),
    "store": ("shard_bytes",),
    "capture": ("token_budget", "num_buckets", "pad_multiple", "seed", "compile"),
}


def identity_differences(spec: StoreSpec, run: Run) -> list[str]:
    """What of a store's identity the run says and contradicts; the target's files say the rest."""
    told = {
        "hidden_mode": run.store.hidden_mode,
        "last_mode": run.store.last_mode,
        "last_rows": run.store.last_rows,
        "template_args": template_arguments_text(run.target),
        "max_len": run.data.max_len,
        "overlong": run.data.overlong,
    }
    return [
        f"{name}: {getattr(spec, name)!r} and {value!r}"
        for name, value in told.items()
        if getattr(spec, name) != value
    ]


def refuse_merged(path: str, attributes: Attributes) -> None:
    """UsageError for a store that `dflash merge` made: it has no capture to go on with."""
    if "merged" in attributes.run:
        raise UsageError(
            f"{path} was made by dflash merge, nothing is captured into it: capture into another "
            "--store, and merge that with it"
        )


def plan_differences(spec: StoreSpec, attributes: Attributes, run: Run) -> list[str]:
    """What arranged a store, or where its calibration is from, that this run says otherwise."""
    recorded_run, this_run, found = attributes.run, to_dict(run), list[str]()
    defaults = to_dict(Run())
    for section, names in _PLAN_FIELDS.items():
        before = recorded_run.get(section)
        for name in names:
            # of a store from before there was this setting: it was as the default is
            missing = defaults[section][name]
            value = before.get(name, missing) if isinstance(before, dict) else None
            if value != this_run[section][name]:
                found.append(f"{section}.{name}: {value!r} and {this_run[section][name]!r}")
    return found + _calibration_differences(spec, attributes, run)


def refuse(path: str, found: Sequence[str]) -> None:
    """UsageError that lists the differences between a store and this run; none: nothing."""
    if found:
        raise UsageError(
            f"{path} is the store of another run, the store and this command differ in "
            f"{'; '.join(found)}: use another --store, or the settings of before"
        )


def _calibration_differences(spec: StoreSpec, attributes: Attributes, run: Run) -> list[str]:
    """Once a store is calibrated its calibration counts, before that where it shall come from."""
    path = run.capture.calibration_from
    if not spec.is_calibrated:
        before = attributes.run.get("capture")
        planned = before.get("calibration_from") if isinstance(before, dict) else None
        differs = planned is not None and planned != path
        return [f"capture.calibration_from: {planned!r} and {path!r}"] if differs else []
    if not path or not spec.is_quantised:
        return []
    return spec.differences(replace(spec, calibration_hash=open_store(path).spec.calibration_hash))
