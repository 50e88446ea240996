"""Optimizer state of another shape follows its parameter dim by dim: the whole, cut by slicing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import arange, assert_same, blank, refused, without_warning
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    FusedShard,
    IndexShard,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
    contiguous,
)
from dcp_placements.testing import FakeDTensor, World

Cuts = Mapping[str, int]
"""By axis, the dim of the parameter that it cuts."""

SIZES = {"ep": 2, "tp": 2, "fsdp": 2}
WORLD = World(8)


def mesh(rank: int) -> Any:
    return WORLD.mesh(rank, **SIZES)


def part(whole: torch.Tensor, dims: Mapping[str, int | None], rank: int) -> torch.Tensor:
    """Return what a rank has of a whole that axes cut, by plain slicing."""
    for axis, dim in dims.items():
        if dim is not None:
            at = mesh(rank)[axis].get_coordinate()[0]
            rows = whole.shape[dim] // SIZES[axis]
            whole = whole.narrow(dim, at * rows, rows)
    return whole.clone()


def ruled(rank: int, cuts: Cuts, key: str = "model.w") -> PlacementRules:
    return PlacementRules(
        {key: CheckpointPlacement(mesh(rank), {axis: Shard(dim) for axis, dim in cuts.items()})}
    )


def state(**held: Any) -> dict[str, Any]:
    return {
        "model": {"w": held.pop("w")},
        "optim": {"state": {"w": held}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
    }


def assert_stored(path: Path, wholes: Mapping[str, torch.Tensor]) -> None:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    read = {}
    for name, whole in wholes.items():
        key = "model.w" if name == "w" else f"optim.state.w.{name}"
        assert tuple(stored[key].size) == whole.shape, key
        read[key] = torch.full_like(whole, -3)
    dcp.load(read, checkpoint_id=path, no_dist=True)
    for name, key in zip(wholes, list(read), strict=True):
        assert torch.equal(read[key], wholes[name]), key


def assert_saved_and_loaded(
    path: Path,
    wholes: Mapping[str, torch.Tensor],
    held: Callable[[int], dict[str, Any]],
    rules: Callable[[int], Any],
    rename: Callable[[int], Any] = lambda rank: None,
) -> None:
    """Assert that a file has the wholes, and that each rank finds its part of them again."""
    with without_warning():
        WORLD.save(path, held, lambda rank: PlacementSavePlanner(rules(rank), rename=rename(rank)))
        assert_stored(path, wholes)
        loaded = [blank(held(rank)) for rank in range(8)]
        WORLD.load(
            path,
            loaded.__getitem__,
            lambda rank: PlacementLoadPlanner(rules(rank), rename=rename(rank)),
        )
    for rank in range(8):
        assert_same(loaded[rank], held(rank))


SHAPES = {
    "adam": ((8, 12), {"exp_avg": (8, 12), "exp_avg_sq": (8, 12)}),
    "torch's Adafactor": ((8, 12), {"row_var": (8, 1), "col_var": (1, 12)}),
    "torch's Adafactor, 3-d": ((4, 10, 12), {"row_var": (4, 10, 1), "col_var": (4, 1, 12)}),
    "torch's Adafactor, 4-d": ((4, 8, 2, 6), {"row_var": (4, 8, 2, 1), "col_var": (4, 8, 1, 6)}),
    "NorMuon": ((4, 10, 12), {"momentum_buffer": (4, 10, 12), "second": (4, 10, 1)}),
    "Adafactor of Transformers": (
        (4, 10, 12),
        {"exp_avg_sq_row": (4, 10), "exp_avg_sq_col": (4, 12)},
    ),
    "Adam-mini, a number per row": ((8, 12), {"vmean": (8, 1)}),
    "one number for all": ((8, 12), {"scale": (1, 1)}),
}
DIMS: dict[tuple[int, ...], tuple[int | None, ...]] = {}


def dims_of(shape: tuple[int, ...], parameter: tuple[int, ...]) -> list[int | None]:
    """Return by dim of the parameter that of the state; sizes of these parameters all differ."""
    return [shape.index(size) if size in shape else None for size in parameter]


@pytest.mark.parametrize(
    ("form", "cuts"),
    [
        ("plain", {"ep": 0, "tp": 1}),
        ("plain", {"ep": 1, "tp": 0}),
        ("DTensors", {"ep": 0}),
        ("DTensors", {"tp": 1}),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_state_follows_its_parameter_dim_by_dim(
    tmp_path: Path, name: str, cuts: Cuts, form: str
) -> None:
    """Over ep and tp by the rule; over fsdp, where there are DTensors, by them."""
    parameter, shapes = SHAPES[name]
    wholes = {"w": arange(*parameter)}
    wholes |= {one: arange(*shape, start=1000 * i) for i, (one, shape) in enumerate(shapes.items())}

    def local(one: str, rank: int) -> Any:
        dims = dims_of(tuple(wholes[one].shape), parameter)
        held = part(wholes[one], {axis: dims[dim] for axis, dim in cuts.items()}, rank)
        if form == "plain" or dims[0] is None:
            return held
        return FakeDTensor.distribute(held, mesh(rank)["fsdp"], [Shard(dims[0])])

    assert_saved_and_loaded(
        tmp_path,
        wholes,
        lambda rank: state(**{one: local(one, rank) for one in wholes}),
        lambda rank: ruled(rank, cuts),
    )


@pytest.mark.parametrize("pattern", ["w", "**.w.**", "model.w"])
def test_plain_state_of_a_dtensor_has_its_cuts_too_whichever_pattern_matches(
    tmp_path: Path, pattern: str
) -> None:
    """A pattern that matches the state as well is the parameter's, of which a state lacks dims."""
    wholes = {
        "w": arange(4, 8, 12),
        "row": arange(4, 8, 1, start=500),
        "col": arange(4, 12, start=900),
    }

    def held(rank: int) -> dict[str, Any]:
        local = part(wholes["w"], {"ep": 0, "tp": 1}, rank)
        made = state(
            w=FakeDTensor.distribute(local, mesh(rank)["fsdp"], [Shard(2)]),
            row=part(wholes["row"], {"ep": 0, "tp": 1}, rank),
            col=part(wholes["col"], {"ep": 0, "fsdp": 1}, rank),
        )
        return made

    assert_saved_and_loaded(
        tmp_path, wholes, held, lambda rank: ruled(rank, {"ep": 0, "tp": 1}, pattern)
    )


