"""``from_pretrained`` of transformers on exports, and checkpoints of what ``save_pretrained`` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from runai_model_streamer import SafetensorsStreamer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import cloudckpt

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    "llama, tied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2, tied": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)),
}
HEAD = "lm_head.weight"
EMBEDDING = {"llama, tied": "model.embed_tokens.weight", "gpt2, tied": "transformer.wte.weight"}


def made(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    kind, config = MODELS[name]
    return kind(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20).reshape(2, 10)).logits
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_shard_bytes", [5_000_000, 20_000], ids=["one file", "several files"])
def test_an_export_opens_with_from_pretrained(tmp_path: Path, name: str, max_shard_bytes: int) -> None:
    """If this fails, ``from_pretrained`` opens an export with weights missing, left as they were drawn, or not tied."""
    model = made(name, 1)
    cloudckpt.save({"model": model.state_dict(), "step": 3}, tmp_path / "step-3", no_dist=True)
    report = cloudckpt.export_checkpoint(
        tmp_path / "step-3",
        tmp_path / "hub",
        include="model.*",
        strip_prefix="model.",
        max_shard_bytes=max_shard_bytes,
    )
    assert (len(report.files) > 2) == (max_shard_bytes < 5_000_000)
    model.config.save_pretrained(tmp_path / "hub")
    opened, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(opened.eval()), logits(model))
    is_tied = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert is_tied == ("tied" in name)


@pytest.mark.parametrize("name", MODELS)
def test_shared_export_in_bfloat16_opens_and_streams(tmp_path: Path, name: str) -> None:
    """An export in another dtype would lack its config or have other weights, in transformers or Run:ai's streamer."""
    model = made(name, 1)
    cloudckpt.save({"model": model.state_dict()}, tmp_path / "step-3", no_dist=True)
    model.bfloat16().config.save_pretrained(tmp_path / "base")
    for rank in (2, 0, 1):
        report = cloudckpt.export_checkpoint(
            tmp_path / "step-3",
            tmp_path / "hub",
            include="model.*",
            strip_prefix="model.",
            max_shard_bytes=20_000,
            dtype="bfloat16",
            config_from=tmp_path / "base",
            part=(rank, 3),
        )
    assert report.is_whole
    opened, info = type(model).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert opened.dtype is torch.bfloat16
    assert all(torch.equal(value, expected[key]) for key, value in opened.state_dict().items())
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(sorted(map(str, (tmp_path / "hub").glob("*.safetensors"))))
        streamed = {key: value.clone() for key, value in streamer.get_tensors()}
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in streamed.items())


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_of_save_pretrained_is_imported_and_loaded(tmp_path: Path, name: str) -> None:
    """A run that begins with a published model could not load it: of a tied one, the head's name is in no file."""
    model = made(name, 1)
    model.save_pretrained(tmp_path / "hub")
    tie = {HEAD: EMBEDDING[name]} if name in EMBEDDING else None
    cloudckpt.import_checkpoint(tmp_path / "hub", tmp_path / "step-0", add_prefix="model.", tie=tie)
    other = made(name, 2)
    assert not torch.equal(logits(other), logits(model))
    cloudckpt.load(tmp_path / "step-0", model=other, no_dist=True)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"], ids=["one file", "several files"])
def test_model_loads_from_what_save_pretrained_wrote(tmp_path: Path, name: str, max_shard_size: str) -> None:
    """A run could not begin with a published model as it lies in a bucket, or would begin with other weights."""
    model = made(name, 1)
    model.save_pretrained(tmp_path / "hub", max_shard_size=max_shard_size)
    expected = type(model).from_pretrained(tmp_path / "hub").state_dict()
    other = made(name, 2)
    cloudckpt.load(tmp_path / "hub", model=other, no_dist=True)
    found = other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert torch.equal(logits(other), logits(model))
    base = made(name, 3).base_model
    prefix = model.base_model_prefix
    cloudckpt.load(tmp_path / "hub", model=base, rename={prefix: "model"}, no_dist=True)
    assert all(torch.equal(value, expected[f"{prefix}.{key}"]) for key, value in base.state_dict().items())


def test_model_on_the_meta_device_is_tied_again(tmp_path: Path) -> None:
    """A large model is made without memory first. Its head would keep undefined weights, or could not be loaded."""
    model = made("llama, tied", 1)
    model.save_pretrained(tmp_path / "hub")
    with torch.device("meta"):
        other = LlamaForCausalLM(model.config)
    other.to_empty(device="cpu")
    other.tie_weights()
    cloudckpt.load(tmp_path / "hub", model=other, no_dist=True)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in other.state_dict().items())
