"""The Zarr codec `dflash.packed_rows`: stored rows on disk, float32 for whoever opens the array.

Zarr finds it through the entry point of the installed package. Trap: whatever raises while this
module is imported breaks each `zarr.open` of the environment, so it imports next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from zarr.abc.codec import ArrayBytesCodec

from dflash_pipeline.store.rows import decode, encode, row_bytes

NAME = "dflash.packed_rows"


@dataclass(frozen=True)
class PackedRows(ArrayBytesCodec):
    """Serializer of float32 [..., H] as rows of `mode`."""

    mode: str = "bf16"
    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """From the `codecs` entry of an array's zarr.json."""
        configuration = dict(data.get("configuration", {}))
        mode = configuration.pop("mode", None)
        if data.get("name") != NAME or configuration or not isinstance(mode, str):
            raise ValueError(f"not a codec that this version of {NAME} knows: {data}")
        row_bytes(mode, 1)
        return cls(mode=mode)

    def to_dict(self) -> dict[str, Any]:
        """The `codecs` entry of an array's zarr.json."""
        return {"name": NAME, "configuration": {"mode": self.mode}}

    def evolve_from_array_spec(self, array_spec: Any) -> Self:
        """Nothing depends on the array."""
        return self

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Bytes of an encoded chunk."""
        *lead, hidden_size = chunk_spec.shape
        return int(math.prod(lead)) * row_bytes(self.mode, hidden_size)

    def _encode_sync(self, chunk_array: Any, chunk_spec: Any) -> Any:
        rows = encode(chunk_array.as_numpy_array().astype("float32", copy=False), self.mode)
        return chunk_spec.prototype.buffer.from_bytes(rows.tobytes())

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        *lead, hidden_size = chunk_spec.shape
        shape = (*lead, row_bytes(self.mode, hidden_size))
        values = decode(chunk_bytes.as_numpy_array().view("uint8").reshape(shape), self.mode)
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(values)

    async def _encode_single(self, chunk_array: Any, chunk_spec: Any) -> Any:
        return self._encode_sync(chunk_array, chunk_spec)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return self._decode_sync(chunk_bytes, chunk_spec)
