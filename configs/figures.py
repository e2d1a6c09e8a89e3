"""What all figures of acceptance share: a drafter has one colour in each of them."""

from __future__ import annotations

from typing import Any

COLOURS = {"trained": "C0", "untrained": "C1", "lookup": "C2"}
"""By the names that results have."""


def legend_above(axes: Any) -> None:
    """A legend that covers nothing: what is drawn may fill the axes to their edges."""
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
