"""A folder of published weights, as docs/frameworks.md makes it for vLLM and SGLang, with the real transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import cloudckpt

DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_folder_of_the_documents_has_the_published_bits(tmp_path: Path, *, is_tied: bool) -> None:
    """If this fails, an engine reloads other weights than were published, or a folder that it cannot read."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # it takes long

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )
    trained = LlamaForCausalLM(config).bfloat16()
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "nvme" / "base")
    (tmp_path / "nvme" / "base" / "tokenizer.json").write_text("{}")
    publisher = cloudckpt.Publisher(tmp_path / "policy", anchor_every=3)
    (snippet,) = re.findall(
        r"^## vLLM and SGLang$.*?^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    program = snippet.replace("/nvme/", f"{tmp_path}/nvme/").replace("s3://bucket/policy", str(tmp_path / "policy"))
    for version in (1, 2, 3):
        with torch.no_grad():
            trained.lm_head.weight[version] += version
        publisher.publish(model=trained, version=version)
        names: dict[str, Any] = {}
        exec(compile(program, str(DOCUMENT), "exec"), names)  # noqa: S102  # our own text
        assert (names["weights"].version, names["weights"].starts_at_anchor) == (version, version == 1)
        files = {"config_from": tmp_path / "nvme" / "base", "max_shard_bytes": 10_000}
        cloudckpt.pull(tmp_path / "policy", tmp_path / "nvme" / "in-files", **files)
        for name, least_files in (("policy", 1), ("in-files", 3)):
            folder = tmp_path / "nvme" / name
            found, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
            assert not any(info.values()), info
            assert found.state_dict().keys() == trained.state_dict().keys()
            for key, tensor in trained.state_dict().items():
                assert torch.equal(found.state_dict()[key], tensor), key
            assert (folder / "tokenizer.json").exists()
            weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            assert len(set(weight_map.values())) >= least_files
            for key, file in weight_map.items():  # as vLLM and SGLang iterate
                with safe_open(folder / file, framework="pt") as opened:
                    assert torch.equal(opened.get_tensor(key), trained.state_dict()[key]), key
