"""The weighted mean of checkpoints, beside what torch computes of whole tensors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.convert.states import bits, save, small
from tests.kit.options import make_options
from tests.kit.ranks import run_ranks
from tests.kit.wrapped import Call, FaultyStore
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel

import cloudckpt
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidOptionError,
    InvalidURIError,
    UnsupportedValueError,
)
from cloudckpt.options import KIB

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mean_of(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The mean in float32, or float64, of whole tensors, in the first one's dtype."""
    total = math.fsum(weights)
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    mean = torch.zeros(tensors[0].shape, dtype=wide)
    for tensor, weight in zip(tensors, weights, strict=True):
        mean = mean.add(tensor.to(wide), alpha=weight / total)
    return mean.to(tensors[0].dtype)


def random_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    num_sources = draw(st.integers(2, 4))
    weights = draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0]), min_size=num_sources, max_size=num_sources))
    weights[draw(st.integers(0, num_sources - 1))] = 0.7
    entries = draw(
        st.dictionaries(
            st.text("abc.", min_size=1, max_size=4).filter(lambda name: "" not in name.split(".")),
            st.tuples(
                st.lists(st.sampled_from([0, 1, 3, 40]), max_size=3).map(tuple),
                st.lists(st.sampled_from(FLOATS), min_size=num_sources, max_size=num_sources),
            ),
            min_size=1,
            max_size=4,
        )
    )
    states = [
        {name: random_of(shape, dtypes[i], 7 * i + j) for j, (name, (shape, dtypes)) in enumerate(entries.items())}
        for i in range(num_sources)
    ]
    return states, weights


@given(cases())
@settings(max_examples=25)
@pytest.mark.hypothesis
def test_a_mean_is_that_of_whole_tensors(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[dict[str, torch.Tensor]], list[float]]
) -> None:
    """If this fails, a merged model has other weights than the mean of its sources."""
    states, weights = case
    folder = tmp_path_factory.mktemp("merge")
    sources = [f"{folder}/{number}" for number in range(len(states))]
    for source, state in zip(sources, states, strict=True):
        save({"model": state}, source)
    cloudckpt.merge(sources, folder / "mean", weights=weights)
    expected = {name: mean_of([state[name] for state in states], weights) for name in states[0]}
    assert bits(cloudckpt.read(folder / "mean")["model"]) == bits(expected)
    cloudckpt.verify(folder / "mean")


def test_all_else_stays_as_it_was_saved(tmp_path: Path) -> None:
    """If this fails, a merged checkpoint has other keys, types or values than its sources, or does not load."""
    state = small() | {"odd": {3: (1, torch.ones(2)), None: [], "set": {}}, "flag": True}
    save(state, f"{tmp_path}/a")
    save(state, f"{tmp_path}/b")
    report = cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert (report.num_averaged, report.weights) == (5, (0.5, 0.5))
    assert cloudckpt.compare(tmp_path / "a", tmp_path / "mean").is_same
    assert repr(cloudckpt.read(tmp_path / "mean")) == repr(cloudckpt.read(tmp_path / "a"))
    cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "model", include="model")
    assert [*cloudckpt.read(tmp_path / "model")] == ["model"]
    model = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    cloudckpt.load(model, str(tmp_path / "model"))
    assert bits(model["model"]) == bits(state["model"])


def _save_sharded(uri: str, dim: int, offset: float) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(131 * 67, dtype=torch.float32).view(131, 67) * offset
    options = make_options(tile_bytes=4 * KIB, object_bytes=20 * KIB, extensions=(cloudckpt.Zstandard(),) * dim)
    cloudckpt.save({"w": distribute_tensor(full, mesh, [Shard(dim)])}, uri, options=options)


@pytest.mark.multirank
def test_shards_of_any_cut_are_merged(tmp_path: Path) -> None:
    """If this fails, checkpoints of jobs with other numbers of ranks are mixed up."""
    run_ranks(_save_sharded, str(tmp_path / "a"), 0, 1.0, world_size=2)
    run_ranks(_save_sharded, str(tmp_path / "b"), 1, 3.0, world_size=3)
    options = make_options(read_bytes=64 * KIB, request_bytes=4 * KIB, tile_bytes=4 * KIB, connections=2)
    cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", options=options, target_options=options)
    (mean,) = cloudckpt.read(tmp_path / "mean").values()
    assert torch.equal(mean, torch.arange(131 * 67, dtype=torch.float32).view(131, 67) * 2)


