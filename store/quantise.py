"""int8 and int4 rows in plain numpy: the truth that the Triton kernels repeat bit for bit.

A record of R bytes, padded with zeros to a multiple of 16:
    [q][group scales][row scale][kept channel values]
q is H signed bytes (int8), or H nibbles in two's complement, the even channel in the lower half
(int4). A group scale is one e4m3 byte for 16 channels (int4 only), the row scale a little-endian
float32, a kept value a little-endian bfloat16.

Each step below is one float32 operation rounded to nearest even, never fused with another:
 1. A value that is not finite, or beyond LARGEST, counts as 0 (whoever calls drops its sample).
 2. d = x - centre, and 0 on the kept channels, whose x is stored as bfloat16 instead.
 3. Rotation inside blocks of channels: for stride 1, 2, 4, ..., block / 2, values a and b that
    lie `stride` apart become a + b and a - b. Then y = d * 2**-(log2(block) // 2), which is exact.
 4. int8: scale = max|y| / 127, q = nearest(y * (1 / scale)).
    int4: master = max|y| / 3584, the row scale. A group's magnitude t = max|y| / 8 becomes the
    e4m3 code nearest to t / master (at most 448); its sign is opposite to the group's extreme,
    which therefore lands on -8; a tie counts as positive. scale = e4m3 * master,
    q = nearest(y * (1 / scale)) within -8..7.
    A scale of 0 gives q = 0, and a row with max|y| below FAINTEST has scale 0.
Decoding: y = q * scale, the same rotation times 2**-(log2(block) - log2(block) // 2), + centre,
then the kept values. A record of zeros is the centre with zeros on the kept channels.

Letters: H hidden, N rows, R bytes of a row, k kept channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_pipeline.store.bf16 import bf16_bits, bf16_to_float32

Bytes = NDArray[np.uint8]
Float = NDArray[np.float32]

MODES = ("int8", "int4")
NUM_KEPT = 4
"""Channels of a layer that are kept as bfloat16; the largest few carry most of the error."""
GROUP_SIZES = {"int8": 0, "int4": 16}
"""Channels that share an e4m3 scale; 0: the row scale is the only one."""
RECORD_ALIGNMENT = 16
LARGEST = 2.0**100
"""Beyond any hidden state, and 64 of them add up without overflow."""
FAINTEST = 2.0**-100
"""So that no scale and no reciprocal of one is subnormal."""

INT8_MAX = 127.0
INT4_EXTREME = 8.0
E4M3_MAX = 448.0
E4M3_MAX_CODE = 126
_E4M3_SUBNORMAL = 512.0
# exponent biases 127 of float32 and 7 of e4m3, in units of e4m3's 3 mantissa bits
_E4M3_REBIAS = (127 - 7) << 3


def rotation_block(hidden_size: int) -> int:
    """The largest power of two up to 64 that divides H."""
    return min(hidden_size & -hidden_size, 64)


def row_bytes(mode: str, hidden_size: int, num_kept: int) -> int:
    """R, the bytes of one stored row."""
    used = _kept_offset(mode, hidden_size) + 2 * num_kept
    return -(-used // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def _scales_offset(mode: str, hidden_size: int) -> int:
    return hidden_size if mode == "int8" else hidden_size // 2


def _row_scale_offset(mode: str, hidden_size: int) -> int:
    group = GROUP_SIZES[mode]
    return _scales_offset(mode, hidden_size) + (hidden_size // group if group else 0)


def _kept_offset(mode: str, hidden_size: int) -> int:
    return _row_scale_offset(mode, hidden_size) + 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """How the rows of one layer are quantised."""

    mode: str
    """int8 or int4."""
    hidden_size: int
    """H, a multiple of 16."""
    group: int
    """Channels of a group scale; 0 for int8."""
    block: int
    """Channels that are rotated together."""
    kept_k: NDArray[np.int32]
    """Channels stored as bfloat16, ascending."""
    centre_H: NDArray[np.uint16]
    """Bits of the bfloat16 that is subtracted from each channel."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"calibration.mode {self.mode!r} is not one of {MODES}")
        size = self.hidden_size
        if size < 16 or size % 16:
            raise ValueError(
                f"hidden size {size} is not a multiple of 16: store its rows as bf16, not as "
                f"{self.mode}"
            )
        expected = (GROUP_SIZES[self.mode], rotation_block(size))
        if (self.group, self.block) != expected:
            raise ValueError(
                f"calibration has group {self.group} and block {self.block}, this program expects "
                f"{expected}: update dflash-pipeline"
            )
        kept = self.kept_k
        if kept.ndim != 1 or kept.dtype != np.int32 or not 1 <= len(kept) <= 64:
            raise ValueError(f"calibration.kept is {kept.dtype}{kept.shape}, expected int32[1..64]")
        if kept[0] < 0 or kept[-1] >= size or (np.diff(kept) <= 0).any():
            raise ValueError(f"calibration.kept must ascend within 0..{size - 1}: {kept.tolist()}")
        centre = self.centre_H
        if centre.shape != (size,) or centre.dtype != np.uint16:
            raise ValueError(
                f"calibration.centre is {centre.dtype}{centre.shape}, expected uint16[{size}]"
            )
        if not (np.abs(bf16_to_float32(centre)) <= LARGEST).all():
            raise ValueError("calibration.centre holds values that are not finite")

    @property
    def num_kept(self) -> int:
        """k."""
        return len(self.kept_k)

    @property
    def scales_offset(self) -> int:
        """Byte of a record at which the group scales begin."""
        return _scales_offset(self.mode, self.hidden_size)

    @property
    def row_scale_offset(self) -> int:
        """Byte at which the row scale begins."""
        return _row_scale_offset(self.mode, self.hidden_size)

    @property
    def kept_offset(self) -> int:
        """Byte at which the kept values begin."""
        return _kept_offset(self.mode, self.hidden_size)

    @property
    def row_bytes(self) -> int:
        """R."""
        return row_bytes(self.mode, self.hidden_size, self.num_kept)

    @property
    def encode_factor(self) -> float:
        """What the rotation is multiplied by when a row is stored: a power of two."""
        return 2.0 ** -((self.block.bit_length() - 1) // 2)

    @property
    def decode_factor(self) -> float:
        """The same when a row is read; with `encode_factor` it makes 1 / block."""
        return 1.0 / (self.block * self.encode_factor)

    @property
    def inlier_H(self) -> NDArray[np.bool_]:
        """Channels that are quantised, i.e. not kept."""
        inlier_H = np.ones(self.hidden_size, bool)
        inlier_H[self.kept_k] = False
        return inlier_H


def encode(values: NDArray[Any], calibration: Calibration) -> Bytes:
    """Rows uint8 [..., R] of float32 values or raw bf16 bits (uint16) [..., H]."""
    lead = values.shape[:-1]
    x_NH = bf16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)
    x_NH = x_NH.reshape(-1, calibration.hidden_size)
    x_NH = np.where(np.abs(x_NH) <= LARGEST, x_NH, np.float32(0))
    y_NH = np.where(
        calibration.inlier_H, x_NH - bf16_to_float32(calibration.centre_H), np.float32(0)
    )
    y_NH = _rotated(y_NH, calibration.block, calibration.encode_factor)
    rows_NR = np.zeros((len(x_NH), calibration.row_bytes), np.uint8)
    scale_N = (
        _encode_int8(y_NH, rows_NR)
        if calibration.mode == "int8"
        else _encode_int4(y_NH, rows_NR, calibration)
    )
    kept = calibration.kept_offset
    rows_NR[:, calibration.row_scale_offset : kept] = scale_N.astype("<f4")[:, None].view(np.uint8)
    kept_Nk = bf16_bits(x_NH[:, calibration.kept_k]).astype("<u2")
    rows_NR[:, kept : kept + 2 * calibration.num_kept] = kept_Nk.view(np.uint8)
    return rows_NR.reshape(*lead, calibration.row_bytes)


