"""What all ranks ask for together: a load in which several ask for one part, and none for another,
is refused; what is right together, or left out on purpose, is quiet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, edit_metadata, same_bits, warned, without_warning
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    IndexShard,
    MeshCoordinate,
    PlacementError,
    PlacementLoadPlanner,
    Renames,
    Renumber,
    Replace,
    Stack,
    Unstack,
)
from dcp_placements.storage.provenance import RESERVED_KEY
from dcp_placements.testing import FakeDTensor, FakeMesh, World
from tests.load.sides import Held, Side, at

EXPERTS = {
    f"layers.{layer}.experts.{e}.w": arange(4, 2, start=100 * layer + 10 * e)
    for layer in range(2)
    for e in range(4)
}
STACKED = {f"layers.{layer}.experts.w": arange(4, 2, 3, start=100 * layer) for layer in range(2)}
ONE, EP, EP_EDP = {"ep": 1}, {"ep": 2}, {"edp": 2, "ep": 2}
HALVES = ([0, 1], [2, 3])

RowsOf = Callable[[FakeMesh], Sequence[int]]


def own(mesh: FakeMesh) -> Sequence[int]:
    """The rows of a rank by its position along ``ep``."""
    return HALVES[at(mesh, "ep")]


def of_edp(mesh: FakeMesh) -> Sequence[int]:
    return HALVES[at(mesh, "edp")]


def of_first(mesh: FakeMesh) -> Sequence[int]:
    return HALVES[0]


# One tensor per expert, which ranks number from 0.


def local_experts(ids: RowsOf) -> Held:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {
            f"layers.{layer}.experts.{i}.w": EXPERTS[f"layers.{layer}.experts.{e}.w"].clone()
            for layer in range(2)
            for i, e in enumerate(ids(mesh))
        }

    return held


def renumber(ids: RowsOf, total: int | None = 4, pattern: str = "experts.{}") -> Any:
    return lambda mesh: Renumber(pattern, ids(mesh), total=total)


def by_function(mesh: FakeMesh) -> Callable[[str], str]:
    """Return a rename that only its caller understands."""

    def rename(key: str) -> str:
        head, _, tail = key.partition(".experts.")
        number, _, rest = tail.partition(".")
        return f"{head}.experts.{own(mesh)[int(number)]}.{rest}"

    return rename


def wrapped(mesh: FakeMesh) -> Callable[[str], str]:
    """Return a function that returns what a rename does, with the number in it."""
    rename = renumber(own)(mesh)
    return lambda key: rename(key)  # type: ignore[no-any-return]


def numbered(ids: RowsOf = own, asked: RowsOf | None = None, **axes: int) -> Side:
    """Return ranks with these experts, whose rename has the same numbers, or those of ``asked``."""
    return Side(axes or EP, local_experts(asked or ids), rename=renumber(ids))


def by_global_name(ids: RowsOf, **axes: int) -> Side:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {k: v for k, v in EXPERTS.items() if int(k.split(".")[3]) in ids(mesh)}

    return Side(axes or EP, held)


BY_NAME = numbered()
WHOLE_BY_NAME = Side(ONE, lambda mesh: dict(EXPERTS))


def over_edp(side: Side) -> Side:
    """Return the same with each tensor over ``edp``, as FSDP has it, which knows of no ``ep``."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {
            k: FakeDTensor.distribute(v, mesh["edp"], [Shard(0)])
            for k, v in side.held(mesh).items()
        }

    return replace(side, axes=EP_EDP, held=held)


SHARDED = over_edp(numbered())


# One tensor for all experts of a layer: by stacking those by name, or by a rule.


def unstacked(ids: RowsOf) -> Held:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {
            fqn.replace(".w", f".{i}.w"): whole[e].clone()
            for fqn, whole in STACKED.items()
            for i, e in enumerate(ids(mesh))
        }

    return held


def stacked(ids: RowsOf = own, **axes: int) -> Side:
    stack = Stack("experts.{}.w", 4)
    return Side(axes or EP, unstacked(ids), rename=lambda mesh: Renames(renumber(ids)(mesh), stack))


