"""One tensor per layer and expert on the ranks, one ``[layers, experts, ...]`` for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import digest_budget
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from strategies import examples
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    PlacementError,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Row,
    Stack,
)
from dcp_placements.formats.huggingface.export import export_safetensors
from dcp_placements.testing import FakeDTensor, World, cut
from dcp_placements.testing.megatron import MegatronModel
from dcp_placements.testing.megatron_dist import write_torch_dist

ROWS, COLUMNS = 5, 4
WEIGHT, MOMENT = "layers.experts.w", "optim.state.layers.experts.w.exp_avg"
STEP, RATE = "optim.state.layers.experts.w.step", "optim.param_groups.layers.experts.w.lr"


def matrix(layer: int, expert: int) -> torch.Tensor:
    start = 1000.0 * layer + 100.0 * expert
    return torch.arange(start, start + ROWS * COLUMNS).reshape(ROWS, COLUMNS)


@dataclass(frozen=True)
class Cells:
    """How some ranks hold the experts of some layers.

    Attributes:
        layers: How many there are.
        experts: Per layer.
        held: By position on ``ep`` and layer, the experts there, in order.
        fsdp: Ranks along that axis, and the dim of the local tensor that they cut.
        etp: Ranks along that axis, and the dim of a matrix that they cut.
        dims: That of the stack of experts, and that of the stack of layers.
    """

    layers: int
    experts: int
    held: tuple[tuple[tuple[int, ...], ...], ...]
    fsdp: tuple[int, int] = (1, 0)
    etp: tuple[int, int] = (1, 0)
    dims: tuple[int, int] = (0, 0)

    @property
    def world(self) -> World:
        return World(len(self.held) * self.fsdp[0] * self.etp[0])

    def truth(self) -> dict[str, torch.Tensor]:
        by_layer = [
            torch.stack([matrix(i, j) for j in range(self.experts)], self.dims[0])
            for i in range(self.layers)
        ]
        whole = torch.stack(by_layer, self.dims[1])
        found = {WEIGHT: whole, MOMENT: -whole}
        if self.dims == (0, 0):
            found[STEP] = torch.arange(float(self.layers * self.experts)).reshape(
                self.layers, self.experts
            )
        return found

    def mesh(self, rank: int) -> Any:
        return self.world.mesh(rank, ep=len(self.held), fsdp=self.fsdp[0], etp=self.etp[0])

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return what a rank holds, cut by plain slicing."""
        mesh = self.mesh(rank)
        ep, _, etp = mesh.get_coordinate()
        found: dict[str, Any] = {}
        for layer, mine in enumerate(self.held[ep]):
            for local, expert in enumerate(mine):
                name = f"layers.{layer}.experts.{local}.w"
                for key, sign in ((name, 1), (f"optim.state.{name}.exp_avg", -1)):
                    whole = sign * matrix(layer, expert)
                    part = cut(whole, [Shard(self.etp[1])], (self.etp[0],), (etp,))
                    found[key] = FakeDTensor.distribute(part, mesh["fsdp"], [Shard(self.fsdp[1])])
                if self.dims == (0, 0):
                    step = torch.tensor(float(layer * self.experts + expert))
                    found[f"optim.state.{name}.step"] = step
                found[f"optim.param_groups.{name}.lr"] = 0.5
        return found

    def blank(self, rank: int) -> dict[str, Any]:
        found = self.state_dict(rank)
        for key, value in found.items():
            if isinstance(value, FakeDTensor):
                value.to_local().fill_(-99)
            else:
                found[key] = torch.tensor(-99.0) if isinstance(value, torch.Tensor) else 0.0
        return found

    def options(self, rank: int) -> dict[str, Any]:
        mesh = self.mesh(rank)
        by_layer = dict(enumerate(self.held[mesh.get_coordinate()[0]]))
        rename = Renames(
            Renumber("layers.{layer}.experts.{}", by_layer, self.experts),
            Stack("experts.{}", self.experts, dim=self.dims[0]),
            Stack("layers.{}", self.layers, dim=self.dims[1]),
        )
        # Where that dim of a matrix is, with a dim before it or behind it for each stack.
        at = self.etp[1]
        for ndim, dim in enumerate(self.dims, 3):
            at += at >= dim % ndim
        rule = CheckpointPlacement(
            mesh, {"etp": Shard(at)}, global_shape=self.truth()[WEIGHT].shape
        )
        return {"rules": PlacementRules({"experts.w": rule}), "rename": rename}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        one, other = (
            v.to_local() if isinstance(v, FakeDTensor) else v for v in (found[key], value)
        )
        same = torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
        assert same, key