def decode(rows: Bytes, calibration: Calibration) -> Float:
    """Values float32 [..., H] of rows uint8 [..., R]."""
    y_NH, kept_Nk = decode_rotated(rows.reshape(-1, calibration.row_bytes), calibration)
    with np.errstate(all="ignore"):  # a damaged scale may be anything
        y_NH = _rotated(y_NH, calibration.block, calibration.decode_factor)
        y_NH += bf16_to_float32(calibration.centre_H)
    y_NH[:, calibration.kept_k] = kept_Nk
    return y_NH.reshape(*rows.shape[:-1], calibration.hidden_size)


def decode_rotated(rows: Bytes, calibration: Calibration) -> tuple[Float, Float]:
    """The rotated inliers y float32 [..., H] and the kept values float32 [..., k]."""
    lead = rows.shape[:-1]
    rows_NR = np.ascontiguousarray(rows).reshape(-1, calibration.row_bytes)
    kept = calibration.kept_offset
    scale_N = _bytes_as(rows_NR[:, calibration.row_scale_offset : kept], "<f4")
    kept_Nk = _bytes_as(rows_NR[:, kept : kept + 2 * calibration.num_kept], "<u2")
    q_NQ = rows_NR[:, : calibration.scales_offset]
    with np.errstate(all="ignore"):
        if calibration.mode == "int8":
            y_NH = q_NQ.view(np.int8) * scale_N
        else:
            # shifted up and back down, a nibble keeps its sign
            low, high = (q_NQ << 4).view(np.int8) >> 4, q_NQ.view(np.int8) >> 4
            group = calibration.group
            shape_NGg = len(rows_NR), calibration.hidden_size // group, group
            q_NGg = np.stack((low, high), axis=-1).reshape(shape_NGg)
            codes_NG = rows_NR[:, calibration.scales_offset : calibration.row_scale_offset]
            y_NH = q_NGg * (e4m3_to_float32(codes_NG) * scale_N)[..., None]
    return (
        y_NH.reshape(*lead, calibration.hidden_size).astype(np.float32, copy=False),
        bf16_to_float32(kept_Nk).reshape(*lead, calibration.num_kept),
    )


