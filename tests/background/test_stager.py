"""Snapshots of state dicts: all values as they were, in memory of their own that later snapshots use again."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tensors.samples import views
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from cloudckpt.background.stager import PinnedStager
from cloudckpt.tensors.host_memory import SnapshotPool
from cloudckpt.tensors.snapshot import Snapshot
from cloudckpt.tensors.snapshot_plan import CopyTask, SnapshotPlan, add_tasks, lay_out_copies
from cloudckpt.tensors.tensor_bytes import as_carrier, bytes_view, is_short, plain_tensor

WAIT_S = 60


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def stager(request: pytest.FixtureRequest) -> Iterator[PinnedStager]:
    """One of each kind of memory."""
    made = PinnedStager(shared=request.param, num_threads=3)
    yield made
    made.close()


def copied(stager: PinnedStager, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A complete snapshot."""
    snapshot = stager.begin(state_dict)
    snapshot.completed.result(WAIT_S)
    assert snapshot.copied_bytes == snapshot.num_bytes
    return snapshot.state_dict


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the values, in row-major order."""
    tensor = plain_tensor(tensor, "", uri="")
    return bytes(bytes_view(as_carrier(tensor).contiguous()))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["private", "shared"]))
def test_every_view_is_copied_bit_for_bit_and_again(data: st.DataObject, kind: str) -> None:
    """If this fails, a background save holds other values than the model had, of some type or layout."""
    stager = PinnedStager(shared=kind == "shared", num_threads=2)
    try:
        for _ in range(data.draw(st.integers(1, 3))):
            drawn = data.draw(st.lists(views(), max_size=6))
            if drawn and data.draw(st.booleans()):  # several views of one memory
                tensor = drawn[0][0]
                parts = [tensor[..., None], tensor[None].transpose(0, -1), tensor[None, ..., None][:, :1]]
                drawn += [(part, bytes_of(part)) for part in parts]
            state = {str(number): tensor for number, (tensor, _) in enumerate(drawn)}
            staged = copied(stager, state)
            for number, (tensor, expected) in enumerate(drawn):
                result = staged[str(number)]
                assert result.dtype is tensor.dtype
                assert result.shape == tensor.shape
                assert bytes_of(result) == expected
                assert not tensor.numel() or result.data_ptr() % tensor.itemsize == 0
    finally:
        stager.close()


def test_later_changes_are_not_in_the_copy(stager: PinnedStager) -> None:
    """If this fails, a checkpoint is a mixture of two steps."""
    state = {"large": torch.ones(9_000_000), "small": torch.ones(3), "value": [1, 2], "bytes": io.BytesIO(b"old")}
    staged = copied(stager, state)
    state["large"].fill_(2)
    state["small"].fill_(2)
    state["value"].append(3)
    state["bytes"].write(b"new")
    are_old = {name: bool((staged[name] == 1).all()) for name in ("large", "small")}
    assert are_old == {"large": True, "small": True}
    assert staged["value"] == [1, 2]
    assert staged["bytes"].getvalue() == b"old"


def test_tied_tensors_stay_tied_and_are_copied_once(stager: PinnedStager) -> None:
    """If this fails, tied weights double the memory and the time of a snapshot, and are saved twice."""
    weight = torch.randn(500, 400)
    flat = torch.randn(1000)
    state = {
        "in": weight,
        "out": torch.nn.Parameter(weight),
        "transposed": weight.t(),
        "row": weight[3],
        "thin": weight[:, 5],
        "head": flat[:600],
        "tail": flat[400:],
    }
    snapshot = stager.begin(state)
    snapshot.completed.result(WAIT_S)
    assert snapshot.num_bytes == weight.nbytes + flat.nbytes
    staged = snapshot.state_dict
    staged["in"][3, 5] = 77
    for name, value in (("out", staged["out"][3, 5]), ("transposed", staged["transposed"][5, 3])):
        assert float(value.detach()) == 77, name
    assert float(staged["row"][5]) == float(staged["thin"][3]) == 77
    assert staged["tail"].data_ptr() - staged["head"].data_ptr() == 400 * 4
    assert staged["out"].data_ptr() == staged["in"].data_ptr()
    assert staged["out"].stride() == staged["in"].stride()


class Pair(NamedTuple):
    """A pair of tensors, as optimizers keep them."""

    first: Any
    second: Any


@dataclasses.dataclass
class Holder:
    """A value of the user's own, with a tensor in it."""

    tensor: torch.Tensor
    name: str