def assert_loads(path: Path, into: Cells, **options: Any) -> None:
    held = into.world.load(
        path, into.blank, lambda rank: PlacementLoadPlanner(**into.options(rank), **options)
    )
    for rank, found in enumerate(held):
        assert_equal(found, into.state_dict(rank))


def drawn(data: st.DataObject, sizes: tuple[int, int], dims: tuple[int, int], name: str) -> Cells:
    ranks = data.draw(st.integers(1, 3), f"ep ranks that {name}")
    held: list[list[list[int]]] = [[[] for _ in range(sizes[0])] for _ in range(ranks)]
    for layer in range(sizes[0]):
        for expert in data.draw(st.permutations(range(sizes[1])), f"order of layer {layer}"):
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
                held[rank][layer].append(expert)
    return Cells(
        *sizes,
        tuple(tuple(map(tuple, layers)) for layers in held),
        fsdp=data.draw(st.tuples(st.integers(1, 2), st.integers(0, 1))),
        etp=data.draw(st.tuples(st.integers(1, 2), st.integers(0, 1))),
        dims=dims,
    )


@pytest.mark.filterwarnings("ignore:look at this load .1 note.\\nverify='digests'")
@examples(10)
@given(st.data())
def test_whatever_experts_a_rank_has_of_each_layer_the_bytes_are_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4)), "layers, experts")
    dims = data.draw(
        st.just((0, 0)) | st.tuples(st.integers(-3, 2), st.integers(-4, 3)), "dims of the stacks"
    )
    saving, loading = (drawn(data, sizes, dims, name) for name in ("save", "load"))
    truth = saving.truth()
    path = tmp_path_factory.mktemp("rows")
    stock = truth | {RATE: 0.5}
    dcp.save(stock, checkpoint_id=path / "stock", planner=DefaultSavePlanner(), no_dist=True)
    assert_loads(path / "stock", loading)

    planners = saving.world.save(
        path / "saved",
        saving.state_dict,
        lambda rank: PlacementSavePlanner(**saving.options(rank), digests="full"),
    )
    for key, expected in planners[0].report.keys.items():  # type: ignore[attr-defined]
        assert expected.unique_nbytes == expected.whole_nbytes, key
    read: dict[str, Any] = {key: torch.full_like(whole, -7) for key, whole in truth.items()}
    read[RATE] = None
    stored = dcp.FileSystemReader(path / "saved").read_metadata().state_dict_metadata
    assert set(stored) == set(stock)
    dcp.load(read, checkpoint_id=path / "saved", planner=DefaultLoadPlanner(), no_dist=True)
    assert_equal(read, stock)
    assert_loads(path / "saved", loading, verify="digests")


BY_LAYER = (((1, 0), (2,)), ((2,), (0, 1)))
"""Of two layers of three experts, what each of two ranks has."""


def refusal(run: Any) -> str:
    with pytest.raises(CheckpointException) as refused:
        run()
    error = next(iter(refused.value.failures.values()))[0]
    assert isinstance(error, PlacementError), refused.value
    return str(error)


def save(path: Path, by: Cells, **options: Any) -> None:
    by.world.save(
        path,
        by.state_dict,
        lambda rank: PlacementSavePlanner(**by.options(rank)),
        **options,
    )