def by_index(ids: RowsOf = own, **axes: int) -> Side:
    return Side(
        axes or EP,
        lambda mesh: {fqn: whole[list(ids(mesh))] for fqn, whole in STACKED.items()},
        lambda mesh: {"ep": IndexShard(0, list(ids(mesh)))},
        key="experts",
        shapes={"global_shape": (4, 2, 3)},
    )


def by_ep_and_tp(ids: RowsOf) -> Side:
    """Return ranks that list rows over ``ep``, and have half of each over ``tp``."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        half = at(mesh, "tp")
        return {k: v[list(ids(mesh)), half : half + 1].clone() for k, v in STACKED.items()}

    return Side(
        {"ep": 2, "tp": 2},
        held,
        lambda mesh: {"ep": IndexShard(0, list(ids(mesh))), "tp": Shard(1)},
        key="experts",
        shapes={"global_shape": (4, 2, 3)},
    )


def layers_in_one_tensor(ids: RowsOf) -> Side:
    whole = arange(2, 4, 3)

    def held(mesh: FakeMesh) -> dict[str, Any]:
        return {
            f"layers.{layer}.experts.{i}.w": whole[layer, e].clone()
            for layer in range(2)
            for i, e in enumerate(ids(mesh))
        }

    steps = Stack("experts.{}.w", 4), Stack("layers.{}.experts.w", 2)
    return Side(EP, held, rename=lambda mesh: Renames(renumber(ids)(mesh), *steps))


IN_ONE = Side(ONE, lambda mesh: {"layers.experts.w": arange(2, 4, 3)})


def of_stages(rename: bool) -> Side:
    def held(mesh: FakeMesh) -> dict[str, Any]:
        rank = at(mesh, "ep")
        layers = {f"layers.{i}.w": arange(2, start=10 * rank + i) for i in range(2)}
        return {f"stage{rank}" if rename else "model": layers}

    def renames(mesh: FakeMesh) -> Renames:
        rank = at(mesh, "ep")
        return Renames(Renumber("layers.{}", own(mesh), total=4), Replace(f"stage{rank}", "model"))

    return Side(EP, held, rename=renames if rename else None)


# A model of fewer experts, in one tensor, than the checkpoint has by name.

EIGHT = {f"layers.{layer}.experts.w": arange(8, 2, 3, start=100 * layer) for layer in (0, 1)}
EIGHT_BY_NAME = Side(
    ONE,
    lambda mesh: {
        fqn.replace(".w", f".{i}.w"): whole[i].clone()
        for fqn, whole in EIGHT.items()
        for i in range(8)
    },
)
EIGHT_SAVED = {
    "Unstack": Side(ONE, lambda mesh: dict(EIGHT), rename=Unstack("experts.{}")),
    "Renumber": replace(EIGHT_BY_NAME, rename=Renumber("experts.{}", range(8), total=8)),
    "no rename": EIGHT_BY_NAME,
}


def first_experts(count: int, layers: int = 2, **axes: int) -> Side:
    """Return ranks that together have so many experts in one tensor."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        ranks, rank = mesh["ep"].size(), at(mesh, "ep")
        return {k: v[:count].chunk(ranks)[rank].clone() for k, v in [*EIGHT.items()][:layers]}

    rule = {"ep": Shard(0)} if axes else None
    return Side(axes or ONE, held, rule, key="experts", rename=Unstack("experts.{}"))


W = Side(ONE, lambda mesh: {"w": arange(4, 2), "norm": arange(2)})


def third_rank(asks_for_all: bool) -> Side:
    """Return two ranks that ask for one half; a third has no rules, and the whole, or no part."""

    def held(mesh: FakeMesh) -> dict[str, Any]:
        if mesh.rank < 2:
            return {"w": arange(4, 2)[:2].clone()}
        return {"w": arange(4, 2)} if asks_for_all else {"norm": arange(2)}

    return Side(
        {"any": 3},
        held,
        lambda mesh: {"ep": Shard(0)} if mesh.rank < 2 else None,
        mesh=lambda mesh: MeshCoordinate(("ep",), (2,), (0,)),
    )


