"""What a run's last line says for planning another."""

from __future__ import annotations

from dflash_pipeline.train.speed import Speed, Stretch

WARM = Stretch(
    num_steps=10, elapsed_s=60.0, wait_s=0.0, num_samples=80, num_rows=8e4, num_tokens=4e4
)
LATER = Stretch(
    num_steps=10, elapsed_s=4.0, wait_s=0.5, num_samples=160, num_rows=2e5, num_tokens=1e5
)


def test_rates_are_of_all_ranks_and_the_first_line_counts_only_alone() -> None:
    speed = Speed(world=8)
    assert speed.line() == ""
    speed.add(WARM)
    assert "the last 10 steps: 1.3 samples/s" in speed.line()
    speed.add(LATER)
    speed.add(LATER)
    # 40 samples a second: a million in 25,000 s
    assert speed.line() == (
        "speed of the last 20 steps: 40.0 samples/s, 50,000 draft rows/s, 25,000 context tok/s, "
        "12.5% of the time waiting for data; a million samples take 6.94 h on 8 processes (55.56 "
        "device hours)"
    )
    speed = Speed(world=1)
    speed.add(LATER)
    assert speed.line().endswith("take 6.94 h on 1 process (6.94 device hours)")
