"""What shapes cannot show is compared with the record of the save, where a rule or a rename
declares it; a load into another topology is quiet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds, load, refused, same_bits, save
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementRules,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.testing import FakeDTensor, World

TWO, FOUR = World(2), World(4)


def rules_of(world: World, axes: dict[str, int], key: str, **placements: Any) -> Any:
    def on(rank: int) -> PlacementRules:
        mesh = world.mesh(rank, **axes)
        return PlacementRules({key: CheckpointPlacement(mesh, placements)})

    return on


ROWS = ((0, 2), (1, 3))


def listed(rank: int) -> PlacementRules:
    placement = {"ep": IndexShard(0, ROWS[rank])}
    mesh = TWO.mesh(rank, ep=2)
    return PlacementRules({"w": CheckpointPlacement(mesh, placement, global_shape=(4, 3))})


def test_m74_axes_that_are_swapped_on_a_square_tensor_are_refused(tmp_path: Path) -> None:
    axes, whole = {"ep": 2, "tp": 2}, arange(4, 4)

    def part(rank: int) -> torch.Tensor:
        return whole.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].clone()

    by = rules_of(FOUR, axes, "w", ep=Shard(0), tp=Shard(1))
    save(FOUR, tmp_path, lambda rank: {"w": part(rank)}, by)
    swapped = rules_of(FOUR, axes, "w", ep=Shard(1), tp=Shard(0))
    with refused() as refusal:
        load(FOUR, tmp_path, lambda rank: {"w": torch.zeros(2, 2)}, swapped)
    refusal.says("Shard(0) over 'ep'", "Shard(1) over 'ep'")
    waive = {"w": "the model lays out w in another way"}
    load(FOUR, tmp_path, lambda rank: {"w": torch.zeros(2, 2)}, swapped, waive=waive)


def test_m74_listed_rows_that_a_load_declares_as_a_plain_cut_are_refused(tmp_path: Path) -> None:
    whole = arange(4, 3)
    save(TWO, tmp_path, lambda rank: {"w": whole[list(ROWS[rank])]}, listed)
    with refused() as refusal:
        load(
            TWO,
            tmp_path,
            lambda rank: {"w": torch.zeros(2, 3)},
            rules_of(TWO, {"ep": 2}, "w", ep=Shard(0)),
        )
    refusal.says("rows of dim 0", "Shard(0) over 'ep'")


def test_m74_listed_rows_that_are_unstacked_and_loaded_by_a_plain_cut_are_refused(
    tmp_path: Path,
) -> None:
    whole, rename = arange(4, 3), Unstack("w.{}")
    save(TWO, tmp_path, lambda rank: {"w": whole[list(ROWS[rank])]}, listed, rename=rename)
    plain = rules_of(TWO, {"ep": 2}, "w", ep=Shard(0))
    states = [{"w": torch.zeros(2, 3)} for _ in range(2)]
    with refused() as refusal:
        load(TWO, tmp_path, states.__getitem__, plain, rename=rename)
    refusal.says("w.0-3", "one tensor per row, each rank its own", "Shard(dim of the rows)")
    assert not any(state["w"].any() for state in states)
    load(TWO, tmp_path, states.__getitem__, listed, rename=rename)
    assert all(same_bits(states[at]["w"], whole[list(ROWS[at])]) for at in range(2))
    waive = {"w.*": "this model has its experts in order"}
    load(TWO, tmp_path, states.__getitem__, plain, rename=rename, waive=waive)
    assert same_bits(states[1]["w"], whole[2:])


NAMES = ["gate", "up"]
OTHERWISE: dict[str, Any] = {
    "groups": Split("w", NAMES),
    "names": Split("w", NAMES[::-1], groups=2),
}


@pytest.mark.parametrize("rename", OTHERWISE.values(), ids=OTHERWISE)
def test_m74_a_tensor_that_a_load_splits_otherwise_is_refused(tmp_path: Path, rename: Any) -> None:
    saved = Split("w", NAMES, groups=2)
    save(TWO, tmp_path, lambda rank: {"w": arange(8, 3)}, rename=saved)
    with refused():
        load(TWO, tmp_path, lambda rank: {"w": torch.zeros(8, 3)}, rename=rename)


def test_m74_a_stack_along_another_dim_is_refused(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {f"experts.{i}": torch.full((2,), value * i) for i in range(2)}

    save(TWO, tmp_path, lambda rank: state(1), rename=Stack("experts.{}", 2))
    with refused():
        load(TWO, tmp_path, lambda rank: state(0), rename=Stack("experts.{}", 2, dim=1))


def test_m75_unstacked_experts_over_the_wrong_axis_are_refused(tmp_path: Path) -> None:
    axes, whole = {"ep": 2, "edp": 2}, arange(4, 3)
    rename = Unstack("experts.{}")
    save(
        FOUR,
        tmp_path,
        lambda rank: {"experts": whole.chunk(2)[rank // 2].clone()},
        rules_of(FOUR, axes, "experts", ep=Shard(0)),
        rename=rename,
    )
    with refused():
        load(
            FOUR,
            tmp_path,
            lambda rank: {"experts": torch.zeros(2, 3)},
            rules_of(FOUR, axes, "experts", edp=Shard(0)),
            rename=rename,
        )


EP_EDP = {"ep": 2, "edp": 2}


def rows_at(axis: str) -> Any:
    """Return rules that list the rows by a rank's position along an axis."""

    def on(rank: int) -> PlacementRules:
        mesh = FOUR.mesh(rank, **EP_EDP)
        at = rank // 2 if axis == "ep" else rank % 2
        placement = CheckpointPlacement(mesh, {axis: IndexShard(0, ROWS[at])}, global_shape=(4, 3))
        return PlacementRules({"w": placement})

    return on