def test_a_row_that_nobody_holds_is_refused_on_save_and_missed_on_load(tmp_path: Path) -> None:
    lacking = Cells(2, 3, (((1, 0), (2,)), ((2,), (0,))), dims=(0, 0))
    message = refusal(lambda: save(tmp_path / "saved", lacking))
    assert f"{WEIGHT}: nobody holds" in message
    assert "[1:2, 1:2, " in message

    short = Cells(2, 2, (((0, 1), (0, 1)),)).truth() | {RATE: 0.5}
    dcp.save(short, checkpoint_id=tmp_path / "short", planner=DefaultSavePlanner(), no_dist=True)
    assert WEIGHT in refusal(lambda: assert_loads(tmp_path / "short", Cells(2, 3, BY_LAYER)))


def test_replicas_of_a_row_that_differ_are_refused(tmp_path: Path) -> None:
    by = Cells(2, 3, (((0, 1, 2), (1,)), ((2,), (0, 1, 2))))

    def held(rank: int) -> dict[str, Any]:
        found = by.state_dict(rank)
        if rank == 1:
            found["layers.0.experts.0.w"].to_local()[0, 0] += 1
        return found

    message = refusal(
        lambda: by.world.save(
            tmp_path, held, lambda rank: PlacementSavePlanner(**by.options(rank), digests="full")
        )
    )
    assert WEIGHT in message
    assert not list(tmp_path.iterdir())


def test_cached_plans_folded_digests_and_saves_without_collectives(tmp_path: Path) -> None:
    by = Cells(2, 3, BY_LAYER, fsdp=(2, 1))
    planners = [
        PlacementSavePlanner(**by.options(rank), enable_plan_caching=True)
        for rank in range(by.world.size)
    ]
    for turn in range(3):
        path = tmp_path / f"cached{turn}"
        by.world.save(path, by.state_dict, lambda rank: planners[rank])
        assert_loads(path, by)
    save(tmp_path / "alone", by, use_collectives=False)
    held = by.world.load(
        tmp_path / "alone",
        by.blank,
        lambda rank: PlacementLoadPlanner(**by.options(rank)),
        lambda rank: PlacementFileSystemReader(tmp_path / "alone"),
    )
    for rank, found in enumerate(held):
        assert_equal(found, by.state_dict(rank))
    with digest_budget(8):
        save(tmp_path / "large", by)
    assert_loads(tmp_path / "large", by)


@pytest.mark.filterwarnings("ignore:look at this load .1 note.\\nverify='digests'")
def test_plain_moments_follow_their_parameter(tmp_path: Path) -> None:
    world, moment = World(2), torch.arange(24.0).reshape(2, 3, 4)
    whole = {"l.e.w": moment + 1, "optim.state.l.e.w.exp_avg": moment}
    dcp.save(whole, checkpoint_id=tmp_path, planner=DefaultSavePlanner(), no_dist=True)

    def held(rank: int, sign: int) -> dict[str, Any]:
        mesh, found = world.mesh(rank, fsdp=2), dict[str, Any]()
        for layer, expert in ((0, 2), (1, 0), (1, 1)):
            part = sign * whole["l.e.w"][layer, expert]
            tensor = FakeDTensor.distribute(part, mesh, [Shard(0)])
            found[f"l.{layer}.e.{expert}.w"] = tensor
            mine = sign * moment[layer, expert].chunk(2)[rank]
            found[f"optim.state.l.{layer}.e.{expert}.w.exp_avg"] = mine.clone()
        return found

    rename = Renames(Stack("e.{}", 3), Stack("l.{}", 2))
    read = world.load(
        tmp_path, lambda rank: held(rank, -1), lambda _: PlacementLoadPlanner(rename=rename)
    )
    for rank, found in enumerate(read):
        assert_equal(found, held(rank, 1))