def beyond(first: int, ranks: int) -> Side:
    """Return ranks with some of four parts of 8 rows, of which the last 4 are padding."""
    padded = torch.cat([arange(4, 2), torch.full((4, 2), 77.0)])
    return Side(
        {"any": ranks},
        lambda mesh: {"w": padded.chunk(4)[first + mesh.rank].clone(), "norm": arange(2)},
        {"ep": Shard(0)},
        shapes={"global_shape": (4, 2), "padded_shape": (8, 2)},
        mesh=lambda mesh: MeshCoordinate(("ep",), (4,), (first + mesh.rank,)),
    )


NUMBERS = "layers.0-1.experts.{}: several ranks ask for 0-1 of it, and none for 2-3"
STACK_ROWS = "layers.0-1.experts.w: several ranks ask for [0:2, :, :] of (4, 2, 3)"
WRONG_ROWS = (
    *(STACK_ROWS, "and none for [2:4, :, :]", "saved:       rows of dim 0, each rank its own"),
    *("asked for:   [0:2, :, :] by ranks 0-1", "optional=[pattern] or waive={pattern: reason}"),
)
HALF_OF_ALL = (
    "layers.0-1.experts.w: several ranks ask for [0:2, 0:1, :] of (4, 2, 3), and none for "
    "[0:2, 1:2, :], [2:4, 0:1, :]"
)
REFUSED: dict[str, tuple[Side, Side, tuple[str, ...]]] = {
    **{
        f"m43: the rename forgotten: {kind}": (
            replace(BY_NAME, rename=rename),
            replace(BY_NAME, rename=None),
            (
                *(NUMBERS, "saved with:  rename=", "'experts.{}'", "this load:   no rename="),
                *("asked for:   0-1 by ranks 0-1", "rename= was forgotten"),
                "way out:     rename=, rows and meshes as in the save, on each rank its own",
                "waive={pattern: reason}",
            ),
        )
        for kind, rename in (
            ("a Renumber", renumber(own)),
            ("a function that returns the answer of a Renumber", wrapped),
            ("a Renumber without a total", renumber(own, None)),
        )
    },
    "m43: the rename forgotten: a function": (
        replace(BY_NAME, rename=by_function),
        replace(BY_NAME, rename=None),
        (
            "layers: several ranks ask for layers.0-1.experts.0-1.w, and none for "
            "layers.0-1.experts.2-3.w",
            "saved with:  rename=function('by_function.<locals>.rename')",
            "this load:   no rename=",
            "that function was forgotten",
        ),
    ),
    # All numbers are asked for, since a replica of that rank asks for its own.
    "m43: a rank without the rename that its replicas have": (
        BY_NAME,
        replace(
            BY_NAME,
            axes=EP_EDP,
            rename=lambda mesh: None if mesh.rank == 1 else renumber(own)(mesh),
        ),
        (
            "layers.0-1.experts.{}: no rename= of rank 1 numbers it, as others do",
            "other ranks: rename=Renumber('experts.{}', total=4)",
        ),
    ),
    "m43: a rank whose rename numbers the layers alone, which changes nothing": (
        BY_NAME,
        replace(
            BY_NAME,
            axes=EP_EDP,
            rename=lambda mesh: Renames(
                Renumber("layers.{}", [0, 1], total=2),
                *([] if mesh.rank == 1 else [renumber(own)(mesh)]),
            ),
        ),
        (),
    ),
    "m43: layers of stages without the rename": (
        of_stages(True),
        of_stages(False),
        ("model.layers.{}: several ranks ask for 0-1 of it, and none for 2-3",),
    ),
    "m119: layers of stages, with the Replace of the rename alone": (
        of_stages(True),
        replace(of_stages(True), rename=lambda mesh: Replace(f"stage{at(mesh, 'ep')}", "model")),
        (
            "model.layers.{}: several ranks ask for 0-1 of it, and none for 2-3",
            "saved with:  rename=Renumber('layers.{}', total=4)",
        ),
    ),
    "m43: numbers by the position along edp": (
        SHARDED,
        over_edp(numbered(of_edp)),
        (
            "layers.0-1.experts.0-1.w: several ranks",
            "several ranks ask for [0:2, :] of (4, 2), and none for [2:4, :]",
            "several ranks ask for [2:4, :] of (4, 2), and none for [0:2, :]",
            "saved:       Shard(0) over 'edp' of size 2",
            "this load:   Shard(0) over 'edp' of size 2; rename=Renumber('experts.{}', total=4)",
            *("asked for:   [0:2, :] by ranks 0-1", "asked for:   [2:4, :] by ranks 2-3"),
            "position of another rank, as along a wrong axis (edp in place of ep)",
            "waive={pattern: reason}",
        ),
    ),
    "m43: a stack by the position along edp": (
        over_edp(stacked()),
        over_edp(stacked(of_edp)),
        (HALF_OF_ALL,),
    ),
    "m49: numbers of another rank": (
        BY_NAME,
        numbered(of_first),
        ("none for 2-3", "saved with:  rename=Renumber('experts.{}', total=4)"),
    ),
    # As that of one process that has the whole model, or of another trainer.
    "m49: numbers of another rank, of a checkpoint without renames": (
        WHOLE_BY_NAME,
        numbered(of_first),
        (
            *(NUMBERS, "this load:   rename=Renumber('experts.{}', total=4)"),
            *("asked for:   0-1 by ranks 0-1", "the numbers of another rank"),
            "way out:     rename=",
        ),
    ),
    **{
        f"m49: another total of {pattern}": (
            BY_NAME,
            Side(
                EP,
                local_experts(lambda mesh: [at(mesh, "ep")]),
                rename=renumber(lambda mesh: [at(mesh, "ep")], 2, pattern),
            ),
            (
                "layers.0-1.experts.{}: this load numbers 2 of it, and the save numbered 4",
                f"this load:   rename=Renumber('{pattern}', total=2)",
                "saved with:  rename=Renumber('experts.{}', total=4)",
                "way out:     the rename= of the save",
            ),
        )
        for pattern in ("experts.{}", "layers.*.experts.{}")
    },
    "m49: a stack of the rows of another rank": (
        stacked(),
        stacked(of_first),
        (
            *WRONG_ROWS,
            "this load:   rows of dim 0, each rank its own; "
            "rename=Renumber('experts.{}', total=4), Stack('experts.{}.w', total=4)",
        ),
    ),
    "m49: a stack without its numbers": (
        stacked(),
        replace(stacked(of_first), rename=Stack("experts.{}.w", 4)),
        (
            *WRONG_ROWS,
            "this load:   rows of dim 0, each rank its own; rename=Stack('experts.{}.w', total=4)",
        ),
    ),
    "m49: experts of layers in one tensor, of another rank": (
        IN_ONE,
        layers_in_one_tensor(of_first),
        ("several ranks ask for [:, 0:2, :] of (2, 4, 3), and none for [:, 2:4, :]",),
    ),
    "m49: listed rows of rank 0 on every rank": (
        by_index(),
        by_index(of_first),
        (*WRONG_ROWS, "this load:   rows of dim 0, each rank its own"),
    ),
    "m49: parts of listed rows of rank 0 on every rank": (
        by_index(),
        by_ep_and_tp(of_first),
        ("several ranks ask for [0:2, 0:1, :]", "[0:2, 1:2, :] by ranks 1, 3"),
    ),
    **{
        f"m73: a stack of fewer experts than were saved with {form}": (
            saved,
            first_experts(6),
            (
                "layers.0-1.experts.{}: this load asks for 0-5 of it, and not for 6-7",
                "a stacked tensor of 6 rows",
                "optional=[pattern] or waive={pattern: reason}",
            ),
        )
        for form, saved in EIGHT_SAVED.items()
    },
    "m73: rows over ranks, counted together": (
        EIGHT_SAVED["Renumber"],
        first_experts(6, 1, ep=2),
        ("layers.0.experts.{}: this load asks for 0-5 of it, and not for 6-7",),
    ),
    "fewer experts, the same on every rank": (
        BY_NAME,
        by_global_name(of_first),
        ("several ranks ask for 0-1 of it, and none for 2-3", "optional=[pattern]"),
    ),
    "a third rank that asks for another tensor": (
        W,
        third_rank(False),
        ("w: several ranks ask for [0:2, :] of (4, 2), and none for [2:4, :]", "ranks 0-1"),
    ),
    "padding alone on every rank": (
        W,
        beyond(2, 2),
        ("w: every rank has padding alone of it", "of (4, 2)", "padded to (8, 2)"),
    ),
}


