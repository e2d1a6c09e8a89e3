"""The stage of `dflash generate`: the target's answers, given here or by servers."""

from __future__ import annotations

from pathlib import Path

from dflash_pipeline.configs import inputs
from dflash_pipeline.configs.inputs import need
from dflash_pipeline.configs.schema import Run
from dflash_pipeline.configs.stage import ONE_CPU, devices_of, run_stage


def check(run: Run) -> str:
    """The file of answers. UsageError unless all that the line names is there, and it can be."""
    need(run.data.files, "--data FILE", "data.files")
    if not run.generate.endpoints:
        need(run.target.id, "--target MODEL", "target.id")
    out = need(run.generate.out, "--out FILE", "generate.out")
    inputs.check_target(run.target.id)
    inputs.check_data(run.data.files)
    inputs.check_out_file(out, "--out")
    return out


def answer(run: Run, gpus: str, share: bool) -> int:
    """Answer the prompts; the exit code. ValueError where none of them was answered."""
    out, entry = run.generate.out, "dflash_pipeline.capture.generate:main"
    if run.generate.endpoints:
        # one process asks, and no GPU is needed
        code = run_stage(entry, run, ONE_CPU, "generate", f"{out}.logs", {})
    else:
        devices, per_target = devices_of(gpus, share), run.target.num_gpus
        code = run_stage(entry, run, devices, "generate", f"{out}.logs", {}, share, per_target)
    if code == 0 and Path(out).is_file() and Path(out).stat().st_size == 0:
        raise ValueError(
            f"no prompt of {', '.join(run.data.files)} was answered, {out} is empty: the lines "
            "above say why each was left out"
        )
    return code