def test_the_structure_is_the_same(stager: PinnedStager) -> None:
    """If this fails, names in the checkpoint depend on whether it was saved in the background."""
    tensor = torch.arange(5)
    state = {
        "dict": {"b": tensor, "a": 1, 3: tensor},
        "ordered": OrderedDict(z=tensor, y=2),
        "mapping": MappingProxyType({"m": tensor}),
        "user": UserDict({"u": tensor}),
        "list": [tensor, [tensor, None], "text"],
        "tuple": (tensor, (1, 2.5)),
        "pair": Pair(tensor, {"deep": tensor}),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "nothing": None,
        "holder": Holder(tensor, "h"),
        "empty": {},
        "none": [],
    }
    staged = copied(stager, state)
    assert list(staged) == list(state)
    assert list(staged["dict"]) == ["b", "a", 3]
    assert isinstance(staged["ordered"], OrderedDict)
    assert list(staged["ordered"]) == ["z", "y"]
    assert isinstance(staged["pair"], Pair)
    assert staged["tuple"][1] == (1, 2.5)
    assert staged["size"] == torch.Size([2, 3])
    assert staged["dtype"] is torch.bfloat16
    assert (staged["empty"], staged["none"], staged["nothing"]) == ({}, [], None)
    found = [
        *(staged["dict"]["b"], staged["dict"][3], staged["ordered"]["z"], staged["mapping"]["m"], staged["user"]["u"]),
        *(staged["list"][0], staged["list"][1][0], staged["tuple"][0], staged["pair"].first),
        *(staged["pair"].second["deep"], staged["holder"].tensor),
    ]
    tensor.fill_(-1)
    assert all(torch.equal(each, torch.arange(5)) for each in found)
    assert staged["holder"].name == "h"


class Odd(torch.Tensor):
    """A subclass of the user's own."""


def test_tensors_without_plain_memory_keep_their_values(stager: PinnedStager) -> None:
    """If this fails, a save in the background says something else of them than a save that is waited for."""
    freed = torch.ones(15)[:10]
    part = torch.ones(15)[5:]
    for tensor in (freed, part):
        tensor.untyped_storage().resize_(0)
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": quantized,
        "freed": freed,
        "part": part,
        "gradient": torch.ones(3, requires_grad=True) * 2,
        "odd": torch.arange(4).as_subclass(Odd),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    staged = copied(stager, state)
    assert float(staged["scalar"]) == 2.5
    assert staged["scalar"].shape == ()
    assert staged["empty"].shape == (0, 7)
    assert staged["empty"].dtype is torch.float16
    assert staged["meta"].is_meta
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(staged["quantized"].int_repr(), quantized.int_repr())
    for name in ("freed", "part"):
        assert is_short(staged[name])
        assert staged[name].shape == (10,)
    assert torch.equal(staged["gradient"], torch.full((3,), 2.0))
    assert [name for name, each in staged.items() if each.requires_grad] == ["gradient", "parameter"]
    assert all(each.grad_fn is None for each in staged.values())
    assert torch.equal(staged["odd"].as_subclass(torch.Tensor), torch.arange(4))


def test_the_shard_of_a_distributed_tensor_is_copied_and_its_placement_kept(stager: PinnedStager) -> None:
    """If this fails, background saves of sharded models lose which part of a tensor a rank has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.randn(6, 5)
        tensor = DTensor.from_local(local, mesh, [Shard(0)])
        staged = copied(stager, {"w": torch.nn.Parameter(tensor), "tied": tensor})["w"]
        local_before = local.clone()
        local.zero_()
        assert type(staged) is DTensor
        assert (staged.device_mesh, staged.placements, staged.shape) == (mesh, tensor.placements, tensor.shape)
        assert torch.equal(staged.to_local(), local_before)
        assert staged.requires_grad
    finally:
        dist.destroy_process_group()


def test_sharded_tensors_are_copied_shard_by_shard(stager: PinnedStager) -> None:
    """If this fails, the state of FSDP1 cannot be saved in the background, or changes while it is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        local = torch.randn(4, 5)
        shard = LocalShard(local, ShardMetadata([0, 0], [4, 5], "rank:0/cpu"))
        tensor = init_from_local_shards([shard], 4, 5)
        staged = copied(stager, {"w": tensor, "in": [tensor]})
        before = local.clone()
        local.zero_()
        for each in (staged["w"], staged["in"][0]):
            assert type(each) is type(tensor)
            assert each.metadata().shards_metadata[0].shard_sizes == [4, 5]
            assert torch.equal(each.local_shards()[0].tensor, before)
    finally:
        dist.destroy_process_group()


