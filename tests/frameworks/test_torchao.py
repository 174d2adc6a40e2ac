"""torchao's quantized weights and low-bit optimizers, with the real package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cloudckpt
from cloudckpt.errors import StateDictMismatchError

if TYPE_CHECKING:
    from tests.frameworks.conftest import Jobs

KINDS = ("8bit", "4bit", "fp8", "float8 training")
DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"


def bits(tensor: Any) -> Any:
    """All bits and all metadata of a tensor."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        return type(tensor), repr(context), tensor.shape, {name: bits(getattr(tensor, name)) for name in names}
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def quantized(name: str, *, seed: int) -> nn.Module:
    """A model in which one layer is quantized, and the rest is not."""
    from torchao import quantization  # noqa: PLC0415  # it takes long

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.LayerNorm(32), nn.Linear(32, 8))
    quantization.quantize_(model, getattr(quantization, name)(), filter_fn=lambda module, fqn: fqn == "0")
    return model


@pytest.mark.parametrize(
    "name",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"],
)
def test_quantized_models_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    """If this fails, a model that torchao quantized is not saved in the background, or is another afterwards."""
    model, fresh = quantized(name, seed=0), quantized(name, seed=1)
    expected = {fqn: bits(tensor) for fqn, tensor in model.state_dict().items()}
    assert expected["0.weight"] != bits(fresh.state_dict()["0.weight"])
    cloudckpt.async_save(tmp_path / "step-1", model=model).result(60.0)
    cloudckpt.load(tmp_path / "step-1", model=fresh)
    assert {fqn: bits(tensor) for fqn, tensor in fresh.state_dict().items()} == expected
    read = cloudckpt.read(tmp_path / "step-1")["model"]
    assert {fqn: bits(tensor) for fqn, tensor in read.items()} == expected
    (wrapper,) = cloudckpt.describe(tmp_path / "step-1").wrappers
    assert wrapper.kind == f"{type(read['0.weight']).__module__}.{type(read['0.weight']).__qualname__}"
    with pytest.raises(StateDictMismatchError, match=r"'model\.0\.weight' was saved as a torchao\..* is to take it"):
        cloudckpt.load(tmp_path / "step-1", model=nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16)), strict=False)
    cloudckpt.export_checkpoint(tmp_path / "step-1", tmp_path / "hub", include="model", dequantize=True)
    plain = load_file(tmp_path / "hub" / "model.safetensors")["model.0.weight"]
    assert torch.equal(plain, model[0].weight.dequantize())


def test_the_documents_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, what the document shows does not run."""
    monkeypatch.chdir(tmp_path)
    section = DOCUMENT.read_text().partition("\n## torchao\n")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1].replace("s3://bucket", str(tmp_path)), names)  # noqa: S102  # the document's own
    assert type(names["weight"]).__name__ == "Int8Tensor"
    assert {"model.0.weight.qdata", "model.0.weight.scale"} <= load_file("int8/model.safetensors").keys()
    assert load_file("plain/model.safetensors")["model.0.weight"].dtype is torch.float32


def test_torchao_training_on_shards_resumes_to_the_bit(place: str, jobs: Jobs) -> None:
    """Low-bit optimizers or float8 training under FSDP2 would go on otherwise, or shards of weights have other bits."""
    found = jobs.at(place, "torchao_sharded")
    assert all(found["weights"].values()), found
    for kind in KINDS:
        undisturbed, resumed = found[kind]
        assert resumed == undisturbed


def test_torchao_tensors_load_on_fewer_ranks(one_place: str, jobs: Jobs) -> None:
    """If this fails, one rank loads other values than two ranks saved of torchao's tensors."""
    jobs.at(one_place, "torchao_sharded")
    found = jobs.at(one_place, "torchao_sharded", num_ranks=1)
    assert all(found["weights"].values()), found
    assert [found[kind] for kind in KINDS] == [[]] * len(KINDS)
