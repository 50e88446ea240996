"""``transfer_plan`` under hostile input: balance, replicas, holes, repeats, sizes, rare worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    Renames,
    Renumber,
    Stack,
    TransferWorld,
    Unstack,
    transfer_plan,
)
from dcp_placements.testing import cut
from dcp_placements.testing.reference import numbered
from tests.transfer.test_transfer_plan import filled, meta, world

PLACEMENTS = [Shard(0), Shard(1), Replicate(), FusedShard(0, 2)]


@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 5)),
    placements=st.tuples(*[st.sampled_from(PLACEMENTS)] * 4),
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    shift=st.integers(0, 9),
    hosts=st.sampled_from([None, 1, 2, 4]),
)
@examples(25)
def test_only_what_a_target_lacks_is_sent_wherever_the_worlds_overlap(
    shape: tuple[int, int],
    placements: Sequence[Any],
    sizes: Sequence[int],
    shift: int,
    hosts: int | None,
) -> None:
    sides = []
    for side, first in ((0, 0), (1, shift)):
        a, b = sizes[2 * side : 2 * side + 2]
        by_axis = dict(zip("ab", placements[2 * side : 2 * side + 2], strict=True))
        states = {
            first + rank: {
                "w": cut(numbered(shape), list(by_axis.values()), (a, b), divmod(rank, b))
            }
            for rank in range(a * b)
        }
        ranks = range(first, first + a * b)
        made = world({"a": a, "b": b}, {"w": by_axis}, meta(w=shape), ranks=ranks, hosts=hosts)
        sides.append((made, states))
    (sender, sources), (receiver, targets) = sides
    plan = transfer_plan(sender, receiver)
    filled(plan, sources, targets)
    for rank, state in targets.items():
        own = set(sources.get(rank, {"w": torch.zeros(0)})["w"].flatten().tolist())
        lacking = sum(number not in own for number in state["w"].flatten().tolist())
        mine = plan.part(rank)
        assert mine.receives.nbytes == lacking * 4
        for one in mine.receives:
            assert one.nbytes == 4 * one.box.numel
            holders = [r for r, held in sources.items() if has(held["w"], shape, one.box)]
            assert one.source_rank in holders
            near = [r for r in holders if hosts is not None and r // hosts == rank // hosts]
            assert not near or one.source_rank in near, "a replica on the host of the receiver"
    ranks = sources.keys() | targets.keys()
    sent = Counter(repr(one) for rank in ranks for one in plan.part(rank).sends)
    assert sent == Counter(repr(one) for rank in ranks for one in plan.part(rank).receives)
    moved = {one for rank in ranks for one in map(repr, plan.part(rank).copies)} | set(sent)
    assert moved == set(map(repr, plan.everything()))


def has(held: torch.Tensor, shape: tuple[int, int], box: Any) -> bool:
    wanted = numbered(shape)[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
    return set(wanted.flatten().tolist()) <= set(held.flatten().tolist())


@given(
    replicas=st.integers(1, 6),
    rows=st.integers(1, 40),
    receivers=st.integers(1, 7),
    tensors=st.integers(1, 5),
    together=st.booleans(),
)
@examples(25)
def test_replicas_send_equal_bytes_but_for_one_box(
    replicas: int, rows: int, receivers: int, tensors: int, together: bool
) -> None:
    shapes = meta(**{f"layers.{index}.w": (rows, 3) for index in range(tensors)})
    sender = world({"dp": replicas}, {}, shapes)
    ranks = range(replicas, replicas + receivers)
    if together:  # those that have it already take no turn
        ranks = range(1, 1 + receivers)
    receiver = world({"tp": receivers}, {"layers.*.w": {"tp": Shard(0)}}, shapes, ranks=ranks)
    plan = transfer_plan(sender, receiver)
    sent = [plan.part(rank).sends.nbytes for rank in range(replicas)]
    assert max(sent) - min(sent) <= -(-rows // receivers) * 3 * 4


def test_ranks_that_hold_a_part_share_the_work_for_those_that_do_not() -> None:
    """All eight ranks gather what is cut in two: of every box four are holders, four lack it."""
    sender = world({"dp": 4, "tp": 2}, {"w": {"tp": Shard(0)}}, meta(w=(8, 4)))
    plan = transfer_plan(sender, world({"dp": 8}, {}, meta(w=(8, 4))))
    assert [plan.part(rank).sends.nbytes for rank in range(8)] == [4 * 4 * 4] * 8


def test_a_row_that_a_rank_lists_twice_is_sent_from_once_and_filled_twice() -> None:
    shape = (4, 2)
    source_rows, target_rows = ((0, 0, 1), (2, 3, 2)), ((3, 0, 3), (1, 1, 1), (2,))

    def listed(rows: Sequence[Sequence[int]]) -> Any:
        return lambda mesh: {"ep": IndexShard(0, tuple(rows[mesh.get_coordinate()[0]]))}

    sender = world({"ep": 2}, {"w": listed(source_rows)}, meta(w=shape))
    receiver = world({"ep": 3}, {"w": listed(target_rows)}, meta(w=shape), ranks=[0, 5, 6])
    whole = numbered(shape)
    sources = {rank: {"w": whole[list(rows)]} for rank, rows in enumerate(source_rows)}
    targets = {
        rank: {"w": whole[list(rows)]} for rank, rows in zip((0, 5, 6), target_rows, strict=True)
    }
    filled(transfer_plan(sender, receiver), sources, targets)


def test_scalars_and_empty_tensors() -> None:
    shapes = meta(step=(), none=(0, 3), w=(1, 3))
    sender = world({"tp": 3}, {"w": {"tp": Shard(0)}, "none": {"tp": Shard(0)}}, shapes)
    receiver = world({"tp": 2}, {"w": {"tp": Shard(1)}}, shapes, ranks=[2, 3])
    sources = {
        rank: {
            "step": torch.tensor(7),
            "none": torch.zeros(0, 3, dtype=torch.long),
            "w": cut(numbered((1, 3)), [Shard(0)], [3], [rank]),
        }
        for rank in range(3)
    }
    targets = {
        2 + rank: {
            "step": torch.tensor(7),
            "none": torch.zeros(0, 3, dtype=torch.long),
            "w": cut(numbered((1, 3)), [Shard(1)], [2], [rank]),
        }
        for rank in range(2)
    }
    plan = transfer_plan(sender, receiver)
    filled(plan, sources, targets)
    assert plan.unused == []


def test_padding_is_never_sent() -> None:
    def padded(mesh: MeshCoordinate) -> dict[str, CheckpointPlacement]:
        cuts = {"tp": Shard(0)}
        made = CheckpointPlacement(mesh, cuts, global_shape=(5, 2), padded_shape=(8, 2))
        return {"w": made}

    sender = TransferWorld({"tp": 4}, padded, meta(w=(5, 2)))
    plan = transfer_plan(sender, world({"tp": 1}, {}, ranks=[9]))
    sent = {rank: [one.source_slices[0] for one in plan.part(rank).sends] for rank in range(4)}
    assert sent == {0: [slice(0, 2)], 1: [slice(0, 2)], 2: [slice(0, 1)], 3: []}


def test_sizes_that_64_bits_do_not_hold_are_refused() -> None:
    with pytest.raises(PlacementError, match="has more than 9,223,372,036,854,775,807 bytes"):
        transfer_plan(world({"tp": 1}, {}, {"w": Sized(2**40, 2**30)}), world({"tp": 1}, {}))


def test_sizes_beyond_what_a_double_counts_are_counted_exactly() -> None:
    rows = 2**61 - 1
    sender = world({"tp": 2}, {"w": {"tp": Shard(0)}}, {"w": Sized(rows)})
    plan = transfer_plan(sender, world({"dp": 1}, {}, ranks=[2]))
    assert plan.part(2).receives.nbytes == rows
    # One row that nobody holds is not lost in rounding.
    lacking = TransferWorld(
        {"tp": 2},
        lambda mesh: (
            {"w": CheckpointPlacement(mesh, {"tp": Shard(0)})}
            if mesh.get_coordinate() == (0,)
            else {"w": CheckpointPlacement(_NoPart(), {"tp": Shard(0)})}
        ),
        {"w": Sized(rows)},
    )
    with pytest.raises(PlacementError, match="no source rank holds all of it"):
        transfer_plan(lacking, world({"dp": 1}, {}, ranks=[2]))


class Sized:
    """What a world needs of a tensor."""

    dtype = torch.int8

    def __init__(self, *shape: int) -> None:
        self.shape = shape


class _NoPart(MeshCoordinate):
    """A mesh that the rank is no part of."""

    def __init__(self) -> None:
        super().__init__(("tp",), (2,), (0,))

    def get_coordinate(self) -> None:  # type: ignore[override]
        return None


def test_ranks_outside_of_the_mesh_of_a_rule_hold_nothing() -> None:
    """A mesh of ranks 0, 1 and 3 of four: rank 2 neither sends nor receives."""

    def rules(mesh: MeshCoordinate) -> dict[str, CheckpointPlacement]:
        (rank,) = mesh.get_coordinate()
        at = {0: 0, 1: 1, 3: 2}.get(rank)
        inner = _NoPart() if at is None else MeshCoordinate(("tp",), (3,), (at,))
        return {"w": CheckpointPlacement(inner, {"tp": Shard(0)})}

    shape = (7, 2)
    sender = TransferWorld({"all": 4}, rules, meta(w=shape))
    receiver = world({"tp": 2}, {"w": {"tp": Shard(0)}}, meta(w=shape), ranks=[2, 4])
    whole = numbered(shape)
    sources = {rank: {"w": whole.chunk(3)[at]} for at, rank in enumerate((0, 1, 3))}
    targets = {2: {"w": whole[:4]}, 4: {"w": whole[4:]}}
    plan = transfer_plan(sender, receiver)
    filled(plan, sources, targets)
    assert len(plan.part(2).sends) == 0
    back = transfer_plan(receiver, sender)
    filled(back, targets, sources)


def test_another_dtype_is_listed_and_sent_as_it_is() -> None:
    sender = world({"tp": 1}, {}, {"w": torch.empty(4, dtype=torch.bfloat16, device="meta")})
    plan = transfer_plan(sender, world({"tp": 1}, {}, meta(w=(4,)), ranks=[1]))
    assert plan.casts == {"w": (torch.bfloat16, torch.float32)}
    (one,) = plan.part(1).receives
    assert (one.dtype, one.nbytes) == (torch.bfloat16, 8)


def test_both_sides_per_expert_under_the_name_of_their_stack() -> None:
    """Neither side has the stack itself: only rows of one index meet."""
    tensors = meta(**{f"e.{index}.w": (2, 3) for index in range(6)})
    contents = {key: numbered((2, 3)) + 6 * index for index, key in enumerate(tensors)}

    def rename(ids: Sequence[Sequence[int]]) -> Any:
        return lambda mesh: Renames(
            Renumber("e.{}", ids[mesh.get_coordinate()[0]], total=6), Stack("e.{}.w", total=6)
        )

    def states(first: int, ids: Sequence[Sequence[int]]) -> dict[int, dict[str, torch.Tensor]]:
        return {
            first + rank: {f"e.{one}.w": contents[f"e.{one}.w"] for one in held}
            for rank, held in enumerate(ids)
        }

    two, three = ([0, 1, 2], [3, 4, 5]), ([5, 0], [1, 4], [2, 3])
    sender = world({"ep": 2}, {}, tensors, rename=rename(two))
    receiver = world({"ep": 3}, {}, tensors, rename=rename(three), ranks=[2, 3, 4])
    filled(transfer_plan(sender, receiver), states(0, two), states(2, three))
    filled(transfer_plan(receiver, sender), states(2, three), states(0, two))


def test_holes_of_a_stack_are_refused_with_the_rank() -> None:
    tensors = meta(**{f"e.{index}.w": (2, 3) for index in (0, 2)})
    sender = world({"tp": 1}, {}, tensors, rename=lambda mesh: Stack("e.{}.w", total=3))
    receiver = world({"tp": 1}, {}, meta(**{"e.w": (3, 2, 3)}), ranks=[7])
    with pytest.raises(PlacementError) as caught:
        transfer_plan(sender, receiver)
    text = str(caught.value)
    assert "e.w: no source rank holds all of it" in text
    assert "rank 7 receives 12 of 18 elements" in text
    assert "nobody has:  [1:2, :, :]" in text


def test_an_unstacked_key_beyond_the_rows_is_named() -> None:
    sender = world({"tp": 1}, {}, meta(**{"e.w": (2, 3)}))
    receiver = world({"tp": 1}, {}, meta(**{"e.0.w": (3,), "e.2.w": (3,)}))
    with pytest.raises(PlacementError, match=r"e\.2\.w: the source has no such tensor"):
        transfer_plan(sender, receiver, rename=Unstack("e.{}.w"))
