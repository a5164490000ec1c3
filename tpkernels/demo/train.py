"""One rank's part of a run: sharded training beside the unsharded twin, which lives on rank 0."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tpkernels.nn import full_tensors, grad_norm, init_weights_

from . import data
from .config import RunConfig, model_config, tolerance
from .dense import DenseModel
from .errors import DemoError, DisagreementError
from .model import ParallelModel
from .optim import Optimizer, dense_norm, learning_rate
from .output import MetricsFile
from .paths import path_rows
from .ui import PathRow, Reporter, StepLine
from .verify import Comparison, check_loss, largest_difference

__all__ = ["Outcome", "Trainer"]


@dataclasses.dataclass
class Outcome:
    """What training measured. Losses in nats per byte, one per step; the dense fields are empty or None off rank 0."""

    losses: list[float] = dataclasses.field(default_factory=list)
    dense_losses: list[float] = dataclasses.field(default_factory=list)
    tokens_per_s: list[float] = dataclasses.field(default_factory=list)
    max_difference: float = 0.0
    gradients: Comparison | None = None
    weights: Comparison | None = None
    heldout: float = float("nan")
    dense_heldout: float | None = None
    paths: list[PathRow] = dataclasses.field(default_factory=list)

    @property
    def median_tokens_per_s(self) -> float:
        """Of the sharded model alone, without the first steps (warm-up, compilation)."""
        return statistics.median(self.tokens_per_s[min(3, len(self.tokens_per_s) - 1) :])


class Twin:
    """The unsharded model with its own optimizer; starts from the same weights, bit for bit."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        shape = model_config(config)
        self.model = DenseModel(shape).to(device)
        init_weights_(self.model, seed=config.seed, std=shape.width**-0.5)
        self.optimizer = Optimizer(
            self.model,
            weight_decay=config.weight_decay,
            max_norm=config.max_norm,
            global_norm=lambda: dense_norm(self.model),
        )


