"""Rows that ranks name themselves: what is saved and what is refused, element by element."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import digest_budget
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import examples
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    IndexShard,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
    PlacementSavePlanner,
    Renames,
    Renumber,
    Stack,
)
from dcp_placements.offline import merge_metadata
from dcp_placements.storage.hashing import full_digest
from dcp_placements.testing import FakeDTensor, FakeMesh, World, cut

COLUMNS = 5
KEYS = ("layers.{}.w1", "optim.state.layers.{}.w1.exp_avg")


@dataclass(frozen=True)
class Scene:
    """How some ranks hold the rows of a tensor per layer.

    Attributes:
        rows: How many there are.
        maps: By layer and ``ep`` position, the rows there.
        dim: The dim that they lie along; the other one is cut by ``tp``.
        tp: Ranks along that axis.
        dp: Ranks that hold the same.
        drift: A rank, a layer, and which of its elements differs there.
        other_dtype: A rank and a layer that are of another dtype there.
        lacking: A rank and a layer that are not there.
    """

    rows: int
    maps: tuple[tuple[tuple[int, ...], ...], ...]
    dim: int = 0
    tp: int = 1
    dp: int = 1
    drift: tuple[int, int, int] | None = None
    other_dtype: tuple[int, int] | None = None
    lacking: tuple[int, int] | None = None

    @property
    def world(self) -> World:
        return World(self.dp * len(self.maps[0]) * self.tp)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, COLUMNS) if self.dim == 0 else (COLUMNS, self.rows)

    def claims(self) -> dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]]:
        """Return for each key which elements of the whole each rank holds, and what it holds."""
        found: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        places = torch.arange(self.rows * COLUMNS).reshape(self.shape)
        for rank in range(self.world.size):
            _, ep, tp = self.mesh(rank).get_coordinate()
            held = self.state_dict(rank)
            for layer, by_ep in enumerate(self.maps):
                at = cut(places, [IndexShard(self.dim, by_ep[ep])], (1,), (0,))
                at = cut(at, [Shard(1 - self.dim)], (self.tp,), (tp,))
                for key in (key.format(layer) for key in KEYS):
                    if key in held:
                        found.setdefault(key, []).append((rank, at, held[key]))
        return found

    def contents(self) -> dict[str, list[set[float]]]:
        """Return for each key what ranks hold of each element."""
        found = {key: [set[float]() for _ in range(self.rows * COLUMNS)] for key in self.claims()}
        for key, claims in self.claims().items():
            for _, at, values in claims:
                for place, value in zip(at.flatten(), values.flatten(), strict=True):
                    found[key][int(place)].add(float(value))
        return found

    def truth_saved(self) -> dict[str, torch.Tensor]:
        """Return the whole tensors of the keys that there are, of the dtypes that ranks hold."""
        truth = self.truth()
        return {key: truth[key].to(claims[0][2].dtype) for key, claims in self.claims().items()}

    def faulty(self, digests: str) -> set[str]:
        """Return the keys that no save may pass."""
        return {
            key
            for key, elements in self.contents().items()
            if not all(elements)
            or (digests != "off" and any(len(values) > 1 for values in elements))
            or len({values.dtype for _, _, values in self.claims()[key]}) > 1
        }

    def mesh(self, rank: int) -> Any:
        return self.world.mesh(rank, dp=self.dp, ep=len(self.maps[0]), tp=self.tp)

    def truth(self) -> dict[str, torch.Tensor]:
        made = {}
        for layer in range(len(self.maps)):
            for sign, key in zip((1, -1), KEYS, strict=True):
                whole = torch.arange(1.0, 1 + self.rows * COLUMNS).reshape(self.shape)
                made[key.format(layer)] = sign * (whole + 100 * layer)
        return made

    def state_dict(self, rank: int) -> dict[str, Any]:
        _, ep, tp = self.mesh(rank).get_coordinate()
        held: dict[str, Any] = {"norm": torch.ones(3)}
        for layer, by_ep in enumerate(self.maps):
            for key in KEYS:
                fqn = key.format(layer)
                mine = cut(self.truth()[fqn], [IndexShard(self.dim, by_ep[ep])], (1,), (0,))
                mine = cut(mine, [Shard(1 - self.dim)], (self.tp,), (tp,)).contiguous()
                if self.drift is not None and self.drift[:2] == (rank, layer) and mine.numel():
                    mine.view(-1)[self.drift[2] % mine.numel()] += 0.5
                if self.other_dtype == (rank, layer):
                    mine = mine.double()
                if self.lacking != (rank, layer):
                    held[fqn] = mine
        return held

    def rules(self, rank: int) -> PlacementRules:
        mesh = self.mesh(rank)
        ep = mesh.get_coordinate()[1]
        return PlacementRules(
            {
                f"layers.{layer}": CheckpointPlacement(
                    mesh,
                    {"ep": IndexShard(self.dim, by_ep[ep]), "tp": Shard(1 - self.dim)},
                    global_shape=self.shape,
                )
                for layer, by_ep in enumerate(self.maps)
            }
        )

    def save(self, path: Path, **options: Any) -> list[Any]:
        return self.world.save(
            path, self.state_dict, lambda rank: PlacementSavePlanner(self.rules(rank), **options)
        )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    rows, ep = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    part = st.lists(st.integers(0, rows - 1), max_size=4).map(tuple)
    layer = st.tuples(*[part] * ep).filter(any)
    maps = draw(st.lists(layer, min_size=1, max_size=3))
    if draw(st.booleans()):
        everywhere = tuple(draw(st.permutations(range(rows))))
        maps = [(*one[:-1], everywhere) for one in maps]
    made = Scene(
        rows,
        tuple(maps),
        dim=draw(st.integers(0, 1)),
        tp=draw(st.integers(1, 2)),
        dp=draw(st.integers(1, 2)),
    )
    rank, at = st.integers(0, made.world.size - 1), st.integers(0, len(maps) - 1)
    fault = draw(st.sampled_from([None, None, "drift", "other_dtype", "lacking"]))
    # A layer that no rank holds is no fault: its pattern is warned of.
    if fault is None or (fault == "lacking" and made.world.size == 1):
        return made
    where = (draw(rank), draw(at))
    return replace(
        made, **{fault: (*where, draw(st.integers(0, 40))) if fault == "drift" else where}
    )


def outcome(work: Callable[[], Any]) -> str | None:
    """Return why a save was refused; None where it was not."""
    try:
        work()
    except CheckpointException as error:
        return "\n".join(str(failure[0]) for failure in error.failures.values())
    return None


def chunks_of(path: Path) -> dict[str, Counter[tuple[tuple[int, ...], tuple[int, ...]]]]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        fqn: Counter((tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks)  # type: ignore[union-attr]
        for fqn, stored in metadata.items()
    }


def read_plainly(path: Path, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    read = {fqn: torch.full_like(whole, 77) for fqn, whole in truth.items()}
    dcp.load(read, checkpoint_id=path, no_dist=True)
    return read


@examples(40)
@given(scene=scenes(), digests=st.sampled_from(["sampled", "full", "off"]))
@example(Scene(3, (((0, 1), (2,)), ((0,), (1, 2))), drift=(0, 1, 0), dp=2), "sampled")
@example(Scene(3, (((0, 1), (1,)),)), "sampled")
@example(Scene(3, (((0, 1), (1, 2)),), other_dtype=(1, 0)), "sampled")
@example(Scene(3, (((0, 0), (1, 2, 0)),), tp=2, dim=1), "full")
def test_rows_are_saved_or_refused_as_their_elements_say(scene: Scene, digests: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "saved"
        message = outcome(lambda: scene.save(path, digests=digests))
        faulty = scene.faulty(digests)
        assert (message is None) == (not faulty), message
        if message is not None:
            assert any(key in message for key in faulty)
            assert not path.exists() or not list(path.iterdir())
            return
        assert set(chunks_of(path)) == {"norm", *scene.contents()}
        assert all(set(found.values()) <= {1} for found in chunks_of(path).values())
        templates = scene.truth_saved()
        for fqn, read in read_plainly(path, templates).items():
            for value, allowed in zip(read.flatten(), scene.contents()[fqn], strict=True):
                assert float(value) in allowed
        if digests == "full":
            metadata = FileSystemReader(path).read_metadata()
            stored = metadata.planner_data["dcp_placements"]["digests"]
            read = read_plainly(path, templates)
            for fqn, found in chunks_of(path).items():
                for offsets, sizes in found:
                    at = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                    if fqn in read:
                        assert stored[fqn][offsets] == full_digest(read[fqn][at])


@examples(20)
@given(scene=scenes())
@example(Scene(2, (((0, 1), (1, 0)),) * 3, drift=(0, 1, 0)))
def test_rows_are_saved_whatever_is_folded(scene: Scene) -> None:
    """And replicas that differ are refused where the ranks hold the same keys alike."""
    with tempfile.TemporaryDirectory() as base, digest_budget(8):
        path = Path(base) / "saved"
        message = outcome(lambda: scene.save(path))
        holes = scene.faulty("off")
        if holes:
            assert message is not None
            return
        if message is None:
            for fqn, read in read_plainly(path, scene.truth_saved()).items():
                for value, allowed in zip(read.flatten(), scene.contents()[fqn], strict=True):
                    assert float(value) in allowed
            alike = len(set(scene.maps)) == 1 and scene.lacking is None
            assert not (alike and scene.faulty("sampled"))
        else:
            assert scene.faulty("sampled") or "are not compared" in message


def plans_of(scene: Scene, **options: Any) -> tuple[list[PlacementSavePlanner], list[Any]]:
    """Return what each rank sends."""
    planners, plans = [], []
    for rank in range(scene.world.size):
        with scene.world._as(rank):
            planner = PlacementSavePlanner(scene.rules(rank), **options)
            planner.set_up_planner(scene.state_dict(rank), is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
            planners.append(planner)
    return planners, plans


def test_rows_travel_once_for_all_tensors() -> None:
    rows = tuple((tuple(range(at, 256, 4)),) for at in range(4))
    maps = (tuple(row for (row,) in rows),)
    few = Scene(256, maps * 2)
    many = Scene(256, maps * 60)
    sizes = [len(pickle.dumps(plans_of(scene, digests="off")[1][1])) for scene in (few, many)]
    # 116 tensors more, of 64 rows each: a few bytes each.
    assert sizes[1] - sizes[0] < 116 * 8


def test_each_row_of_alike_tensors_is_written_once() -> None:
    maps = (((0, 3, 5), (1, 4), (2, 3)),)
    planners, plans = plans_of(Scene(6, maps * 40))
    with Scene(6, maps).world._as(0):
        answers, _ = planners[0].create_global_plan(pickle.loads(pickle.dumps(plans)))
    written = Counter(item.index for answer in answers for item in answer.items)
    assert set(written.values()) == {1}
    assert len(written) == 40 * 2 * 6 + 1


@pytest.mark.parametrize("lowest", [False, True])
def test_small_rows_that_several_ranks_hold_stay_with_the_lowest(lowest: bool) -> None:
    scene = Scene(4, (((0, 1), (2, 3)),) * 9, dp=3)
    planners, plans = plans_of(scene, dedup_save_to_lowest_rank=lowest)
    with scene.world._as(0):
        answers, _ = planners[0].create_global_plan(plans)
    written = [
        sum(item.tensor_data.chunk.sizes.numel() for item in answer.items) for answer in answers
    ]
    whole = 4 * COLUMNS * len(KEYS) * 9
    assert written == [whole // 2 + 3, whole // 2, 0, 0, 0, 0]


def test_each_rank_finishes_with_what_the_coordinator_gave_it() -> None:
    scene = Scene(5, (((0, 3, 4, 3), (1, 2)), ((1, 0), (2, 3, 4))), tp=2, dp=2)
    planners, plans = plans_of(scene)
    with scene.world._as(0):
        answers, _ = planners[0].create_global_plan(pickle.loads(pickle.dumps(plans)))
    for planner, answer in zip(planners, answers, strict=True):
        seen = {item.index for item in answer.items}
        finished = planner.finish_plan(pickle.loads(pickle.dumps(answer)))
        written = {i.index for i in finished.items if i.tensor_data is not None}
        assert written == seen


def test_a_key_of_which_every_rank_names_no_row_is_refused(tmp_path: Path) -> None:
    message = outcome(lambda: Scene(2, (((0,), (1,)), ((), ()))).save(tmp_path))
    assert message is not None
    assert "layers.1.w1.exp_avg: nobody holds all of the (2, 5) tensor" in message
    assert "(2 faults)" in message
    assert "layers.0.w1" not in message


def test_a_row_by_rows_on_one_rank_and_whole_on_another_is_refused(tmp_path: Path) -> None:
    scene = Scene(2, (((0,), (1,)),))

    def rules(rank: int) -> PlacementRules:
        return scene.rules(0) if rank == 0 else PlacementRules({})

    message = outcome(
        lambda: scene.world.save(
            tmp_path, scene.state_dict, lambda rank: PlacementSavePlanner(rules(rank))
        )
    )
    assert message is not None
    assert "layers.0.w1.exp_avg: the ranks do not agree on the shape of the whole tensor" in message


def test_rows_of_an_axis_of_one_rank_may_be_named_where_a_dtensor_shards_it(
    tmp_path: Path,
) -> None:
    """Its own shard is the whole; an axis of one rank without a name is any other such axis."""
    whole = torch.arange(6.0).reshape(3, 2)
    rows = (2, 0, 1)
    for names in (("ep",), None):
        mesh = FakeMesh((1,), ("ep",), rank=0)
        tensor = FakeDTensor(whole[list(rows)], FakeMesh((1,), names, rank=0), [Shard(1)], (3, 2))
        by = CheckpointPlacement(mesh, {"ep": IndexShard(0, rows)}, global_shape=(3, 2))
        path = tmp_path / str(names)
        planner = PlacementSavePlanner(PlacementRules({"w": by}))
        World(1).save(path, lambda rank, held=tensor: {"w": held}, lambda rank, by=planner: by)
        assert torch.equal(read_plainly(path, {"w": whole})["w"], whole)


def test_a_cached_plan_is_not_used_for_other_rows(tmp_path: Path) -> None:
    scenes = [Scene(4, (((0, 1), (2, 3)),)), Scene(4, (((3, 1), (0, 2)),))]
    planners = [
        PlacementSavePlanner(scenes[0].rules(rank), enable_plan_caching=True) for rank in range(2)
    ]
    for turn, scene in enumerate([scenes[0], scenes[0], scenes[1], scenes[1]]):
        for rank, planner in enumerate(planners):
            planner.rules = scene.rules(rank)
        path = tmp_path / str(turn)
        scene.world.save(path, scene.state_dict, lambda rank: planners[rank])
        read = read_plainly(path, scene.truth())
        assert all(torch.equal(read[fqn], whole) for fqn, whole in scene.truth().items())


def test_ranks_that_plan_alone_write_all_rows_that_they_hold_again_and_again(
    tmp_path: Path,
) -> None:
    scene = Scene(4, (((0, 1), (2, 3, 2)),), tp=2)
    planners = [
        PlacementSavePlanner(scene.rules(rank), enable_plan_caching=True)
        for rank in range(scene.world.size)
    ]
    for turn in ("first", "second"):
        path = tmp_path / turn
        scene.world.save(path, scene.state_dict, planners.__getitem__, use_collectives=False)
        merge_metadata(path)
        read = read_plainly(path, scene.truth())
        assert all(torch.equal(read[fqn], whole) for fqn, whole in scene.truth().items())


@pytest.mark.parametrize("digests", ["sampled", "full", "off"])
@pytest.mark.parametrize("dim", [0, 1])
def test_m39_a_rank_that_plans_alone_may_hold_no_row(
    tmp_path: Path, dim: int, digests: str
) -> None:
    scene = Scene(4, (((2, 0, 3, 1), ()), ((), (0, 1, 2, 3)), ((1, 3), (0, 2))), dim=dim, tp=2)
    scene.world.save(
        tmp_path,
        scene.state_dict,
        lambda rank: PlacementSavePlanner(scene.rules(rank), digests=digests),
        use_collectives=False,
    )
    with warnings.catch_warnings():
        if digests == "off":
            warnings.filterwarnings("ignore", "look at this checkpoint")
        merge_metadata(tmp_path)
    read = read_plainly(tmp_path, scene.truth())
    assert all(torch.equal(read[fqn], whole) for fqn, whole in scene.truth().items())


def repeated(rank: int, *, of: str, drift: float, part: int = 0) -> dict[str, Any]:
    """Four rows on two ranks, of which rank 0 holds row 1 twice: as one tensor, or one by one."""
    whole = torch.arange(1.0, 1 + 4 * COLUMNS).reshape(4, COLUMNS)
    rows = [[1, 0, 1], [2, 3]][rank]
    held = whole[rows].clone()
    if rank == 0:
        held[[0, 2][part], COLUMNS // 2] += drift
    norm = torch.ones(3)
    if of == "index":
        return {"layers.0.w1": held, "norm": norm}
    return {f"layers.0.experts.{at}.w1": row for at, row in enumerate(held)} | {"norm": norm}


def repeated_planner(rank: int, of: str, **options: Any) -> PlacementSavePlanner:
    rows = [[1, 0, 1], [2, 3]][rank]
    if of == "index":
        mesh = World(2).mesh(rank, ep=2)
        placement = CheckpointPlacement(mesh, {"ep": IndexShard(0, rows)}, global_shape=(4, 5))
        return PlacementSavePlanner(PlacementRules({"layers": placement}), **options)
    rename = Renames(Renumber("experts.{}", rows, total=4), Stack("experts.{}", total=4))
    return PlacementSavePlanner(rename=rename, **options)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("digests", ["sampled", "full"])
@pytest.mark.parametrize("of", ["index", "stack"])
def test_m38_a_row_that_one_rank_holds_twice_with_different_contents_is_refused(
    tmp_path: Path, of: str, digests: str, part: int
) -> None:
    message = outcome(
        lambda: World(2).save(
            tmp_path,
            lambda rank: repeated(rank, of=of, drift=0.5, part=part),
            lambda rank: repeated_planner(rank, of, digests=digests),
        )
    )
    assert message is not None
    key = "layers.0.w1" if of == "index" else "layers.0.experts.w1"
    assert f"{key}: 2 copies of [1:2, :] of (4, 5) on one rank have different contents" in message
    assert "way out:" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"digests": "off"}, {"on_conflict": "warn"}], ids=str)
@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("of", ["index", "stack"])
def test_m38_a_row_that_one_rank_holds_twice_is_saved_once_where_that_is_let_pass(
    tmp_path: Path, of: str, drift: float, options: dict[str, str]
) -> None:
    if drift and not options:
        pytest.skip("refused, see above")
    warns = drift and "on_conflict" in options
    with pytest.warns(UserWarning, match="have different contents") if warns else nullcontext():
        World(2).save(
            tmp_path,
            lambda rank: repeated(rank, of=of, drift=drift),
            lambda rank: repeated_planner(rank, of, **options),
        )
    key = "layers.0.w1" if of == "index" else "layers.0.experts.w1"
    whole = torch.arange(1.0, 1 + 4 * COLUMNS).reshape(4, COLUMNS)
    read = read_plainly(tmp_path, {key: whole})[key]
    either = [whole[1], whole[1].clone()]
    either[1][COLUMNS // 2] += drift
    assert torch.equal(read[[0, 2, 3]], whole[[0, 2, 3]])
    assert any(torch.equal(read[1], copy) for copy in either)


@pytest.mark.parametrize("whole", [torch.zeros, torch.ones])
def test_m38_equal_copies_of_many_ranks_rows_and_moments_do_not_warn(
    tmp_path: Path, whole: Callable[..., torch.Tensor]
) -> None:
    maps = ((0, 1, 0), (2, 2, 1), (3, 0))

    def state_dict(rank: int) -> dict[str, Any]:
        made = {f"layers.0.experts.{at}.w": whole(2, 3) for at in range(len(maps[rank]))}
        return {
            "model": made,
            "optim": {
                "state": {key: {"step": torch.zeros(()), "exp_avg": whole(2, 3)} for key in made}
            },
        }

    def planner(rank: int) -> PlacementSavePlanner:
        number = Renumber("experts.{}", maps[rank], total=4)
        return PlacementSavePlanner(rename=Renames(number, Stack("experts.{}", total=4)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        World(3).save(tmp_path, state_dict, planner)


def test_stacks_of_layers_with_maps_of_their_own(tmp_path: Path) -> None:
    """Every layer has another expert map, one rank no expert of a layer at all."""
    maps = [[[0, 3], [2, 1], [3, 0]], [[1], [], [0, 2, 3]], [[2, 0], [1, 3], [1, 0]]]
    world, total = World(3), 4
    wholes = {
        f"layers.{layer}.experts.{w}": torch.arange(24.0).reshape(4, 6) + 100 * layer + 50 * i
        for layer in range(3)
        for i, w in enumerate(("w1", "w2"))
    }

    def held(rank: int, drift: float = 0.0) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, whole in wholes.items():
            _, layer, _, w = key.split(".")
            for local, expert in enumerate(maps[int(layer)][rank]):
                made[f"layers.{layer}.experts.{local}.{w}"] = whole[expert].clone() + drift * rank
        return made

    def rename(rank: int) -> Renames:
        ids = {layer: maps[layer][rank] for layer in range(3)}
        number = Renumber("layers.{layer}.experts.{}", ids, total=total)
        return Renames(number, Stack("experts.{}", total))

    def planner(rank: int) -> PlacementSavePlanner:
        return PlacementSavePlanner(rename=rename(rank))

    saved = world.save(tmp_path / "sound", held, planner)
    assert saved[0].report.partial_keys == {  # type: ignore[attr-defined]
        f"layers.1.experts.{w}": (0, 2) for w in ("w1", "w2")
    }
    read = read_plainly(tmp_path / "sound", wholes)
    assert all(torch.equal(read[fqn], whole) for fqn, whole in wholes.items())
    into = {rank: {k: torch.zeros_like(v) for k, v in held(rank).items()} for rank in range(3)}
    world.load(
        tmp_path / "sound",
        lambda rank: into[rank],
        lambda rank: PlacementLoadPlanner(rename=rename(rank)),
        lambda rank: PlacementFileSystemReader(tmp_path / "sound"),
    )
    for rank, found in into.items():
        assert all(torch.equal(found[key], value) for key, value in held(rank).items())
    message = outcome(lambda: world.save(tmp_path / "drift", lambda rank: held(rank, 0.5), planner))
    assert message is not None
    assert "layers.0.experts.w1" in message
    assert "2 different contents on 2 ranks" in message
    assert "layers.1.experts.w1" not in message  # nobody else has those rows