def _rotated(values_NH: Float, block: int, factor: float) -> Float:
    """Step 3; whatever the order of the values in memory, rows follow one another in the result."""
    # a block's channels far apart in memory, so that each sum runs over all blocks at once: 5 ns a
    # value instead of 22, of 64 rows
    channels = np.ascontiguousarray(values_NH.reshape(-1, block).T)
    stride = 1
    while stride < block:
        pairs = channels.reshape(block // (2 * stride), 2, stride, -1)
        first, second = pairs[:, 0].copy(), pairs[:, 1]
        pairs[:, 0] += second
        np.subtract(first, second, out=second)
        stride *= 2
    return np.multiply(channels.T, np.float32(factor), order="C").reshape(values_NH.shape)


def _encode_int8(y_NH: Float, rows_NR: Bytes) -> Float:
    """Write q; the row scale float32 [N]."""
    largest_N = np.abs(y_NH).max(axis=1)
    scale_N = np.where(largest_N < FAINTEST, np.float32(0), largest_N / np.float32(INT8_MAX))
    q_NH = np.rint(y_NH * _reciprocal(scale_N)[:, None])
    rows_NR[:, : y_NH.shape[1]] = q_NH.astype(np.int8).view(np.uint8)
    return scale_N


def _encode_int4(y_NH: Float, rows_NR: Bytes, calibration: Calibration) -> Float:
    """Write q and the group scales; the row scale float32 [N]."""
    num_rows, hidden_size = y_NH.shape
    y_NGg = y_NH.reshape(num_rows, hidden_size // calibration.group, calibration.group)
    highest_NG, lowest_NG = _folded(np.maximum, y_NGg), -_folded(np.minimum, y_NGg)
    largest_NG = np.maximum(highest_NG, lowest_NG)
    largest_N = largest_NG.max(axis=1, keepdims=True)
    master_N = np.where(
        largest_N < FAINTEST, np.float32(0), largest_N / np.float32(INT4_EXTREME * E4M3_MAX)
    )
    ratio_NG = largest_NG * np.float32(1 / INT4_EXTREME) / np.where(master_N == 0, 1, master_N)
    codes_NG = np.where(master_N == 0, np.uint8(0), _e4m3_codes(ratio_NG))
    codes_NG |= np.where((highest_NG >= lowest_NG) & (codes_NG > 0), 0x80, 0).astype(np.uint8)
    scale_NG = e4m3_to_float32(codes_NG) * master_N
    q_NGg = np.clip(np.rint(y_NGg * _reciprocal(scale_NG)[..., None]), -8, 7)
    nibbles = q_NGg.astype(np.int8).view(np.uint8).reshape(y_NH.shape) & 15
    rows_NR[:, : calibration.scales_offset] = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    rows_NR[:, calibration.scales_offset : calibration.row_scale_offset] = codes_NG
    return master_N[:, 0]


def _folded(operation: np.ufunc, values_NGg: NDArray[Any]) -> NDArray[Any]:
    """The largest or smallest of each group, by halves: numpy is slow over an axis of 16."""
    while (num := values_NGg.shape[2]) > 1:
        values_NGg = operation(values_NGg[..., : num // 2], values_NGg[..., num // 2 :])
    return values_NGg[..., 0]


def _reciprocal(scale: Float) -> Float:
    """1 / scale, 0 where the scale is 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, 1, scale))


def _e4m3_codes(ratios: Float) -> Bytes:
    """The nearest e4m3 of non-negative float32, ties to even, at most 448; never NaN."""
    bits = ratios.view(np.uint32)
    # to 3 of float32's 23 mantissa bits; a carry moves into the exponent as it should
    rounded = (bits + ((bits >> 20) & 1) + np.uint32(0x7FFFF)) >> 20
    normal = np.minimum(rounded.astype(np.int64) - _E4M3_REBIAS, E4M3_MAX_CODE)
    subnormal = np.rint(ratios * np.float32(_E4M3_SUBNORMAL)).clip(0, 8)
    return np.where(ratios < 2.0**-6, subnormal.astype(np.int64), normal).astype(np.uint8)


def e4m3_to_float32(codes: Bytes) -> Float:
    """The value of each e4m3 code; 127, NaN by the standard, is never written and reads 480."""
    magnitude = (codes & 0x7F).astype(np.uint32)
    normal = ((magnitude + _E4M3_REBIAS) << 20).view(np.float32)
    subnormal = magnitude.astype(np.float32) * np.float32(1 / _E4M3_SUBNORMAL)
    value = np.where(magnitude < 8, subnormal, normal)
    return np.where(codes & 0x80, -value, value)


def _bytes_as(columns: Bytes, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(columns).view(dtype)
