"""``RaggedShard``: pieces that ``torch.chunk`` does not make, saved as one box each, loaded by and
from any other cut, and refused with the numbers where they do not fit.

Each rank has what plain slicing of the whole tensor by the sizes gives; torch's default planner
reads the files back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_holds, assert_same, refused, warned
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    MeshCoordinate,
    PlacementError,
    Placements,
    RaggedShard,
    Split,
    Stack,
    Unstack,
)
from dcp_placements.offline import export_safetensors, rehearse, reshard
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.load.sides import Held, Side, at, parts_of, rows

WHOLE = arange(10, 3)
SIZES = (5, 3, 0, 2)
EP = {"ep": 4}


def pieces(axis: str = "ep", sizes: tuple[int, ...] = SIZES, whole: Any = WHOLE) -> Held:
    """Return what each position on an axis has of a tensor of so many rows."""
    return lambda mesh: {"w": whole.split(sizes)[at(mesh, axis)].clone()}


def ragged(sizes: tuple[int, ...] = SIZES, **shapes: Any) -> Side:
    return Side(EP, pieces(sizes=sizes), {"ep": RaggedShard(0, sizes)}, shapes=shapes)


RAGGED = ragged()
OWNED = ragged((0, 10, 0, 0))
PLAIN = Side(EP, rows(WHOLE, "ep"), {"ep": Shard(0)}, shapes={"global_shape": (10, 3)})
ALONE = Side({"ep": 1}, lambda mesh: {"w": WHOLE}, {"ep": RaggedShard(-2, (10,))})
LISTED = Side(
    {"ep": 2},
    lambda mesh: {"w": WHOLE[at(mesh, "ep") :: 2].clone()},
    lambda mesh: {"ep": IndexShard(0, range(at(mesh, "ep"), 10, 2))},
    shapes={"global_shape": (10, 3)},
)
EP_TP = {"ep": 2, "tp": 2}


def nested(mesh: FakeMesh) -> dict[str, Any]:
    """Return pieces of pieces: ep has seven rows and three, and tp divides each anew."""
    return {"w": WHOLE.split([7, 3])[at(mesh, "ep")].chunk(2)[at(mesh, "tp")].clone()}


def own_axis(mesh: FakeMesh) -> dict[str, Any]:
    """Return uneven shards as a DTensor, which calls them ``Shard``."""
    return {"w": FakeDTensor(pieces()(mesh)["w"], mesh, [Shard(0)], (10, 3))}


def inside_fsdp(mesh: FakeMesh) -> dict[str, Any]:
    """Return a plain piece of tp that fsdp cuts; each rank knows its own piece alone."""
    part = WHOLE.split([7, 3])[at(mesh, "tp")]
    return {"w": FakeDTensor.distribute(part, mesh["fsdp"], [Shard(0)])}


def with_fsdp(mesh: FakeMesh) -> dict[str, Any]:
    """Return a DTensor over fsdp and tp, of which the latter has uneven shards."""
    part = WHOLE.split([7, 3])[at(mesh, "tp")]
    own = mesh["fsdp", "tp"]
    local = part.chunk(2)[at(mesh, "fsdp")].clone()
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    return {"w": FakeDTensor(local, own, strided, (10, 3))}


def of_tp(mesh: FakeMesh) -> torch.Tensor:
    """Return the uneven rows that fsdp has of the half of tp."""
    return WHOLE.chunk(2)[at(mesh, "tp")].split([1, 4])[at(mesh, "fsdp")].clone()


def uneven_fsdp(mesh: FakeMesh) -> dict[str, Any]:
    """Return a DTensor over fsdp alone, of the half that tp leaves."""
    return {"w": FakeDTensor(of_tp(mesh), mesh["fsdp"], [Shard(0)], (5, 3))}


def uneven_in_both(mesh: FakeMesh) -> dict[str, Any]:
    """Return a DTensor over tp and fsdp."""
    return {"w": FakeDTensor(of_tp(mesh), mesh, [Shard(0), Shard(0)], (10, 3))}


def tp_first(mesh: FakeMesh) -> MeshCoordinate:
    coordinate = at(mesh, "tp"), at(mesh, "fsdp")
    return MeshCoordinate(("tp", "fsdp"), (2, 2), coordinate)


FSDP_TP = {"fsdp": 2, "tp": 2}
TP_FSDP = {"tp": 2, "fsdp": 2}
BY_TP = {"tp": Shard(0), "fsdp": RaggedShard(0, (1, 4))}
ANY = {
    "uneven fsdp inside tp": Side(TP_FSDP, uneven_fsdp, BY_TP),
    "of a mesh in another order": Side(FSDP_TP, uneven_fsdp, BY_TP, mesh=tp_first),
    "tp and uneven fsdp of a DTensor": Side(
        TP_FSDP, uneven_in_both, {**BY_TP, "tp": RaggedShard(0, (5, 5))}
    ),
    "alone": ALONE,
    "ragged": RAGGED,
    "owned": OWNED,
    "plain": PLAIN,
    "shape given": ragged(global_shape=(10, 3)),
    "a DTensor's own axis": replace(RAGGED, held=own_axis),
    "inside fsdp": Side(FSDP_TP, inside_fsdp, {"tp": RaggedShard(0, (7, 3))}),
    "fsdp of a DTensor": Side(FSDP_TP, with_fsdp, {"tp": RaggedShard(0, (7, 3))}),
    "before a plain cut": Side(EP_TP, nested, {"ep": RaggedShard(0, (7, 3)), "tp": Shard(0)}),
    "after a plain cut": Side(
        EP_TP,
        lambda mesh: {"w": WHOLE.chunk(2)[at(mesh, "ep")].split([4, 1])[at(mesh, "tp")].clone()},
        {"ep": Shard(0), "tp": RaggedShard(0, (4, 1))},
    ),
    "another dim": Side(
        EP_TP,
        lambda mesh: {
            "w": WHOLE.split([1, 9])[at(mesh, "ep")].split([0, 3], 1)[at(mesh, "tp")].clone()
        },
        {"ep": RaggedShard(0, (1, 9)), "tp": RaggedShard(-1, (0, 3))},
    ),
    "padding": Side(
        {"ep": 3},
        lambda mesh: {
            "w": torch.cat([WHOLE, torch.zeros(2, 3)]).split([8, 1, 3])[at(mesh, "ep")].clone()
        },
        {"ep": RaggedShard(0, (8, 1, 3))},
        shapes={"global_shape": (10, 3), "padded_shape": (12, 3)},
    ),
}


@pytest.mark.parametrize("name", ANY)
def test_m143_pieces_of_any_sizes_are_saved_and_loaded_by_any_other_cut(
    tmp_path: Path, name: str
) -> None:
    side = ANY[name]
    side.saves(tmp_path / "saved")
    assert_holds(tmp_path / "saved", {"w": WHOLE})
    others = ANY if name == "ragged" else {name: side, "ragged": RAGGED, "plain": PLAIN}
    for other in others.values():
        if name != "padding" and other is not ANY["padding"]:
            other.loads_right(tmp_path / "saved")
    (tmp_path / "stock").mkdir()
    dcp.save({"w": WHOLE}, checkpoint_id=tmp_path / "stock", no_dist=True)
    if name != "padding":
        side.loads_right(tmp_path / "stock")


@pytest.mark.parametrize("side", [RAGGED, OWNED])
def test_m143_a_rank_has_one_chunk(tmp_path: Path, side: Side) -> None:
    side.saves(tmp_path)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"]
    sizes = {"ep": side.placements["ep"].sizes}["ep"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks] == [(n, 3) for n in sizes if n]


@pytest.mark.parametrize("order", [("w", "m"), ("m", "w")])
def test_state_follows_uneven_pieces_and_is_a_replica_of_a_reduced_dim(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    moments = {"exp_avg": arange(10, 3, start=100), "row": arange(10, 1), "column": arange(1, 3)}

    def held(mesh: FakeMesh) -> dict[str, Any]:
        own = {
            key: value.split(SIZES)[at(mesh, "ep")].clone() if len(value) > 1 else value.clone()
            for key, value in moments.items()
        }
        parts = {"w": pieces()(mesh)["w"], "m": {"state": {"w": own}, "param_groups": []}}
        parts["m"]["param_groups"] = [{"params": ["w"]}]
        return {("model" if key == "w" else "optim"): parts[key] for key in order} | {
            "model": {"w": parts["w"]}
        }

    side = replace(RAGGED, held=held)
    side.saves(tmp_path)
    found = {f"optim.state.w.{key}": value for key, value in moments.items()}
    assert_holds(tmp_path, {"model.w": WHOLE, **found})
    side.loads_right(tmp_path)


@pytest.mark.parametrize("rename", [Unstack("w.{}"), Split("w", ["first", "second"])], ids=repr)
def test_rows_and_parts_of_uneven_pieces_have_names(tmp_path: Path, rename: Any) -> None:
    side = replace(RAGGED, rename=rename)
    side.saves(tmp_path)
    gate, up = WHOLE.chunk(2)
    named = {"first": gate, "second": up}
    rows_of = {f"w.{n}": row for n, row in enumerate(WHOLE)}
    assert_holds(tmp_path, named if isinstance(rename, Split) else rows_of)
    side.loads_right(tmp_path)


def test_rows_by_name_are_stacked_by_a_rule_that_says_how_many_each_rank_has(
    tmp_path: Path,
) -> None:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        numbers = torch.arange(10).split(SIZES)[at(mesh, "ep")].tolist()
        return {f"w.{n}": WHOLE[n].clone() for n in numbers}

    side = replace(RAGGED, held=held, rename=Stack("w.{}", total=10))
    side.saves(tmp_path)
    assert_holds(tmp_path, {"w": WHOLE})
    side.loads_right(tmp_path)


def test_a_world_is_rehearsed_resharded_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    RAGGED.saves(tmp_path / "saved")

    def rules(mesh: Any) -> Placements:
        return Placements({"w": CheckpointPlacement(mesh, {"ep": RaggedShard(0, (1, 9))})})

    rehearsal = rehearse(tmp_path / "saved", rules, {"ep": 2})
    assert rehearsal.loads
    assert sorted(rank.wanted_nbytes for rank in rehearsal.ranks) == [12, 108]
    with pytest.raises(PlacementError, match=r"2 sizes, \(1, 9\), but axis 'ep' has 3 ranks"):
        rehearse(tmp_path / "saved", rules, {"ep": 3})
    reshard(tmp_path / "saved", tmp_path / "out", rules, {"ep": 2})
    assert_holds(tmp_path / "out", {"w": WHOLE})
    stored = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata["w"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks] == [(1, 3), (9, 3)]
    export_safetensors(tmp_path / "out", tmp_path / "hub")
    assert_same(load_file(tmp_path / "hub" / "model.safetensors"), {"w": WHOLE})


def by_rank(*sizes: tuple[int, ...]) -> Callable[[FakeMesh], dict[str, Any]]:
    return lambda mesh: {"ep": RaggedShard(0, sizes[min(at(mesh, "ep"), len(sizes) - 1)])}


UNSAVED: dict[str, tuple[Side, tuple[str, ...]]] = {
    "sizes of one rank differ": (
        replace(RAGGED, placements=by_rank((5, 4, 0, 2), SIZES)),
        (
            "the ranks do not agree on the sizes of its shards",
            "RaggedShard(0, (5, 4, 0, 2)) over 'ep' of size 4 on rank 0",
            "RaggedShard(0, (5, 3, 0, 2)) over 'ep' of size 4 on ranks 1-3",
        ),
    ),
    "sizes differ where the pieces make a whole": (
        replace(RAGGED, placements=by_rank((5, 2, 1, 2), SIZES)),
        ("(5, 2, 1, 2)) over 'ep' of size 4 on rank 0", "(5, 3, 0, 2)) over 'ep' of size 4 on"),
    ),
    "a sum beyond the shape": (
        replace(ragged(global_shape=(10, 3)), placements={"ep": RaggedShard(0, (5, 3, 1, 2))}),
        ("sizes (5, 3, 1, 2) of RaggedShard add up to 11, but 10 rows are being cut",),
    ),
    "a sum beyond the DTensor's": (
        replace(ANY["a DTensor's own axis"], placements={"ep": RaggedShard(0, (5, 3, 1, 2))}),
        ("sizes (5, 3, 1, 2) of RaggedShard add up to 11, but 10 rows are being cut",),
    ),
    "another dim than the DTensor's": (
        replace(ANY["a DTensor's own axis"], placements={"ep": RaggedShard(1, (0, 1, 1, 1))}),
        ("sharded on dim 0 by its own DTensor, but as RaggedShard(1, (0, 1, 1, 1)) by the rule",),
    ),
    "fsdp before tp": (
        Side(FSDP_TP, uneven_fsdp, BY_TP),
        (
            "sizes (1, 4) of RaggedShard add up to 5, but 10 rows are being cut",
            """(1, 4) are of what 'tp' leaves: a mesh for this rule with 'tp' before 'fsdp'""",
            """MeshCoordinate(("tp", "fsdp"), (2, 2), coordinate)""",
        ),
    ),
    "of a DTensor that tp cuts, too": (
        Side(TP_FSDP, uneven_in_both, BY_TP),
        ("""'tp' before 'fsdp'""", """and {"tp": RaggedShard(0, (5, 5))} in it"""),
    ),
    "the size of one rank is another": (
        replace(RAGGED, placements={"ep": RaggedShard(0, (5, 2, 1, 2))}),
        ("holds a (3, 3) tensor where (2, 3) was declared", "RaggedShard(0, (5, 2, 1, 2))"),
    ),
    "plainly, with a shape": (
        replace(RAGGED, placements={"ep": Shard(0)}, shapes={"global_shape": (10, 3)}),
        (
            "holds a (5, 3) tensor where (3, 3) was declared",
            'if uneven:   {"ep": RaggedShard(0, (5, 3, 0, 2))} in the rule of every rank',
        ),
    ),
    "by a DTensor alone": (
        replace(ANY["a DTensor's own axis"], placements=None),
        ('if uneven:   {"ep": RaggedShard(0, (5, 3, 0, 2))} in the rule of every rank',),
    ),
    "plainly": (
        replace(RAGGED, placements={"ep": Shard(0)}),
        ('if uneven:   {"ep": RaggedShard(0, (5, 3, 0, 2))} in the rule of every rank',),
    ),
    "plainly, of one rank": (
        replace(OWNED, placements={"ep": Shard(0)}),
        ('if uneven:   {"ep": RaggedShard(0, (0, 10, 0, 0))} in the rule of every rank',),
    ),
    "plainly, of fsdp inside tp": (
        Side(TP_FSDP, uneven_fsdp, {"tp": Shard(0)}),
        (
            'if uneven:   {"tp": Shard(0), "fsdp": RaggedShard(0, (1, 4))} in the rule of every '
            "rank, on a mesh with 'tp' before 'fsdp'",
        ),
    ),
    "plainly, of a DTensor that tp cuts, too": (
        Side(TP_FSDP, uneven_in_both, None),
        ('if uneven:   {"tp": RaggedShard(0, (5, 5)), "fsdp": RaggedShard(0, (1, 4))} in',),
    ),
    "plainly, inside fsdp": (
        replace(ANY["inside fsdp"], placements={"tp": Shard(0)}),
        ('if uneven:   {"tp": RaggedShard(0, (7, 3))} in the rule of every rank',),
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_m143_a_save_of_other_pieces_is_refused_with_the_numbers(tmp_path: Path, name: str) -> None:
    side, facts = UNSAVED[name]
    if name == "plainly, of one rank":  # an empty whole has no position: the others show it
        facts = ('if uneven:   {"ep": RaggedShard(0, ', "in the rule of every rank")
    with refused() as refusal:
        side.saves(tmp_path)
    refusal.says(*facts)
    assert not (tmp_path / ".metadata").exists()


UNLOADED: dict[str, tuple[Side, Side, tuple[str, ...]]] = {
    "sizes of one rank differ": (
        RAGGED,
        Side(
            EP,
            lambda mesh: pieces(sizes=((5, 3, 0, 2), (5, 2, 1, 2))[at(mesh, "ep") // 2])(mesh),
            by_rank(SIZES, SIZES, (5, 2, 1, 2)),
        ),
        ("(5, 3, 0, 2)) over 'ep' of size 4 on ranks 0-1", "(5, 2, 1, 2)) over 'ep' of size 4 on"),
    ),
    "saved as parts": (
        Side({"ep": 2}, parts_of(WHOLE.split([6, 4]), "ep"), {"ep": FusedShard(0, (6, 4))}),
        RAGGED,
        ("saved:       FusedShard(0, (6, 4)) over 'ep'", "this load:   RaggedShard(0, (5, 3, 0,"),
    ),
    "loaded as parts": (
        RAGGED,
        Side({"ep": 2}, parts_of(WHOLE.split([6, 4]), "ep"), {"ep": FusedShard(0, (6, 4))}),
        ('way out:     {"ep": Shard(0)}, or RaggedShard with the sizes of its ranks, in the',),
    ),
    "saved as listed rows": (
        LISTED,
        Side({"ep": 2}, pieces(sizes=(4, 6)), {"ep": RaggedShard(0, (4, 6))}),
        ("rows of dim 0, each rank its own", "RaggedShard(0, (4, 6)) over 'ep' of size 2"),
    ),
    "in another order of the axes": (
        ANY["before a plain cut"],
        replace(
            ANY["before a plain cut"],
            axes={"tp": 2, "ep": 2},
            held=lambda mesh: {
                "w": WHOLE.chunk(2)[at(mesh, "tp")].split([3, 2])[at(mesh, "ep")].clone()
            },
            placements={"tp": Shard(0), "ep": RaggedShard(0, (3, 2))},
        ),
        ("by 'ep' and 'tp' in another way than the save did",),
    ),
    "a fused tensor, by parts": (
        Side(
            {"ep": 2},
            pieces(sizes=(7, 3)),
            {"ep": RaggedShard(0, (7, 3))},
            rename=Split("w", ["first", "second"]),
        ),
        Side(
            {"ep": 2},
            lambda mesh: {
                key: part.chunk(2)[at(mesh, "ep")].clone()
                for key, part in zip(("first", "second"), WHOLE.chunk(2), strict=True)
            },
            {"ep": Shard(0)},
            "*",
            {"global_shape": (5, 3)},
        ),
        ("RaggedShard(0, (7, 3)) of the fused tensor over 'ep'", "the fused tensor by FusedShard"),
    ),
}


@pytest.mark.parametrize("name", UNLOADED)
def test_m143_a_load_of_other_rows_is_refused_with_both_declarations(
    tmp_path: Path, name: str
) -> None:
    saves, loads, facts = UNLOADED[name]
    saves.saves(tmp_path)
    loads.is_refused(tmp_path, *facts)


@pytest.mark.parametrize("sizes", [(3, 5), (3, 5, 0, 2, 0)])
def test_sizes_are_as_many_as_ranks_where_they_are_declared(sizes: tuple[int, ...]) -> None:
    mesh = RAGGED.world.mesh(0, ep=4)
    with pytest.raises(PlacementError) as refusal:
        CheckpointPlacement(mesh, {"ep": RaggedShard(0, sizes)})
    text = f"RaggedShard has {len(sizes)} sizes, {sizes}, but axis 'ep' has 4 ranks"
    assert text in str(refusal.value)


def test_gate_and_up_in_uneven_pieces_are_warned_of_as_in_even_ones(tmp_path: Path) -> None:
    name = "layers.0.mlp.gate_up_proj.weight"
    side = Side(
        {"tp": 2},
        lambda mesh: {name: WHOLE.split([7, 3])[at(mesh, "tp")].clone()},
        {"tp": RaggedShard(0, (7, 3))},
        name,
    )
    with warned() as texts:
        side.world.save(
            tmp_path,
            side.state,
            lambda rank: Placements(side.rules(rank)).save_planner(),
        )
    assert "its name says several tensors in one, but 'tp' cuts it plainly" in texts[0]
    assert "RaggedShard(0, (7, 3)) over 'tp' of size 2" in texts[0]


def test_pieces_that_make_another_whole_have_no_line_to_paste(tmp_path: Path) -> None:
    short = replace(PLAIN, held=pieces(sizes=(4, 3, 3, 0)), shapes={"global_shape": (12, 3)})
    with refused() as refusal:
        short.saves(tmp_path)
    assert "if uneven:" not in refusal.text


@pytest.mark.parametrize("declared", [(3, 3, 2), (1, 3, 4), (4, 4, 4)])
def test_sizes_that_are_wrong_get_the_line_with_those_of_all_ranks(
    tmp_path: Path, declared: tuple[int, ...]
) -> None:
    world, parts = World(3), torch.arange(32.0).view(8, 4).split([4, 3, 1])

    def planner(rank: int, sizes: tuple[int, ...], *, coordinate: int | None = None) -> Any:
        mesh = MeshCoordinate(["ep"], [3], [rank if coordinate is None else coordinate])
        rule = CheckpointPlacement(mesh, {"ep": RaggedShard(0, sizes)})
        return Placements({"experts": rule}).save_planner()

    with refused() as refusal:
        world.save(tmp_path, lambda r: {"experts": parts[r]}, lambda r: planner(r, declared))
    refusal.says(
        'if uneven:   {"ep": RaggedShard(0, (4, 3, 1))} in the rule of every rank',
        "likely:      sizes of RaggedShard that are of another topology, or in another order",
    )
    # Where all ranks say that they are the first, no size has a rank.
    with refused() as refusal:
        world.save(
            tmp_path,
            lambda r: {"experts": parts[r]},
            lambda r: planner(r, (4, 3, 1), coordinate=0),
        )
    refusal.says("or a coordinate that is not this rank's")
    assert "if uneven:" not in refusal.text
