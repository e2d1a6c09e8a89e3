"""The least arithmetic that a training step can do, and the time it takes at the GPU's best rate.

A multiply-add counts as two. Counted are the products of matrices: element-wise work, masks and
copies are what a step is allowed to hide, not what it needs.

Letters: N packed tokens, Q drafted rows (anchors x slots), R of them with loss, U distinct teacher
rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_pipeline.train.shape import DrafterShape

# dense bf16 on one H200, of which its best products reach 96 to 99 % (measured at 8192^3)
H200_FLOP_PER_S = 790e12


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """What one batch of a drafter holds."""

    num_context: int
    """N."""
    num_rows: int
    """Q."""
    num_visible: int
    """Keys that each drafted row sees, own block included, added up over all of them."""
    num_scored: int
    """R."""
    num_teachers: int
    """U; 0: no term needs the target's distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlop:
    """Floating-point operations of one forward and backward pass."""

    linear_forward: int
    linear_backward: int
    attention_forward: int
    attention_backward: int
    loss: int

    @property
    def total(self) -> int:
        """Of the whole step."""
        forward = self.linear_forward + self.attention_forward
        return forward + self.linear_backward + self.attention_backward + self.loss


def step_flop(shape: DrafterShape, size: StepSize) -> StepFlop:
    """The floor of a batch. The frozen parts cost no weight gradient.

    Two products are left out that autograd does: the features' gradient (nobody wants it) and the
    gradient of the first layer's normed rows, where only the norm's weight is trained; it could be
    had from the gradient of the projections' weights.
    """
    hidden = shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_row = hidden * (2 * query + 2 * key) + 3 * hidden * shape.intermediate_size
    context = 2 * hidden * key * shape.num_layers * size.num_context
    fc = len(shape.layer_ids) * hidden * hidden * size.num_context
    forward = 2 * (per_row * shape.num_layers * size.num_rows + context + fc)
    not_needed = 2 * fc + 2 * hidden * (query + 2 * key) * size.num_rows
    attention = 4 * query * size.num_visible * shape.num_layers
    return StepFlop(
        linear_forward=forward,
        linear_backward=2 * forward - not_needed,
        attention_forward=attention,
        # five products instead of two: the scores are made again
        attention_backward=attention * 5 // 2,
        loss=loss_flop(shape, size.num_scored, size.num_teachers),
    )


def loss_flop(shape: DrafterShape, num_scored: int, num_teachers: int) -> int:
    """Logits and their way back for each scored row, logits alone for each teacher row."""
    return 2 * shape.hidden_size * shape.vocab_size * (2 * num_scored + num_teachers)
