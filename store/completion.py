"""Completes the identity of a planned store whose rows are int8 or int4: its calibration, once.

The files of `calibration/` and the documents of the arrays that it makes readable are written
first, each aside and renamed; nothing refers to them. Then the root is replaced in one rename by
one that carries the calibration's hash and theirs. Whoever is killed on the way leaves a store
that is not calibrated, and the next holder of the first lease writes over what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_pipeline.configs.mounts import root_of
from dflash_pipeline.store import durable, flatfiles, metadata, paths
from dflash_pipeline.store.calibration import (
    Calibrated,
    Calibrations,
    calibration_hash,
    to_arrays,
)
from dflash_pipeline.store.calibrationgroup import calibration_documents, calibration_files
from dflash_pipeline.store.documents import canonical
from dflash_pipeline.store.lease import Lease
from dflash_pipeline.store.reader import Store, open_store
from dflash_pipeline.store.spec import Layout, StoreSpec


def is_calibrated(store: str | Path) -> bool:
    """Whether the store on the disk is calibrated by now; cheap, unlike opening it again."""
    return metadata.read_root(root_of(store))[1].is_calibrated


def publish_calibration(
    store: Store, calibrations: Calibrations, report: Mapping[str, Any], lease: Lease
) -> Store:
    """The store with this calibration (one entry a captured layer, then `last`), or with the one
    that it has by now.

    `lease`: of a shard of the store, held so that one worker alone calibrates; LeaseLost if it was
    taken over. `report`: plain JSON values without NaN.
    """
    with lease.fence():
        path = store.path
        if not is_calibrated(path):
            write_calibration(path, calibrations, report)
    return open_store(path)


def write_calibration(path: Path, calibrations: Calibrations, report: Mapping[str, Any]) -> None:
    """The same for a planned store that nobody else can write; see `publish_calibration`."""
    root, spec, layout, _ = metadata.read_root(path)
    complete = replace(spec, calibration_hash=calibration_hash(calibrations))
    calibrated = Calibrated.of(calibrations, spec.num_layers, report)
    _write_files(path, _files(complete, layout, calibrated))
    added = {name: flatfiles.sha256_of(path / name) for name in calibration_files(complete, layout)}
    found = replace(root, identity=complete.to_dict(), hashes=dict(root.hashes) | added)
    _write_files(path, {"zarr.json": canonical(metadata.root_document(found))})


def _files(spec: StoreSpec, layout: Layout, calibrated: Calibrated) -> dict[str, bytes]:
    """Every file that the calibration adds, by path."""
    documents = calibration_documents(spec, layout, calibrated)
    arrays, _ = to_arrays(calibrated.entries(spec.num_layers, spec.has_last))
    files = {f"{name}/zarr.json": canonical(document) for name, document in documents.items()}
    files[paths.KEPT_FILE] = np.ascontiguousarray(arrays["kept"], "<i4").tobytes()
    files[paths.CENTRE_FILE] = np.ascontiguousarray(arrays["centre"], "<u2").tobytes()
    return files


def _write_files(path: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        file = path / name
        durable.make_directories(file.parent)
        # of a worker that was killed here
        for leftover in durable.temporaries(file.parent):
            leftover.unlink(missing_ok=True)
        durable.write_durably(file, content)