class Trainer:
    """Training and evaluation of both models on this rank; every method is called on all ranks together."""

    def __init__(self, config: RunConfig, device: torch.device, reporter: Reporter) -> None:
        self.config = config
        self.device = device
        self.reporter = reporter
        self.limit = tolerance(config.dtype, config.size, config.fp8)
        self.first = dist.get_rank() == 0
        self.corpus = self._load_corpus()
        shape = model_config(config)
        self.model = ParallelModel(
            shape,
            sequence_parallel=config.sequence_parallel,
            path=config.path,
            device=device,
            recipe=config.fp8,
        )
        init_weights_(self.model, seed=config.seed, std=shape.width**-0.5)
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        if config.compile:
            self.loss_of = torch.compile(self.model.loss, fullgraph=True, dynamic=False)
        self.optimizer = Optimizer(
            self.model,
            weight_decay=config.weight_decay,
            max_norm=config.max_norm,
            global_norm=lambda: float(grad_norm(self.model.parameters())),
        )
        self.twin = Twin(config, device) if config.dense and self.first else None
        self.outcome = Outcome()

    def _load_corpus(self) -> data.Corpus:
        corpus = data.load_corpus()
        if min(corpus.train.numel(), corpus.heldout.numel()) <= self.config.seq + 1:
            raise DemoError(f"--seq {self.config.seq} is longer than the text; use a smaller one.")
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, corpus.digest)
        if len(set(digests)) > 1:
            raise DemoError("the ranks read different standard libraries; run them all with the same Python.")
        return corpus

    def train(self, metrics: MetricsFile | None) -> Outcome:
        """All steps, then the final comparisons; raises DisagreementError on every rank alike."""
        for step in range(self.config.steps):
            record = self._step(step)
            if metrics is not None:
                metrics.write(record)
            if (step + 1) % self.limit.window == 0 or step + 1 == self.config.steps:
                self._end_window()
        self._evaluate()
        return self.outcome

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        c = self.config
        tokens, targets = data.batch_at(self.corpus.train, step, seed=c.seed, batch=c.batch, seq=c.seq)
        return tokens.to(self.device), targets.to(self.device)

    def _step(self, step: int) -> dict[str, float | int | None]:
        c, out = self.config, self.outcome
        tokens, targets = self._batch(step)
        rate = learning_rate(step, peak=c.lr, warmup=c.warmup, steps=c.steps)
        began = time.perf_counter()
        with tpk.record_paths() as forward:
            loss = self.loss_of(tokens, targets)
        with tpk.record_paths() as backward:
            self.optimizer.scale_loss(loss).backward()
        gradients = self._full(self.optimizer.gradients()) if step == 0 and c.dense else {}
        norm = self.optimizer.step(rate)
        value = float(loss.detach())
        speed = tokens.numel() / (time.perf_counter() - began)
        if step == 0:
            out.paths = path_rows(forward, backward)
        out.losses.append(value)
        out.tokens_per_s.append(speed)
        record: dict[str, float | int | None] = {
            "step": step + 1, "loss": value, "lr": rate, "grad_norm": norm, "tokens_per_s": round(speed, 1)
        }  # fmt: skip
        dense_loss = None
        if self.twin is not None:
            dense_loss, dense_norm = self._twin_step(tokens, targets, rate, gradients)
            record |= {
                "dense_loss": dense_loss,
                "difference": abs(value - dense_loss),
                "dense_grad_norm": dense_norm,
            }
        self.reporter.step(StepLine(step, value, dense_loss, speed))
        self._judge(lambda: self._check_step(step, value, dense_loss))
        return record

    def _twin_step(
        self, tokens: Tensor, targets: Tensor, rate: float, gradients: dict[str, Tensor]
    ) -> tuple[float, float]:
        assert self.twin is not None
        loss = self.twin.model.loss(tokens, targets)
        self.twin.optimizer.scale_loss(loss).backward()
        if gradients:
            self.outcome.gradients = largest_difference(gradients, self.twin.optimizer.gradients())
        norm = self.twin.optimizer.step(rate)
        return float(loss.detach()), norm

    def _check_step(self, step: int, loss: float, dense_loss: float | None) -> None:
        if dense_loss is None:
            if loss != loss:
                raise DemoError(
                    f"the loss is not a number at step {step + 1}; try a smaller --lr or another --dtype."
                )
            return
        self.outcome.dense_losses.append(dense_loss)
        self.outcome.max_difference = max(
            self.outcome.max_difference, check_loss(step, loss, dense_loss, self.limit)
        )
        if step == 0 and self.outcome.gradients is not None:
            self.outcome.gradients.check("first gradient", self.limit.grad)

    def _end_window(self) -> None:
        """Compares the weights; the twin goes on from those of the sharded model, see ``config.Tolerance``."""
        if not self.config.dense:
            return
        state = {key: self._full(tensors) for key, tensors in self.optimizer.state().items()}

        def compare() -> None:
            if self.twin is not None:
                found = largest_difference(state["weight"], self.twin.optimizer.state()["weight"])
                found.check("weight", self.limit.weight)
                if self.outcome.weights is None or found.difference > self.outcome.weights.difference:
                    self.outcome.weights = found

        self._judge(compare)
        if self.twin is not None and len(self.outcome.losses) < self.config.steps:
            self.twin.optimizer.load_state(state)

    @torch.no_grad()
    def _evaluate(self) -> None:
        c, out = self.config, self.outcome
        batches = data.heldout_batches(self.corpus.heldout, batch=c.batch, seq=c.seq, count=c.heldout_batches)
        batches = [(tokens.to(self.device), targets.to(self.device)) for tokens, targets in batches]
        out.heldout = statistics.fmean(float(self.model.loss(*pair)) for pair in batches)
        if self.twin is not None:
            twin = self.twin.model
            out.dense_heldout = statistics.fmean(float(twin.loss(*pair)) for pair in batches)

        def compare() -> None:
            if out.dense_heldout is not None:
                check_loss(c.steps - 1, out.heldout, out.dense_heldout, self.limit)

        self._judge(compare)

    def _full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers what is cut as the parameters of the same names are; all ranks call it."""
        return full_tensors(tensors, dict(self.model.named_parameters()))

    def full_weights(self) -> dict[str, Tensor]:
        """The gathered parameters, on every rank."""
        return self._full(dict(self.model.named_parameters()))

    def _judge(self, check: Callable[[], None]) -> None:
        """Runs ``check`` everywhere; what it raises on the first rank is raised on every rank."""
        error: DemoError | None = None
        try:
            check()
        except DemoError as e:
            error = e
        verdict = torch.tensor([error is not None], dtype=torch.int32, device=self.device)
        dist.broadcast(verdict, src=0)
        if int(verdict):
            raise error or DisagreementError("rank 0 found the sharded and the unsharded model to differ.")