LENGTH = 12


@pytest.fixture
def private_stager() -> Iterator[PinnedStager]:
    """With two threads, so that copies are made beside what looks at the tensors."""
    with closing(PinnedStager(num_threads=2)) as made:
        yield made


def as_values(value: Any) -> Any:
    """Return what it is, in Python's own values."""
    if isinstance(value, torch.Tensor):
        there = value.layout is torch.sparse_coo or not is_short(value)
        # In words: NaN, as which some bits of other types are read, is not equal to itself.
        return str(value.dtype), list(value.shape), str(value.to_dense().tolist()) if there else None
    if isinstance(value, dict):
        return [(name, as_values(item)) for name, item in value.items()]
    return [as_values(item) for item in value] if isinstance(value, list) else value


def is_memory(tensor: torch.Tensor) -> bool:
    """Return True if it has some."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not is_short(tensor)


State = dict[str, Any]
"""Tensors by name. Some may share memory."""
Change = Callable[[State, str], None]


def _set(make: Callable[[torch.Tensor], Any]) -> Change:
    def change(state: State, name: str) -> None:
        state[name] = make(state[name])

    return change


def _put_there_what_is_elsewhere(state: State, name: str) -> None:
    state[name].data = torch.arange(LENGTH, dtype=state[name].dtype) + 100


def _give_it_the_memory_of_another(state: State, name: str) -> None:
    other = state[next(iter(state))]
    if isinstance(other, torch.Tensor) and is_memory(other):
        state[name] = other.detach()


def _let_it_go_and_take_its_place(state: State, name: str) -> None:
    size, dtype = state[name].size(), state[name].dtype
    del state[name]  # what is allocated next mostly gets its address
    state[name] = torch.full(size, 7, dtype=dtype)


def _move_to_the_end(state: State, name: str) -> None:
    state[name] = state.pop(name)


def _take_a_part_and_free_it(state: State, name: str) -> None:
    state[name] = state[name][2:]
    state[name].untyped_storage().resize_(0)


def _shrink(state: State, name: str) -> None:
    state[name].resize_(LENGTH // 2)


CHANGES: dict[str, Change] = {
    "other values": lambda state, name: state[name].fill_(5),
    "nothing": lambda state, name: None,  # a change like the others
    "resized in place": _shrink,
    "other memory in place": _put_there_what_is_elsewhere,
    "other dtype": _set(lambda tensor: tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.float32)),
    "half as many of twice the size": _set(lambda tensor: tensor.view(torch.int64)),
    "other shape": _set(lambda tensor: tensor.view(-1, 2)),
    "a dimension more": _set(lambda tensor: tensor[None]),
    "a dimension more in place": lambda state, name: state[name].unsqueeze_(0),
    "other strides": _set(lambda tensor: tensor.view(-1, 2).t()),
    "a part": _set(lambda tensor: tensor[::2]),
    "later": _set(lambda tensor: tensor[2:]),
    "negative": _set(torch._neg_view),
    "a clone": _set(torch.clone),
    "a parameter": _set(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "a subclass": _set(lambda tensor: tensor.as_subclass(Odd)),
    "a number": _set(lambda tensor: int(tensor.numel())),
    "nothing left": _set(lambda tensor: tensor[:0]),
    "sparse": _set(torch.Tensor.to_sparse),
    "in a list": _set(lambda tensor: [tensor, 1]),
    "gone": lambda state, name: state.pop(name),
    "new": lambda state, name: state.update({name + "'": torch.arange(LENGTH)}),
    "freed": lambda state, name: state[name].untyped_storage().resize_(0),
    "a part, and freed": _take_a_part_and_free_it,
    "tied": _give_it_the_memory_of_another,
    "let go": _let_it_go_and_take_its_place,
    "last": _move_to_the_end,
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_single_change_of_a_tensor_is_noticed(private_stager: PinnedStager, change: str) -> None:
    """If this fails, a checkpoint holds what a tensor was in the save before."""
    state: State = {name: torch.arange(LENGTH, dtype=torch.float32) for name in "abc"}
    for _ in range(2):
        assert as_values(copied(private_stager, state)) == as_values(state)
    CHANGES[change](state, "b")
    for _ in range(2):
        assert as_values(copied(private_stager, state)) == as_values(state)


def test_ties_that_appear_or_end_are_noticed(private_stager: PinnedStager) -> None:
    """If this fails, tied weights are stored twice, or one tensor is stored under the name of another."""
    one, two = torch.ones(100), torch.full((100,), 2.0)
    for _ in range(2):
        for state in ({"a": one, "b": two}, {"a": one, "b": one}, {"a": two, "b": two}, {"a": two, "b": one[:50]}):
            for _ in range(2):
                snapshot = private_stager.begin(state)
                snapshot.completed.result(WAIT_S)
                assert snapshot.num_bytes == (400 if state["a"] is state["b"] else 400 + state["b"].nbytes)
                assert as_values(snapshot.state_dict) == as_values(state)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.resize_(4),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.set_(torch.zeros(6, 6)),
        lambda tensor: setattr(tensor, "data", torch.zeros(6, 6)),
    ],
    ids=["unsqueeze", "resize", "t", "set", "data"],
)
def test_changed_copies_are_not_used_again(
    private_stager: PinnedStager, tamper: Callable[[torch.Tensor], None]
) -> None:
    """If this fails, a planner that changes a tensor in place changes it in all later checkpoints."""
    state = {"a": torch.arange(36.0).view(6, 6), "b": torch.ones(3)}
    tamper(copied(private_stager, state)["a"])
    state["a"].add_(1)
    assert as_values(copied(private_stager, state)) == as_values(state)


def test_other_containers_around_the_same_tensors_are_seen(private_stager: PinnedStager) -> None:
    """If this fails, a checkpoint has the names and the nesting of an earlier one."""
    one, two = torch.ones(3), torch.zeros(3)
    for state in (
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": {"c": one}, "b": [two]},
        {"a": [one, two]},
        {"a": (one, two)},
        OrderedDict(a=one, b=two),
        {"a": one, "n": 1, "b": two},
        {"a": one, "n": 2, "b": two},
    ):
        snapshot = copied(private_stager, state)
        assert list(snapshot) == list(state)
        assert str(snapshot) == str(dict(state) if type(state) is not OrderedDict else state)


MIB = 1024 * 1024


class Gate:
    """Lets copies pass one by one, as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: BaseException | None = None) -> None:
        self.permits = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self._error = error
        self._run = CopyTask.run
        monkeypatch.setattr(CopyTask, "run", lambda task, views: self._pass(task, views))  # noqa: PLW0108  # a function, which binds the task

    def _pass(self, task: CopyTask, views: Sequence[torch.Tensor]) -> None:
        self.entered.set()
        assert self.permits.acquire(timeout=WAIT_S)
        self.threads.add(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        self._run(task, views)


def waiting_for(snapshot: Snapshot, tensor: torch.Tensor) -> tuple[threading.Thread, threading.Event]:
    """A thread that waits for a tensor's bytes, and whether they were there."""
    is_there = threading.Event()

    def wait() -> None:
        with contextlib.suppress(ValueError):
            snapshot.wait(tensor.data_ptr(), tensor.nbytes)
            is_there.set()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, is_there


def test_copied_part_is_readable_while_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an upload begins only when all has been copied, or reads bytes that are not there yet."""
    gate = Gate(monkeypatch)
    stager = PinnedStager(num_threads=1)
    first, second = torch.full((5 * MIB,), 1, dtype=torch.uint8), torch.full((5 * MIB,), 2, dtype=torch.uint8)
    snapshot = stager.begin({"first": first, "second": second})
    elsewhere = torch.ones(3)
    snapshot.wait(elsewhere.data_ptr(), 12)  # which is none of its memory
    snapshot.wait(0, 0)
    early, early_there = waiting_for(snapshot, snapshot.state_dict["first"])
    late, late_there = waiting_for(snapshot, snapshot.state_dict["second"])
    tasks = -(-10 * MIB // (10 * MIB // 4))
    for _ in range(2):
        gate.permits.release()
    early.join(WAIT_S)
    assert early_there.is_set()
    assert bool((snapshot.state_dict["first"] == 1).all())
    assert not late_there.is_set()
    assert not snapshot.completed.done()
    assert snapshot.copied_bytes == 5 * MIB
    for _ in range(tasks):
        gate.permits.release()
    late.join(WAIT_S)
    assert late_there.is_set()
    snapshot.completed.result(WAIT_S)
    assert bool((snapshot.state_dict["second"] == 2).all())
    assert gate.threads == {"cloudckpt-stage-0"}
    stager.close()


def test_a_copy_that_fails_ends_all_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a save whose copying failed hangs, or commits what was never copied."""
    with monkeypatch.context() as patched:
        gate = Gate(patched, error=ValueError("the memory is broken"))
        stager = PinnedStager(num_threads=2)
        snapshot = stager.begin({"w": torch.arange(4 * MIB)})
        thread, is_there = waiting_for(snapshot, snapshot.state_dict["w"])
        gate.permits.release(100)
        thread.join(WAIT_S)
        assert not is_there.is_set()
        with pytest.raises(ValueError, match="the memory is broken"):
            snapshot.completed.result(WAIT_S)
        with pytest.raises(ValueError, match="the memory is broken"):
            snapshot.wait(snapshot.state_dict["w"].data_ptr(), 8)
    again = stager.begin({"w": torch.arange(4 * MIB)})
    again.completed.result(WAIT_S)
    assert torch.equal(again.state_dict["w"], torch.arange(4 * MIB))
    stager.close()


class FakeEvent:
    """A point in a fake stream's work, which is done only when it is waited for."""

    def __init__(self, stream: FakeStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        if self._number == self._stream.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._stream.log.append(f"waited {self._number}")


class FakeStream:
    """Stands for a CUDA stream, and notes the order of the calls."""

    def __init__(self, *, failing: int | None = None) -> None:
        self.failing = failing
        self.log: list[str] = []
        self._num_events = 0

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        self.log.append("begin")
        yield
        self.log.append("end")

    def record_event(self) -> FakeEvent:
        self.log.append(f"event {self._num_events}")
        self._num_events += 1
        return FakeEvent(self, self._num_events - 1)

    def drain(self) -> None:
        self.log.append("drain")


GPU = torch.device("cuda", 0)


def device_plan(tensors: list[torch.Tensor], *, task_bytes: int) -> SnapshotPlan:
    """The plan of a snapshot of a GPU's tensors, which lie on the CPU here."""
    whole = [False] * len(tensors)
    copies, segments = lay_out_copies(tensors, SnapshotPool(shared=False), reuse_lent=True, urgent=(), whole=whole)
    segments = [msgspec.structs.replace(segment, is_small=False) for segment in segments]  # as a GPU's never are
    tasks: list[CopyTask] = []
    ranges = add_tasks(tasks, segments, device=GPU, task_bytes=task_bytes)
    begins = [segment.block.address + segment.offset for segment in segments]
    return SnapshotPlan(
        copies=copies,
        num_bytes=sum(segment.num_bytes for segment in segments),
        batched=frozenset(),
        tasks=tasks,
        tasks_of_device={GPU: range(len(tasks))},
        begins=begins,
        ends=[begin + segment.num_bytes for begin, segment in zip(begins, segments, strict=True)],
        tasks_of_segment=ranges,
    )


def copied_by(stream: FakeStream, tensors: list[torch.Tensor]) -> tuple[Snapshot, list[torch.Tensor]]:
    """A snapshot that is copied on `stream`, when it has ended, and the copies."""
    plan = device_plan(tensors, task_bytes=1000)
    snapshot = Snapshot(plan, tensors, {}, num_threads=1, urgent=(), new_stream=lambda _: stream)
    snapshot.start()
    snapshot.completed.exception(WAIT_S)
    return snapshot, plan.copies


def test_copies_of_a_gpu_are_done_once_their_events_have_occurred() -> None:
    """If this fails, bytes are uploaded that the GPU has not sent yet."""
    whole, stream = torch.randn(30, 50), FakeStream()
    tensors = [torch.arange(10_000), torch.ones(3), whole.t(), whole[:, ::9], torch.randn(70, 90)[:, 3::9]]
    snapshot, copies = copied_by(stream, tensors)
    assert snapshot.copied_bytes == snapshot.num_bytes
    for copied, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copied, tensor)
        snapshot.wait(copied.data_ptr(), tensor.nbytes)
    events = [line for line in stream.log if line.startswith("event")]
    waits = [line for line in stream.log if line.startswith("waited")]
    assert len(events) == len(waits) > 50
    assert waits == [f"waited {number}" for number in range(len(waits))]
    ahead = max(
        sum(line.startswith("event") for line in stream.log[:at]) - sum("waited" in line for line in stream.log[:at])
        for at in range(len(stream.log))
    )
    assert ahead == 65
    assert "drain" not in stream.log


def test_an_error_of_the_gpu_ends_the_snapshot_after_its_last_copy() -> None:
    """If this fails, a GPU error is lost, or memory is freed that copies in flight still write to."""
    stream = FakeStream(failing=7)
    snapshot, _ = copied_by(stream, [torch.arange(10_000)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        snapshot.completed.result(WAIT_S)
    assert stream.log[-1] == "drain"
    assert snapshot.copied_bytes < snapshot.num_bytes
