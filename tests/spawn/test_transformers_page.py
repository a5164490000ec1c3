"""The page for users of transformers runs as it stands, and its table is ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from integration_pages import run_snippet, snippets, table_rows

pytest.importorskip(
    "transformers", minversion="5.22", reason="needs transformers 5.22 or newer (extra: integrations)"
)


def test_the_snippets_run(tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    first, second = snippets("transformers.md")
    out = run_snippet(first, tmp_path, ranks=2)
    assert "matmul_all_reduce: gloo+" in out, out
    assert "matmul_replicated: " in out, out
    run_snippet(second, tmp_path)


def test_the_table_of_names() -> None:
    from tpkernels.integrations.transformers import STYLES

    told: dict[str, str] = {}
    for first, others, _ in table_rows("transformers.md"):
        name = first.strip("`")
        told[name] = name
        told |= dict.fromkeys(re.findall(r"`(\w+)`", others), name)
    assert told == STYLES