def test_names_tell_both_rows_and_keys_must_have_both(tmp_path: Path) -> None:
    rename = Renames(Stack("experts.{}", 8), Stack("layers.{}", 4))
    row = rename("layers.3.experts.5.w")
    assert row == Row("layers.experts.w", 5, 8, within=(Row("layers.experts.w", 3, 4),))
    expected = rename.table(["layers.3.experts.5.w"])
    assert expected == "layers.3.experts.5.w -> layers.experts.w, row 5 of 8 of row 3 of 4"
    held = {"layers.0.experts.1.w": torch.zeros(2), "layers.0.experts.w": torch.zeros(2)}
    expected = refusal(
        lambda: dcp.save(
            held, checkpoint_id=tmp_path, planner=PlacementSavePlanner(rename=rename), no_dist=True
        )
    )
    assert "one of 8 rows on dim 0 within 4 rows on dim 0, and" in expected


@pytest.mark.parametrize("dims", [(0, 0), (1, 2), (2, 0)])
def test_the_export_stacks_rows_of_rows_as_the_planner_does(
    tmp_path: Path, dims: tuple[int, int]
) -> None:
    rename = Renames(Stack("e.{}", 3, dim=dims[0]), Stack("l.{}", 2, dim=dims[1]))
    held = {f"l.{i}.e.{j}.w": matrix(i, j) for i in range(2) for j in range(3)}
    dcp.save(dict(held), checkpoint_id=tmp_path / "rows", no_dist=True)
    planner = PlacementSavePlanner(rename=rename)
    dcp.save(dict(held), checkpoint_id=tmp_path / "stacked", planner=planner, no_dist=True)
    for name, options in (("rows", {"rename": rename}), ("stacked", {})):
        export_safetensors(tmp_path / name, tmp_path / f"{name}.out", **options)
    exported, stacked = (
        load_file(tmp_path / f"{name}.out" / "model.safetensors") for name in ("rows", "stacked")
    )
    assert_equal(exported, stacked)
    by_layer = [torch.stack([matrix(i, j) for j in range(3)], dims[0]) for i in range(2)]
    assert_equal(exported, {"l.e.w": torch.stack(by_layer, dims[1])})
    more = Renames(Stack("e.{}", 4), Stack("l.{}", 2))
    with pytest.raises(PlacementError, match="of 8 rows these are missing: 3 within 0, 3 within 1"):
        export_safetensors(tmp_path / "rows", tmp_path / "more", rename=more)


@pytest.mark.parametrize("by_layer", [BY_LAYER, (((3, 0), (1,), (2,)), ((1,), (0, 2, 3), ()))])
def test_experts_of_torch_dist_load_one_tensor_each(tmp_path: Path, by_layer: Any) -> None:
    layers, experts = len(by_layer[0]), 4
    model = MegatronModel(dense_layers=0, layers=layers, experts=experts)
    source, truth = write_torch_dist(tmp_path, model, tp=2), model.truth()
    name = "decoder.layers.{}.mlp.experts.experts.{}.linear_fc{}.weight"
    world = World(2)

    def wanted(rank: int) -> dict[str, Any]:
        return {
            name.format(layer, local, fc): truth[
                f"decoder.layers.{layer}.mlp.experts.linear_fc{fc}.weight{expert}"
            ]
            for layer, mine in enumerate(by_layer[rank])
            for local, expert in enumerate(mine)
            for fc in (1, 2)
        }

    def planner(rank: int) -> PlacementLoadPlanner:
        by = dict(enumerate(by_layer[rank]))
        return PlacementLoadPlanner(
            rename=Renames(
                Renumber("layers.{layer}.mlp.experts.experts.{}", by, experts),
                Stack("experts.experts.{}", experts),
                Stack("decoder.layers.{}", layers),
            )
        )

    held = world.load(
        source,
        lambda rank: {key: torch.zeros_like(value) for key, value in wanted(rank).items()},
        planner,
        lambda rank: PlacementFileSystemReader(source),
    )
    for rank, found in enumerate(held):
        assert_equal(found, wanted(rank))
