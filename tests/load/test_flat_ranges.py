"""``FlatShard``: ranges of the flattened tensor, saved as at most ``2n - 1`` boxes without a copy,
loaded by and from any other cut, and refused with the numbers where they do not fit.

Each rank has what ``whole.reshape(-1).split(sizes)`` gives; torch's default planner reads the files
back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_holds, assert_same, read_whole, refused, warned
from torch.distributed.tensor import Replicate, Shard

from dcp_placements import (
    CheckpointPlacement,
    FlatShard,
    FusedShard,
    IndexShard,
    PlacementError,
    Placements,
    RaggedShard,
    Split,
    Stack,
    Unstack,
    check,
)
from dcp_placements.declaration import DeclaredWorld
from dcp_placements.offline import export_safetensors, rehearse, reshard
from dcp_placements.testing import FakeDTensor, FakeMesh
from tests.load.sides import Held, Side, at, dtensor, parts_of, rows

WHOLE = arange(6, 4)
SIZES = (5, 13, 0, 6)
SHAPE = {"global_shape": (6, 4)}
DP, TP_DP, EP_DP = {"dp": 4}, {"tp": 2, "dp": 4}, {"ep": 2, "dp": 4}


def ranges(
    sizes: tuple[int, ...] = SIZES, of: Callable[[FakeMesh], torch.Tensor] = lambda mesh: WHOLE
) -> Held:
    """Return what each position on dp has of the flattened part that other axes leave."""
    return lambda mesh: {"w": of(mesh).reshape(-1).split(sizes)[at(mesh, "dp")].clone()}


def columns(mesh: FakeMesh) -> torch.Tensor:
    return WHOLE.chunk(2, 1)[at(mesh, "tp")]


def gate_and_up(mesh: FakeMesh) -> torch.Tensor:
    return torch.cat([half.chunk(2, 1)[at(mesh, "tp")] for half in WHOLE.chunk(2, 1)], 1)


def uneven(mesh: FakeMesh) -> torch.Tensor:
    return WHOLE.split([4, 2])[at(mesh, "ep")]


def listed(mesh: FakeMesh) -> torch.Tensor:
    return WHOLE[[4, 0, 1] if at(mesh, "ep") else [5, 3, 2]]


def of_ep(of_first: Any, of_second: Any) -> Callable[[FakeMesh], Any]:
    return lambda mesh: (of_first, of_second)[at(mesh, "ep")]


def padded(mesh: FakeMesh) -> torch.Tensor:
    around = torch.zeros(8, 5)
    around[:6, :4] = WHOLE
    return around.chunk(2)[at(mesh, "tp")]


FLAT = Side(DP, ranges(), {"dp": FlatShard(SIZES)}, shapes=SHAPE)
ROWS = Side({"dp": 3}, rows(WHOLE, "dp"), {"dp": Shard(0)})
COLUMNS = Side({"tp": 2}, rows(WHOLE, "tp", dim=1), {"tp": Shard(1)})
INNER = (5, 0, 3, 4)
ANY = {
    "flat": FLAT,
    "rows": ROWS,
    "columns": COLUMNS,
    "alone": Side({"dp": 1}, lambda mesh: {"w": WHOLE.view(-1)}, {"dp": FlatShard((24,))}),
    "owned": replace(FLAT, held=ranges((0, 0, 24, 0)), placements={"dp": FlatShard((0, 0, 24, 0))}),
    "of columns": Side(
        TP_DP, ranges(INNER, columns), {"tp": Shard(1), "dp": FlatShard(INNER)}, shapes=SHAPE
    ),
    "of gate and up": Side(
        TP_DP,
        ranges(INNER, gate_and_up),
        {"tp": FusedShard(1, 2), "dp": FlatShard(INNER)},
        shapes=SHAPE,
    ),
    "of listed rows": Side(
        EP_DP,
        ranges(INNER, listed),
        lambda mesh: {
            "ep": of_ep(IndexShard(0, (5, 3, 2)), IndexShard(0, (4, 0, 1)))(mesh),
            "dp": FlatShard(INNER),
        },
        shapes=SHAPE,
    ),
    "of uneven rows": Side(
        EP_DP,
        lambda mesh: ranges(of_ep((1, 8, 3, 4), (0, 0, 1, 7))(mesh), uneven)(mesh),
        lambda mesh: {
            "ep": RaggedShard(0, (4, 2)),
            "dp": FlatShard(of_ep((1, 8, 3, 4), (0, 0, 1, 7))(mesh)),
        },
        shapes=SHAPE,
    ),
    "of padded rows": Side(
        TP_DP,
        ranges((7, 2, 0, 11), padded),
        {"tp": Shard(0), "dp": FlatShard((7, 2, 0, 11))},
        shapes={**SHAPE, "padded_shape": (8, 5)},
    ),
    "beside replicas": Side(
        {"pp": 2, "dp": 4, "cp": 2}, ranges(), {"dp": FlatShard(SIZES)}, shapes=SHAPE
    ),
    "of a DTensor of one dim": Side(
        DP, dtensor(ranges(), WHOLE.view(-1), Shard(0)), {"dp": FlatShard(SIZES)}, shapes=SHAPE
    ),
    "of a replicated DTensor": Side(
        {"cp": 2, "dp": 4},
        dtensor(ranges(), torch.empty(0), Replicate(), over="cp"),
        {"dp": FlatShard(SIZES)},
        shapes=SHAPE,
    ),
}
ANY["alone"] = replace(ANY["alone"], shapes=SHAPE)
PADDED = ANY["of padded rows"]


@pytest.mark.parametrize("name", ANY)
def test_m143_ranges_of_any_sizes_are_saved_and_loaded_by_any_other_cut(
    tmp_path: Path, name: str
) -> None:
    side = ANY[name]
    side.saves(tmp_path / "saved")
    assert_holds(tmp_path / "saved", {"w": WHOLE})
    others = ANY if name == "flat" else {name: side, "flat": FLAT, "rows": ROWS}
    for other in others.values():
        if other is not PADDED:
            other.loads_right(tmp_path / "saved")
    (tmp_path / "stock").mkdir()
    dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "stock", no_dist=True)
    if side is not PADDED:
        side.loads_right(tmp_path / "stock")


def test_padding_inside_a_range_is_left_as_it_is(tmp_path: Path) -> None:
    PADDED.saves(tmp_path)
    states = [{"w": torch.full_like(PADDED.state(rank)["w"], -1)} for rank in range(8)]
    PADDED.loads(tmp_path, states)
    for rank, state in enumerate(states):
        held = PADDED.state(rank)["w"]
        around = torch.ones(8, 5)
        around[:6, :4] = 0
        mesh = PADDED.world.mesh(rank, **TP_DP)
        pads = around.chunk(2)[at(mesh, "tp")].reshape(-1).split((7, 2, 0, 11))[at(mesh, "dp")]
        assert_same(state["w"], torch.where(pads == 1, -1, held))


def test_padding_of_a_range_that_is_not_constant_is_warned_of(tmp_path: Path) -> None:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        around = torch.arange(40.0).reshape(8, 5)
        around[:6, :4] = WHOLE
        return ranges((7, 2, 0, 11), lambda mesh: around.chunk(2)[at(mesh, "tp")])(mesh)

    side = replace(PADDED, held=held)
    with warned() as texts:
        side.world.save(
            tmp_path, side.state, lambda rank: Placements(side.rules(rank)).save_planner()
        )
    assert "[6:8] of dim 0 is padding by the rule, and is not constant" in texts[0]


@pytest.mark.parametrize(
    ("shape", "sizes", "boxes"),
    [
        ((6, 4), (5, 13, 0, 6), [[(1, 4), (1, 1)], [(1, 3), (2, 4), (1, 2)], [], [(1, 2), (1, 4)]]),
        ((2, 3, 4), (6, 11, 7), [[(1, 1, 4), (1, 1, 2)], None, [(1, 1, 3), (1, 1, 4)]]),
        ((24,), (5, 13, 6), [[(5,)], [(13,)], [(6,)]]),
        ((1, 24), (24, 0), [[(1, 24)], []]),
        ((), (0, 1), [[], [()]]),
    ],
)
def test_m143_a_range_is_few_boxes_each_a_view(
    shape: tuple[int, ...], sizes: tuple[int, ...], boxes: list[Any]
) -> None:
    from dcp_placements.bind.rule_and_dtensor import Placed, SharedPlaces
    from dcp_placements.rules.mesh_axes import MeshCoordinate

    whole = arange(*shape) if shape else torch.tensor(3.0)
    for position, size in enumerate(sizes):
        mesh = MeshCoordinate(("dp",), (len(sizes),), (position,))
        rule = CheckpointPlacement(mesh, {"dp": FlatShard(sizes)}, global_shape=shape)
        local = whole.reshape(-1).split(sizes)[position].clone()
        place = SharedPlaces().bind((local, None, (), local.shape), rule)
        placed = Placed("w", local, place)
        views = [placed.view(chunk) for chunk in place.chunks]
        assert len(views) <= max(2 * len(shape) - 1, 1)
        if boxes[position] is not None:
            assert [chunk.sizes for chunk in place.chunks] == boxes[position]
        starts = [view.storage_offset() for view in views]
        assert starts == sorted(starts)
        assert sum(view.numel() for view in views) == size
        for view, chunk in zip(views, place.chunks, strict=True):
            assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            ends = map(sum, zip(*chunk.box, strict=True))
            of_whole = whole[tuple(map(slice, chunk.offsets, ends))]
            assert torch.equal(view, of_whole)


STATE = {"exp_avg": arange(6, 4, start=100), "exp_avg_sq": arange(6, 4, start=200)}


def zero_1(mesh: FakeMesh) -> dict[str, Any]:
    """Return a whole parameter that tp cuts, and its moments in ranges."""
    own = {
        key: value.chunk(2, 1)[at(mesh, "tp")].reshape(-1).split(INNER)[at(mesh, "dp")].clone()
        for key, value in STATE.items()
    }
    group = [{"params": ["w"], "lr": 0.1}]
    optim = {"state": {"w": {**own, "step": torch.tensor(3.0)}}, "param_groups": group}
    return {"model": {"w": columns(mesh).clone()}, "optim": optim}


def zero_1_rules(mesh: Any) -> Any:
    part = {"tp": Shard(1)}
    moments = CheckpointPlacement(mesh, {**part, "dp": FlatShard(INNER)}, **SHAPE)
    return {"state.w.exp_avg*": moments, "w": CheckpointPlacement(mesh, part)}


def zero_1_side(held: Held = zero_1, rules: Any = zero_1_rules) -> Any:
    side = Side(TP_DP, held)

    class Ruled(Side):
        def rules(self, rank: int) -> Any:
            return Placements(rules(self.world.mesh(rank, **self.axes))).rules

    return Ruled(**vars(side))


def replicated_state(mesh: FakeMesh) -> dict[str, Any]:
    state = zero_1(mesh)
    state["model"]["w"] = WHOLE.clone()
    state["optim"]["state"]["w"].update({key: value.clone() for key, value in STATE.items()})
    return state


def test_m143_moments_in_ranges_beside_a_parameter_that_is_not(tmp_path: Path) -> None:
    side = zero_1_side()
    side.saves(tmp_path)
    expected = {"model.w": WHOLE, "optim.state.w.step": torch.tensor(3.0)}
    expected |= {f"optim.state.w.{key}": value for key, value in STATE.items()}
    assert_holds(tmp_path, expected)
    side.loads_right(tmp_path)
    zero_1_side(replicated_state, lambda mesh: {}).loads_right(tmp_path)


def test_an_optimizer_alone_and_a_model_of_ranges(tmp_path: Path) -> None:
    def alone(mesh: FakeMesh) -> dict[str, Any]:
        return {"optim": zero_1(mesh)["optim"]}

    def moments(mesh: Any) -> Any:
        return {"exp_avg*": zero_1_rules(mesh)["state.w.exp_avg*"]}

    zero_1_side(alone, moments).saves(tmp_path / "alone")
    zero_1_side(alone, moments).loads_right(tmp_path / "alone")

    def flat(mesh: FakeMesh) -> dict[str, Any]:
        state = zero_1(mesh)
        state["model"]["w"] = ranges(INNER, columns)(mesh)["w"]
        state["optim"]["state"]["w"]["scale"] = torch.tensor([2.0])  # of no element
        return state

    def rules(mesh: Any) -> Any:
        return {"w": zero_1_rules(mesh)["state.w.exp_avg*"]}

    zero_1_side(flat, rules).saves(tmp_path / "flat")
    zero_1_side(flat, rules).loads_right(tmp_path / "flat")
    found = read_whole(tmp_path / "flat")
    assert torch.equal(found["model.w"], WHOLE)
    assert torch.equal(found["optim.state.w.exp_avg"], STATE["exp_avg"])
    assert found["optim.state.w.scale"].tolist() == [2.0]


def declared(sizes: tuple[int, ...]) -> Callable[[Any], Placements]:
    return lambda mesh: Placements(
        {"w": CheckpointPlacement(mesh, {"dp": FlatShard(sizes)}, **SHAPE)}
    )


def test_a_world_is_rehearsed_resharded_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    FLAT.saves(tmp_path / "saved")
    rehearsal = rehearse(tmp_path / "saved", declared((1, 23)), {"dp": 2})
    assert rehearsal.loads, rehearsal
    assert sorted(rank.wanted_nbytes for rank in rehearsal.ranks) == [4, 92]
    with pytest.raises(PlacementError, match=r"2 sizes, \(1, 23\), but axis 'dp' has 3 ranks"):
        rehearse(tmp_path / "saved", declared((1, 23)), {"dp": 3})
    assert not rehearse(tmp_path / "saved", declared((1, 22)), {"dp": 2}).loads
    reshard(tmp_path / "saved", tmp_path / "out", declared((6, 18)), {"dp": 2})
    assert_holds(tmp_path / "out", {"w": WHOLE})
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata["w"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks] == [(1, 4), (1, 2), (1, 2), (4, 4)]
    export_safetensors(tmp_path / "out", tmp_path / "hub")
    assert_same(load_file(tmp_path / "hub" / "model.safetensors"), {"w": WHOLE})
    assert DeclaredWorld({"dp": 2}, declared((6, 18))).placements(1).rules is not None


def test_check_and_the_report_have_ranges(tmp_path: Path) -> None:
    side = ANY["alone"]
    report = check(side.state(0), side.rules(0))
    assert report.shapes == {"'w'": (((24,), (6, 4)),)}
    assert report.keys["w"].shape == (6, 4)


def by_rank(*sizes: tuple[int, ...]) -> Callable[[FakeMesh], dict[str, Any]]:
    return lambda mesh: {"dp": FlatShard(sizes[min(at(mesh, "dp"), len(sizes) - 1)])}


def two_dims(mesh: FakeMesh) -> dict[str, Any]:
    return {"w": WHOLE.split([2, 2, 1, 1])[at(mesh, "dp")].clone()}


def inside_fsdp(mesh: FakeMesh) -> dict[str, Any]:
    part = WHOLE.reshape(-1).split([10, 14])[at(mesh, "dp")]
    return {"w": FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])}


def moments_alone(mesh: FakeMesh) -> dict[str, Any]:
    """Return a whole parameter and the ranges of its moments, of ZeRO-1."""
    moments = {
        key: value.reshape(-1).split(SIZES)[at(mesh, "dp")].clone() for key, value in STATE.items()
    }
    optim = {"state": {"w": moments}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    return {"model": {"w": WHOLE.clone()}, "optim": optim}


UNSAVED: dict[str, tuple[Side, tuple[str, ...]]] = {
    "sizes of one rank differ": (
        replace(FLAT, placements=by_rank((5, 12, 1, 6), SIZES)),
        (
            "the ranks do not agree on the sizes of its shards",
            "FlatShard((5, 12, 1, 6)) over 'dp' of size 4 on rank 0",
            "FlatShard((5, 13, 0, 6)) over 'dp' of size 4 on ranks 1-3",
        ),
    ),
    "a sum below the elements": (
        replace(FLAT, placements={"dp": FlatShard((5, 13, 0, 5))}),
        (
            "the sizes (5, 13, 0, 5) of FlatShard add up to 23, but 24 elements are being divided",
            "those of a (6, 4) tensor",
            "coordinate:  (dp=0)",
        ),
    ),
    "a sum beyond the part": (
        replace(ANY["of columns"], placements={"tp": Shard(1), "dp": FlatShard(SIZES)}),
        ("add up to 24, but 12 elements", "which Shard(1) over 'tp' of size 2 leaves"),
    ),
    "other sizes than the ranks have": (
        replace(FLAT, placements={"dp": FlatShard((6, 12, 0, 6))}),
        (
            "holds a (5,) tensor where (6,) was declared",
            'if uneven:   {"dp": FlatShard((5, 13, 0, 6))} in the rule of every rank',
        ),
    ),
    "no rule": (
        replace(FLAT, placements=None),
        ("(13,) on rank 1", "{axis: FlatShard((5, 13, 0, 6))} and global_shape= in its rule"),
    ),
    "no rule for moments": (
        Side(DP, moments_alone, {"dp": Replicate()}, "no_such_key"),
        (
            "optim.state.w.exp_avg",
            "{axis: FlatShard((5, 13, 0, 6))} and global_shape= in its rule",
        ),
    ),
    "a tensor of two dims": (
        replace(FLAT, held=two_dims),
        (
            "holds a (2, 4) tensor where a range of the flattened one was declared",
            "of global_shape (6, 4)",
            'a pattern on the keys of the state, as "state.**.exp_avg*"',
        ),
    ),
    "a DTensor that is cut after it": (
        Side({"dp": 2, "fsdp": 2}, inside_fsdp, {"dp": FlatShard((10, 14))}, shapes=SHAPE),
        (
            "FlatShard((10, 14)) over 'dp' of size 2 divides the flattened tensor and is its last",
            "Shard(0) over 'fsdp' of size 2 comes after it",
        ),
    ),
    "stacked": (
        Side(
            {"dp": 2},
            lambda mesh: {f"w.{n}": WHOLE[n, at(mesh, "dp") * 2 :][:2].clone() for n in range(6)},
            {"dp": FlatShard((12, 12))},
            shapes=SHAPE,
            rename=Stack("w.{}", total=6),
        ),
        ("FlatShard((12, 12)) is a range of the flattened tensor, and rename= stacks",),
    ),
    "unstacked": (
        replace(FLAT, rename=Unstack("w.{}")),
        ("FlatShard((5, 13, 0, 6)) is a range of the flattened tensor, and rename= stacks",),
    ),
    "split": (
        replace(FLAT, rename=Split("w", ["first", "second"])),
        ("FlatShard((5, 13, 0, 6)) is a range of the flattened tensor, and rename= stacks",),
    ),
    "contents of another range": (
        replace(
            ANY["beside replicas"], held=lambda mesh: {"w": ranges()(mesh)["w"] + at(mesh, "cp")}
        ),
        ("w", "along 'cp'"),
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_m143_a_save_of_other_ranges_is_refused_with_the_numbers(tmp_path: Path, name: str) -> None:
    side, facts = UNSAVED[name]
    with refused() as refusal:
        side.saves(tmp_path)
    refusal.says(*facts)
    assert not (tmp_path / ".metadata").exists()


UNLOADED: dict[str, tuple[Side, Side, tuple[str, ...]]] = {
    "sizes of one rank differ": (
        FLAT,
        replace(
            FLAT,
            held=lambda mesh: ranges((SIZES, (5, 12, 1, 6))[at(mesh, "dp") // 2])(mesh),
            placements=by_rank(SIZES, SIZES, (5, 12, 1, 6)),
        ),
        (
            "(5, 13, 0, 6)) over 'dp' of size 4 on ranks 0-1",
            "(5, 12, 1, 6)) over 'dp' of size 4 on",
        ),
    ),
    "what is flattened was cut as parts": (
        ANY["of gate and up"],
        ANY["of columns"],
        ("saved:       FusedShard(1, 2) over 'tp'", "this load:   Shard(1) over 'tp'"),
    ),
    "over another axis": (
        FLAT,
        Side(
            {"dp": 4, "edp": 4},
            lambda mesh: {"w": WHOLE.reshape(-1).split(SIZES)[at(mesh, "edp")].clone()},
            {"edp": FlatShard(SIZES)},
            shapes=SHAPE,
        ),
        ("saved:       FlatShard() over 'dp'", "this load:   FlatShard((5, 13, 0, 6)) over 'edp'"),
    ),
    "of another shape": (
        FLAT,
        replace(FLAT, shapes={"global_shape": (4, 6)}),
        ("(6, 4)", "(4, 6)"),
    ),
}


@pytest.mark.parametrize("name", UNLOADED)
def test_m143_a_load_of_other_ranges_is_refused_with_both_declarations(
    tmp_path: Path, name: str
) -> None:
    saves, loads, facts = UNLOADED[name]
    saves.saves(tmp_path)
    loads.is_refused(tmp_path, *facts)


def test_what_fused_parts_of_one_axis_were_is_loaded_as_ranges(tmp_path: Path) -> None:
    parts = WHOLE.split([2, 4])
    Side({"dp": 2}, parts_of(parts, "dp"), {"dp": FusedShard(0, (2, 4))}).saves(tmp_path)
    FLAT.loads_right(tmp_path)


@pytest.mark.parametrize(
    ("axes", "placements", "shapes", "fact"),
    [
        (DP, {"dp": FlatShard((12, 12))}, SHAPE, "2 sizes, (12, 12), but axis 'dp' has 4 ranks"),
        (DP, {"dp": FlatShard(SIZES)}, {}, "needs global_shape="),
        (
            {"dp": 4, "tp": 2},
            {"dp": FlatShard(SIZES), "tp": Shard(0)},
            SHAPE,
            "FlatShard((5, 13, 0, 6)) over 'dp' divides the flattened tensor and is its last cut, "
            "but Shard(0) over 'tp' comes after it",
        ),
        (
            {"dp": 4, "cp": 1},
            {"dp": FlatShard(SIZES), "cp": FlatShard((24,))},
            SHAPE,
            "but FlatShard((24,)) over 'cp' comes after it",
        ),
    ],
)
def test_ranges_are_refused_where_they_are_declared(
    axes: dict[str, int], placements: Any, shapes: Any, fact: str
) -> None:
    mesh = Side(axes, ranges()).world.mesh(0, **axes)
    with pytest.raises(PlacementError) as refusal:
        CheckpointPlacement(mesh, placements, **shapes)
    assert fact in str(refusal.value)


@pytest.mark.parametrize("sizes", [(), (3, -1), (1.5,), {1, 2}, 8])
def test_sizes_are_counts_of_elements(sizes: Any) -> None:
    with pytest.raises(PlacementError, match=r"FlatShard needs a count|must be counts of elements"):
        FlatShard(sizes)


def test_no_range_is_proposed_where_the_numbers_of_a_rank_are_not_known(tmp_path: Path) -> None:
    held = ranges()
    side = replace(FLAT, held=lambda mesh: held(mesh) if at(mesh, "dp") else {}, placements=None)
    with refused() as refusal:
        side.saves(tmp_path)
    assert "FlatShard" not in refusal.text
