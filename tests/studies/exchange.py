"""The rows of a store as speculators reads them: the same tokens, masks and hidden states.

It wants the state before the final norm and applies the norm itself. The store has the one after
it, and a norm does not see the length of what it is given: state / weight has the same direction,
so its norm gives the stored state back, but for bf16's rounding and the norm's epsilon.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.store.reader import Store

FINAL_NORM = "model.norm.weight"
# norms of the form 1 + weight, and those with another shape, are not what speculators builds
FAMILIES = ("llama", "qwen3")


def final_norm(files: TargetFiles) -> torch.Tensor:
    """The weight of the target's final norm, fp32 [H]. ValueError for a family that scales by 1 + w
    or where it is not found."""
    kind = files.config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"target of type {kind}: its final norm is known for {FAMILIES} alone")
    for path in files.weight_paths():
        found = load_file(path)
        if FINAL_NORM in found:
            return found[FINAL_NORM].float()
    raise ValueError(f"{files.directory} has no tensor {FINAL_NORM}")


def before_norm(last_MH: torch.Tensor, norm_H: torch.Tensor) -> torch.Tensor:
    """bf16 states whose norm with this weight is `last_MH`."""
    return (last_MH / norm_H).to(torch.bfloat16)


def write_samples(store: Store, samples: Sequence[int], norm_H: torch.Tensor, folder: Path) -> int:
    """One file a sample and samples.jsonl, in this order; returns the bytes of the files.

    Where the store has no `last` (a token whose next one is not supervised), zeros stand: the
    trainer looks at its states for supervised labels alone.
    """
    hidden = folder / "hidden_states"
    hidden.mkdir(parents=True)
    size_bytes = 0
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as lines:
        for number, index in enumerate(samples):
            sample = store.sample(index)
            ids_T: npt.NDArray[np.int64] = sample.ids_T.astype(np.int64)
            rows_TKH = torch.from_numpy(np.array(sample.hidden_TKH)).to(torch.bfloat16)
            last_TH = torch.zeros(len(ids_T), rows_TKH.shape[2], dtype=torch.bfloat16)
            places = torch.from_numpy(np.flatnonzero(sample.mask_T[1:]))
            last_TH[places] = before_norm(torch.from_numpy(np.array(sample.last_MH)), norm_H)
            path = hidden / f"hs_{number}.safetensors"
            states = torch.cat((rows_TKH, last_TH[:, None]), dim=1).contiguous()
            save_file({"hidden_states": states, "token_ids": torch.from_numpy(ids_T)}, path)
            size_bytes += path.stat().st_size
            row = {"input_ids": ids_T.tolist(), "loss_mask": sample.mask_T.astype(int).tolist()}
            lines.write(json.dumps(row) + "\n")
    return size_bytes