def test_state_of_a_fused_tensor_and_of_listed_rows(tmp_path: Path) -> None:
    """gate|up over tp, of experts that each ep rank lists."""
    wholes = {
        "w": arange(4, 8, 6),
        "row": arange(4, 8, 1, start=500),
        "col": arange(4, 1, 6, start=900),
    }
    rows = [[3, 0], [1, 2]]

    def held(rank: int) -> dict[str, Any]:
        ep, tp, _ = mesh(rank).get_coordinate()
        fused = [*range(2 * tp, 2 * tp + 2), *range(4 + 2 * tp, 6 + 2 * tp)]
        mine = {one: whole[rows[ep]] for one, whole in wholes.items()}
        return state(w=mine["w"][:, fused], row=mine["row"][:, fused], col=mine["col"].clone())

    def rules(rank: int) -> PlacementRules:
        ep = mesh(rank).get_coordinate()[0]
        placements = {"ep": IndexShard(0, rows[ep]), "tp": FusedShard(-2, 2)}
        placement = CheckpointPlacement(mesh(rank), placements, global_shape=(4, 8, 6))
        return PlacementRules({"w": placement})

    assert_saved_and_loaded(tmp_path, wholes, held, rules)


def test_state_of_a_padded_parameter_of_unequal_experts(tmp_path: Path) -> None:
    """Five experts over two ranks; 7 columns that were padded to 8 for tp."""
    wholes = {"w": arange(5, 7), "row": arange(5, 1, start=500), "col": arange(1, 7, start=900)}

    def held(rank: int) -> dict[str, Any]:
        ep, tp, _ = mesh(rank).get_coordinate()
        padded = {n: torch.nn.functional.pad(wholes[n], (0, 1)) for n in ("w", "col")}
        mine = slice(3 * ep, 3 * ep + 3), slice(4 * tp, 4 * tp + 4)
        return state(w=padded["w"][mine], row=wholes["row"][mine[0]], col=padded["col"][:, mine[1]])

    def rules(rank: int) -> PlacementRules:
        shapes = {"global_shape": (5, 7), "padded_shape": (5, 8)}
        placement = CheckpointPlacement(mesh(rank), {"ep": Shard(0), "tp": Shard(1)}, **shapes)
        return PlacementRules({"w": placement})

    with without_warning():
        WORLD.save(tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank)))
    assert_stored(tmp_path, wholes)