def test_tied_tensors_are_stored_once_if_all_sources_tie_them(tmp_path: Path) -> None:
    """If this fails, a merge takes the room of tied weights twice, or ties weights that are not the same."""
    for name, seed in (("a", 1), ("b", 2)):
        weight = random_of((300, 40), torch.float32, seed)
        save({"head": weight, "embed": weight}, f"{tmp_path}/{name}")
    save(
        {"head": random_of((300, 40), torch.float32, 3), "embed": random_of((300, 40), torch.float32, 4)},
        f"{tmp_path}/c",
    )
    tied = cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "tied")
    apart = cloudckpt.merge([tmp_path / "a", tmp_path / "c"], tmp_path / "apart")
    assert apart.num_bytes > 1.9 * tied.num_bytes
    weights = cloudckpt.read(tmp_path / "apart")
    assert not torch.equal(weights["head"], weights["embed"])


def test_files_of_hugging_face_are_merged(tmp_path: Path) -> None:
    """If this fails, a model from a hub must be imported before it can be averaged."""
    states = [{"w": random_of((30, 4), torch.bfloat16, seed)} for seed in (1, 2)]
    for number, state in enumerate(states):
        (tmp_path / str(number)).mkdir()
        save_file(state, tmp_path / str(number) / "model.safetensors")
    cloudckpt.merge([tmp_path / "0", tmp_path / "1" / "model.safetensors"], tmp_path / "mean", weights=[3, 1])
    assert bits(cloudckpt.read(tmp_path / "mean")) == bits({"w": mean_of([state["w"] for state in states], [3, 1])})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.update(step=13), "'step' (values)"),
        (lambda state: state["optim"]["state"].__setitem__(0, torch.arange(9) + 1), "'optim.state.0' (values)"),
        (lambda state: state["model"].pop("weight"), "'model.weight' (removed)"),
        (lambda state: state.update(more=torch.ones(1)), "'more' (added)"),
        (lambda state: state["model"].update(half=torch.ones(34)), "'model.half' (shape: [33] and [34])"),
        (lambda state: state["model"].update(half=torch.ones(33, dtype=torch.int8)), "(dtype: bfloat16 and int8)"),
    ],
    ids=["value", "integers", "missing", "more", "shape", "dtype"],
)
def test_sources_that_differ_are_refused_by_name(tmp_path: Path, change: Any, named: str) -> None:
    """If this fails, a merge takes one source's entry for both, or leaves an entry out, without a word."""
    other = small()
    change(other)
    save(small(), f"{tmp_path}/a")
    save(other, f"{tmp_path}/b")
    with pytest.raises(UnsupportedValueError, match="cannot be merged") as caught:
        cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert named in str(caught.value)
    assert not (tmp_path / "mean").exists()
    follow_both_ways(caught.value, [tmp_path / "a", tmp_path / "b"])


def test_different_models_come_without_advice_to_take_one(tmp_path: Path) -> None:
    """If this fails, the error proposes a merge that is a copy of the first of two different models."""
    for name, size in (("a", 4), ("b", 8)):
        save({"model": {"w": torch.ones(size), "b": torch.ones(size)}, "extra": size}, f"{tmp_path}/{name}")
    with pytest.raises(UnsupportedValueError, match="cannot be merged") as caught:
        cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert "pass" not in str(caught.value)


def follow_both_ways(error: UnsupportedValueError, sources: list[Path], **given: Any) -> list[dict[str, Any]]:
    """Merge as the error says to, by each of its two ways. Return what each merge has made."""
    ways = re.findall(r"pass ((?:include|from_first)=(?:'[^']*'|\[[^\]]*\]))", str(error))
    assert len(ways) == 2, error
    merged = []
    for way in ways:
        target = sources[0].parent / f"mean-{len(merged)}"
        cloudckpt.merge(sources, target, overwrite=True, **{**given, **eval(f"dict({way})")})  # noqa: S307  # text of our own
        merged.append(cloudckpt.read(target))
    return merged


