"""Which of the known layouts a checkpoint's config.json is of. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ZLAB_ARCHITECTURE = "DFlashDraftModel"
SPECULATORS_ARCHITECTURE = "DFlashSpeculator"
SPECULATORS_KIND = "speculators_model_type"


def layout_name(config: Mapping[str, Any]) -> str:
    """`zlab` or `speculators`. ValueError for any other model, as a target that was named where a
    drafter was meant."""
    architecture = (config.get("architectures") or ["none"])[0]
    # the speculators trainer writes the name of its class instead, which is z-lab's as well
    if architecture == SPECULATORS_ARCHITECTURE or SPECULATORS_KIND in config:
        return "speculators"
    if architecture == ZLAB_ARCHITECTURE:
        return "zlab"
    raise ValueError(
        f"architecture {architecture}, expected {ZLAB_ARCHITECTURE} or {SPECULATORS_ARCHITECTURE}"
    )
