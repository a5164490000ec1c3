"""A rank from the process group to the last file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.ops import _agreement

from .config import RunConfig, model_config, tolerance
from .dense import generate
from .model import count_parameters, explain_first_product
from .output import MetricsFile, save_checkpoint, write_summary
from .plot import draw_losses
from .train import Outcome, Trainer
from .ui import Reporter

__all__ = ["run_rank"]

PROMPTS = ("def ", "class ", "import ")


@contextlib.contextmanager
def _group(config: RunConfig) -> Iterator[torch.device]:
    """The default process group and this rank's device."""
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield device
    dist.destroy_process_group()  # not in a finally: after a failure the others may never come


def run_rank(config: RunConfig) -> None:
    """Trains, checks, samples, and writes the output on rank 0; raises DemoError for what the user should know."""
    began = time.perf_counter()
    with _group(config) as device:
        first = dist.get_rank() == 0
        reporter = Reporter(first, config.steps)
        trainer = Trainer(config, device, reporter)
        reporter.say(_banner(config, trainer))
        metrics = MetricsFile(config.out / "metrics.jsonl") if first else None
        reporter.start()
        try:
            with metrics or contextlib.nullcontext():
                outcome = trainer.train(metrics)
        finally:
            reporter.stop()
        _show(config, reporter, outcome, explain_first_product(trainer.model, config.batch, config.seq))
        window = config.seq
        texts = generate(
            trainer.model,
            [p.encode() for p in PROMPTS],
            config.sample_bytes,
            window=window,
            seed=config.seed,
            device=device,
        )
        samples = [text.decode("utf-8", errors="replace") for text in texts]
        reporter.samples(PROMPTS, samples)
        weights = trainer.full_weights()
        if first:
            seconds = time.perf_counter() - began
            save_checkpoint(config.out, model_config(config), weights)
            write_summary(config.out / "summary.json", _summary(config, trainer, outcome, samples, seconds))
            _plot(config, outcome)
            reporter.say(_farewell(config, seconds))
        dist.barrier()


def _banner(config: RunConfig, trainer: Trainer) -> str:
    total = count_parameters(trainer.model)
    local = sum(p.numel() for p in trainer.model.parameters())
    size = model_config(config)
    text = trainer.corpus
    where = (
        torch.cuda.get_device_name(trainer.device)
        if config.device == "cuda"
        else f"CPU, threads per rank: {torch.get_num_threads()}"
    )
    sequence = " + sequence" if config.sequence_parallel else ""
    products = "" if config.fp8 is None else f", products of the blocks in FP8, {config.fp8}"
    return (
        f"model     {config.size}: {size.layers} layers, width {size.width}, {size.heads} heads, {total:,} parameters "
        f"({local:,} on this rank), {config.dtype}{products}\n"
        f"ranks     {config.tp}, tensor{sequence} parallel over {dist.get_backend()}, {where}\n"
        f"text      {text.files} files of the standard library, {text.train.numel():,} bytes to train on, "
        f"{text.heldout.numel():,} held out\n"
        f"training  {config.steps} steps of {config.batch} x {config.seq} bytes"
        + (_comparison(config) if config.dense else ", nothing to compare with (--no-dense)")
    )


def _comparison(config: RunConfig) -> str:
    window = tolerance(config.dtype, config.size, config.fp8).window
    again = f", set equal to it every {window} steps" if config.steps > window else ""
    if config.fp8 is not None:
        again = ", which has no FP8 and goes its own way"
    return f", beside the unsharded model in plain PyTorch{again}"


def _show(config: RunConfig, reporter: Reporter, outcome: Outcome, explanation: str) -> None:
    checking = "on" if _agreement.enabled() else "off"
    reporter.paths(
        outcome.paths,
        f"agreement of the ranks is checked at every call: {checking} (TPK_CHECK)\n\n{explanation}\n",
    )
    limit = tolerance(config.dtype, config.size, config.fp8)
    rows = []
    if (
        config.dense
        and outcome.gradients is not None
        and outcome.weights is not None
        and outcome.dense_heldout is not None
    ):
        g, w = outcome.gradients, outcome.weights
        heldout = abs(outcome.heldout - outcome.dense_heldout)
        # A violation has ended the run before this point.
        rows = [
            (f"loss, all {config.steps} steps", f"{outcome.max_difference:.1e}", f"{limit.loss:g}", True),
            (f"gradients of step 1, relative ({g.name})", f"{g.difference:.1e}", f"{limit.grad:g}", True),
            (f"weights, relative ({w.name})", f"{w.difference:.1e}", f"{limit.weight:g}", True),
            ("held-out loss", f"{heldout:.1e}", f"{limit.loss:g}", True),
        ]
        reporter.checks(rows)
    reporter.say(
        f"\nloss {outcome.losses[0]:.3f} -> {outcome.losses[-1]:.3f}, held-out {outcome.heldout:.3f} nats per byte "
        f"({outcome.heldout / 0.6931471805599453:.2f} bits), {outcome.median_tokens_per_s:,.0f} tokens/s\n"
    )


def _summary(
    config: RunConfig, trainer: Trainer, outcome: Outcome, samples: list[str], seconds: float
) -> dict[str, Any]:
    limit = tolerance(config.dtype, config.size, config.fp8)
    return {
        "options": dataclasses.asdict(config),
        "model": dataclasses.asdict(model_config(config)),
        "versions": {
            "tpkernels": tpk.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "device": torch.cuda.get_device_name(trainer.device) if config.device == "cuda" else "cpu",
        "backend": str(dist.get_backend()),
        "text_sha256": trainer.corpus.digest,
        "first_loss": outcome.losses[0],
        "last_loss": outcome.losses[-1],
        "heldout_loss": outcome.heldout,
        "dense_heldout_loss": outcome.dense_heldout,
        "compared": config.dense,
        "max_loss_difference": outcome.max_difference if config.dense else None,
        "first_gradients": dataclasses.asdict(outcome.gradients) if outcome.gradients else None,
        "weights": dataclasses.asdict(outcome.weights) if outcome.weights else None,
        "tolerance": dataclasses.asdict(limit),
        "paths": [dataclasses.asdict(row) for row in outcome.paths],
        "tokens_per_s": round(outcome.median_tokens_per_s, 1),
        "seconds": round(seconds, 2),
        "samples": [prompt + text for prompt, text in zip(PROMPTS, samples, strict=True)],
    }


def _plot(config: RunConfig, outcome: Outcome) -> None:
    kind = config.dtype if config.fp8 is None else f"{config.dtype}, FP8 {config.fp8}"
    note = f"{config.size} model, {config.tp} ranks, {kind}, {config.device}"
    if config.dense:
        note += f"; largest difference {outcome.max_difference:.1e}"
    draw_losses(
        config.out / "loss.png",
        title="Tensor-parallel and unsharded training on the Python standard library",
        losses=outcome.losses,
        dense_losses=outcome.dense_losses if config.dense else None,
        heldout=outcome.heldout,
        limit=tolerance(config.dtype, config.size, config.fp8).loss,
        note=note,
    )


def _farewell(config: RunConfig, seconds: float) -> str:
    verdict = "sharded and unsharded model agree. " if config.dense else ""
    return (
        f"{verdict}{seconds:.0f} s in all. Written to {config.out}: "
        "loss.png, metrics.jsonl, summary.json, config.json, model.pt\n"
        f'sample with plain PyTorch: python -m tpkernels.demo.dense {config.out} "def main("'
    )
