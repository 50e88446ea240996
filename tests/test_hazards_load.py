"""Rows of ``hazards.md`` that a load decides: the right bytes, or an error that names the facts.

Every ``M<n>`` is a row of that table. Ranks are simulated; ``test_hazards_ranks.py`` has those
where real processes matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import (
    FILL,
    arange,
    assert_same,
    edit_metadata,
    load,
    refused,
    same_bits,
    save,
    warned,
    without_warning,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard

from dcp_placements import (
    CheckpointPlacement,
    LoadReport,
    PlacementFileSystemReader,
    PlacementLoadPlanner,
    PlacementRules,
)
from dcp_placements.testing import FakeDTensor, World

WORLD = World(4)
ONE = World(1)


def rows(rank: int) -> PlacementRules:
    """Rules that cut ``w`` by rows over four ranks."""
    placement = CheckpointPlacement(WORLD.mesh(rank, ep=4), {"ep": Shard(0)})
    return PlacementRules({"w": placement})


def save_rows(path: Path, whole: torch.Tensor, **options: Any) -> None:
    """Save ``whole`` as ``w``, cut by rows over four ranks, and a replicated ``norm``."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": whole.chunk(4)[rank].clone(), "norm": arange(3, dtype=whole.dtype)}

    save(WORLD, path, state, rows, **options)


# M13: another dtype in the template than in the checkpoint.


CASTS = {
    "wrong": [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int64),
        (torch.float32, torch.bool),
        (torch.complex64, torch.float32),
    ],
    "narrowing": [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.int8),
    ],
    "widening": [(torch.bfloat16, torch.float32)],
}


@pytest.mark.parametrize("cast", ["warn", "allow", "error"])
@pytest.mark.parametrize(
    ("kind", "stored", "template"), [(kind, *pair) for kind in CASTS for pair in CASTS[kind]]
)
def test_m13_a_cast_is_listed_warned_of_or_refused_by_what_it_loses(
    tmp_path: Path, kind: str, stored: torch.dtype, template: torch.dtype, cast: str
) -> None:
    whole, target = arange(4, 2, dtype=stored), torch.zeros(4, 2, dtype=template)
    save(ONE, tmp_path, lambda rank: {"a": {"w": whole}, "same": arange(2)})
    change = f"{stored} -> {template}".replace("torch.", "")

    def loaded() -> LoadReport:
        state = {"a": {"w": target}, "same": torch.zeros(2)}
        return load(ONE, tmp_path, lambda rank: state, cast=cast)[1][0]

    if kind == "wrong" or (kind, cast) == ("narrowing", "error"):
        with refused() as refusal:
            loaded()
        refusal.says(f"a.w: loading {change}", "way out:", str(stored).removeprefix("torch."))
        if kind == "narrowing":
            refusal.says("loses precision", 'cast="allow"')
        assert not target.any()
        return
    is_warned = (kind, cast) == ("narrowing", "warn")
    with warned() if is_warned else without_warning() as texts:
        report = loaded()
    assert report.casts == {"a.w": change}
    assert same_bits(target, whole.to(template))
    assert len(report.warnings) == is_warned
    if is_warned:
        (text,) = texts
        assert all(part in text for part in ("a.w: ", change, 'cast="allow"'))


# M15: a partial load in which no key matches.


def test_m15_a_partial_load_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    save(ONE, tmp_path, lambda rank: {"model": {"a": arange(3), "b": arange(4)}})
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: {"module.a": torch.zeros(3)}, allow_partial_load=True)
    refusal.says("none of the 1 keys", "module.a", "model.a, model.b", "prefix", "rename=")


def test_m15_a_partial_load_that_matches_something_counts_the_rest(tmp_path: Path) -> None:
    save(ONE, tmp_path, lambda rank: {"a": arange(3), "b": arange(4)})
    target = {"a": torch.zeros(3), "c": torch.full((2,), 5.0)}
    with without_warning():
        loaded, reports = load(ONE, tmp_path, lambda rank: target, allow_partial_load=True)
    assert reports[0].missing == ("c",)
    assert reports[0].unread == ("b",)
    assert same_bits(loaded[0]["a"], arange(3))
    assert same_bits(loaded[0]["c"], torch.full((2,), 5.0))


