"""Additions to Hugging Face's Trainer for SFT, reward model and DPO: usage rows, metric rows, our checkpoints,
stopping.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from config.errors import EnvironmentFault, ParamsError, TrainingDiverged
from config.sections.offline import Optimisation
from training.distributed import collectives, nodes
from training.hf.validation import Validation
from training.modeling.batching import LengthBuckets
from training.modeling.low_bit import require_bitsandbytes
from training.process.checkpoint import restoring
from training.process.faults import is_out_of_memory
from training.process.out_of_memory import OomBackoff
from training.process.stage import Stage
from training.process.usage import Work

logger = logging.getLogger(__name__)


def trainer_arguments(stage: Stage, settings: Optimisation) -> dict[str, Any]:
    """TrainingArguments with the same meaning in every stage.

    Raises EnvironmentFault for settings this machine does not support.
    """
    if stage.params.model.dtype == "fp16" and stage.device == "cpu":
        raise EnvironmentFault(
            f"model.dtype=fp16: {stage.name} scales its loss on a GPU only, and there is none "
            "here. Set model.dtype: fp32 in params.yaml."
        )
    return {
        "output_dir": str(stage.checkpoints.folder / "trainer"),
        "optim": trainer_optimizer(stage, settings),
        "learning_rate": settings.learning_rate,
        "adam_beta2": settings.adam_beta2,
        "max_grad_norm": settings.max_grad_norm,
        "gradient_checkpointing": settings.activation_checkpointing,
        "bf16": stage.params.model.dtype == "bf16",
        "fp16": stage.params.model.dtype == "fp16",
        "save_strategy": "steps",
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "seed": stage.params.seed,
        "use_cpu": stage.device == "cpu",
        "dataloader_pin_memory": stage.device != "cpu",
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
    }


def arguments(stage: Stage, settings: Optimisation) -> dict[str, Any]:
    """TrainingArguments from a params section: the only place that translates names."""
    per_process = settings.batch_size // stage.world_size
    if per_process * stage.world_size != settings.batch_size:
        raise ParamsError(
            f"{stage.name}.batch_size={settings.batch_size} does not split over {stage.world_size} "
            "processes. Change it in params.yaml."
        )
    micro_batch_size = largest_divisor(per_process, settings.micro_batch_size)
    return {
        **trainer_arguments(stage, settings),
        "per_device_train_batch_size": micro_batch_size,
        "per_device_eval_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": per_process // micro_batch_size,
        "warmup_steps": settings.warmup_fraction,  # below 1 it is a share of all steps
        "lr_scheduler_type": settings.schedule if settings.schedule != "constant" else "constant_with_warmup",
        "weight_decay": settings.weight_decay,
        "save_steps": settings.checkpoint_every_steps,
        "logging_steps": settings.log_every_steps,
    }


def trainer_optimizer(stage: Stage, settings: Optimisation) -> str:
    """The Trainer's name of the optimizer. Raises EnvironmentFault if its library is missing."""
    if settings.optimizer == "adamw":
        return "adamw_torch_fused"
    require_bitsandbytes(f"{stage.name}.optimizer={settings.optimizer}", f"{stage.name}.optimizer: adamw")
    return "adamw_bnb_8bit"


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


FILLER_TOKENS = 1
"""Length of filler rows. Real rows are longer: they have at least a prompt and an EOS token."""


def real_rows(batch: Mapping[str, Any]) -> Tensor:
    """Which rows of a collated batch are real data, [B]."""
    real_B: Tensor = batch["attention_mask"].sum(dim=1) > FILLER_TOKENS
    return real_B


class Tally:
    """Counts tokens and rows that a Trainer processes."""

    def __init__(self) -> None:
        self.work = Work()

    def take(self) -> Work:
        """Counts since the last call, summed over processes."""
        tokens, sequences = collectives.all_reduce_sum([self.work.tokens, self.work.sequences])
        self.work = Work()
        return Work(int(tokens), int(sequences))


class CountingCollator(Tally):
    """A collator that also counts real tokens and rows."""

    def __init__(self, collator: Callable[[list[dict]], Mapping[str, Any]]) -> None:
        super().__init__()
        self._collator = collator

    def __call__(self, examples: list[dict]) -> Mapping[str, Any]:
        batch = self._collator(examples)
        real_B = real_rows(batch)
        self.work.add(tokens=int(batch["attention_mask"][real_B].sum()), sequences=int(real_B.sum()))
        return batch


