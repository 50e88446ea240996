"""A load that is declared otherwise than its checkpoint was saved is refused where shapes cannot
show it; a load into another topology is quiet, and right.

The ranks are simulated, and hold parts of whole tensors that are cut by plain slicing here, as a
framework would.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hazard_scenes import arange, assert_holds
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_placements import FusedShard, IndexShard, Split, Stack, Unstack
from dcp_placements.testing import FakeMesh
from tests.load.sides import Held, Side, at, distributed, dtensor, parts_of, rows

WHOLE = arange(8, 3)
GATE, UP = WHOLE.chunk(2)
GATE_UP = "layers.0.mlp.gate_up_proj.weight"
TP, EP, EP_EDP, EP_TP = {"tp": 2}, {"ep": 2}, {"ep": 2, "edp": 2}, {"ep": 2, "tp": 2}
FUSED = Side(TP, parts_of((GATE, UP), "tp"), {"tp": FusedShard(0, 2)})
PLAIN = Side(TP, rows(WHOLE, "tp"), {"tp": Shard(0)})
ONE = Side({"tp": 1}, rows(WHOLE, "tp"), {"tp": FusedShard(0, 2)})


def named(held: Held) -> Held:
    """Return the same under the name of a fused tensor, as a DTensor that says a plain cut."""
    of = dtensor(held, WHOLE, Shard(0))
    return lambda mesh: {GATE_UP: of(mesh)["w"]}


SAID_FUSED = replace(FUSED, held=named(FUSED.held), key=GATE_UP)

ROWS = ((0, 2), (1, 3))


def listed(axis: str) -> Side:
    """Return ranks that list rows 0 and 2, or 1 and 3, by their position along an axis."""
    whole = arange(4, 3)
    return Side(
        EP_EDP if axis == "edp" else EP,
        lambda mesh: {"w": whole[list(ROWS[at(mesh, axis)])]},
        lambda mesh: {axis: IndexShard(0, ROWS[at(mesh, axis)])},
        shapes={"global_shape": (4, 3)},
    )


def cut_over(axis: str, kind: str) -> Side:
    """Return four ranks that hold a tensor over one of two axes of two."""
    whole = arange(4, 3)
    if kind == "listed":
        return replace(listed(axis), axes=EP_EDP)
    if kind == "fused":
        return Side(EP_EDP, parts_of(whole.chunk(2), axis), {axis: FusedShard(0, 2)})
    return Side(EP_EDP, rows(whole, axis), {axis: Shard(0)})


SQUARE = Side(
    EP_TP,
    lambda mesh: {"w": arange(4, 4).chunk(2)[at(mesh, "ep")].chunk(2, 1)[at(mesh, "tp")].clone()},
    {"ep": Shard(0), "tp": Shard(1)},
)


def square(ep: int, tp: int, dims: tuple[int, int] = (0, 1)) -> Side:
    """Return ranks that hold (4, 4) cut by ep along dim 0 and tp along dim 1, declared as given."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {"w": arange(4, 4).chunk(ep)[at(mesh, "ep")].chunk(tp, 1)[at(mesh, "tp")].clone()}

    return Side({"ep": ep, "tp": tp}, held, {"ep": Shard(dims[0]), "tp": Shard(dims[1])})


CUBE = arange(2, 2, 2)