def cut_over(placement: Any) -> Any:
    return lambda axis: rules_of(FOUR, EP_EDP, "w", **{axis: placement})


KINDS = {"plain": cut_over(Shard(0)), "fused": cut_over(FusedShard(0, 2)), "listed": rows_at}


@pytest.mark.parametrize("by", KINDS.values(), ids=KINDS)
def test_m75_a_tensor_over_edp_that_was_saved_over_ep_is_refused(tmp_path: Path, by: Any) -> None:
    parts = {
        "plain": arange(4, 3).chunk(2),
        "fused": (arange(4, 3)[[0, 2]], arange(4, 3)[[1, 3]]),
        "listed": [arange(4, 3)[list(rows)] for rows in ROWS],
    }
    (kind,) = [name for name, one in KINDS.items() if one is by]
    save(FOUR, tmp_path, lambda rank: {"w": parts[kind][rank // 2].clone()}, by("ep"))
    blank = {"w": torch.zeros(2, 3)}
    with refused() as refusal:
        load(FOUR, tmp_path, lambda rank: blank, by("edp"))
    refusal.says("w: this load cuts it by 'ep' and 'edp' in another way than the save did")
    refusal.says("or:          the save declared it wrongly")
    load(FOUR, tmp_path, lambda rank: blank, by("edp"), waive={"w": "experts are over edp here"})
    states = [{"w": torch.zeros(2, 3)} for _ in range(4)]
    load(FOUR, tmp_path, states.__getitem__, by("ep"))
    assert all(same_bits(state["w"], parts[kind][at // 2]) for at, state in enumerate(states))


OVER: dict[str, tuple[dict[str, int], str]] = {
    "tp": ({"tp": 4}, "tp"),
    "another number of ranks": ({"ep": 2, "edp": 2}, "edp"),
    "other names": ({"dp": 1, "expert": 4}, "expert"),
    "ranks of both": ({"edp": 4, "ep": 1}, "edp"),
}


@pytest.mark.parametrize(("axes", "axis"), OVER.values(), ids=OVER)
def test_a_load_over_other_axes_than_those_of_the_save_is_quiet(
    tmp_path: Path, axes: dict[str, int], axis: str
) -> None:
    whole = arange(4, 3)
    save(FOUR, tmp_path, lambda r: {"w": whole[[r]]}, rules_of(FOUR, {"ep": 4}, "w", ep=Shard(0)))
    size = axes[axis]
    states = [{"w": torch.zeros(4 // size, 3)} for _ in range(4)]
    load(FOUR, tmp_path, states.__getitem__, rules_of(FOUR, axes, "w", **{axis: Shard(0)}))
    for rank, state in enumerate(states):
        mesh = FOUR.mesh(rank, **axes)
        assert same_bits(state["w"], whole.chunk(size)[mesh[axis].get_coordinate()[0]])


def test_a_load_by_fsdp_over_another_axis_than_that_of_the_save_is_quiet(tmp_path: Path) -> None:
    """The DTensor itself says that edp cuts it; the rule names an axis that cuts nothing."""
    whole = arange(4, 3)
    parts = whole.chunk(2)
    save(FOUR, tmp_path, lambda r: {"w": parts[r // 2]}, rules_of(FOUR, EP_EDP, "w", ep=Shard(0)))

    def state(rank: int) -> dict[str, Any]:
        mesh = FOUR.mesh(rank, **EP_EDP)["edp"]
        return {"w": FakeDTensor(torch.zeros(2, 3), mesh, [Shard(0)], (4, 3))}

    loaded, _ = load(FOUR, tmp_path, state, rules_of(FOUR, EP_EDP, "w", ep=Replicate()))
    assert all(same_bits(one["w"].to_local(), parts[at % 2]) for at, one in enumerate(loaded))


def test_dtensors_that_swap_their_dims_are_quiet(tmp_path: Path) -> None:
    """A DTensor is what it says; only a rule may be wrong."""
    whole = arange(4, 4)

    def state(rank: int, *dims: int) -> dict[str, Any]:
        mesh = FOUR.mesh(rank, ep=2, tp=2)
        return {"w": FakeDTensor.distribute(whole, mesh, [Shard(dim) for dim in dims])}

    save(FOUR, tmp_path, lambda rank: state(rank, 0, 1))
    loaded, _ = load(FOUR, tmp_path, lambda rank: state(rank, 1, 0))
    assert same_bits(loaded[1]["w"].to_local(), whole[2:, :2])


def test_listed_rows_are_loaded_plainly_by_another_number_of_ranks(tmp_path: Path) -> None:
    whole = arange(4, 3)
    save(TWO, tmp_path / "listed", lambda rank: {"w": whole[list(ROWS[rank])]}, listed)
    loaded, _ = load(
        FOUR,
        tmp_path / "listed",
        lambda rank: {"w": torch.zeros(1, 3)},
        rules_of(FOUR, {"ep": 4}, "w", ep=Shard(0)),
    )
    assert same_bits(loaded[2]["w"], whole[2:3])
    # A plain cut is loaded as listed rows: an inference engine that places experts as it likes.
    plain = rules_of(TWO, {"ep": 2}, "w", ep=Shard(0))
    save(TWO, tmp_path / "plain", lambda rank: {"w": whole.chunk(2)[rank].clone()}, plain)
    loaded, _ = load(TWO, tmp_path / "plain", lambda rank: {"w": torch.zeros(2, 3)}, listed)
    assert same_bits(loaded[1]["w"], whole[[1, 3]])


def test_m74_rows_of_another_dim_are_refused(tmp_path: Path) -> None:
    save(TWO, tmp_path, lambda rank: {"experts": arange(3, 3)}, rename=Unstack("experts.{}"))
    other = Unstack("experts.{}", dim=1)
    with refused() as refusal:
        load(TWO, tmp_path, lambda rank: {"experts": torch.zeros(3, 3)}, rename=other)
    refusal.says("another Unstack", "Unstack('experts.{}', dim=1)")
    state = {"experts": torch.zeros(3, 3)}
    load(World(1), tmp_path, lambda rank: state, rename=other, waive={"experts.*": "transposed"})
    assert torch.equal(state["experts"], arange(3, 3).T)


FUSED = arange(8, 3)  # gate and up, of (4, 3) each
GATE_UP = Split("w", NAMES)


def fused_part(rank: int) -> torch.Tensor:
    """Return what a tp rank of two holds of gate and of up, joined."""
    return torch.cat([part.chunk(2)[rank] for part in FUSED.chunk(2)])


def by_tp(key: str, placement: Any) -> Any:
    return rules_of(TWO, {"tp": 2}, key, tp=placement)


def blank_of(*names: str) -> Any:
    return lambda rank: {name: torch.zeros(8 // len(names) // 2, 3) for name in names}


def test_parts_of_a_fused_tensor_that_a_load_cuts_plainly_are_refused(tmp_path: Path) -> None:
    """As w itself would be: shapes cannot show it, and every element is asked for once."""
    fused, plain = by_tp("w", FusedShard(0, 2)), by_tp("w", Shard(0))
    save(TWO, tmp_path / "fused", lambda rank: {"w": fused_part(rank)}, fused, rename=GATE_UP)
    save(TWO, tmp_path / "plain", lambda r: {"w": FUSED.chunk(2)[r]}, plain, rename=GATE_UP)
    assert_holds(tmp_path / "fused", dict(zip(NAMES, FUSED.chunk(2), strict=True)))
    with refused() as refusal:
        load(TWO, tmp_path / "fused", blank_of("w"), plain, rename=GATE_UP)
    refusal.says("FusedShard(0, 2) of the fused tensor over 'tp'", "Shard(0) of the fused tensor")
    with refused() as refusal:
        load(TWO, tmp_path / "plain", blank_of("w"), fused, rename=GATE_UP)
    with refused() as refusal:  # a DTensor that lacks its rule
        dtensors = FakeDTensor.distribute
        load(
            TWO,
            tmp_path / "fused",
            lambda rank: {"w": dtensors(torch.zeros(8, 3), TWO.mesh(rank, tp=2), [Shard(0)])},
            rename=GATE_UP,
        )
    loaded, _ = load(TWO, tmp_path / "fused", blank_of("w"), fused, rename=GATE_UP)
    assert [same_bits(loaded[rank]["w"], fused_part(rank)) for rank in range(2)] == [True] * 2


def test_parts_are_compared_with_tensors_that_were_never_fused(tmp_path: Path) -> None:
    fused, each = by_tp("w", FusedShard(0, (4, 4))), rules_of(TWO, {"tp": 2}, "*", tp=Shard(0))
    parts = dict(zip(NAMES, FUSED.chunk(2), strict=True))
    save(TWO, tmp_path, lambda rank: {n: t.chunk(2)[rank] for n, t in parts.items()}, each)
    loaded, _ = load(TWO, tmp_path, blank_of("w"), fused, rename=GATE_UP)
    assert same_bits(loaded[1]["w"], fused_part(1))
    with refused() as refusal:
        load(TWO, tmp_path, blank_of("w"), by_tp("w", Shard(0)), rename=GATE_UP)
    refusal.says("Shard(0) of the fused tensor over 'tp' of size 2")
    waive = {"gate": "tp holds whole parts", "up": "tp holds whole parts"}
    load(TWO, tmp_path, blank_of("w"), by_tp("w", Shard(0)), rename=GATE_UP, waive=waive)


def test_fsdp_of_a_fused_tensor_and_of_its_parts_are_quiet(tmp_path: Path) -> None:
    """FSDP cuts what there is: the fused tensor plainly, and each part plainly where it is one."""
    meshes = [TWO.mesh(rank, fsdp=2) for rank in range(2)]
    distribute = FakeDTensor.distribute

    def parts(rank: int, whole: torch.Tensor) -> dict[str, Any]:
        both = zip(NAMES, whole.chunk(2), strict=True)
        return {name: distribute(part, meshes[rank], [Shard(0)]) for name, part in both}

    def joined(rank: int, whole: torch.Tensor) -> dict[str, Any]:
        return {"w": distribute(whole, meshes[rank], [Shard(0)])}

    save(TWO, tmp_path / "joined", lambda rank: joined(rank, FUSED), rename=GATE_UP)
    save(TWO, tmp_path / "parts", lambda rank: parts(rank, FUSED))
    zeros = torch.zeros(8, 3)
    for directory in ("joined", "parts"):
        path = tmp_path / directory
        loaded, _ = load(TWO, path, lambda rank: joined(rank, zeros.clone()), rename=GATE_UP)
        assert same_bits(loaded[1]["w"].to_local(), FUSED[4:])
        loaded, _ = load(TWO, path, lambda rank: parts(rank, zeros.clone()))
        assert same_bits(loaded[1]["up"].to_local(), FUSED[6:])


def test_groups_of_fused_parts_that_an_axis_leaves_whole_are_cut_plainly(tmp_path: Path) -> None:
    """Megatron's Q|K|V: tp holds whole query groups, and so a plain part of each of the three."""
    whole, names = arange(16, 2), ["q", "k", "v"]  # two groups of 4 + 2 + 2 rows
    groups = [group.split([4, 2, 2]) for group in whole.chunk(2)]
    parts = {n: torch.cat([group[i] for group in groups]) for i, n in enumerate(names)}
    rename = Split("w", names, sizes=(2, 1, 1), groups=2)
    plain, each = by_tp("w", Shard(0)), rules_of(TWO, {"tp": 2}, "*", tp=Shard(0))
    save(TWO, tmp_path / "w", lambda rank: {"w": whole.chunk(2)[rank]}, plain, rename=rename)
    assert_holds(tmp_path / "w", parts)

    def blank(rank: int) -> dict[str, Any]:
        return {name: torch.zeros(len(part) // 2, 2) for name, part in parts.items()}

    loaded, _ = load(TWO, tmp_path / "w", blank, each)
    assert same_bits(loaded[1]["q"], parts["q"][4:])
    sized = by_tp("w", FusedShard(0, (4, 2, 2, 4, 2, 2)))
    with refused():
        load(TWO, tmp_path / "w", lambda rank: {"w": torch.zeros(8, 2)}, sized, rename=rename)


STACKS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "rows cut plainly": ((2, 8), {"tp": FusedShard(1, 2)}, {"tp": Shard(1)}),
    "rows of a fused dim": ((4, 4), {"tp": FusedShard(0, 2)}, {"tp": Shard(0)}),
    "rows of a strided dim": ((4, 4), {"tp": _StridedShard(0, split_factor=2)}, {"tp": Shard(0)}),
}


@pytest.mark.parametrize(("shape", "saved", "loaded"), STACKS.values(), ids=STACKS)
def test_rows_that_a_load_cuts_otherwise_are_refused(
    tmp_path: Path, shape: tuple[int, ...], saved: Any, loaded: Any
) -> None:
    whole, rename = arange(*shape), Unstack("w.{}")
    one, other = (rules_of(TWO, {"tp": 2}, "w", **each) for each in (saved, loaded))
    dim = saved["tp"].dim

    def part(rank: int) -> torch.Tensor:
        return torch.cat([half.chunk(2, dim)[rank] for half in whole.chunk(2, dim)], dim)

    save(TWO, tmp_path, lambda rank: {"w": part(rank)}, one, rename=rename)
    assert_holds(tmp_path, {f"w.{i}": row for i, row in enumerate(whole)})
    again, _ = load(TWO, tmp_path, lambda r: {"w": torch.zeros_like(part(r))}, one, rename=rename)
    assert all(same_bits(again[rank]["w"], part(rank)) for rank in range(2))
    with refused() as refusal:
        load(TWO, tmp_path, lambda r: {"w": torch.zeros_like(part(r))}, other, rename=rename)
    refusal.says("'tp'", "another way than the save")
