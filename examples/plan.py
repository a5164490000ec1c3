"""How the model is cut: a plan for torch's ``parallelize_module``, in which tpkernels makes the products."""

from __future__ import annotations

from model import Llama
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tpkernels.integrations.torch import Colwise, GatherOnce, Rowwise, SequenceParallel


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Sequence parallel between the products: every rank has a part of each sequence.

    Logits are a DTensor: each rank has those of a part of the vocabulary, which ``loss_parallel`` takes.
    """
    plan = {
        "tok_embeddings": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": Colwise(input_layouts=Shard(1), use_local_output=False),
    }
    for i in range(len(model.layers)):
        plan |= {
            f"layers.{i}.attention_norm": SequenceParallel(),
            f"layers.{i}.attention": GatherOnce("wq", "wk", "wv"),
            f"layers.{i}.attention.wq": Colwise(),
            f"layers.{i}.attention.wk": Colwise(),
            f"layers.{i}.attention.wv": Colwise(),
            f"layers.{i}.attention.wo": Rowwise(output_layouts=Shard(1)),
            f"layers.{i}.ffn_norm": SequenceParallel(),
            f"layers.{i}.feed_forward": GatherOnce("w1", "w3"),
            f"layers.{i}.feed_forward.w1": Colwise(),
            f"layers.{i}.feed_forward.w3": Colwise(),
            f"layers.{i}.feed_forward.w2": Rowwise(output_layouts=Shard(1)),
        }
    parallelize_module(model, mesh, plan)
    return model
