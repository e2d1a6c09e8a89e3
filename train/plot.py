"""The figure of an evaluation: tau by domain with its interval, and acceptance by slot."""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.configs.disk import writing
from dflash_pipeline.configs.figures import COLOURS, legend_above
from dflash_pipeline.train.report import ALL, Report


def draw(path: Path, report: Report) -> None:
    """Write a PNG; matplotlib is imported only for it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    domains = next(iter(report.arms.values())).domains
    width = 0.8 / len(report.arms)
    for place, name in enumerate(report.arms):
        found = [report.summary(name, domain) for domain in domains]
        taus = [one.whole.tau for one in found]
        # a percentile may lie on the other side of the value itself: no bar is negative
        below = [max(tau - one.tau.low, 0.0) for tau, one in zip(taus, found, strict=True)]
        above = [max(one.tau.high - tau, 0.0) for tau, one in zip(taus, found, strict=True)]
        middles = [number - 0.4 + width * (place + 0.5) for number in range(len(domains))]
        colour = COLOURS[name]
        left.bar(middles, taus, width, yerr=(below, above), capsize=2, color=colour)
        shares = report.summary(name, ALL).whole.accepted_by_slot
        right.plot(range(1, len(shares) + 1), shares, marker="o", label=name, color=colour)
    left.set_xticks(range(len(domains)), domains)
    left.set(ylabel="tokens kept a cycle (tau), 95 %")
    right.set(xlabel="slot", ylabel="share of cycles that accept up to it", ylim=(0, 1))
    legend_above(right)
    how = "replayed" if report.plain is None else "decoded"
    sampled = f", temperature {report.settings['temperature']:g}" if report.is_sampled else ""
    figure.suptitle(f"{report.num_prompts} prompts, {how}{sampled}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=120, format="png")
