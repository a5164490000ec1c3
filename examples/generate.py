"""Continues a text with a checkpoint of train.py, on any number of ranks, all of them tensor parallel.

torchrun --nproc-per-node 2 examples/generate.py --checkpoint /tmp/llama --prompt "def main("
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Config, Llama
from plan import parallelize
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train import say, start

import tpkernels as tpk

WINDOW = 64  # bytes that the model sees; every rank has a part of them, so ranks divide it


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--bytes", type=int, default=80, help="to add")
    return parser.parse_args()


def main(args: argparse.Namespace, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize(Llama(Config()).to(device), mesh)
    dcp.load({"model": (weights := model.state_dict())}, checkpoint_id=args.checkpoint)
    model.load_state_dict(weights)
    text = torch.tensor(list(args.prompt.encode()), device=device)
    with torch.inference_mode():
        for _ in range(args.bytes):
            text = torch.cat((text, following(model, text)))
    say(bytes(text.tolist()).decode(errors="replace"))
    say(str(tpk.last_path()))


def following(model: Llama, text: Tensor) -> Tensor:
    """The likeliest byte behind the text."""
    seen = text[-WINDOW:]
    window = torch.nn.functional.pad(seen, (0, WINDOW - len(seen)))  # positions see none behind them
    return model(window[None]).full_tensor()[0, len(seen) - 1].argmax().view(1)


if __name__ == "__main__":
    main(parse(), start())
    gc.collect()  # what holds groups goes before them
    dist.destroy_process_group()
