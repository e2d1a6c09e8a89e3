"""Which layers of the target a drafter reads. A layer id names the output of that 0-based layer."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_pipeline.configs.errors import UsageError


def layer_ids(num_target_layers: int, num: int) -> tuple[int, ...]:
    """Spread `num` layers from the second to the third-to-last of the target.

    round(1 + i (L - 4) / (n - 1)) for i = 0..n-1 with Python's round-half-to-even, L // 2 for
    n = 1: z-lab's `build_target_layer_ids`. Raises UsageError where the rule cannot spread.
    """
    if num < 1:
        raise UsageError(f"target.num_capture_layers must be at least 1, got {num}")
    if num_target_layers < num + 3:
        raise UsageError(
            f"{num} layers cannot be spread over a target of {num_target_layers}: the rule needs "
            f"at least {num + 3}; {_named_instead(num_target_layers, num)}"
        )
    if num == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num - 1)) for i in range(num))


def _named_instead(num_target_layers: int, num: int) -> str:
    """What names as many layers of a shallow target as there are up to `num`, from the first to the
    last that can be captured."""
    last = num_target_layers - 2
    if last < 0:
        return "before its last layer there is none to capture: use a deeper target"
    most = min(num, last + 1)
    ids = [round(i * last / max(most - 1, 1)) for i in range(most)]
    return f"name them, as by --set target.layer_ids={','.join(map(str, ids))}"


def check_layer_ids(ids: Sequence[int], num_target_layers: int) -> None:
    """Refuse ids that no server can capture, each with its reason.

    The last layer's output is only ever seen after the final norm, so L - 1 is refused.
    """
    if not ids:
        raise UsageError("target.layer_ids is empty: name at least one layer")
    last = num_target_layers - 1
    if last < 1:
        raise UsageError(
            "the target has one layer alone, whose output is only seen after the final norm: a "
            "drafter reads layers before the last, so take a target of two layers or more"
        )
    for layer_id in ids:
        if layer_id < 0:
            raise UsageError(f"layer id {layer_id} is negative: ids count from 0")
        if layer_id >= last:
            raise UsageError(
                f"layer id {layer_id} does not exist before the last layer: the target has "
                f"{num_target_layers} layers, ids go from 0 to {last - 1}"
            )
    if len(set(ids)) != len(ids):
        raise UsageError(f"layer ids {tuple(ids)} name a layer twice")