class OurNames:
    """TRL trainer mixin that logs metrics under our names and drops the others."""

    names: ClassVar[Mapping[str, str]]
    _metrics: dict[str, dict[str, list[float]]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        for metrics in self._metrics.values():
            ours = {self.names[name]: values for name, values in metrics.items() if name in self.names}
            metrics.clear()
            metrics.update(ours)
        super().log(logs, start_time)  # type: ignore[misc]


class _Filled:
    """Rows, and a filler after them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], filler: Mapping[str, Any]) -> None:
        self._rows, self._filler = rows, filler

    def __len__(self) -> int:
        return len(self._rows) + 1

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        return self._filler if place == len(self._rows) else self._rows[place]


class BucketedData:
    """Trainer mixin: rows of similar length share a batch, in an order that is the same after a resume and for any
    number of processes.

    Processes must run the same number of equally shaped micro-batches: filler rows complete the last batch. A
    checkpoint that this version cannot restore is a CheckpointError, not a traceback.
    """

    args: TrainingArguments
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    lengths: NDArray[np.int64]

    def bucket(
        self,
        rows: Sequence[Mapping[str, Any]],
        lengths: NDArray[np.int64],
        filler: Mapping[str, Any],
        settings: Optimisation,
    ) -> None:
        """Train on `rows`, in batches by their `lengths`; `filler` is a row of FILLER_TOKENS tokens without loss.

        The number of rows determines the steps of `settings`.
        """
        self.lengths = lengths
        self.args.max_steps = settings.optimizer_steps(len(lengths))
        self.train_dataset = _Filled(rows, filler)

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthBuckets:
        several = collectives.world_size()
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps * several
        return LengthBuckets(
            self.lengths, batch_size, self.args.seed, filler=len(self.lengths) if several > 1 else None
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Each process evaluates all rows: split, the last batches would be padded with rows counted twice."""
        if collectives.world_size() == 1:
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=self.data_collator)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with restoring(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring(Path(checkpoint or ".")):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with restoring(Path(checkpoint or ".")):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


class StageCallback(TrainerCallback):
    """Connects a Trainer to its Stage."""

    def __init__(self, stage: Stage, tally: Tally, validation: Validation | None = None) -> None:
        self._stage = stage
        self._tally = tally
        self._validation = validation

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Set the sampler's epoch: with several processes it is wrapped too deeply for the Trainer to find it after a
        resume.
        """
        sampler = train_dataloader.batch_sampler
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if isinstance(sampler.sampler, LengthBuckets):
            sampler.sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step
        self._stage.meter.lap("train", step, self._tally.take())
        self._stage.step = step
        if self._stage.synchronise_stop():
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Move a checkpoint of the Trainer to the folder of complete checkpoints, after a look at the validation
        rows.
        """
        saved, step = Path(args.output_dir) / f"checkpoint-{state.global_step}", state.global_step
        collectives.barrier()  # each writes a file of its own there
        if self._validation is not None:
            self._stage.meter.lap("save", step, Work())
            self._validation.check(model, step, state.max_steps)
        with self._stage.checkpoints.saving(step) as folder:
            if collectives.rank() in (0, *nodes.leaders()):
                folder.rmdir()
                saved.rename(folder)
        self._stage.meter.lap("save", step, Work())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        values = {
            key: float(value)
            for key, value in (logs or {}).items()
            if isinstance(value, int | float) and key != "epoch"
        }
        step = state.global_step
        self._stage.log(step, values)
        loss = values.get("loss", 0.0)
        if loss != loss or abs(loss) == float("inf"):
            raise TrainingDiverged(
                f"{self._stage.name} loss is {loss} at step {step}: training diverged. "
                f"Lower {self._stage.name}.learning_rate in params.yaml; the last checkpoint is kept."
            )


def train(trainer: Trainer, stage: Stage) -> None:
    """Train to the end, from the newest checkpoint if there is one.

    After running out of memory it resumes from the last step with micro-batches of half the size, and the same
    batches. Raises StageStopped after a checkpoint if the stage was asked to stop, EnvironmentFault if no micro-batch
    fits in memory.
    """
    # TRL casts adapters on a 4-bit base to bf16, where small steps vanish
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer.place(stage)
    trainer.remove_callback(PrinterCallback)
    if not stage.interactive:
        trainer.remove_callback(ProgressCallback)
    checkpoint = stage.checkpoints.latest()
    if checkpoint:
        stage.resumed(checkpoint.step)
    # a killed process may have left it incomplete
    if stage.rank == 0:
        shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    collectives.barrier()
    if checkpoint:
        with restoring(checkpoint.path):
            state = TrainerState.load_from_json(str(checkpoint.path / "trainer_state.json"))
        if state.global_step >= state.max_steps:  # the Trainer would take one step more
            trainer._load_from_checkpoint(str(checkpoint.path))
            trainer.state = state
            return
    oom = OomBackoff(stage, f"{stage.name}.micro_batch_size", trainer.args.per_device_train_batch_size)
    if oom.size < trainer.args.per_device_train_batch_size:
        halve_micro_batches(trainer, oom)
    while not trained(trainer, stage, oom):
        halve_micro_batches(trainer, oom)
    if stage.stopping and trainer.state.global_step < trainer.state.max_steps:
        raise stage.stopped()


def trained(trainer: Trainer, stage: Stage, oom: OomBackoff) -> bool:
    """Train from the newest checkpoint; False if memory ran out, with a checkpoint of the last step done and `oom` of
    half the size.
    """
    checkpoint, began = stage.checkpoints.latest(), time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if stage.world_size > 1:  # the others wait for this one in the middle of a step
            oom.start_again(trainer.state.global_step + 1, error)
    else:
        return True
    lost_seconds = min(stage.meter.unaccounted_seconds(), time.monotonic() - began)
    trainer.model.zero_grad(set_to_none=True)
    try:
        oom.halve(trainer.state.global_step + 1, lost_seconds)
    finally:  # without a smaller size the completed steps still count
        if trainer.state.global_step > (checkpoint.step if checkpoint else 0):
            trainer._save_checkpoint(trainer.model, None)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    return False


def halve_micro_batches(trainer: Trainer, oom: OomBackoff) -> None:
    """Prepare the Trainer to restart with the size of `oom`, or the next smaller one that divides the batch."""
    args = trainer.args
    per_process = args.per_device_train_batch_size * args.gradient_accumulation_steps
    oom.size = args.per_device_train_batch_size = trainer._train_batch_size = largest_divisor(per_process, oom.size)
    args.per_device_eval_batch_size = min(args.per_device_eval_batch_size, oom.size)
    args.gradient_accumulation_steps = per_process // oom.size
    loading = trainer.accelerator.gradient_state
    while loading.in_dataloader:  # the interrupted one
        loading._remove_dataloader(loading.active_dataloader)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.model_wrapped = trainer.model