def cube(sizes: tuple[int, int, int], dims: tuple[int, int, int]) -> Side:
    """Return ranks that hold (2, 2, 2) cut by three axes along one dim each, declared as given."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        local = CUBE
        for dim, axis in enumerate("abc"):
            local = local.chunk(sizes[dim], dim)[at(mesh, axis)]
        return {"w": local.clone()}

    placements = {axis: Shard(dim) for axis, dim in zip("abc", dims, strict=True)}
    return Side(dict(zip("abc", sizes, strict=True)), held, placements)


def rows_over(**axes: int) -> Side:
    """Return ranks that hold rows over several axes, in the order of their mesh."""
    return Side(axes, rows(WHOLE, *axes), dict.fromkeys(axes, Shard(0)))


WHOLE_RANK = Side({"tp": 1}, lambda mesh: {"w": WHOLE}, {"tp": Shard(0)})
SPLIT = Split("w", ["gate", "up"])
WHOLES = {"gate": GATE, "up": UP}
APART = Side(
    TP,
    lambda mesh: {k: t.chunk(2)[at(mesh, "tp")].clone() for k, t in WHOLES.items()},
    {"tp": Shard(0)},
    "*",
)
ON_ALL = Side(TP, lambda mesh: {"w": WHOLE}, None)
EXPERTS = Side(TP, lambda mesh: {f"w.{i}": torch.full((2,), 5.0 * i) for i in range(2)}, None)
QKV = arange(16, 2)  # two groups of 4 + 2 + 2 rows
GROUPS = [group.split([4, 2, 2]) for group in QKV.chunk(2)]
Q_K_V = {name: torch.cat([group[i] for group in GROUPS]) for i, name in enumerate("qkv")}
GROUPED = Split("w", ["q", "k", "v"], sizes=(2, 1, 1), groups=2)
Q_K_V_OF_TP = Side(
    TP,
    lambda mesh: {k: t.chunk(2)[at(mesh, "tp")].clone() for k, t in Q_K_V.items()},
    {"tp": Shard(0)},
    "*",
)


def of_rows(shape: tuple[int, ...], placement: Any, dim: int = 0) -> Side:
    """Return ranks that have rows by name in the checkpoint, and cut all of them in two parts."""
    halves = arange(*shape).chunk(2, dim)
    return Side(TP, parts_of(halves, "tp", dim), {"tp": placement}, rename=Unstack("w.{}"))


def two_axes(*order: str) -> Side:
    """Return DTensors that two axes cut along one dim, in the order of their mesh."""
    return Side(dict.fromkeys(order, 2), distributed(Shard(0), Shard(0), w=WHOLE))


REFUSED: dict[str, tuple[Side, Side, tuple[str, ...]]] = {
    "m46: the rule forgotten": (
        SAID_FUSED,
        replace(SAID_FUSED, placements=None),
        (
            "ranks 0-1 cannot be loaded from this checkpoint (1 fault)",
            f"{GATE_UP}: this load cuts it by 'tp' in another way than the save did",
            "saved:       FusedShard(0, 2) over 'tp' of size 2",
            "this load:   Shard(0) over 'tp' of size 2",
            "by rule:     no rule, its own DTensor",
            'way out:     {"tp": FusedShard(0, 2)} in the rules of this load',
            "waive={pattern: reason}",
        ),
    ),
    "m46: more parts": (
        FUSED,
        replace(FUSED, placements={"tp": FusedShard(0, 4)}),
        ("FusedShard(0, 2) over 'tp' of size 2", "FusedShard(0, 4) over 'tp'", "by rule:     'w'"),
    ),
    "m46: parts of other sizes": (
        FUSED,
        replace(FUSED, placements={"tp": FusedShard(0, (6, 2))}),
        ("FusedShard(0, 2) over 'tp' of size 2", "FusedShard(0, (6, 2)) over 'tp' of size 2"),
    ),
    "m46: parts where there were none": (
        PLAIN,
        FUSED,
        ("saved:       Shard(0) over 'tp' of size 2", "FusedShard(0, 2) over 'tp' of size 2"),
    ),
    "m46: no parts, which one rank saved": (
        ONE,
        PLAIN,
        ("FusedShard(0, 2) over 'tp' of size 1", "this load:   Shard(0) over 'tp' of size 2"),
    ),
    "m46: another order of two axes": (
        two_axes("tp", "fsdp"),
        two_axes("fsdp", "tp"),
        (
            "w: this load cuts it by 'fsdp' and 'tp' in another way",
            "saved:       Shard(0) over 'tp' of size 2, then Shard(0) over 'fsdp' of size 2",
            "this load:   Shard(0) over 'fsdp' of size 2, then Shard(0) over 'tp' of size 2",
            "way out:     cut by 'tp' before 'fsdp'",
        ),
    ),
    "m74: axes that are swapped on a square tensor": (
        SQUARE,
        replace(SQUARE, placements={"ep": Shard(1), "tp": Shard(0)}),
        ("Shard(0) over 'ep'", "Shard(1) over 'ep'"),
    ),
    "m74: listed rows by a plain cut": (
        listed("ep"),
        Side(EP, rows(arange(4, 3), "ep"), {"ep": Shard(0)}),
        ("rows of dim 0", "Shard(0) over 'ep'"),
    ),
    "m74: listed rows that are unstacked, by a plain cut": (
        replace(listed("ep"), rename=Unstack("w.{}")),
        Side(EP, rows(arange(4, 3), "ep"), {"ep": Shard(0)}, rename=Unstack("w.{}")),
        ("w.0-3", "one tensor per row, each rank its own", "Shard(dim of the rows)"),
    ),
    "m74: a split of other groups": (
        replace(ON_ALL, rename=Split("w", ["gate", "up"], groups=2)),
        replace(ON_ALL, rename=SPLIT),
        (),
    ),
    "m74: a split of other names": (
        replace(ON_ALL, rename=Split("w", ["gate", "up"], groups=2)),
        replace(ON_ALL, rename=Split("w", ["up", "gate"], groups=2)),
        (),
    ),
    "m74: a stack along another dim": (
        replace(EXPERTS, rename=Stack("w.{}", 2)),
        replace(EXPERTS, rename=Stack("w.{}", 2, dim=1)),
        (),
    ),
    "m74: rows of another dim": (
        Side(TP, lambda mesh: {"w": arange(3, 3)}, rename=Unstack("w.{}")),
        Side(TP, lambda mesh: {"w": arange(3, 3).T}, rename=Unstack("w.{}", dim=1)),
        ("another Unstack", "Unstack('w.{}', dim=1)"),
    ),
    "m75: unstacked experts over the wrong axis": (
        replace(cut_over("ep", "plain"), rename=Unstack("w.{}")),
        replace(cut_over("edp", "plain"), rename=Unstack("w.{}")),
        (),
    ),
    **{
        f"m75: a {kind} tensor over edp that was saved over ep": (
            cut_over("ep", kind),
            cut_over("edp", kind),
            (
                "w: this load cuts it by 'ep' and 'edp' in another way than the save did",
                "or:          the save declared it wrongly",
            ),
        )
        for kind in ("plain", "fused", "listed")
    },
    "m121: saved with two dims swapped, where both axes cut": (
        square(2, 2, (1, 0)),
        square(4, 1),
        (
            "w: this load cuts it by 'ep' and 'tp' in another way than the save did",
            "saved:       Shard(1) over 'ep' of size 2, then Shard(0) over 'tp' of size 2",
            "this load:   Shard(0) over 'ep' of size 4, then Shard(1) over 'tp' of size 1",
        ),
    ),
    "m121: loaded with two dims swapped, of which one was not cut": (
        square(4, 1),
        square(2, 2, (1, 0)),
        ("Shard(1) over 'tp' of size 1", "Shard(1) over 'ep' of size 2"),
    ),
    "m121: loaded with two dims swapped, of which none was cut": (
        square(1, 1),
        square(2, 2, (1, 0)),
        ("'ep' and 'tp' in another way",),
    ),
    "m121: three dims in turn": (
        cube((2, 2, 1), (0, 1, 2)),
        cube((2, 2, 2), (1, 2, 0)),
        ("'a', 'b' and 'c' in another way",),
    ),
    "m121: saved with two dims swapped, loaded as DTensors": (
        square(2, 2, (1, 0)),
        Side(EP_TP, distributed(Shard(0), Shard(1), w=arange(4, 4))),
        ("by rule:     no rule, its own DTensor", "or:          the save declared it wrongly"),
    ),
    "m121: another order of two axes, of which one cuts nothing": (
        rows_over(ep=2, tp=2),
        rows_over(tp=1, ep=4),
        ("saved:       Shard(0) over 'ep' of size 2, then Shard(0) over 'tp' of size 2",),
    ),
    "m121: another order of two axes, of which one cut nothing": (
        rows_over(tp=1, ep=4),
        rows_over(ep=2, tp=2),
        ("saved:       Shard(0) over 'tp' of size 1, then Shard(0) over 'ep' of size 4",),
    ),
    "m156: fused in the save, plain where one rank has all": (
        FUSED,
        WHOLE_RANK,
        (
            "saved:       FusedShard(0, 2) over 'tp' of size 2",
            "this load:   Shard(0) over 'tp' of size 1",
            "the rule of the save: it permuted the rows of its file",
            "the rule of this load: the file is right, and so is what this load reads of it",
        ),
    ),
    "m156: plain in the save, fused where one rank has all": (
        PLAIN,
        ONE,
        ("the rule of the save", "FusedShard(0, 2) over 'tp' of size 1"),
    ),
    "m156: plain where one rank had all, fused in this load": (
        WHOLE_RANK,
        FUSED,
        (
            "saved:       Shard(0) over 'tp' of size 1",
            "the rule of the save: its file is right all the same",
            "the rule of this load: its ranks get rows of other ranks",
        ),
    ),
    "m156: fused in the save, plain beside a DTensor of one rank": (
        FUSED,
        Side({"tp": 1}, distributed(Shard(0), w=WHOLE), {"tp": Shard(0)}),
        ("Shard(0) over 'tp' of size 1",),
    ),
    "m156: other parts, where one rank has all": (
        FUSED,
        replace(ONE, placements={"tp": FusedShard(0, (2, 6))}),
        ("FusedShard(0, (2, 6)) over 'tp' of size 1",),
    ),
    "m156: a part of a fused tensor, plain where one rank has all": (
        replace(FUSED, rename=SPLIT),
        replace(WHOLE_RANK, rename=SPLIT),
        ("of the fused tensor over 'tp' of size 1",),
    ),
    "parts of a fused tensor by a plain cut": (
        replace(FUSED, rename=SPLIT),
        replace(PLAIN, rename=SPLIT),
        ("FusedShard(0, 2) of the fused tensor over 'tp'", "Shard(0) of the fused tensor"),
    ),
    "parts of a fused tensor that was cut plainly": (
        replace(PLAIN, rename=SPLIT),
        replace(FUSED, rename=SPLIT),
        (),
    ),
    "parts of a fused tensor by a DTensor that lacks its rule": (
        replace(FUSED, rename=SPLIT),
        Side(TP, distributed(Shard(0), w=WHOLE), rename=SPLIT),
        (),
    ),
    "parts of tensors that were never fused, by a plain cut": (
        APART,
        replace(PLAIN, rename=SPLIT),
        ("Shard(0) of the fused tensor over 'tp' of size 2",),
    ),
    "parts of groups that were cut plainly": (
        Side(TP, rows(QKV, "tp"), {"tp": Shard(0)}, rename=GROUPED),
        Side(TP, rows(QKV, "tp"), {"tp": FusedShard(0, (4, 2, 2, 4, 2, 2))}, rename=GROUPED),
        (),
    ),
    "rows by name, cut plainly": (
        of_rows((2, 8), FusedShard(1, 2), dim=1),
        of_rows((2, 8), Shard(1), dim=1),
        ("'tp'", "another way than the save"),
    ),
    "rows by name of a fused dim, cut plainly": (
        of_rows((4, 4), FusedShard(0, 2)),
        of_rows((4, 4), Shard(0)),
        ("'tp'", "another way than the save"),
    ),
    "rows by name of a strided dim, cut plainly": (
        of_rows((4, 4), _StridedShard(0, split_factor=2)),
        of_rows((4, 4), Shard(0)),
        ("'tp'", "another way than the save"),
    ),
}


@pytest.mark.parametrize(("saved", "loaded", "facts"), REFUSED.values(), ids=REFUSED)
def test_a_load_that_is_declared_otherwise_is_refused(
    tmp_path: Path, saved: Side, loaded: Side, facts: tuple[str, ...]
) -> None:
    saved.saves(tmp_path)
    loaded.is_refused(tmp_path, *facts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no case has all these names
        loaded.loads(tmp_path, waive={f"{at}*": "this model lays it out so" for at in "guwlqkv"})
    saved.loads_right(tmp_path)


def torchtitan(ep: int, *, ruled: bool = False) -> Side:
    """Return experts cut by ``ep`` and then by FSDP, as DTensors or a rule over both axes say."""
    held = rows(WHOLE, "ep", "efsdp")
    placements = _StridedShard(0, split_factor=ep), Shard(0)
    if ruled:
        return Side({"efsdp": 4 // ep, "ep": ep}, held, placements)
    return Side({"efsdp": 4 // ep, "ep": ep}, dtensor(held, WHOLE, *placements))


def padded(parts: tuple[int, ...], size: int) -> Side:
    """Return Q, K and V of ten rows, the last padded to what the ranks divide."""
    full = torch.cat([arange(10, 3), torch.full((size - 10, 3), 77.0)])
    shapes = {"global_shape": (10, 3), "padded_shape": (size, 3)}
    held = parts_of(full.split([4, 4, size - 8]), "tp")
    return Side(TP, held, {"tp": FusedShard(0, parts)}, shapes=shapes)


def over(axis: str, **axes: int) -> Side:
    """Return ranks that hold rows over one axis."""
    return Side(axes, rows(arange(4, 3), axis), {axis: Shard(0)})


def both(whole: torch.Tensor) -> Held:
    """Return rows over ep, of which FSDP over edp has rows."""

    def held(mesh: Any) -> dict[str, Any]:
        return distributed(Shard(0), over="edp", w=whole.chunk(2)[at(mesh, "ep")])(mesh)

    return held


def strided_and_named(size: int) -> Side:
    """Return DTensors with pieces of two parts, over an axis for which a plain rule speaks, too."""
    held = parts_of((GATE, UP), "tp") if size > 1 else lambda mesh: {"w": WHOLE}
    strided = dtensor(held, WHOLE, _StridedShard(0, split_factor=2))
    return Side({"tp": size}, strided, {"tp": Shard(0)})


BY_EP = {"ep": Shard(0)}
COLUMNS = arange(8, 4)
OVER_EP = over("ep", ep=4)
QUIET: dict[str, tuple[Side, Side]] = {
    "as saved": (SAID_FUSED, SAID_FUSED),
    "parts of the same sizes": (FUSED, replace(FUSED, placements={"tp": FusedShard(0, (4, 4))})),
    **{
        f"fused, by FSDP over {axis}": (FUSED, Side({axis: 2}, distributed(Shard(0), w=WHOLE)))
        for axis in ("fsdp", "dp_shard")
    },
    "fused, in one process": (FUSED, Side({"tp": 1}, lambda mesh: {"w": WHOLE})),
    "fused, by an axis of size 1": (FUSED, Side({"tp": 1}, distributed(Shard(0), w=WHOLE))),
    "fused, by columns": (
        Side(TP, parts_of(COLUMNS.chunk(2), "tp"), {"tp": FusedShard(0, 2)}),
        Side(TP, rows(COLUMNS, "tp", dim=1), {"tp": Shard(1)}),
    ),
    **{
        f"strided shards of ep {one}, by ep {other}": (torchtitan(one), torchtitan(other))
        for one in (4, 2, 1)
        for other in (4, 2, 1)
    },
    "parts of a padded dim": (padded((4, 4, 4), 12), padded((4, 4, 6), 14)),
    "over tp": (OVER_EP, over("tp", tp=4)),
    "over another number of ranks": (OVER_EP, over("edp", ep=2, edp=2)),
    "over axes of other names": (OVER_EP, over("expert", dp=1, expert=4)),
    "over the other of two axes that then has all ranks": (OVER_EP, over("edp", edp=4, ep=1)),
    # The DTensor itself says that edp cuts it; the rule names an axis that cuts nothing.
    "by FSDP over another axis": (
        cut_over("ep", "plain"),
        Side(EP_EDP, distributed(Shard(0), over="edp", w=arange(4, 3)), {"ep": Replicate()}),
    ),
    # The save declared ep as this load does, with one rank along it.
    **{
        f"of FSDP, by an ep that had one rank, and {'now cut' if held is None else 'on'} all": (
            Side({"ep": 1, "edp": 2}, distributed(Shard(0), over="edp", w=arange(4, 3)), BY_EP),
            Side(EP_EDP, held or both(arange(4, 3)), BY_EP),
        )
        for held in (rows(arange(4, 3), "ep"), None)
    },
    # A DTensor is what it says; only a rule may be wrong.
    "DTensors that swap their dims": (
        Side(EP_TP, distributed(Shard(0), Shard(1), w=arange(4, 4))),
        Side(EP_TP, distributed(Shard(1), Shard(0), w=arange(4, 4))),
    ),
    "listed rows, plainly by another number of ranks": (listed("ep"), OVER_EP),
    # An inference engine that places experts as it likes.
    "a plain cut, as listed rows": (over("ep", ep=2), listed("ep")),
    "never fused, into a fused tensor": (
        APART,
        replace(FUSED, placements={"tp": FusedShard(0, (4, 4))}, rename=SPLIT),
    ),
    "groups that an axis leaves whole, each part by itself": (
        Side(TP, rows(QKV, "tp"), {"tp": Shard(0)}, rename=GROUPED),
        Q_K_V_OF_TP,
    ),
}
# The same declaration in other words, where an axis cuts nothing on one side.
QUIET |= {
    f"strided shards that a rule declares, of ep {one}, by ep {other}": (
        torchtitan(one, ruled=True),
        torchtitan(other, ruled=True),
    )
    for one in (4, 2, 1)
    for other in (4, 2, 1)
}
QUIET |= {
    "an axis that this topology lacks": (
        FUSED,
        Side({"dp": 1}, lambda mesh: {"w": WHOLE}, {"tp": Shard(0)}, shapes={"absent": ("tp",)}),
    ),
    "a DTensor of one rank that no rule declares, into fused parts": (
        Side({"tp": 1}, distributed(Shard(0), w=WHOLE)),
        FUSED,
    ),
    "a DTensor of one rank along another dim, by a rule": (
        Side({"ep": 1, "tp": 2}, distributed(Shard(1), Shard(0), w=arange(4, 4))),
        square(2, 2),
    ),
    # The DTensor says more than the rule of the same axis, also where it is of one rank.
    "a strided DTensor whose axis a rule names, too, of one rank": (
        strided_and_named(1),
        strided_and_named(2),
    ),
    "a strided DTensor whose axis a rule names, too, on one rank": (
        strided_and_named(2),
        strided_and_named(1),
    ),
    "dims as saved, where an axis cuts nothing": (square(2, 2), square(4, 1)),
    "dims as saved, where no axis cut": (square(1, 1), square(1, 4)),
    "an order as saved, where an axis cuts nothing": (
        rows_over(ep=2, tp=2),
        rows_over(ep=1, tp=4),
    ),
}
# FSDP cuts what there is: the fused tensor plainly, and each part plainly where it is one.
BY_FSDP = {
    "joined": Side({"fsdp": 2}, distributed(Shard(0), w=WHOLE), rename=SPLIT),
    "parts": Side({"fsdp": 2}, distributed(Shard(0), **WHOLES)),
}
QUIET |= {
    f"{one} of FSDP into {other}": (BY_FSDP[one], BY_FSDP[other])
    for one in BY_FSDP
    for other in BY_FSDP
}


@pytest.mark.parametrize(("saved", "loaded"), QUIET.values(), ids=QUIET)
def test_a_load_into_another_topology_is_quiet_and_right(
    tmp_path: Path, saved: Side, loaded: Side
) -> None:
    saved.saves(tmp_path)
    for report in loaded.loads_right(tmp_path):
        assert "declared as saved" in report.compared


@pytest.mark.parametrize(
    ("side", "wholes"),
    [
        (replace(FUSED, rename=SPLIT), WHOLES),
        (Side(TP, rows(QKV, "tp"), {"tp": Shard(0)}, rename=GROUPED), Q_K_V),
        *(
            (side, {f"w.{i}": row for i, row in enumerate(arange(*shape))})
            for side, shape in (
                (of_rows((2, 8), FusedShard(1, 2), dim=1), (2, 8)),
                (of_rows((4, 4), _StridedShard(0, split_factor=2)), (4, 4)),
            )
        ),
    ],
)
def test_parts_and_rows_by_name_are_whole_in_the_file(
    tmp_path: Path, side: Side, wholes: dict[str, torch.Tensor]
) -> None:
    side.saves(tmp_path)
    assert_holds(tmp_path, wholes)
