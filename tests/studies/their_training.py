"""Runs in the environment of speculators: `python their_training.py DATA ARGUMENTS OF ITS TRAINER`.

Makes the data set of DATA/samples.jsonl on the first call, trains by the library's own entry point,
and writes DATA/times.json: when each step was begun, and how many an epoch has. Imports nothing of
this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from speculators.train import cli
from speculators.train import trainer as trainers
from speculators.train.config.schema import TrainConfig


def make_data_set(folder: Path) -> None:
    """What its loader opens: ids, mask and length of each sample, in the order of the files."""
    if (folder / "dataset_info.json").exists():
        return
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    table = {
        "input_ids": [row["input_ids"] for row in rows],
        "loss_mask": [row["loss_mask"] for row in rows],
        "seq_len": [len(row["input_ids"]) for row in rows],
    }
    made = datasets.Dataset.from_dict(table)
    made.set_format("torch")
    made.save_to_disk(str(folder))


def use_cpu() -> None:
    """Its trainer knows accelerators alone; without one these names are what it lacks."""
    trainers.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_a, **_k: None


def end_with_the_steps(trainer: Any) -> None:
    """Let its class end with --max-steps: the epoch of the last step is saved and validated.

    Its own loop goes on through all epochs, with one more step, a validation and a start of the
    loader each; and how many steps an epoch has, and so how many are needed, changes with it.
    """
    train, save, validate = trainer.train_epoch, trainer.maybe_save_checkpoint, trainer.val_epoch

    def is_over(self: Any) -> bool:
        return bool(self.global_step >= self.config.max_steps)

    def trained(self: Any, epoch: int, **options: Any) -> None:
        self.was_over = is_over(self)
        if not self.was_over:
            train(self, epoch, **options)

    def saved(self: Any, epoch: Any, local_step: int = 0) -> None:
        if self.was_over:
            return
        if is_over(self):
            self.config = self.config._replace(checkpoint_freq=1)
        save(self, epoch, local_step)

    def validated(self: Any, epoch: int) -> Any:
        return None if self.was_over else validate(self, epoch)

    trainer.train_epoch, trainer.maybe_save_checkpoint = trained, saved
    trainer.val_epoch = validated


def main() -> None:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    make_data_set(folder)
    if not torch.cuda.is_available():
        use_cpu()
    begun: list[float] = []
    lengths: list[int] = []
    step, build = trainers.Trainer._optimizers_step, trainers.Trainer.setup_trainer

    def timed(self: Any) -> Any:
        begun.append(time.time())
        return step(self)

    def counted(self: Any) -> Any:
        lengths.append(len(self.train_loader))
        return build(self)

    end_with_the_steps(trainers.Trainer)
    trainers.Trainer._optimizers_step = timed
    trainers.Trainer.setup_trainer = counted
    cli.main(TrainConfig.resolve(arguments))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    told = {"steps": begun, "end": time.time(), "steps_per_epoch": lengths[0]}
    (folder / "times.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    # its loader starts workers that import this file again
    main()