@pytest.mark.parametrize("rules", [None, lambda fqn, tensor: None])
def test_state_of_a_stack_of_which_no_rule_speaks_is_stacked(tmp_path: Path, rules: Any) -> None:
    w, row = arange(2, 8, 12), arange(2, 8, 1, start=500)
    names = ["experts.0.w", "experts.1.w"]
    states = {name: {"row": row[at], "m": w[at]} for at, name in enumerate(names)}
    fsdp = World(1).mesh(0, fsdp=1)
    held = {
        "model": {
            name: FakeDTensor.distribute(w[at], fsdp, [Shard(0)]) for at, name in enumerate(names)
        },
        "optim": {"state": states, "param_groups": [{"params": names}]},
    }
    planner = PlacementSavePlanner(rules, rename=Stack("experts.{}", total=2))
    World(1).save(tmp_path, lambda rank: held, lambda rank: planner)
    shapes = {key.rpartition(".")[2]: stored.shape for key, stored in planner.report.keys.items()}
    assert shapes == {"w": (2, 8, 12), "row": (2, 8, 1), "m": (2, 8, 12)}


@pytest.mark.parametrize("stacked", [True, False])
def test_state_of_numbered_experts_follows_with_and_without_a_stack(
    tmp_path: Path, stacked: bool
) -> None:
    """A rename of the weights alone, too: state is told by this rank's own names."""
    w, row, col = arange(4, 8, 12), arange(4, 8, 1, start=500), arange(4, 1, 12, start=900)

    def held(rank: int) -> dict[str, Any]:
        ep, _, _ = mesh(rank).get_coordinate()
        experts = [2 * ep, 2 * ep + 1]
        mine = {f"experts.{i}.w": part(w[e], {"tp": 1}, rank) for i, e in enumerate(experts)}
        return {
            "model": mine,
            "optim": {
                "state": {
                    f"experts.{i}.w": {"row": row[e].clone(), "col": part(col[e], {"tp": 1}, rank)}
                    for i, e in enumerate(experts)
                },
                "param_groups": [{"params": list(mine)}],
            },
        }

    def rename(rank: int) -> Any:
        steps = [
            Renumber("experts.{}", contiguous([2, 2], mesh(rank).get_coordinate()[0]), total=4)
        ]
        return Renames(*steps, *([Stack("experts.{}", total=4)] if stacked else []))

    def rules(rank: int) -> PlacementRules:
        placements = {"ep": Shard(0), "tp": Shard(2)} if stacked else {"tp": Shard(1)}
        return PlacementRules({"model.**.w": CheckpointPlacement(mesh(rank), placements)})

    with without_warning():
        WORLD.save(
            tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank), rename=rename(rank))
        )
        loaded = [blank(held(rank)) for rank in range(8)]
        WORLD.load(
            tmp_path,
            loaded.__getitem__,
            lambda rank: PlacementLoadPlanner(rules(rank), rename=rename(rank)),
        )
    for rank in range(8):
        found, wanted = loaded[rank], held(rank)
        assert_same(found["model"], wanted["model"])
        assert_same(found["optim"]["state"], wanted["optim"]["state"])
    wholes = {"model": w, "row": row, "col": col}
    read: dict[str, torch.Tensor] = {}
    for name, whole in wholes.items():
        head, tail = ("model", "") if name == "model" else ("optim.state", f".{name}")
        if stacked:
            read[f"{head}.experts.w{tail}"] = torch.zeros_like(whole)
        else:
            read |= {f"{head}.experts.{e}.w{tail}": torch.zeros_like(whole[e]) for e in range(4)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    found = list(read.values())
    expected = (
        list(wholes.values()) if stacked else [one[e] for one in wholes.values() for e in range(4)]
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("cuts", "shape", "axis"),
    [({"tp": 1}, (8, 1), "tp"), ({"ep": 0}, (1, 12), "ep"), ({"ep": 0}, (12,), "ep")],
)
def test_statistics_of_a_part_are_refused(
    tmp_path: Path, cuts: Cuts, shape: tuple[int, ...], axis: str
) -> None:
    """A mean over a dim that an axis cuts is the mean of a rank's own part."""
    whole = arange(8, 12)

    def held(rank: int) -> dict[str, Any]:
        at = mesh(rank)[axis].get_coordinate()[0]
        return state(w=part(whole, cuts, rank), mean=arange(*shape, start=1000 * (at + 1)))

    with refused() as refusal:
        WORLD.save(tmp_path, held, lambda rank: PlacementSavePlanner(ruled(rank, cuts)))
    refusal.says("optim.state.w.mean: ", "statistics of a part", f"'{axis}'", "rank", str(shape))


@pytest.mark.parametrize("is_flat", [False, True])
def test_state_in_levels_is_that_of_its_parameter_in_a_refusal(
    tmp_path: Path, is_flat: bool
) -> None:
    """Factors of Shampoo, by block and in a list, are no shards of anything."""
    whole = arange(8, 12)

    def held(rank: int) -> dict[str, Any]:
        at = mesh(rank)["ep"].get_coordinate()[0]
        factors = {"block_0": {"factors": [arange(4, 4, start=1000 * (at + 1))]}}
        of_rank = state(w=part(whole, {"ep": 0}, rank), **factors)
        if is_flat:
            of_rank["optim"]["param_groups"] = {"w": {"lr": 0.1}}
        return of_rank

    with refused() as refusal:
        rules = lambda rank: ruled(rank, {"ep": 0})  # noqa: E731
        WORLD.save(tmp_path, held, lambda rank: PlacementSavePlanner(rules(rank)))
    refusal.says("block_0.factors.0: ", "statistics of a part", "cut over 'ep'", "(4, 4)")
    assert "it is sharded" not in refusal.text


@pytest.mark.parametrize("shape", [(6, 6), (4, 6, 6)])
def test_a_factored_moment_of_a_square_matrix_needs_a_rule_of_its_own(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    whole = arange(*shape)
    row = arange(*shape[:-1], start=900)
    dim = len(shape) - 2

    def held(rank: int) -> dict[str, Any]:
        return state(w=part(whole, {"tp": dim}, rank), row=part(row, {"tp": dim}, rank))

    def square(rank: int) -> dict[str, Any]:
        """The local weight is square."""
        local = torch.arange(6.0 * len(row.flatten())).reshape(shape)
        return state(w=local + rank % 4 // 2, row=row + rank % 4 // 2)

    with refused() as refusal:
        WORLD.save(tmp_path, square, lambda rank: PlacementSavePlanner(ruled(rank, {"tp": dim})))
    refusal.says(
        "optim.state.w.row", f"without dim {dim} or {dim + 1}", "a rule for this key itself"
    )
    own = {"optim.state.w.row": CheckpointPlacement(mesh(0), {"tp": Shard(dim)})}

    def rules(rank: int) -> PlacementRules:
        named = {key: CheckpointPlacement(mesh(rank), one.placements) for key, one in own.items()}
        placement = CheckpointPlacement(mesh(rank), {"tp": Shard(dim)})
        return PlacementRules({**named, "model.w": placement})

    with without_warning():
        WORLD.save(tmp_path, square, lambda rank: PlacementSavePlanner(rules(rank)))
    assert_saved_and_loaded(tmp_path / "own", {"w": whole, "row": row}, held, rules)


def test_a_factored_moment_fits_in_two_ways_that_lie_alike(tmp_path: Path) -> None:
    """Square experts that ep alone cuts: which of the two dims is lost is all the same."""
    wholes = {"w": arange(4, 6, 6), "row": arange(4, 6, start=500), "col": arange(4, 6, start=900)}
    assert_saved_and_loaded(
        tmp_path,
        wholes,
        lambda rank: state(**{n: part(one, {"ep": 0}, rank) for n, one in wholes.items()}),
        lambda rank: ruled(rank, {"ep": 0}, "w"),
    )


@pytest.mark.parametrize("name", ["torch's Adafactor, 3-d", "NorMuon", "adam"])
def test_an_optimizer_that_is_saved_alone_is_cut_as_with_its_weights(
    tmp_path: Path, name: str
) -> None:
    """Its state shows the sizes of the parameters that the pattern means."""
    parameter, shapes = SHAPES[name]
    cuts = {"ep": 0, "tp": 1}
    wholes = {one: arange(*shape, start=1000 * i) for i, (one, shape) in enumerate(shapes.items())}

    def local(one: str, rank: int) -> torch.Tensor:
        dims = dims_of(tuple(wholes[one].shape), parameter)
        return part(wholes[one], {axis: dims[dim] for axis, dim in cuts.items()}, rank)

    def held(rank: int) -> dict[str, Any]:
        made = state(w=None, **{one: local(one, rank) for one in wholes})
        return {"optim": made["optim"]}

    assert_saved_and_loaded(tmp_path, wholes, held, lambda rank: ruled(rank, cuts, "w"))


@pytest.mark.parametrize("alone", [False, True], ids=["with weights", "alone"])
def test_reduced_state_of_experts_is_equal_along_ep_without_a_note(
    tmp_path: Path, alone: bool
) -> None:
    """The mean over the experts of a bias: its name says expert, and no cut of its own is left."""
    wholes = {"experts.w": arange(4, 6), "row_var": arange(4, 1), "col_var": arange(1, 6)}

    def held(rank: int) -> dict[str, Any]:
        local = {one: part(whole, {"ep": 0}, rank) for one, whole in wholes.items()}
        local["col_var"] = wholes["col_var"].clone()
        w = local.pop("experts.w")
        optim = {
            "state": {"experts.w": {**local, **({"exp_avg": w.clone()} if alone else {})}},
            "param_groups": [{"params": ["experts.w"]}],
        }
        return {"optim": optim} if alone else {"model": {"experts.w": w}, "optim": optim}

    with without_warning():
        WORLD.save(
            tmp_path,
            held,
            lambda rank: PlacementSavePlanner(ruled(rank, {"ep": 0}, "experts.w")),
        )


def test_preconditioners_of_an_optimizer_that_is_saved_alone_have_the_rule_that_matches(
    tmp_path: Path,
) -> None:
    """Nothing shows which of the shapes is the parameter's."""
    wholes = {"exp_avg": arange(8, 6), "left": arange(8, 4, start=300)}

    def held(rank: int) -> dict[str, Any]:
        made = state(w=None, **{n: part(one, {"ep": 0}, rank) for n, one in wholes.items()})
        return {"optim": made["optim"]}

    assert_saved_and_loaded(tmp_path, wholes, held, lambda rank: ruled(rank, {"ep": 0}, "w"))


def test_state_of_any_other_shape_is_a_replica_or_has_a_rule_of_its_own(tmp_path: Path) -> None:
    """Preconditioners and blocks, under a pattern that matches them as well as their parameter."""
    w = arange(8, 6)
    left, blocks = arange(4, 4, start=300), arange(16, start=700)

    def held(rank: int, same: bool = True) -> dict[str, Any]:
        ep = mesh(rank).get_coordinate()[0]
        own = left if same else left + ep
        return state(w=part(w, {"ep": 0}, rank), left=own, blocks=part(blocks, {"ep": 0}, rank))

    def rules(rank: int, **own: Any) -> PlacementRules:
        placement = CheckpointPlacement(mesh(rank), {"ep": Shard(0)})
        return PlacementRules({**{f"w.{name}": placement for name in own}, "w": placement})

    assert_saved_and_loaded(
        tmp_path,
        {"w": w, "left": left, "blocks": blocks},
        held,
        lambda rank: rules(rank, blocks=True),
    )
    with refused() as refusal:
        WORLD.save(
            tmp_path / "2",
            lambda rank: held(rank, same=False),
            lambda rank: PlacementSavePlanner(rules(rank, blocks=True)),
        )
    refusal.says("optim.state.w.left: ", "2 different contents on 8 ranks")