def test_m15_a_key_that_the_checkpoint_lacks_is_refused_unless_optional(tmp_path: Path) -> None:
    save(ONE, tmp_path, lambda rank: {"a": arange(3), "old.name": arange(4)})

    def state(rank: int) -> dict[str, Any]:
        return {"a": torch.zeros(3), "new.name": torch.full((4,), 5.0)}

    with refused() as refusal:
        load(ONE, tmp_path, state)
    refusal.says("new.name: the checkpoint lacks this key", "old.name", "optional=")
    with warned() as texts:
        loaded, reports = load(ONE, tmp_path, state, optional=["new.*"])
    assert "new.name: not in the checkpoint: left as it was" in texts[0]
    assert reports[0].missing == ("new.name",)
    assert same_bits(loaded[0]["new.name"], torch.full((4,), 5.0))


# M16: metadata that lacks a chunk.


def test_m16_a_chunk_that_the_metadata_lacks_is_named_by_its_box(tmp_path: Path) -> None:
    save_rows(tmp_path, arange(8, 3))

    def lose_the_third(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.chunks = [c for c in entry.chunks if c.offsets[0] != 4]  # type: ignore[union-attr]

    edit_metadata(tmp_path, lose_the_third)
    targets = [torch.full((2, 3), float(FILL)) for _ in range(4)]
    with refused() as refusal:
        load(WORLD, tmp_path, lambda rank: {"w": targets[rank], "norm": torch.zeros(3)}, rows)
    refusal.says(
        "rank 2 cannot be loaded from this checkpoint (1 fault)",
        "w: nobody stored [4:6, :] of (8, 3), which is needed",
        "way out:",
    )
    assert all(same_bits(target, torch.full((2, 3), float(FILL))) for target in targets)


# M20: a checkpoint whose bytes are not those that were saved.


def load_with_crc(world: World, path: Path, state: Any, rules: Any = None) -> None:
    """Load with the reader that compares checksums."""
    world.load(
        path,
        state,
        lambda rank: PlacementLoadPlanner(None if rules is None else rules(rank)),
        lambda rank: PlacementFileSystemReader(path),
    )


@pytest.mark.parametrize("seed", range(4))
def test_m20_any_flipped_bit_is_loud_or_harmless(tmp_path: Path, seed: int) -> None:
    """Wherever the bit is, in data, in file headers or in the metadata: never wrong in silence."""
    whole, norm = arange(16, 8), arange(5)

    def state(rank: int) -> dict[str, Any]:
        return {"w": whole.chunk(4)[rank].clone(), "norm": norm, "seen": ("step", 3)}

    save(WORLD, tmp_path, state, rows)
    chance = random.Random(seed)
    for _ in range(40):
        file = chance.choice(sorted(tmp_path.iterdir()))
        sound = file.read_bytes()
        damaged = bytearray(sound)
        damaged[chance.randrange(len(sound))] ^= 1 << chance.randrange(8)
        file.write_bytes(bytes(damaged))
        target: dict[str, Any] = {"w": torch.zeros(16, 8), "norm": torch.zeros(5), "seen": None}
        loud = False
        try:
            load_with_crc(ONE, tmp_path, lambda rank, target=target: target)
        except (Exception, dcp.CheckpointException):
            loud = True
        if not loud:
            assert_same(target, {"w": whole, "norm": norm, "seen": ("step", 3)})
        file.write_bytes(sound)


class Gone:
    """A class that a later version of a trainer lacks."""


def test_m20_an_object_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(ONE, tmp_path, lambda rank: {"state": Gone(), "step": 3, "w": arange(3)})
    monkeypatch.delattr(f"{__name__}.Gone")
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: {"state": None, "w": torch.zeros(3)})
    refusal.says("state: AttributeError: ", "way out:     make the class importable")
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    place = next(info for index, info in stored.items() if index.fqn == "step")
    with (tmp_path / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"<html>not there</html>"[: place.length])
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: {"step": 0, "w": torch.zeros(3)})
    refusal.says("step: UnpicklingError: invalid load key", "the file was damaged")


# M40: the checkpoint has an object where the rank has a tensor, and the other way round.


def m40_dtensor() -> FakeDTensor:
    return FakeDTensor.distribute(arange(4), ONE.mesh(0, fsdp=1), [Shard(0)])


M40_TENSORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: arange(3),
    "empty": lambda: torch.zeros(0),
    "parameter": lambda: torch.nn.Parameter(arange(3)),
    "dtensor": m40_dtensor,
}


