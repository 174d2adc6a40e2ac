"""Orders: what a plan's items hold, through a file in memory and back."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.resources import open_files
from tests.stage.samples import views
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from cloudckpt._dcp.save_planner import BalancedSavePlanner
from cloudckpt._process.contents import Contents, contents_of
from cloudckpt._process.mapped import MappedPlanner, Maps
from cloudckpt._stage.items import staged
from cloudckpt._stage.stager import PinnedStager
from cloudckpt._stage.tensors import as_carrier, bytes_view
from cloudckpt._stage.transforms import WriteTransforms
from cloudckpt.errors import UnsupportedValueError

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")

URI = "/orders"


def state() -> dict[str, Any]:
    shared = torch.arange(24.0)
    return {
        "weight": torch.randn(37, 11),
        "strided": torch.randn(30, 40).t(),
        "rows": torch.randn(64, 8)[3:17],
        "columns": torch.randn(64, 8)[:, 2:5],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "tied": shared,
        "tied too": shared,
        "a view": shared[3:7],
        "bfloat16": torch.randn(77).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bool": torch.tensor([True, False, True]),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "numbers": {"step": 7, "lr": [0.1, 0.2], "name": "run"},
    }


def planned(planner: DefaultSavePlanner, values: dict[str, Any]) -> list[WriteItem]:
    planner.set_up_planner(values, is_coordinator=True)
    return planner.create_global_plan([planner.create_local_plan()])[0][0].items


def raw(content: Any) -> bytes:
    if isinstance(content, torch.Tensor):
        content = bytes_view(as_carrier(content.resolve_conj()).contiguous())
    return bytes(content)


def assert_resolves_alike(items: list[WriteItem], planner: SavePlanner, contents: Contents) -> None:
    """The planner's items, and the order's, as the upload gets them."""
    mapped = MappedPlanner(contents.order, contents.files, Maps())
    ordered = mapped.items()
    assert [(item.index, item.index.index, item.type, item.tensor_data) for item in ordered] == [
        (item.index, item.index.index, item.type, item.tensor_data) for item in items
    ]
    expected = list(staged(items, planner, WriteTransforms(None), uri=URI))
    got = list(staged(ordered, mapped, WriteTransforms(None), uri=URI))
    for one, other in zip(expected, got, strict=True):
        assert (one.entry, one.index_offsets, one.dtype, one.lengths) == (
            other.entry,
            other.index_offsets,
            other.dtype,
            other.lengths,
        )
        assert raw(one.content) == raw(other.content), one.entry.fqn


@pytest.fixture
def stager() -> Iterator[PinnedStager]:
    made = PinnedStager(shared=True)
    yield made
    made.close()


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BalancedSavePlanner])
@pytest.mark.parametrize("is_shared", [True, False], ids=["snapshot", "foreign"])
def test_items_hold_the_same_at_the_other_end(
    stager: PinnedStager, planner: type[DefaultSavePlanner], *, is_shared: bool
) -> None:
    """If this fails, a save by process commits other bytes, shapes or types than one by thread."""
    values, memory = state(), None
    if is_shared:
        memory = stager.begin(values)
        memory.completed.result(60)
        values = memory.state_dict
    own = planner()
    items = planned(own, values)
    contents = contents_of(items, own, memory, uri=URI)
    try:
        assert_resolves_alike(items, own, contents)
    finally:
        contents.close()


@given(found=st.lists(views(), min_size=1, max_size=5), is_shared=st.booleans())
def test_every_kind_of_view_holds_the_same_at_the_other_end(
    found: list[tuple[torch.Tensor, bytes]], *, is_shared: bool
) -> None:
    """If this fails, some strides or offsets are read wrongly from shared memory."""
    values: dict[str, Any] = {f"t{n}": tensor for n, (tensor, _) in enumerate(found)}
    with closing(PinnedStager(shared=True)) as stager:
        memory = stager.begin(values) if is_shared else None
        if memory is not None:
            memory.completed.result(60)
            values = memory.state_dict
        own = BalancedSavePlanner()
        items = planned(own, values)
        contents = contents_of(items, own, memory, uri=URI)
        try:
            assert_resolves_alike(items, own, contents)
            mapped = MappedPlanner(contents.order, contents.files, Maps())
            for item, (_, content) in zip(mapped.items(), found, strict=True):
                assert raw(mapped.resolve_data(item)) == content
        finally:
            contents.close()


def test_tensors_of_a_snapshot_are_not_copied_again(stager: PinnedStager) -> None:
    """If this fails, each save by process holds a second copy of the state dict, and spends the time to make it."""
    staging = stager.begin(state())
    staging.completed.result(60)
    own = BalancedSavePlanner()
    items = planned(own, staging.state_dict)
    contents = contents_of(items, own, staging, uri=URI)
    try:
        (scratch,) = contents.own_files
        number = contents.files.index(scratch)
        # Conjugates have no bytes of their own in memory; empty tensors have none at all.
        copied = {
            fqn
            for fqn, file, begin, end in zip(
                contents.order.fqns,
                contents.order.file_numbers,
                contents.order.begins,
                contents.order.ends,
                strict=True,
            )
            if file == number and end > begin
        }
        values = {item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO}
        assert copied == {*values, "complex"}
        assert os.fstat(scratch).st_size < 64 * 1024
    finally:
        contents.close()


def test_tensors_that_share_memory_share_it_at_the_other_end(stager: PinnedStager) -> None:
    """If this fails, tied weights are stored twice by saves by process alone."""
    staging = stager.begin(state())
    staging.completed.result(60)
    own = BalancedSavePlanner()
    items = planned(own, staging.state_dict)
    contents = contents_of(items, own, staging, uri=URI)
    try:
        mapped = MappedPlanner(contents.order, contents.files, Maps())
        address_of = {
            item.index.fqn: mapped.resolve_data(item).data_ptr()  # type: ignore[union-attr]
            for item in mapped.items()
            if item.index.fqn in ("tied", "tied too", "a view")
        }
    finally:
        contents.close()
    assert address_of["tied"] == address_of["tied too"] == address_of["a view"] - 12


def test_items_that_are_alike_share_what_describes_them() -> None:
    """If this fails, an order of many tensors is as large as its plan, and takes as long to send."""
    own = BalancedSavePlanner()
    items = planned(own, {f"layers.{n}.weight": torch.zeros(8) for n in range(500)})
    contents = contents_of(items, own, None, uri=URI)
    try:
        assert len(contents.order.forms) == 1
    finally:
        contents.close()


class Casting(DefaultSavePlanner):
    """A planner that makes what is saved only when it is asked for it."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        return found * 2 if isinstance(found, torch.Tensor) else found


def test_a_planner_that_makes_tensors_is_asked_for_each(stager: PinnedStager) -> None:
    """If this fails, planners that transform are passed over by saves by process."""
    staging = stager.begin({"a": torch.ones(5), "b": torch.ones(6)})
    staging.completed.result(60)
    own = Casting()
    items = planned(own, staging.state_dict)
    contents = contents_of(items, own, staging, uri=URI)
    try:
        mapped = MappedPlanner(contents.order, contents.files, Maps())
        assert [raw(mapped.resolve_data(item)) for item in mapped.items()] == [
            raw(torch.full((length,), 2.0)) for length in (5, 6)
        ]
    finally:
        contents.close()


def test_what_cannot_be_saved_is_refused_and_leaves_no_file_open() -> None:
    """If this fails, a save by process writes what it cannot, or loses a descriptor each time that it refuses."""
    own = DefaultSavePlanner(flatten_state_dict=False)
    items = planned(own, {"value": 3, "meta": torch.zeros(3)})
    own.state_dict["meta"] = torch.zeros(3, device="meta")
    before = open_files()
    with pytest.raises(UnsupportedValueError, match="meta"):
        contents_of(items, own, None, uri=URI)
    assert not open_files() - before
