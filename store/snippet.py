"""How people read a store from a notebook: shown by `inspect` and the README, run by tests."""

from __future__ import annotations

NUMPY_DECODER = """\
import json, numpy as np
path, i = "{path}", 0                              # sample i, in plan order
with open(f"{{path}}/zarr.json") as file: about = json.load(file)["attributes"]["dflash"]
K, H = len(about["identity"]["layer_ids"]), about["identity"]["hidden_size"]
def column(name, dtype):
    return int(np.memmap(f"{{path}}/samples/{{name}}/c/0", dtype, "r")[i])
b, s, T = column("bucket", "<i2"), column("shard", "<i4"), column("num_tokens", "<i4")
first = column("start", "<i8") - s * about["layout"]["rows_per_shard"]
bits = np.memmap(f"{{path}}/b{{b}}/hidden/c/{{s}}/0/0", "<u2", "r", 0, (first + T, K, H))[first:]
hidden_TKH = (bits.astype("<u4") << 16).view("<f4")
"""
"""Reads a bf16 store with numpy alone (decision 20)."""

_NOTEBOOK = """\
# with dflash-pipeline installed
from dflash_pipeline.store import open_store
sample = open_store("{path}").sample(0)            # ids_T, mask_T, hidden_TKH, last_MH as float32
# plain zarr, codec found by itself: float32 [rows, layers, channels]
import zarr
hidden = zarr.open("{path}", mode="r")["b0/hidden"][:10]
# plain zarr without the package: the stored bytes, uint8 [rows, layers, bytes]
raw = zarr.open("{path}", mode="r")["raw/b0/hidden"][:10]
# numpy alone
"""


def snippet(path: str) -> str:
    """Lines to paste into a notebook."""
    return (_NOTEBOOK + NUMPY_DECODER).format(path=path)
