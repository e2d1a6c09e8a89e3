"""The Zarr codec `dflash.packed_rows`: stored rows on disk, float32 for whoever opens the array.

Its configuration, in the array's zarr.json, holds all that decoding needs, calibrations included:
a codec is told neither the array's path nor its group. Zarr finds the class through the entry point
of the installed package. Trap: whatever raises while this module is imported breaks each
`zarr.open` of the environment, so it imports next to nothing.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import Any, Self

from zarr.abc.codec import ArrayBytesCodec

from dflash_pipeline.store.calibration import from_configuration
from dflash_pipeline.store.quantise import Calibration
from dflash_pipeline.store.rows import MODES, decode, encode, row_bytes

NAME = "dflash.packed_rows"


@dataclass(frozen=True)
class PackedRows(ArrayBytesCodec):
    """Serializer of float32 [..., K, H] as rows; a chunk holds all K layers."""

    configuration: str = '{"mode": "bf16"}'
    """As JSON text: zarr hashes codecs."""
    is_fixed_size = True

    @property
    def mode(self) -> str:
        """bf16, int8 or int4."""
        return str(json.loads(self.configuration)["mode"])

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """From the `codecs` entry of an array's zarr.json."""
        configuration = dict(data.get("configuration", {}))
        mode = configuration.get("mode")
        if data.get("name") != NAME or mode not in MODES:
            raise ValueError(f"not a codec that this version of {NAME} knows: {str(data)[:200]}")
        if mode == "bf16" and len(configuration) > 1:
            raise ValueError(f"{NAME} bf16 with {sorted(configuration)}: update dflash-pipeline")
        text = json.dumps(configuration, sort_keys=True)
        _calibrations(text)
        return cls(text)

    def to_dict(self) -> dict[str, Any]:
        """The `codecs` entry of an array's zarr.json."""
        return {"name": NAME, "configuration": json.loads(self.configuration)}

    def evolve_from_array_spec(self, array_spec: Any) -> Self:
        """Nothing depends on the array."""
        return self

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Bytes of an encoded chunk."""
        *lead, hidden_size = chunk_spec.shape
        return int(math.prod(lead)) * self._row_bytes(hidden_size)

    def _row_bytes(self, hidden_size: int) -> int:
        calibrations = _calibrations(self.configuration)
        if not calibrations:
            return row_bytes(self.mode, hidden_size)
        if calibrations[0].hidden_size != hidden_size:
            raise ValueError(
                f"{NAME} is calibrated for {calibrations[0].hidden_size} channels, the array has "
                f"{hidden_size}"
            )
        return calibrations[0].row_bytes

    def _encode_sync(self, chunk_array: Any, chunk_spec: Any) -> Any:
        values = chunk_array.as_numpy_array().astype("float32", copy=False)
        rows = encode(values, self.mode, _calibrations(self.configuration))
        return chunk_spec.prototype.buffer.from_bytes(rows.tobytes())

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        *lead, hidden_size = chunk_spec.shape
        shape = (*lead, self._row_bytes(hidden_size))
        rows = chunk_bytes.as_numpy_array().view("uint8").reshape(shape)
        values = decode(rows, self.mode, _calibrations(self.configuration))
        return chunk_spec.prototype.nd_buffer.from_ndarray_like(values)

    async def _encode_single(self, chunk_array: Any, chunk_spec: Any) -> Any:
        return self._encode_sync(chunk_array, chunk_spec)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return self._decode_sync(chunk_bytes, chunk_spec)


@functools.lru_cache(maxsize=64)
def _calibrations(configuration: str) -> tuple[Calibration, ...]:
    found = json.loads(configuration)
    return () if found["mode"] == "bf16" else from_configuration(found)
