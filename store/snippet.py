"""How people read a store from a notebook: shown by `inspect` and the README, run by tests."""

from __future__ import annotations

NUMPY_DECODER = """\
import json, numpy as np
path, i = "{path}", {sample}                              # sample i, in plan order
with open(f"{{path}}/zarr.json") as file: about = json.load(file)["attributes"]["dflash"]
mode = about["identity"]["hidden_mode"]
assert mode == "bf16", f"{{path}} holds {{mode}} rows: dflash inspect prints their decoder"
K, H = len(about["identity"]["layer_ids"]), about["identity"]["hidden_size"]
def column(name, dtype):
    return int(np.memmap(f"{{path}}/samples/{{name}}/c/0", dtype, "r")[i])
b, s, T = column("bucket", "<i2"), column("shard", "<i4"), column("num_tokens", "<i4")
first = column("start", "<i8") - s * about["layout"]["rows_per_shard"]
bits = np.memmap(f"{{path}}/b{{b}}/hidden/c/{{s}}/0/0", "<u2", "r", 0, (first + T, K, H))[first:]
hidden_TKH = (bits.astype("<u4") << 16).view("<f4")
"""
"""Reads a bf16 store with numpy alone, and no other: bytes of int8 rows would make numbers too."""

QUANTISED_DECODER = """\
import base64, json, numpy as np
path, i = "{path}", {sample}                              # sample i, in plan order
def document(name):
    with open(f"{{path}}/{{name}}/zarr.json") as file: return json.load(file)
layout = document(".")["attributes"]["dflash"]["layout"]
def column(name, dtype):
    return int(np.memmap(f"{{path}}/samples/{{name}}/c/0", dtype, "r")[i])
b, s, T = column("bucket", "<i2"), column("shard", "<i4"), column("num_tokens", "<i4")
first = column("start", "<i8") - s * layout["rows_per_shard"]
codec = document(f"b{{b}}/hidden")["codecs"][0]["configuration"]["codecs"][0]["configuration"]
(_, K, H), R = document(f"b{{b}}/hidden")["shape"], document(f"raw/b{{b}}/hidden")["shape"][-1]
rows = np.memmap(f"{{path}}/b{{b}}/hidden/c/{{s}}/0/0", "u1", "r", 0, (first + T, K, R))[first:]
group, block, rotation = codec["group"], codec["block"], np.ones((1, 1), "f4")
while len(rotation) < block: rotation = np.kron(np.array([[1, 1], [1, -1]], "f4"), rotation)
factor = 2.0 ** ((block.bit_length() - 1) // 2) / block
def decode(rows, layer):                           # uint8 [T, R] -> float32 [T, H]
    num_q = H if codec["mode"] == "int8" else H // 2
    scale = num_q + (H // group if group else 0)   # where the row's scale stands
    kept = layer["kept"]
    def field(begin, size, dtype):
        return np.ascontiguousarray(rows[:, begin : begin + size]).view(dtype)
    if group:                                      # int4: nibbles, and an e4m3 scale a group
        q = np.stack((field(0, num_q, "u1") << 4, field(0, num_q, "u1")), -1).view("i1") >> 4
        code = field(num_q, H // group, "u1").astype("i4")
        exponent, mantissa = code >> 3 & 15, code & 7
        size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa / 512)
        size = np.where(code & 128, -size, size).astype("f4") * field(scale, 4, "<f4")
        y = q.reshape(T, -1, group) * size[..., None]
    else:                                          # int8
        y = field(0, H, "i1") * field(scale, 4, "<f4")
    centre = np.frombuffer(base64.b64decode(layer["centre"]), "<u2").astype("<u4") << 16
    x = (y.reshape(T, -1, block) @ rotation * factor).reshape(T, H) + centre.view("<f4")
    x[:, kept] = (field(scale + 4, 2 * len(kept), "<u2").astype("<u4") << 16).view("<f4")
    return x
hidden_TKH = np.stack([decode(rows[:, k], layer) for k, layer in enumerate(codec["layers"])], 1)
"""
"""Reads an int8 or int4 store with numpy alone."""

_NOTEBOOK = """\
# with dflash-pipeline installed
from dflash_pipeline.store import open_store
sample = open_store("{path}").sample({sample})    # ids_T, mask_T, hidden_TKH, last_MH as float32
# plain zarr, codec found by itself: float32 [rows, layers, channels]
import zarr
hidden = zarr.open("{path}", mode="r")["b{bucket}/hidden"][{rows}]
# plain zarr without the package: the stored bytes, uint8 [rows, layers, bytes]
raw = zarr.open("{path}", mode="r")["raw/b{bucket}/hidden"][{rows}]
# numpy alone
"""


def snippet(
    path: str, hidden_mode: str, sample: int = 0, bucket: int = 0, first_row: int = 0
) -> str:
    """Lines to paste into a notebook, which read this sample and ten rows from its first one on.

    The sample should be one whose shard is there: zarr shows rows that were not captured yet, or
    were released, as zeros. first_row: in the whole array of the bucket.
    """
    decoder = NUMPY_DECODER if hidden_mode == "bf16" else QUANTISED_DECODER
    rows = f"{first_row}:{first_row + 10}" if first_row else ":10"
    return (_NOTEBOOK + decoder).format(path=path, sample=sample, bucket=bucket, rows=rows)