def test_error_over_the_count_of_an_average_says_how_to_merge_it(tmp_path: Path) -> None:
    """If this fails, the EMA of a run cannot be merged as the error says, or the error shows one source at a time."""
    sources = [tmp_path / f"step-{step}" for step in range(3)]
    net = nn.Linear(2, 2)
    ema = AveragedModel(net)
    for step, source in enumerate(sources):
        cloudckpt.save(source, model={"net": net, "ema": ema}, extra={"a": min(step, 1), "b": step // 2})
        ema.update_parameters(net)
    with pytest.raises(UnsupportedValueError, match=r"'extra\.a' .*'extra\.b' ") as caught:
        cloudckpt.merge(sources, tmp_path / "mean")
    for choice in ({}, {"include": "model"}, {"include": "model.ema"}):
        with pytest.raises(UnsupportedValueError, match=r"n_averaged' \(values\)") as caught:
            cloudckpt.merge(sources, tmp_path / "mean", **choice)
        left_out, first = follow_both_ways(caught.value, sources, **choice)
        assert "n_averaged" not in left_out["model"]["ema"]
        assert first["model"]["ema"]["n_averaged"].item() == 0
        assert ("net" in left_out["model"]) == (choice.get("include") != "model.ema")


def test_entries_of_the_first_source_alone(tmp_path: Path) -> None:
    """If this fails, models with batch norms cannot be merged, or get the counts of another source."""
    for name, step in (("a", 3), ("b", 5)):
        norm = {"num_batches_tracked": torch.tensor(step), "running_mean": torch.full((2,), float(step))}
        save({"model": norm, "step": step}, f"{tmp_path}/{name}")
    sources, mean = [tmp_path / "a", tmp_path / "b"], tmp_path / "mean"
    with pytest.raises(UnsupportedValueError, match="num_batches_tracked") as caught:
        cloudckpt.merge(sources, mean, from_first="step")
    follow_both_ways(caught.value, sources, from_first="step")
    with pytest.raises(InvalidOptionError, match=r"from_first='model.running_men'.*'model.running_mean'"):
        cloudckpt.merge(sources, mean, from_first=["step", "model.running_men"])
    cloudckpt.merge(iter(sources), mean, from_first=["step", "model.num*"])
    merged = cloudckpt.read(mean)
    assert (merged["step"], merged["model"]["num_batches_tracked"].item()) == (3, 3)
    assert merged["model"]["running_mean"].tolist() == [4.0, 4.0]


def test_one_name_of_tied_tensors_from_the_first_source(tmp_path: Path) -> None:
    """If this fails, a tensor that the first source alone should give becomes the mean of its tied name."""
    for name, value in (("a", 1.0), ("b", 3.0)):
        weight = torch.full((5,), value)
        save({"embed": weight, "head": weight}, f"{tmp_path}/{name}")
    cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", from_first="head")
    merged = cloudckpt.read(tmp_path / "mean")
    assert (merged["embed"].tolist(), merged["head"].tolist()) == ([2.0] * 5, [1.0] * 5)


def test_floats_of_8_bits_are_not_averaged(tmp_path: Path) -> None:
    """If this fails, quantized weights and their scales are averaged apart, to a model that is no mean of the two."""
    for name, scale in (("a", 1.0), ("b", 0.5)):
        quantized = {"weight": (torch.tensor([8.0, 4.0]) / scale).to(torch.float8_e4m3fn), "scale": torch.tensor(scale)}
        save(quantized | {"norm": torch.ones(2)}, f"{tmp_path}/{name}")
    save({"weight": torch.ones(2)}, f"{tmp_path}/wide")
    for sources, named in (("ab", r"'weight' \(values\)"), (("wide", "a"), "dtype: float32 and float8_e4m3fn")):
        with pytest.raises(UnsupportedValueError, match=named):
            cloudckpt.merge([tmp_path / name for name in sources], tmp_path / "mean", include="weight")
    cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", from_first=["weight", "scale"])
    assert bits(cloudckpt.read(tmp_path / "mean")) == bits(cloudckpt.read(tmp_path / "a"))


def test_arguments_that_fit_no_merge_are_refused(tmp_path: Path) -> None:
    """If this fails, a wrong number of weights, or a target among the sources, gives some other mean."""
    for name in "ab":
        save({"w": torch.ones(3)}, f"{tmp_path}/{name}")
    both = [tmp_path / "a", tmp_path / "b"]
    for weights in ([1.0], 0.5, [1.0, -1.0], [float("nan"), 1.0], ["1", "2"]):
        with pytest.raises(InvalidOptionError, match="weights"):
            cloudckpt.merge(both, tmp_path / "mean", weights=weights)
    with pytest.raises(InvalidOptionError, match="their sum not 0"):  # in floats it is 2.8e-17
        cloudckpt.merge([*both, tmp_path / "a"], tmp_path / "mean", weights=[0.1, 0.2, -0.3])
    for sources in ([tmp_path / "a"], f"{tmp_path}/a", []):
        with pytest.raises(InvalidOptionError, match="two or more"):
            cloudckpt.merge(sources, tmp_path / "mean")
    with pytest.raises(InvalidURIError, match="both the source and the target"):
        cloudckpt.merge(both, tmp_path / "b", overwrite=True)
    with pytest.raises(InvalidOptionError, match="no entry"):
        cloudckpt.merge(both, tmp_path / "mean", include="modle")
    save({"w": torch.zeros(3)}, f"{tmp_path}/c")
    with pytest.raises(CheckpointExistsError):
        cloudckpt.merge(both, tmp_path / "c")
    assert bits(cloudckpt.read(tmp_path / "c")) == bits({"w": torch.zeros(3)})


def test_a_mean_does_not_become_a_step_of_its_run(tmp_path: Path) -> None:
    """If this fails, the next restart of a run takes the mean of its steps for the newest one."""
    sources = [tmp_path / "run/step-1", tmp_path / "run/step-2"]
    for source in sources:
        save({"w": torch.ones(3)}, str(source))
    with pytest.raises(InvalidURIError, match=rf"run/step-3 would be the newest .*{tmp_path}/run-mean/step-3"):
        cloudckpt.merge(sources, tmp_path / "run/step-3")
    for target in ("run/mean", "run-mean/step-3"):
        assert cloudckpt.merge(sources, tmp_path / target).num_averaged == 1


def test_a_mean_that_does_not_fit_its_dtype_is_refused(tmp_path: Path) -> None:
    """If this fails, an extrapolated model has infinite weights, without a word."""
    for name, value in (("a", 60_000.0), ("b", -60_000.0)):
        save({"w": torch.full((3,), value, dtype=torch.float16)}, f"{tmp_path}/{name}")
    with pytest.raises(UnsupportedValueError, match="'w' does not fit its dtype"):
        cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", weights=[2, -1])
    save({"w": torch.full((3,), 1e300, dtype=torch.float64)}, f"{tmp_path}/wide")
    with pytest.raises(UnsupportedValueError, match="'w' does not fit its dtype"):
        cloudckpt.merge([tmp_path / "a", tmp_path / "wide"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_infinite_elements_of_a_source_stay(tmp_path: Path) -> None:
    """If this fails, a mask of minus infinity cannot be merged, or its mean is another one."""
    for name in "ab":
        save({"mask": torch.tensor([0.0, -math.inf, math.nan])}, f"{tmp_path}/{name}")
    cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert bits(cloudckpt.read(tmp_path / "mean")) == bits(cloudckpt.read(tmp_path / "a"))


def test_damage_in_any_source_is_found(tmp_path: Path) -> None:
    """If this fails, flipped bits of one source are averaged into the target."""
    for name in "ab":
        save({"w": torch.ones(3000)}, f"{tmp_path}/{name}")
    (path,) = (tmp_path / "b" / "data").rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-7] ^= 2
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert not [*tmp_path.glob("mean/data/*/*")]


def test_a_source_that_is_replaced_meanwhile_is_noticed(tmp_path: Path) -> None:
    """If this fails, the mean is of parts of two saves."""
    for name in "ab":
        save({"w": torch.ones(300_000)}, f"{tmp_path}/{name}")
    waiting = [f"{tmp_path}/b"]

    def replace_b(call: Call) -> None:
        if waiting and call.operation == "read_into" and "data/" in call.key:
            save({"w": torch.zeros(300_000)}, waiting.pop(), overwrite=True)

    options = make_options(wrap_store=lambda inner: FaultyStore(inner, find_error=replace_b))
    with pytest.raises((CheckpointChangedError, CorruptCheckpointError), match="b"):
        cloudckpt.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "mean", options=options)
    assert not cloudckpt.latest(tmp_path / "mean")