@pytest.mark.parametrize(("saved", "loaded", "facts"), REFUSED.values(), ids=REFUSED)
def test_parts_that_several_ranks_ask_for_while_none_asks_for_others_are_refused(
    tmp_path: Path, saved: Side, loaded: Side, facts: tuple[str, ...]
) -> None:
    saved.saves(tmp_path)
    refusal = loaded.is_refused(tmp_path, *facts)
    assert list(refusal.by_rank) == [0], "one rank speaks for all"
    assert ("saved with" in refusal.text) <= (saved.rename is not None)
    keys = list(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    for options in ({"optional": keys}, {"waive": dict.fromkeys(keys, "on purpose")}):
        with without_warning():
            loaded.loads(tmp_path, **options)


LISTED: dict[str, tuple[dict[str, int], RowsOf]] = {
    "each its own": (EP, own),
    "twice as many ranks": ({"ep": 4}, lambda mesh: [3 - at(mesh, "ep")]),
    "replicas": ({"ep": 4}, lambda mesh: HALVES[at(mesh, "ep") % 2]),
    "copies of some": (EP, lambda mesh: [[0, 1, 2], [1, 2, 3]][at(mesh, "ep")]),
    "copies of all of a rank's": (EP, lambda mesh: [[0, 1, 2, 3], [1, 2]][at(mesh, "ep")]),
    "all on every rank": (EP, lambda mesh: [0, 1, 2, 3]),
    "copies that leave out others": (EP, lambda mesh: [[0, 1], [1, 2]][at(mesh, "ep")]),
    "others on each, some on none": (EP, lambda mesh: [at(mesh, "ep")]),
    "one process": (ONE, lambda mesh: [2]),
}


QUIET: dict[str, tuple[Side, Side]] = {
    **{
        f"{name}: {kind}": (saved, loaded)
        for name, (axes, ids) in LISTED.items()
        for kind, saved, loaded in (
            ("stacked", stacked(), stacked(ids, **axes)),
            ("listed", by_index(), by_index(ids, **axes)),
            ("stacked, then listed", stacked(), by_index(ids, **axes)),
        )
    },
    "by the rename of the save": (BY_NAME, BY_NAME),
    "by name, on twice as many ranks": (BY_NAME, numbered(lambda m: [3 - at(m, "ep")], ep=4)),
    "by name, all in one process": (BY_NAME, WHOLE_BY_NAME),
    "by name, all on each rank": (BY_NAME, replace(WHOLE_BY_NAME, axes=EP)),
    "by name, on replicas": (BY_NAME, numbered(edp=2, ep=2)),
    "by name, of ranks that know the global names": (BY_NAME, by_global_name(own)),
    "by name, some in one process": (BY_NAME, by_global_name(lambda mesh: [2], ep=1)),
    "other layers on each stage": (
        BY_NAME,
        Side(
            {"pp": 2, "ep": 2},
            lambda mesh: {k: v for k, v in EXPERTS.items() if k[7] == str(at(mesh, "pp"))},
        ),
    ),
    "a rank that asks for all numbers needs no rename": (
        BY_NAME,
        Side(
            {"any": 3},
            local_experts(lambda mesh: [*HALVES, range(4)][mesh.rank]),
            rename=lambda mesh: renumber(lambda m: HALVES[m.rank])(mesh) if mesh.rank < 2 else None,
        ),
    ),
    "ranks whose numbers are those of the whole need no rename": (
        BY_NAME,
        replace(
            BY_NAME,
            axes=EP_EDP,
            rename=lambda mesh: renumber(own)(mesh) if at(mesh, "ep") else None,
        ),
    ),
    "m49: numbers of a checkpoint without renames": (WHOLE_BY_NAME, BY_NAME),
    "experts of layers in one tensor": (IN_ONE, layers_in_one_tensor(own)),
    "parts of the same rows": (by_index(), by_ep_and_tp(own)),
    "parts of some rows, each once": (by_index(), by_ep_and_tp(lambda mesh: [at(mesh, "ep")])),
    "sharded experts": (SHARDED, SHARDED),
    "sharded experts, in one process": (SHARDED, WHOLE_BY_NAME),
    "sharded experts, all on each rank": (SHARDED, replace(WHOLE_BY_NAME, axes=EP_EDP)),
    "m73: as many experts as were saved": (EIGHT_SAVED["Renumber"], first_experts(8)),
    # Half of an embedding for inference: no rank asks for what another one asks for.
    "ranks with parts of their own": (
        Side(ONE, lambda mesh: {"emb": arange(8, 2)}),
        Side(
            EP,
            lambda mesh: {"emb": arange(8, 2).chunk(4)[at(mesh, "ep")].clone()},
            {"tp": Shard(0)},
            key="emb",
            mesh=lambda mesh: MeshCoordinate(("tp",), (4,), (mesh.rank,)),
        ),
    ),
    "a third rank that asks for all": (W, third_rank(True)),
    "padding alone on the last rank": (W, beyond(0, 3)),
    "optimizer state that some experts lack": (
        replace(
            numbered(lambda mesh: [at(mesh, "ep")]),
            held=(
                state := lambda mesh: {
                    "model": {"experts.0.w": arange(2, start=at(mesh, "ep"))},
                    "optim": {
                        "state": {} if at(mesh, "ep") else {"experts.0.w.step": torch.tensor(3.0)},
                        "param_groups": {"experts.0.w": {"lr": 0.1}},
                    },
                }
            ),
            rename=(two := renumber(lambda mesh: [at(mesh, "ep")], 2)),
        ),
        Side(EP, state, rename=two),
    ),
}


@pytest.mark.parametrize(("saved", "loaded"), QUIET.values(), ids=QUIET)
def test_what_is_right_together_is_quiet(tmp_path: Path, saved: Side, loaded: Side) -> None:
    saved.saves(tmp_path)
    loaded.loads_right(tmp_path)


def test_a_partial_load_of_parts_of_their_own_is_quiet(tmp_path: Path) -> None:
    saved, loaded = QUIET["ranks with parts of their own"]
    saved.saves(tmp_path)
    loaded.loads_right(tmp_path, allow_partial_load=True)


def test_m49_rows_of_a_checkpoint_without_a_record_are_compared_too(tmp_path: Path) -> None:
    dcp.save(dict(STACKED), checkpoint_id=tmp_path / "stock", no_dist=True)
    stacked().saves(tmp_path / "old")

    def drop(metadata: Metadata) -> None:
        del metadata.planner_data[RESERVED_KEY]

    edit_metadata(tmp_path / "old", drop)
    for name in ("stock", "old"):
        refusal = stacked(of_first).is_refused(tmp_path / name, STACK_ROWS)
        assert not re.search("saved(:| with)", refusal.text)


def test_a_rank_that_asks_for_the_whole_tensor_leaves_no_gap(tmp_path: Path) -> None:
    """An evaluation on rank 3 reads all experts, while the others read by half."""
    SHARDED.saves(tmp_path)
    wrong = over_edp(numbered(of_edp))
    side = replace(
        wrong,
        held=lambda mesh: wrong.held(mesh) if mesh.rank < 3 else dict(EXPERTS),
        rename=lambda mesh: wrong.rename(mesh) if mesh.rank < 3 else None,
    )
    states = [side.state(rank) for rank in range(4)]
    for value in states[3].values():
        value.zero_()
    side.loads(tmp_path, states)
    assert all(same_bits(states[3][fqn], value) for fqn, value in EXPERTS.items())


@pytest.mark.parametrize(
    ("saved", "loaded", "keys"),
    [
        (BY_NAME, by_global_name(lambda mesh: [at(mesh, "ep")]), "layers.0-1.experts.2-3.w"),
        (EIGHT_SAVED["Renumber"], first_experts(8, 1, ep=2), "layers.1.experts.0-7.w"),
    ],
)
def test_what_no_rank_asks_for_is_warned_of(
    tmp_path: Path, saved: Side, loaded: Side, keys: str
) -> None:
    """Of other ranks other experts: nobody asks for what another asks for. It may be a mistake."""
    saved.saves(tmp_path)
    with warned() as texts:
        loaded.loads(tmp_path)
    assert [f"no rank asks for: {keys}" in text for text in texts] == [True]


@pytest.mark.parametrize("options", [{"optional": ["experts"]}, {"waive": {"experts": "pruned"}}])
def test_m73_a_stack_of_fewer_experts_loads_where_that_is_declared(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    EIGHT_SAVED["Unstack"].saves(tmp_path)
    first_experts(6).loads_right(tmp_path, **options)


def test_a_waiver_of_one_layer_does_not_excuse_the_other(tmp_path: Path) -> None:
    stacked().saves(tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"layers\.1\.experts\.w: several ranks"):
        stacked(of_first).loads(tmp_path, waive={"layers.0.experts.w": "a smaller layer"})


# A rank that loads by itself, as with ``no_dist=True``.


def loads_alone(side: Side, path: Path, rank: int, **options: Any) -> tuple[dict[str, Any], Any]:
    planner, reader = (
        side.planner(PlacementLoadPlanner, rank, **options),
        dcp.FileSystemReader(path),
    )
    state = side.state(rank)
    for value in state.values():
        value.zero_()
    with World(2)._as(rank):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, True)
        local_plan = reader.prepare_local_plan(planner.create_local_plan())
        plans = reader.prepare_global_plan(planner.create_global_plan([local_plan]))
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    return state, planner.report


@pytest.mark.parametrize("rank", range(2))
def test_m43_a_rank_that_loads_alone_by_local_numbers_is_refused(tmp_path: Path, rank: int) -> None:
    BY_NAME.saves(tmp_path)
    for rename in (None, Replace("module", "model")):  # one that gives no numbers
        with pytest.raises(PlacementError) as refusal:
            loads_alone(replace(BY_NAME, rename=rename), tmp_path, rank)
        for text in (
            "layers.0-1.experts.{}: this load asks for 0-1 of it, and not for 2-3",
            f"asked for:   0-1 by rank {rank}",
            "saved with:  rename=Renumber('experts.{}', total=4)",
            "rename= was forgotten",
            "waive={pattern: reason}",
        ):
            assert text in str(refusal.value)
    waive = {"experts": "two of the four"}
    state, report = loads_alone(replace(BY_NAME, rename=None), tmp_path, rank, waive=waive)
    assert all(same_bits(state[key], EXPERTS[key]) for key in state)
    assert report.compared == "declared as saved, but not with what other ranks ask for"


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("side", [BY_NAME, by_global_name(lambda mesh: range(4))])
def test_a_rank_that_loads_alone_its_numbers_or_all_is_right(
    tmp_path: Path, side: Side, rank: int
) -> None:
    BY_NAME.saves(tmp_path)
    state, report = loads_alone(side, tmp_path, rank)
    wanted = side.state(rank)
    assert all(same_bits(state[key], wanted[key]) for key in wanted)
    assert "declared as saved" in report.compared