@pytest.mark.parametrize("partial", [False, True], ids=["strict", "partial"])
@pytest.mark.parametrize("kind", M40_TENSORS)
def test_m40_an_object_is_not_read_into_a_tensor(tmp_path: Path, kind: str, partial: bool) -> None:
    save(ONE, tmp_path, lambda rank: {"a": {"w": 7, "norm": arange(3)}})
    tensor = M40_TENSORS[kind]()
    state = {"a": {"w": tensor, "norm": torch.zeros(3)}}
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: state, allow_partial_load=partial)
    refusal.says("a.w: the checkpoint holds an object, but the state dict a tensor", "way out:")
    assert state["a"]["w"] is tensor


@pytest.mark.parametrize("kind", M40_TENSORS)
def test_m40_a_tensor_is_not_read_into_an_object(tmp_path: Path, kind: str) -> None:
    save(ONE, tmp_path, lambda rank: {"w": M40_TENSORS[kind](), "norm": arange(3)})
    state = {"w": 7, "norm": torch.zeros(3)}
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: state)
    refusal.says("w: the checkpoint holds a ", "tensor, but the state dict a int")
    assert state["w"] == 7


# M50: a partial load that reads counters, and nothing of the model.


@pytest.mark.parametrize("options", [{"allow_partial_load": True}, {"optional": ["**"]}], ids=str)
@pytest.mark.parametrize("moments_too", [False, True])
def test_m50_a_load_that_reads_no_tensor_of_the_model_is_warned_of(
    tmp_path: Path, moments_too: bool, options: dict[str, Any]
) -> None:
    def state(prefix: str) -> dict[str, Any]:
        made: dict[str, Any] = {
            prefix: {"a": arange(4, 3), "b": arange(3)},
            "step": torch.tensor(3),
        }
        if moments_too:
            state = {"a": {"exp_avg": arange(4, 3)}}
            made["optim"] = {"state": state, "param_groups": [{"params": ["a", "b"]}]}
        return made

    save(ONE, tmp_path, lambda rank: state("model"))
    with warned() as texts:
        _, reports = load(ONE, tmp_path, lambda rank: state("module"), **options)
    (text,) = texts
    assert "asks for 2 tensors of the model, and none of them is in the checkpoint" in text
    assert "module.a, module.b" in text
    assert "model.a, model.b" in text
    assert len(reports[0].warnings) == 1


def test_m50_partial_loads_on_purpose_are_not_warned_of(tmp_path: Path) -> None:
    weights = {"a": arange(4, 3), "b": arange(3)}
    groups = [{"params": ["a", "b"]}]
    moments = {"state": {"a": {"exp_avg": arange(4, 3)}}, "param_groups": groups}
    save(ONE, tmp_path, lambda rank: {"model": weights, "optim": moments, "step": 3})
    for state, options in (
        ({"model": {"a": arange(4, 3), "new": arange(2)}}, {}),
        ({"optim": moments, "step": 0, "scheduler": 5}, {}),
        ({"head": {"w": arange(2)}, "step": 0}, {"optional": ["head"]}),
    ):
        with without_warning():
            load(ONE, tmp_path, lambda rank, s=state: s, allow_partial_load=True, **options)


# M108: a level of which no rank asks for some tensors.


def trainer(layers: int, *, rank: int = 0, fill: float = 0.0) -> dict[str, Any]:
    """Return the state of a rank, of which only rank 0 keeps the stream of data."""
    names = [f"layers.{n}.w" for n in range(layers)]
    moments = {name: {"exp_avg": torch.full((2,), fill)} for name in names}
    return {
        "model": {name: torch.full((2,), fill) for name in names},
        "optim": {"state": moments, "groups": {"lr": 0.1}},
        "data": {} if rank else {"seen": torch.tensor([fill])},
        "rng": {str(rank): torch.full((3,), fill)},
    }


