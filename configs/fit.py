"""What each unit of work costs, from the times of some batches; no cost is below 0.

A handful of costs and some tens of batches: small enough for plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median


def fitted(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Seconds of a unit of each amount, none below 0: the least sum of squared relative errors.

    amounts: a row a batch. All batches together come out as they were measured, so that what
    disturbed some of them is neither lost nor counted twice. ValueError without a batch.
    """
    if not seconds:
        raise ValueError("nothing was measured")
    num_costs = len(amounts[0])
    largest = [max(abs(row[i]) for row in amounts) or 1.0 for i in range(num_costs)]
    # of one size, and relative to what was measured
    rows = [
        [row[i] / largest[i] / time for i in range(num_costs)]
        for row, time in zip(amounts, seconds, strict=True)
    ]
    best, least = [0.0] * num_costs, float("inf")
    for count in range(1, num_costs + 1):
        for chosen in combinations(range(num_costs), count):
            solution = _solved(rows, chosen)
            if solution is None or min(solution) < 0:
                continue
            error = sum(
                (sum(row[i] * cost for i, cost in zip(chosen, solution, strict=True)) - 1) ** 2
                for row in rows
            )
            # more costs than needed explain noise
            if error < 0.99 * least:
                least, best = error, [0.0] * num_costs
                for i, cost in zip(chosen, solution, strict=True):
                    best[i] = cost / largest[i]
    predicted = sum(dot(row, best) for row in amounts)
    return [cost * sum(seconds) / predicted for cost in best]


def steady(amounts: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Seconds of one, and of each unit of its amount, none below 0: medians of the slopes between
    any two and of what is left (Theil and Sen). What disturbed a few of them counts for nothing.

    ValueError without any.
    """
    if not seconds:
        raise ValueError("nothing was measured")
    pairs = combinations(zip(amounts, seconds, strict=True), 2)
    slopes = [(one[1] - two[1]) / (one[0] - two[0]) for one, two in pairs if one[0] != two[0]]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    rest = [taken - slope * amount for amount, taken in zip(amounts, seconds, strict=True)]
    return [max(0.0, median(rest)), slope]


def dot(amounts: Sequence[float], costs: Sequence[float]) -> float:
    """What so much of each amount costs together."""
    return sum(amount * cost for amount, cost in zip(amounts, costs, strict=True))


def _solved(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Costs of the chosen columns whose sum is nearest to 1 in each row; None: not determined."""
    size = len(chosen)
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in chosen] + [sum(row[i] for row in rows)]
        for i in chosen
    ]
    for pivot in range(size):
        top = max(range(pivot, size), key=lambda line: abs(matrix[line][pivot]))
        matrix[pivot], matrix[top] = matrix[top], matrix[pivot]
        if abs(matrix[pivot][pivot]) < 1e-9 * max(1.0, abs(matrix[0][0])):
            return None
        for line in range(size):
            if line != pivot:
                factor = matrix[line][pivot] / matrix[pivot][pivot]
                matrix[line] = [
                    value - factor * above
                    for value, above in zip(matrix[line], matrix[pivot], strict=True)
                ]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
