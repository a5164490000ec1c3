"""Trains the model with tensor and data parallelism, keeps a checkpoint, and goes on from it on another grid.

torchrun --nproc-per-node 4 examples/train.py --tp 2 --steps 60 --checkpoint /tmp/llama
torchrun --nproc-per-node 2 examples/train.py --tp 1 --steps 90 --checkpoint /tmp/llama   # goes on at step 60

The grid is (ranks / tp) x tp. Tensor parallelism is that of plan.py; over the other dimension FSDP2 cuts parameters,
gradients and the optimizer's state. Losses are those of one process, whatever the grid.
"""

from __future__ import annotations

import argparse
import gc
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Config, Llama
from plan import parallelize
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import tpkernels as tpk


def main(args: argparse.Namespace, device: torch.device) -> None:
    world = dist.get_world_size()
    if world % args.tp or args.batch % (world // args.tp):
        raise SystemExit(
            f"--tp {args.tp}: {world} ranks must divide by it, and --batch {args.batch} by the quotient."
        )
    mesh = init_device_mesh(device.type, (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    mesh["dp", "tp"]._flatten()  # so that the norm of all gradients is one collective
    torch.manual_seed(0)  # the same start on every rank; each keeps its part
    model = parallelize(Llama(Config()).to(device), mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(model, optimizer, args.checkpoint)

    text, part = read(device), args.batch // (world // args.tp)
    with tpk.record_paths() as log:
        for step in range(first, args.steps):
            x, y = (t.chunk(args.batch // part)[mesh["dp"].get_local_rank()] for t in batch(text, args, step))
            with loss_parallel():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == args.steps - 1:
                say(
                    f"step {step:4d}  loss {mean(loss, mesh['dp']):.4f}  norm {norm.full_tensor().item():.4f}"
                )
    if args.checkpoint:
        save(model, optimizer, args.steps, args.checkpoint)
    say(str(log))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=60, help="at which to stop, counted from the first run")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, on all ranks together")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder to go on from, if it is there, and to save in"
    )
    return parser.parse_args()


def start() -> torch.device:
    """The process group, and this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def read(device: torch.device) -> Tensor:
    """Something to learn: Python's own sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).to(device)


def batch(text: Tensor, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same on every rank and every grid: inputs, and what follows each byte."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - args.length - 1, (args.batch, 1), generator=draw).to(text.device)
    rows = text[starts + torch.arange(args.length + 1, device=text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def save(model: Llama, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    to = dcp.FileSystemWriter(folder, overwrite=True)
    dcp.save({"model": weights, "optimizer": state, "step": step}, storage_writer=to)


def load(model: Llama, optimizer: torch.optim.Optimizer, folder: Path | None) -> int:
    """Step to go on at. The checkpoint may be of another grid."""
    if folder is None or not (folder / ".metadata").exists():
        return 0
    weights, state = get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(kept, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(kept["step"])


def mean(loss: Tensor, mesh: DeviceMesh) -> float:
    """Of all data-parallel ranks: parts of a batch are equal."""
    value = loss.detach().full_tensor()
    dist.all_reduce(value, group=mesh.get_group())
    return value.item() / mesh.size()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main(parse(), start())
    gc.collect()  # what holds groups goes before them
    dist.destroy_process_group()
