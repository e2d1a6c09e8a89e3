"""What a calibration adds to a store: its group, and the arrays that only it makes readable.

The root names all of it by hash once it is there; see `completion.py` for how it gets there.
"""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.configs.jsonfile import read_object
from dflash_pipeline.store import paths
from dflash_pipeline.store.calibration import (
    Calibrated,
    calibration_hash,
    from_arrays,
    to_arrays,
    to_configuration,
)
from dflash_pipeline.store.documents import (
    BF16,
    Document,
    flat,
    group,
    packed,
    quantised_kinds,
)
from dflash_pipeline.store.flatfiles import inside, read_flat
from dflash_pipeline.store.quantise import NUM_KEPT
from dflash_pipeline.store.spec import Layout, StoreSpec


def calibration_documents(
    spec: StoreSpec, layout: Layout, calibrated: Calibrated
) -> dict[str, Document]:
    """The documents that the calibration fixes, by path; none where all rows are bf16."""
    if not spec.is_quantised:
        return {}
    arrays, attributes = to_arrays(calibrated.entries(spec.num_layers, spec.has_last))
    result = {paths.CALIBRATION: group(attributes | {"report": dict(calibrated.report)})}
    shapes = {name: values.shape for name, values in arrays.items()}
    result[f"{paths.CALIBRATION}/kept"] = flat("<i4", shapes["kept"], ("layer", "kept"), {})
    result[f"{paths.CALIBRATION}/centre"] = flat(
        "<u2", shapes["centre"], ("layer", "channel"), BF16
    )
    for bucket, num_shards in enumerate(layout.num_shards):
        for kind, _, lead in quantised_kinds(spec):
            layers = calibrated.hidden if kind == "hidden" else calibrated.last
            configuration = to_configuration(layers)
            document = packed(spec, layout, num_shards, kind, lead, configuration)
            result[f"b{bucket}/{kind}"] = document
    return result


def calibration_files(spec: StoreSpec, layout: Layout) -> list[str]:
    """Each file that the calibration adds to a store."""
    if not spec.is_quantised:
        return []
    names = [paths.CALIBRATION, f"{paths.CALIBRATION}/kept", f"{paths.CALIBRATION}/centre"]
    for bucket in range(len(layout.num_shards)):
        names += [f"b{bucket}/{kind}" for kind, _, _ in quantised_kinds(spec)]
    return [f"{name}/zarr.json" for name in names] + [paths.KEPT_FILE, paths.CENTRE_FILE]


def read_calibration(store: Path, spec: StoreSpec) -> Calibrated:
    """The calibration of a store, which must be the one that its identity names."""
    if not (spec.is_quantised and spec.is_calibrated):
        return Calibrated()
    file = inside(store, f"{paths.CALIBRATION}/zarr.json")
    try:
        attributes = read_object(file)["attributes"]
        report = attributes.pop("report")
        shapes = {"kept": (spec.num_amax, NUM_KEPT), "centre": (spec.num_amax, spec.hidden_size)}
        arrays = {
            "kept": read_flat(store, paths.KEPT_FILE, "<i4", shapes["kept"]),
            "centre": read_flat(store, paths.CENTRE_FILE, "<u2", shapes["centre"]),
        }
        entries = from_arrays(arrays, attributes)
        found = ["bf16" if entry is None else entry.mode for entry in entries]
        wanted = [spec.hidden_mode] * spec.num_layers + [spec.last_mode] * spec.has_last
        if found != wanted or calibration_hash(entries) != spec.calibration_hash:
            raise ValueError("it is not the calibration that identity.calibration_hash names")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: {error}: the store is damaged") from None
    return Calibrated.of(entries, spec.num_layers, report)
