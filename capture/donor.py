"""The calibration of another store, taken over: both then have one identity, and train together."""

from __future__ import annotations

from dataclasses import replace

from dflash_pipeline.configs.errors import UsageError
from dflash_pipeline.store.calibration import Calibrations
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import StoreSpec


def donor(path: str, wanted: StoreSpec) -> Store:
    """The store at `path`, whose calibration a store of the identity `wanted` may take over.

    `wanted` is not calibrated yet. UsageError lists what differs between the two.
    """
    flag = f"--calibration-from {path}"
    if not wanted.is_quantised:
        raise UsageError(
            f"{flag}: rows of {wanted.hidden_mode} / {wanted.last_mode} need no calibration; leave "
            "it out, or capture with --hidden-mode int8 or int4"
        )
    found = open_store(path)
    differing = replace(found.spec, calibration_hash="").differences(wanted)
    if differing:
        raise UsageError(
            f"{flag}: that store and this capture differ in {'; '.join(differing)}: capture with "
            "the settings of that store, or calibrate anew without --calibration-from"
        )
    if not found.spec.is_calibrated:
        raise UsageError(
            f"{flag}: that store is not calibrated yet; wait until its capture has calibrated it"
        )
    return found


def donated(path: str, wanted: StoreSpec) -> Calibrations:
    """The calibration of the store at `path`, an entry a captured layer, then `last`."""
    found = donor(path, wanted)
    return found.calibration.entries(wanted.num_layers, wanted.has_last)
