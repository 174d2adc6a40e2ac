"""What several ranks hold is saved once, whole, and by as many of them as it takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt._plan.balance import Held, Share, spread


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Held], list[int]]:
    """Items of any sizes, each on some of the ranks, and what each rank has beside them."""
    own_bytes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
    some_ranks = st.lists(st.integers(0, len(own_bytes) - 1), min_size=1, unique=True)
    item = st.builds(
        lambda ranks, num_rows, row_bytes: Held(ranks=tuple(ranks), num_rows=num_rows, num_bytes=num_rows * row_bytes),
        some_ranks,
        st.integers(1, 300),
        st.integers(0, 40),
    )
    return draw(st.lists(item, max_size=12)), own_bytes


@given(jobs(), st.integers(1, 500))
@settings(deadline=None)
def test_every_row_is_saved_once_by_a_rank_that_holds_it(job: tuple[list[Held], list[int]], min_bytes: int) -> None:
    """If this fails, rows are lost, or saved twice, or asked of a rank that does not have them."""
    items, own_bytes = job
    for item, shares in zip(items, spread(items, own_bytes=own_bytes, min_piece_bytes=min_bytes), strict=True):
        assert [share.begin_row for share in shares] == [0, *(share.end_row for share in shares[:-1])]
        assert shares[-1].end_row == item.num_rows
        assert all(share.rank in item.ranks and share.begin_row < share.end_row for share in shares)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.lists(st.integers(0, 5000), min_size=2, max_size=8),
    st.integers(1, 200),
)
@settings(deadline=None)
def test_no_rank_has_more_than_its_part(num_rows: list[int], own_bytes: list[int], min_bytes: int) -> None:
    """If this fails, all ranks wait for one that could have left some of its bytes to others."""
    ranks = tuple(range(len(own_bytes)))
    items = [Held(ranks=ranks, num_rows=rows, num_bytes=rows) for rows in num_rows]
    loads = list(own_bytes)
    for shares in spread(items, own_bytes=own_bytes, min_piece_bytes=min_bytes):
        for share in shares:
            loads[share.rank] += share.end_row - share.begin_row
    mean_bytes = -(-sum(loads) // len(loads))
    most_bytes = max(mean_bytes, *own_bytes)
    assert max(loads) <= most_bytes * 33 / 32 + 2 * min_bytes


def test_equal_tensors_are_not_cut() -> None:
    """If this fails, checkpoints of replicated models fall into needlessly many pieces."""
    items = [Held(ranks=(0, 1), num_bytes=100, num_rows=100)] * 6
    shares = spread(items, own_bytes=[0, 0], min_piece_bytes=1)
    assert [len(of_item) for of_item in shares] == [1] * 6
    assert [of_item[0].rank for of_item in shares] == [0, 1] * 3


def test_one_huge_tensor_goes_to_all_ranks() -> None:
    """If this fails, an embedding as large as the rest of the model makes its rank the one that all wait for."""
    (shares,) = spread([Held(ranks=(0, 1, 2, 3), num_bytes=4000, num_rows=400)], own_bytes=[0] * 4, min_piece_bytes=1)
    assert shares == [Share(rank=rank, begin_row=100 * rank, end_row=100 * rank + 100) for rank in range(4)]
