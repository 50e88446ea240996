"""``transfer_plan`` against plain slicing: cuts, names, replicas, hosts, rare worlds, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementRules,
    Placements,
    Renames,
    Renumber,
    Replace,
    Split,
    TransferWorld,
    Unstack,
    transfer_plan,
)
from dcp_placements.names.stacks_and_parts import Rename
from dcp_placements.testing import cut
from dcp_placements.testing.reference import numbered, part
from dcp_placements.transfer.plan import TransferPlan

State = dict[str, torch.Tensor]


def meta(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def world(
    axes: Mapping[str, int],
    placements: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    rename: Callable[[MeshCoordinate], Any] = lambda mesh: None,
    padded: tuple[int, ...] | None = None,
    **options: Any,
) -> TransferWorld:
    """Return a world; ``placements`` maps a pattern to placements by axis, or a function of it."""

    def rules(mesh: MeshCoordinate) -> Placements:
        table = {}
        for pattern, by_axis in placements.items():
            cuts = by_axis(mesh) if callable(by_axis) else by_axis
            if padded is not None or any(isinstance(one, IndexShard) for one in cuts.values()):
                assert tensors is not None
                shape = tuple(tensors[pattern].shape)
                table[pattern] = CheckpointPlacement(
                    mesh, cuts, global_shape=shape, padded_shape=padded
                )
            else:
                table[pattern] = CheckpointPlacement(mesh, cuts)
        return Placements(PlacementRules(table), rename=rename(mesh))

    return TransferWorld(axes, rules, tensors, **options)


def filled(plan: TransferPlan, sources: Mapping[int, State], targets: Mapping[int, State]) -> None:
    """Fill the targets; assert that each of their elements but padding (-1) comes exactly once."""
    found = {r: {k: torch.full_like(t, -2) for k, t in s.items()} for r, s in targets.items()}
    for rank in targets:
        mine = plan.part(rank)
        for one in (*mine.receives, *mine.copies):
            into = found[rank][one.target_fqn][one.target_slices]
            assert (into == -2).all(), f"{one} comes twice"
            into.copy_(
                sources[one.source_rank][one.source_fqn][one.source_slices].reshape(into.shape)
            )
    for rank, state in targets.items():
        for key, tensor in state.items():
            expected = torch.where(tensor == -1, -2, tensor)
            assert torch.equal(found[rank][key], expected), f"{key} on rank {rank}"


def test_both_ends_of_a_pair_list_their_messages_in_one_order() -> None:
    sender = world(
        {"dp": 3, "tp": 2}, {"a": {"tp": Shard(0)}, "b": {"tp": Shard(1)}}, meta(a=(7, 4), b=(3, 8))
    )
    receiver = world(
        {"tp": 3},
        {"a": {"tp": Shard(1)}, "b": {"tp": Shard(0)}},
        meta(a=(7, 4), b=(3, 8)),
        ranks=[6, 7, 8],
    )
    plan = transfer_plan(sender, receiver)
    for source in range(6):
        for target in (6, 7, 8):
            sent = [one for one in plan.part(source).sends if one.target_rank == target]
            assert sent == [one for one in plan.part(target).receives if one.source_rank == source]


EXPERTS, HIDDEN, INNER = 4, 3, 4
GATE_UP = torch.arange(EXPERTS * 2 * INNER * HIDDEN).reshape(EXPERTS, 2 * INNER, HIDDEN)
NAMES = Renames(
    Unstack("experts.{}.gate_up"),
    Split("gate_up", ("gate.weight", "up.weight")),
    Replace("model", "engine"),
)


def trainer(first: int, rename: Rename | None = None) -> tuple[TransferWorld, dict[int, State]]:
    """Return experts in one tensor, gate over up, on ``(ep, etp)``."""
    cuts = {"ep": Shard(0), "etp": FusedShard(1, 2)}
    key = "model.experts.gate_up"
    made = world(
        {"ep": 2, "etp": 2},
        {"experts.gate_up": cuts},  # with the rename the rules see another prefix
        meta(**{key: tuple(GATE_UP.shape)}),
        rename=lambda mesh: rename,
        ranks=range(first, first + 4),
    )
    states = {
        first + rank: {key: cut(GATE_UP, list(cuts.values()), (2, 2), divmod(rank, 2))}
        for rank in range(4)
    }
    return made, states


def engine(first: int) -> tuple[TransferWorld, dict[int, State]]:
    """Return two tensors per expert, numbered locally, half of the experts on each rank."""
    tensors = {
        f"engine.experts.{expert}.{name}.weight": part(GATE_UP[expert], which, 0, (1, 1))
        for expert in range(EXPERTS)
        for which, name in enumerate(("gate", "up"))
    }
    ids = ([0, 2], [3, 1])

    def rename(mesh: MeshCoordinate) -> Renumber:
        return Renumber("experts.{}", ids[mesh.get_coordinate()[0]], total=EXPERTS)

    shapes = meta(**{key: tuple(tensor.shape) for key, tensor in tensors.items()})
    made = world({"ep": 2}, {}, shapes, rename=rename, ranks=[first, first + 1])
    states = {
        first + rank: {key: t for key, t in tensors.items() if int(key.split(".")[2]) in ids[rank]}
        for rank in (0, 1)
    }
    return made, states


def test_a_trainer_s_stack_of_gate_and_up_for_an_engine_s_experts() -> None:
    (sender, sources), (receiver, targets) = trainer(0), engine(4)
    filled(transfer_plan(sender, receiver, rename=NAMES), sources, targets)


def test_and_back_by_the_rename_of_the_trainer() -> None:
    (sender, sources), (receiver, targets) = engine(4), trainer(0, NAMES)
    filled(transfer_plan(sender, receiver), sources, targets)


def test_a_target_without_shapes_gets_what_the_renames_make() -> None:
    (sender, sources), (receiver, targets) = trainer(0), engine(4)
    unknown = TransferWorld(receiver.axes, receiver.rules, ranks=receiver.ranks)
    filled(transfer_plan(sender, unknown, rename=NAMES), sources, targets)


def test_fsdp_cuts_inside_of_the_rules() -> None:
    sender = world({"fsdp": 2, "tp": 2}, {"w": {"tp": Shard(0)}}, meta(w=(9, 2)), fsdp=["fsdp"])
    whole = numbered((9, 2))
    sources = {
        rank: {"w": cut(whole, [Shard(0), Shard(0)], (2, 2), (rank % 2, rank // 2))}
        for rank in range(4)
    }
    receiver = world({"tp": 1}, {}, ranks=[9])
    filled(transfer_plan(sender, receiver), sources, {9: {"w": whole}})


def test_keys_that_a_rank_is_said_to_lack_come_from_the_others() -> None:
    """Two stages: the embedding is on the first, the head on the second."""

    def absent(mesh: MeshCoordinate) -> list[str]:
        return ["head"] if mesh.get_coordinate()[0] == 0 else ["embed"]

    # In this order replicas that take turns would send each from the other stage.
    sender = world({"pp": 2}, {}, meta(head=(3, 2), embed=(4, 2)), absent=absent)
    receiver = world({"tp": 1}, {}, ranks=[9])
    embed, head = numbered((4, 2)), numbered((3, 2)) + 8
    plan = transfer_plan(sender, receiver)
    filled(plan, {0: {"embed": embed}, 1: {"head": head}}, {9: {"embed": embed, "head": head}})


def test_a_replica_on_the_same_host_sends() -> None:
    tensors = meta(**{f"layers.{index}.w": (8, 4) for index in range(12)})
    sender = world({"dp": 4}, {}, tensors, hosts=["a", "a", "b", "b"])
    receiver = world({"dp": 3}, {}, ranks=[4, 5, 6], hosts=["b", "a", "c"])
    plan = transfer_plan(sender, receiver)
    senders = {
        rank: Counter(one.source_rank for one in plan.part(rank).receives) for rank in (4, 5, 6)
    }
    assert senders == {
        4: {2: 6, 3: 6},
        5: {0: 6, 1: 6},
        6: {0: 3, 1: 3, 2: 3, 3: 3},
    }


def test_a_rank_of_both_worlds_copies_what_it_has() -> None:
    sender = world({"tp": 2}, {"w": {"tp": Shard(0)}}, meta(w=(4, 4)))
    receiver = world({"dp": 2}, {}, meta(w=(4, 4)))
    plan = transfer_plan(sender, receiver)
    mine = plan.part(1)
    assert [one.source_slices for one in mine.copies] == [(slice(0, 2), slice(0, 4))]
    assert [one.source_rank for one in mine.receives] == [0]
    pairs = plan.pairs()
    table = zip(*[column.tolist() for column in pairs], strict=True)
    assert list(table) == [(0, 0, 32, 1), (0, 1, 32, 1), (1, 0, 32, 1), (1, 1, 32, 1)]


def test_what_the_target_does_not_need_is_unused() -> None:
    sender = world({"tp": 2}, {}, meta(a=(2,), b=(2,)))
    receiver = world({"tp": 1}, {}, meta(b=(2,)), ranks=[2])
    assert transfer_plan(sender, receiver).unused == ["a"]


def refusal(sender: TransferWorld, receiver: TransferWorld, **options: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        transfer_plan(sender, receiver, **options)
    return str(caught.value)


def test_a_tensor_that_the_source_lacks_is_refused() -> None:
    text = refusal(world({"tp": 2}, {}, meta(a=(2,))), world({"tp": 1}, {}, meta(b=(2,))))
    assert text.splitlines()[1:] == [
        "b: the source has no such tensor",
        "    way out:     rename= where the names differ; tensors= without it",
    ]


def test_another_shape_is_refused() -> None:
    text = refusal(world({"tp": 2}, {}, meta(a=(2,))), world({"tp": 1}, {}, meta(a=(3,))))
    assert "a: the source has a in shape (2,), the target in shape (3,)" in text


def test_experts_that_no_source_rank_holds_are_refused() -> None:
    tensors = meta(**{f"experts.{index}.w": (3,) for index in range(3)})
    ids = lambda mesh: Renumber("experts.{}", [mesh.get_coordinate()[0]], total=3)  # noqa: E731
    text = refusal(world({"ep": 2}, {}, tensors, rename=ids), world({"tp": 2}, {}, tensors))
    assert text.splitlines()[1:] == [
        "experts.2.w: no source rank holds all of it",
        "    rank 0 receives 0 of 3 elements; 2 ranks lack some",
        "    nobody has:  [:]",
    ]


def test_boxes_that_share_elements_are_refused() -> None:
    def uneven(mesh: MeshCoordinate) -> dict[str, CheckpointPlacement | None]:
        cut_on_one = mesh.get_coordinate()[0] == 1
        return {"w": CheckpointPlacement(mesh, {"tp": Shard(0)}) if cut_on_one else None}

    sender = TransferWorld({"tp": 2}, uneven, meta(w=(4,)))
    text = refusal(sender, world({"tp": 1}, {}))
    assert "w: source ranks hold different boxes of it that share elements" in text
    assert "boxes:       [:], [2:4]" in text


def test_a_function_as_rename_of_a_rank_is_refused() -> None:
    sender = world({"tp": 1}, {}, meta(w=(4,)), rename=lambda mesh: str.upper)
    assert "which keys the rank holds does not follow" in refusal(sender, world({"tp": 1}, {}))


def test_one_key_for_two_tensors_is_refused() -> None:
    sender = world({"tp": 1}, {}, meta(a=(4,), b=(4,)))
    text = refusal(sender, world({"tp": 1}, {}), rename=lambda key: "c")
    assert "c: the source makes it, or a row of it, more than once: of a, b" in text


def test_a_source_needs_shapes() -> None:
    assert "needs tensors=" in refusal(world({"tp": 1}, {}), world({"tp": 1}, {}))


@pytest.mark.parametrize(
    "options", [{"ranks": [1]}, {"ranks": [1, 1]}, {"hosts": ["a"]}, {"hosts": 0}]
)
def test_ranks_and_hosts_must_be_those_of_the_mesh(options: dict[str, Any]) -> None:
    with pytest.raises(PlacementError):
        world({"tp": 2}, {}, **options)


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


def test_sizes_that_64_bits_do_not_hold_are_refused() -> None:
    with pytest.raises(PlacementError, match="has more than 9,223,372,036,854,775,807 bytes"):
        transfer_plan(world({"tp": 1}, {}, {"w": Sized(2**40, 2**30)}), world({"tp": 1}, {}))


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


def test_an_unstacked_key_beyond_the_rows_is_named() -> None:
    sender = world({"tp": 1}, {}, meta(**{"e.w": (2, 3)}))
    receiver = world({"tp": 1}, {}, meta(**{"e.0.w": (3,), "e.2.w": (3,)}))
    with pytest.raises(PlacementError, match=r"e\.2\.w: the source has no such tensor"):
        transfer_plan(sender, receiver, rename=Unstack("e.{}.w"))