@pytest.mark.parametrize("world", [ONE, WORLD], ids=["one", "four"])
def test_m108_tensors_of_a_level_that_no_rank_asks_for_are_warned_of_once(
    world: World, tmp_path: Path
) -> None:
    save(World(8), tmp_path, lambda rank: trainer(3, rank=rank, fill=1.0))

    def loaded(state: Callable[[int], dict[str, Any]], **options: Any) -> LoadReport:
        return load(world, tmp_path, state, **options)[1][0]

    def without_optim(rank: int, optim: Any) -> dict[str, Any]:
        return {**trainer(3, rank=rank), "optim": optim}

    for optim, count in (({}, "4 keys"), ({"groups": {"lr": 0.1}}, "3 keys")):
        with warned() as texts:
            report = loaded(partial(without_optim, optim=optim))
        (text,) = texts
        assert f"optim: the checkpoint has {count} of it that no rank asks for: optim." in text
        assert text.count("no rank asks for") == len(report.warnings) == 1
    with warned() as texts:
        loaded(lambda rank: trainer(2, rank=rank))
    (text,) = texts
    assert "model: the checkpoint has 1 key of it" in text
    assert "optim: the checkpoint has 1 key of it" in text
    with without_warning():
        # Another number of ranks; weights alone; some of them by name; and what is said.
        assert loaded(lambda rank: trainer(3, rank=rank)).unasked == ()
        report = loaded(lambda rank: {"model": trainer(3)["model"]})
        assert "optim.state.layers.0.w.exp_avg" in report.unasked
        assert "no rank:" in str(report)
        loaded(lambda rank: {"model": {"layers.2.w": torch.zeros(2)}})
        loaded(lambda rank: trainer(2, rank=rank), waive={"layers.2": "a smaller model"})
        loaded(lambda rank: without_optim(rank, {}), allow_partial_load=True)


@pytest.mark.parametrize("level", ["sched", "data"])
def test_m108_an_empty_dict_for_objects_is_warned_of(level: str, tmp_path: Path) -> None:
    """A scheduler takes an empty state without a word, and begins anew."""
    save(WORLD, tmp_path, lambda rank: {"w": torch.ones(3), level: {"last_epoch": 7, "lr": 0.1}})
    with warned() as texts:
        load(WORLD, tmp_path, lambda rank: {"w": torch.zeros(3), level: {}})
    (text,) = texts
    assert f"{level}: the checkpoint has 2 keys of it that no rank asks for" in text
    with without_warning():
        load(WORLD, tmp_path, lambda rank: {"w": torch.zeros(3)})
        load(WORLD, tmp_path, lambda rank: {"w": torch.zeros(3), level: {}}, waive={level: "new"})


@pytest.mark.parametrize("options", [{"allow_partial_load": True}, {"optional": ["model"]}])
@pytest.mark.parametrize("side", ["saved", "loaded"])
def test_weights_under_a_wrapper_s_name_are_warned_of_beside_an_average(
    side: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The average is read: so it is not true that no tensor of the model is."""

    def state(wrapped: bool, fill: float) -> Callable[[int], dict[str, Any]]:
        names = [f"layers.{n}.{'_orig_mod.' * wrapped}w" for n in range(3)]
        ema = {f"layers.{n}.w": torch.full((3,), fill) for n in range(3)}
        model = {name: torch.full((3,), fill) for name in names}
        return lambda rank: {"model": model, "ema": ema}

    save(WORLD, tmp_path, state(side == "saved", 1.0))
    with warned() as texts:
        load(WORLD, tmp_path, state(side == "loaded", 0.0), **options)
    assert "under a name with another component: it keeps its value" in "".join(texts)
    assert "model.layers.0-2." in "".join(texts)
    both = {"allow_partial_load": True, "optional": ["model"]}
    with without_warning():  # what is declared twice; what is new; what is told
        load(WORLD, tmp_path, state(side == "loaded", 0.0), **both)
        save(WORLD, tmp_path, lambda rank: {"model": {"w": torch.ones(3)}})
        new = {"model": {"w": torch.zeros(3)}, "ema": {"w": torch.zeros(3)}}
        load(WORLD, tmp_path, lambda rank: new, optional=["ema"])


def test_m108_what_other_stages_ask_for_is_no_gap(tmp_path: Path) -> None:
    def stage(rank: int) -> dict[str, Any]:
        names = [f"layers.{n}.w" for n in (2 * rank, 2 * rank + 1)]
        return {
            "model": {name: torch.zeros(2) for name in names},
            "optim": {name: torch.zeros(2) for name in names if rank},
        }

    with without_warning():
        save(WORLD, tmp_path, stage)
        load(WORLD, tmp_path, stage)
