"""Rows of ``hazards.md`` that a load decides: the right bytes, or an error that names the facts.

Every ``M<n>`` is a row of that table. Ranks are simulated; ``test_hazards_ranks.py`` has those
where real processes matter.
"""

from __future__ import annotations

import random
import re
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
from torch.distributed.checkpoint import CheckpointException
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


@pytest.mark.parametrize(
    ("stored", "template"),
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int64),
        (torch.float32, torch.bool),
        (torch.complex64, torch.float32),
    ],
)
@pytest.mark.parametrize("cast", ["warn", "allow", "error"])
def test_m13_what_changes_the_numbers_meaning_is_refused(
    tmp_path: Path, stored: torch.dtype, template: torch.dtype, cast: str
) -> None:
    save(ONE, tmp_path, lambda rank: {"layers": {"w": arange(4, 2, dtype=stored)}})
    target = torch.zeros(4, 2, dtype=template)
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: {"layers": {"w": target}}, cast=cast)
    change = f"{stored} -> {template}".replace("torch.", "")
    refusal.says(f"layers.w: loading {change}", "way out:", str(stored).removeprefix("torch."))
    assert not target.any()


@pytest.mark.parametrize(
    ("stored", "template"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.int8),
    ],
)
def test_m13_narrowing_is_warned_of_refused_or_let_pass_as_asked(
    tmp_path: Path, stored: torch.dtype, template: torch.dtype
) -> None:
    whole = arange(4, 2, dtype=stored)
    save(ONE, tmp_path, lambda rank: {"a": {"w": whole}, "same": arange(2)})

    def state(rank: int) -> dict[str, Any]:
        return {"a": {"w": torch.zeros(4, 2, dtype=template)}, "same": torch.zeros(2)}

    change = f"{stored} -> {template}".replace("torch.", "")
    with warned() as texts:
        loaded, reports = load(ONE, tmp_path, state)
    assert len(texts) == len(reports[0].warnings) == 1
    assert "a.w: " in texts[0]
    assert change in texts[0]
    assert 'cast="allow"' in texts[0]
    assert reports[0].casts == {"a.w": change}
    assert same_bits(loaded[0]["a"]["w"], whole.to(template))

    with without_warning():
        loaded, reports = load(ONE, tmp_path, state, cast="allow")
    assert reports[0].casts == {"a.w": change}
    assert same_bits(loaded[0]["a"]["w"], whole.to(template))

    with refused() as refusal:
        load(ONE, tmp_path, state, cast="error")
    refusal.says(f"a.w: loading {change}", "loses precision", 'cast="allow"')


def test_m13_widening_is_listed_and_not_warned_of(tmp_path: Path) -> None:
    whole = arange(4, 2, dtype=torch.bfloat16)
    save(ONE, tmp_path, lambda rank: {"w": whole})
    with without_warning():
        loaded, reports = load(ONE, tmp_path, lambda rank: {"w": torch.zeros(4, 2)}, cast="error")
    assert reports[0].casts == {"w": "bfloat16 -> float32"}
    assert same_bits(loaded[0]["w"], whole.float())


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
    with without_warning():
        loaded, reports = load(ONE, tmp_path, state, optional=["new.*"])
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
    "scalar": lambda: torch.tensor(5.0),
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


@pytest.mark.parametrize("moments_too", [False, True])
def test_m50_a_partial_load_that_reads_no_tensor_of_the_model_is_warned_of(
    tmp_path: Path, moments_too: bool
) -> None:
    def state(prefix: str) -> dict[str, Any]:
        made: dict[str, Any] = {
            prefix: {"a": arange(4, 3), "b": arange(3)},
            "step": torch.tensor(3),
        }
        if moments_too:
            made["optim"] = {"state": {"a": {"exp_avg": arange(4, 3)}}}
        return made

    save(ONE, tmp_path, lambda rank: state("model"))
    with warned() as texts:
        _, reports = load(ONE, tmp_path, lambda rank: state("module"), allow_partial_load=True)
    (text,) = texts
    assert "asks for 2 tensors of the model, and none of them is in the checkpoint" in text
    assert "module.a, module.b" in text
    assert "model.a, model.b" in text
    assert len(reports[0].warnings) == 1


def test_m50_partial_loads_on_purpose_are_not_warned_of(tmp_path: Path) -> None:
    weights = {"a": arange(4, 3), "b": arange(3)}
    moments = {"state": {"a": {"exp_avg": arange(4, 3)}}}
    save(ONE, tmp_path, lambda rank: {"model": weights, "optim": moments, "step": 3})
    for state, options in (
        ({"model": {"a": arange(4, 3), "new": arange(2)}}, {}),
        ({"optim": moments, "step": 0, "scheduler": 5}, {}),
        ({"head": {"w": arange(2)}, "step": 0}, {"optional": ["head"]}),
    ):
        with without_warning():
            load(ONE, tmp_path, lambda rank, s=state: s, allow_partial_load=True, **options)


def test_optional_that_leaves_out_every_tensor_is_warned_of(tmp_path: Path) -> None:
    def state(prefix: str) -> dict[str, Any]:
        return {prefix: {"a": arange(4, 3), "b": arange(3)}, "step": torch.tensor(3)}

    save(ONE, tmp_path, lambda rank: state("model"))
    with warned() as texts:
        load(ONE, tmp_path, lambda rank: state("module"), optional=["**"])
    (text,) = texts
    assert "asks for 2 tensors of the model, and none of them is in the checkpoint" in text


# M22, M23: optimizer state of a parameter that never took a step.


def moments(name: str, step: float, start: int) -> dict[str, Any]:
    return {
        "step": torch.tensor(step),
        "exp_avg": arange(4, 3, start=start),
        "exp_avg_sq": arange(4, 3, start=2 * start),
    }


def nested(*stepped: str, step: float = 3.0) -> dict[str, Any]:
    """A state dict as ``get_optimizer_state_dict`` makes it."""
    state = {name: moments(name, step, 7) for name in stepped}
    groups = [{"lr": 0.1, "params": ["layers.a", "layers.b"]}]
    weights = {name: arange(4, 3) for name in ("layers.a", "layers.b")}
    return {"model": weights, "optim": {"state": state, "param_groups": groups}}


def flattened(*stepped: str, step: float = 3.0) -> dict[str, Any]:
    """A state dict with flattened optimizer state."""
    state = {
        f"state.{name}.{key}": value
        for name in stepped
        for key, value in moments(name, step, 7).items()
    }
    state |= {f"param_groups.{name}.lr": 0.1 for name in ("layers.a", "layers.b")}
    weights = {name: arange(4, 3) for name in ("layers.a", "layers.b")}
    return {"model": weights, "optim": state}


def fresh(build: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A template whose optimizer has just made its state: moments 0, but ``step`` already 1."""
    made = build("layers.a", "layers.b", step=1.0)
    state = made["optim"].get("state", made["optim"])
    for key, value in state.items():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                tensor.zero_()
        assert key
    for weight in made["model"].values():
        weight.fill_(FILL)
    return made


def states_of(loaded: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    optim = loaded["optim"]
    if "state" in optim:
        return dict(optim["state"][name])
    prefix = f"state.{name}."
    return {k.removeprefix(prefix): v for k, v in optim.items() if k.startswith(prefix)}


@pytest.mark.parametrize("build", [nested, flattened])
@pytest.mark.parametrize("partial", [False, True], ids=["m22-strict", "m23-partial-load"])
class TestNeverStepped:
    def test_state_is_kept_listed_and_its_step_is_0(
        self, tmp_path: Path, build: Callable[..., dict[str, Any]], partial: bool
    ) -> None:
        with without_warning():
            saved = save(WORLD, tmp_path, lambda rank: build("layers.a"))
        assert len(saved.stateless) == 1
        assert saved.stateless[0].endswith("layers.b")
        with without_warning():
            loaded, reports = load(
                WORLD, tmp_path, lambda rank: fresh(build), allow_partial_load=partial
            )
        for rank in range(4):
            assert len(reports[rank].stateless) == 1
            assert reports[rank].stateless[0].endswith("layers.b")
            assert not [key for key in reports[rank].missing if "layers.a" in key]
            assert same_bits(loaded[rank]["model"]["layers.b"], arange(4, 3))
            for name, wanted in (
                ("layers.a", moments("layers.a", 3.0, 7)),
                ("layers.b", moments("layers.b", 0.0, 0)),
            ):
                found = states_of(loaded[rank], name)
                wanted["exp_avg"] *= name == "layers.a"
                wanted["exp_avg_sq"] *= name == "layers.a"
                for key, value in wanted.items():
                    assert same_bits(found[key], value), (name, key, found[key])

    def test_state_that_is_there_in_part_is_refused(
        self, tmp_path: Path, build: Callable[..., dict[str, Any]], partial: bool
    ) -> None:
        def state(rank: int) -> dict[str, Any]:
            made = build("layers.a", "layers.b")
            optim = made["optim"]
            if "state" in optim:
                del optim["state"]["layers.b"]["exp_avg_sq"]
            else:
                del optim["state.layers.b.exp_avg_sq"]
            return made

        save(ONE, tmp_path, state)
        with refused() as refusal:
            load(ONE, tmp_path, lambda rank: fresh(build), allow_partial_load=partial)
        refusal.says("optim.state.layers.b.exp_avg_sq: ", "rank 0")
        assert "layers.a" not in refusal.text


READERS = {"torch's": dcp.FileSystemReader, "ours": PlacementFileSystemReader}


def stepped(build: Callable[..., dict[str, Any]], *, numbers: bool = False) -> dict[str, Any]:
    """A template of an optimizer that has stepped both parameters; ``FILL`` in its moments."""
    made = build("layers.a", "layers.b", step=9.0)
    for name in ("layers.a", "layers.b"):
        for key, value in states_of(made, name).items():
            if value.dim():
                value.fill_(FILL)
            elif numbers and key == "step" and "state" in made["optim"]:
                made["optim"]["state"][name][key] = 9
            elif numbers and key == "step":
                made["optim"][f"state.{name}.{key}"] = 9
    return made


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("build", [nested, flattened])
def test_m78_a_rollback_resets_all_state_that_the_checkpoint_lacks(
    tmp_path: Path, build: Callable[..., dict[str, Any]], partial: bool, reader: Any
) -> None:
    save(ONE, tmp_path, lambda rank: build("layers.a"))
    state = stepped(build)
    planner = PlacementLoadPlanner(allow_partial_load=partial)
    with warned() as texts:
        dcp.load(state, storage_reader=reader(tmp_path), planner=planner, no_dist=True)
    for key, value in states_of(state, "layers.b").items():
        assert not value.any(), key
    for key, value in moments("layers.a", 3.0, 7).items():
        assert same_bits(states_of(state, "layers.a")[key], value), key
    assert same_bits(state["model"]["layers.b"], arange(4, 3))
    (text,) = texts
    assert "that of 1 parameter was reset to 0: the checkpoint has none" in text
    assert "layers.b" in text
    assert len(planner.report.stateless) == 1
    assert any("reset to 0" in warning for warning in planner.report.warnings)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_m78_a_step_that_is_a_number_is_reset_with_its_moments(tmp_path: Path, reader: Any) -> None:
    save(ONE, tmp_path, lambda rank: nested("layers.a"))
    state = stepped(nested, numbers=True)
    del state["optim"]["state"]["layers.a"]["step"]
    state["optim"]["state"]["layers.a"]["step"] = torch.tensor(9.0)
    with warned():
        dcp.load(
            state,
            storage_reader=reader(tmp_path),
            planner=PlacementLoadPlanner(),
            no_dist=True,
        )
    found = states_of(state, "layers.b")
    assert found["step"] == 0
    assert type(found["step"]) is int
    assert not found["exp_avg"].any()


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_m78_a_load_that_fails_resets_nothing(tmp_path: Path, reader: Any) -> None:
    save(ONE, tmp_path, lambda rank: nested("layers.a"))
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    state = stepped(nested)
    with pytest.raises(CheckpointException):
        dcp.load(
            state, storage_reader=reader(tmp_path), planner=PlacementLoadPlanner(), no_dist=True
        )
    found = states_of(state, "layers.b")
    assert found["step"] == 9
    assert bool((found["exp_avg"] == FILL).all())


def test_m78_sharded_state_is_reset_on_every_rank(tmp_path: Path) -> None:
    def state(rank: int, *names: str, fill: float | None = None) -> dict[str, Any]:
        def shard(seed: int) -> FakeDTensor:
            made = FakeDTensor.distribute(
                arange(8, 3, start=seed), WORLD.mesh(rank, fsdp=4), [Shard(0)]
            )
            if fill is not None:
                made.to_local().fill_(fill)
            return made

        weights = {name: shard(1) for name in ("a", "b")}
        optim = {n: {"step": torch.tensor(4.0), "exp_avg": shard(5)} for n in names}
        return {"model": weights, "optim": {"state": optim}}

    save(WORLD, tmp_path, lambda rank: state(rank, "a"))
    with warned():
        loaded, reports = load(WORLD, tmp_path, lambda rank: state(rank, "a", "b", fill=FILL))
    for rank in range(4):
        optim = loaded[rank]["optim"]["state"]
        assert optim["b"]["step"] == 0
        assert not optim["b"]["exp_avg"].to_local().any()
        assert same_bits(optim["a"]["exp_avg"].to_local(), arange(8, 3, start=5).chunk(4)[rank])
        assert any("reset to 0" in warning for warning in reports[rank].warnings)


@pytest.mark.parametrize("partial", [False, True])
def test_m78_a_rank_none_of_whose_parameters_was_stepped_resets_their_state(
    tmp_path: Path, partial: bool
) -> None:
    """The state of another rank's parameter shows that the optimizer was saved."""
    two = World(2)

    def state(rank: int, fill: float | None = None) -> dict[str, Any]:
        made = optimized("ab"[rank], fill=fill)
        if fill is None and rank == 1:
            made["optim"]["state"] = {}
        return made

    save(two, tmp_path, state)
    with warned() as texts:
        loaded, reports = load(
            two, tmp_path, lambda rank: state(rank, FILL), allow_partial_load=partial
        )
    assert_same(loaded[0], state(0))
    assert same_bits(loaded[1]["model"]["b"], arange(3, 2, start=1))
    assert not any(one.any() for one in loaded[1]["optim"]["state"]["b"].values())
    assert (reports[1].stateless, reports[1].missing) == (("b",), ())
    assert "was reset to 0" in texts[0]


def renamed_state(there: str, here: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is saved and asked for, of which the optimizers name ``w`` differently."""
    saved, asked = optimized("w", "v"), optimized("w", "v", fill=FILL)
    for one, name in ((saved, there), (asked, here)):
        one["optim"]["state"] = {name: one["optim"]["state"]["w"]}
    return saved, asked


@pytest.mark.parametrize("names", [("w", "_orig_mod.w"), ("_orig_mod.w", "w")])
def test_optimizer_state_under_another_name_is_no_parameter_that_was_never_stepped(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    saved, asked = renamed_state(*names)
    saved["optim"]["param_groups"] = {names[0]: {"lr": 0.1}}
    save(ONE, tmp_path, lambda rank: saved)
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: asked)
    refusal.says(f"optim.state.{names[1]}.exp_avg", "the checkpoint lacks this key")


def test_an_optimizer_alone_that_has_no_state_is_refused(tmp_path: Path) -> None:
    """Whether its parameters were never stepped or have other names, nothing tells."""
    save(ONE, tmp_path, lambda rank: optimized("a"))
    asked = {"optim": optimized("b", fill=FILL)["optim"]}
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: asked)
    refusal.says("optim.state.b.exp_avg: the checkpoint lacks this key")


def optimized(*names: str, fill: float | None = None) -> dict[str, Any]:
    """Parameters and their moments, all numbers differing; or all ``fill``."""
    weights = {name: arange(3, 2, start=10 * at + 1) for at, name in enumerate(names)}
    states = {
        name: {"step": torch.tensor(4.0 + at), "exp_avg": arange(3, 2, start=100 * at + 101)}
        for at, name in enumerate(names)
    }
    if fill is not None:
        for tensor in (*weights.values(), *(t for s in states.values() for t in s.values())):
            tensor.fill_(fill)
    return {"model": weights, "optim": {"state": states}}


def load_alone(path: Path, state: dict[str, Any], reader: Any, **options: Any) -> LoadReport:
    planner = PlacementLoadPlanner(**options)
    dcp.load(state, storage_reader=reader(path), planner=planner, no_dist=True)
    return planner.report


def save_tied(path: Path) -> dict[str, Any]:
    """Save two parameters of equal contents, of which the first one has state."""
    saved = optimized("embed")
    saved["model"]["head"] = saved["model"]["embed"].clone()
    save(ONE, path, lambda rank: saved)
    return saved["optim"]["state"]["embed"]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_m78_state_that_was_read_under_a_tied_key_is_not_reset(tmp_path: Path, reader: Any) -> None:
    wanted = save_tied(tmp_path)
    state = optimized("embed", fill=FILL)
    for part in (state["model"], state["optim"]["state"]):
        part["head"] = part["embed"]
    with without_warning():
        load_alone(tmp_path, state, reader)
    assert_same(state["optim"]["state"]["embed"], wanted)
    assert same_bits(state["model"]["embed"], arange(3, 2, start=1))


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_m78_a_step_of_all_parameters_is_not_reset(tmp_path: Path, reader: Any) -> None:
    wanted = save_tied(tmp_path)
    state = optimized("embed", "head", fill=FILL)
    states = state["optim"]["state"]
    states["head"]["step"] = states["embed"]["step"]
    with warned():
        load_alone(tmp_path, state, reader)
    assert_same(states["embed"], wanted)
    assert not states["head"]["exp_avg"].any()


def test_m78_of_state_that_overlaps_what_was_read_the_rest_is_reset(tmp_path: Path) -> None:
    """Its columns interleave with what was read, and one of them was."""
    wanted = save_tied(tmp_path)
    state = optimized("embed", "head", fill=FILL)
    columns = torch.full((3, 4), float(FILL))
    state["optim"]["state"]["embed"]["exp_avg"] = columns[:, 0:2]
    state["optim"]["state"]["head"]["exp_avg"] = columns[:, 1:3]
    with warned():
        load_alone(tmp_path, state, PlacementFileSystemReader)
    rest = torch.tensor([[0.0, FILL]] * 3)
    assert same_bits(columns, torch.cat([wanted["exp_avg"], rest], dim=1))


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    "options", [{"allow_partial_load": True}, {"optional": ["*lora*"]}, {"optional": ["model"]}]
)
def test_m78_a_parameter_that_keeps_its_weight_keeps_its_state(
    tmp_path: Path, reader: Any, options: dict[str, Any]
) -> None:
    saved = optimized("a")
    save(ONE, tmp_path, lambda rank: saved)
    state = optimized("a", "lora", fill=7)
    with without_warning():
        report = load_alone(tmp_path, state, reader, **options)
    kept = optimized("lora", fill=7)
    for key in ("model", "optim"):
        inner, wanted, stays = state[key], saved[key], kept[key]
        if key == "optim":
            inner, wanted, stays = (each["state"] for each in (inner, wanted, stays))
        assert_same(inner["a"], wanted["a"])
        assert_same(inner["lora"], stays["lora"])
    assert report.stateless == ()
    lacking = {"model.lora", "optim.state.lora.exp_avg", "optim.state.lora.step"}
    assert {*report.missing} == lacking


def test_m78_optional_state_of_a_parameter_that_is_read_is_left_unchanged(tmp_path: Path) -> None:
    save_tied(tmp_path)
    state = optimized("embed", "head", fill=7)
    with without_warning():
        report = load_alone(
            tmp_path, state, PlacementFileSystemReader, optional=["optim.state.head"]
        )
    assert_same(
        state["optim"]["state"]["head"], optimized("head", fill=7)["optim"]["state"]["head"]
    )
    assert same_bits(state["model"]["head"], arange(3, 2, start=1))
    assert report.stateless == ()


def test_m78_a_parameter_that_is_read_has_its_own_name_and_not_the_end_of_another(
    tmp_path: Path,
) -> None:
    """``model.block.lora`` is read, and ``model.lora`` stays."""
    saved = optimized("block.lora")
    save(ONE, tmp_path, lambda rank: saved)
    state = optimized("block.lora", "lora", fill=7)
    with without_warning():
        load_alone(tmp_path, state, PlacementFileSystemReader, allow_partial_load=True)
    states = state["optim"]["state"]
    assert_same(states["block.lora"], saved["optim"]["state"]["block.lora"])
    assert_same(states["lora"], optimized("lora", fill=7)["optim"]["state"]["lora"])


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_m78_a_load_resets_its_own_state_alone(tmp_path: Path, reader: Any) -> None:
    """Two loads of one planner: both are planned, then the first one is read."""
    wanted = save_tied(tmp_path)
    planner = PlacementLoadPlanner()
    states = [optimized("embed", "head", fill=FILL) for _ in range(2)]
    reads = []
    for state in states:
        source = reader(tmp_path)
        metadata = source.read_metadata()
        planner.set_up_planner(state, metadata, True)
        source.set_up_storage_reader(metadata, True)
        plan = source.prepare_local_plan(planner.create_local_plan())
        (plan,) = source.prepare_global_plan(planner.create_global_plan([plan]))
        reads.append((source, planner.finish_plan(plan)))
    untouched = optimized("embed", "head", fill=FILL)
    for at, (source, plan) in enumerate(reads):
        with warned():
            source.read_data(plan, planner).wait()
        found = states[at]["optim"]["state"]
        assert_same(found["embed"], wanted)
        assert not any(tensor.any() for tensor in found["head"].values())
        if at == 0:
            assert_same(states[1], untouched)


RESTRICTED = {**READERS, "restricted": partial(PlacementFileSystemReader, restricted=True)}


@pytest.mark.parametrize("reader", RESTRICTED.values(), ids=RESTRICTED)
def test_m99_a_load_that_is_refused_after_its_last_item_has_reset_nothing(
    tmp_path: Path, reader: Any
) -> None:
    """Another save begins in the file, and its id is there, when the last item was read."""
    saved = optimized("a")
    saved["model"]["b"] = torch.arange(30_000)  # more than a reader holds in its buffer
    save(ONE, tmp_path, lambda rank: saved)
    (file,) = tmp_path.glob("*.distcp")
    (save_id,) = {*re.findall(rb"dcp_placements save (\w+)\n", file.read_bytes())}

    class Interrupted(PlacementLoadPlanner):
        commits = 0

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().commit_tensor(read_item, tensor)
            self.commits += 1
            if self.commits == 4:
                with file.open("r+b") as stream:
                    held = stream.read().replace(save_id, save_id[::-1])
                    stream.seek(0)
                    stream.write(held)

    state = optimized("a", "b", fill=FILL)
    state["model"]["b"] = torch.zeros(30_000, dtype=torch.int64)
    with pytest.raises(CheckpointException, match="was written by save"):
        dcp.load(state, storage_reader=reader(tmp_path), planner=Interrupted(), no_dist=True)
    assert_same(state["optim"]["state"]["b"], optimized("b", fill=FILL)["optim"]["state"]["b"])


def test_m22_no_optimizer_state_at_all_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """A checkpoint of weights alone is no optimizer that never stepped."""
    save(ONE, tmp_path, lambda rank: {"model": nested()["model"]})
    with refused() as refusal:
        load(ONE, tmp_path, lambda rank: fresh(nested))
    refusal.says("optim.", "layers.a")
    with without_warning():
        loaded, reports = load(ONE, tmp_path, lambda rank: fresh(nested), optional=["optim"])
    assert reports[0].missing
    assert same_bits(loaded[0]["model"]["layers.a"], arange(4, 3))


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

    for optim in ({}, {"groups": {"lr": 0.1}}):
        with warned() as texts:
            report = loaded(partial(without_optim, optim=optim))
        (text,) = texts
        assert "optim: the checkpoint has 3 tensors of it that no rank asks for: optim." in text
        assert text.count("no rank asks for") == len(report.warnings) == 1
    with warned() as texts:
        loaded(lambda rank: trainer(2, rank=rank))
    (text,) = texts
    assert "model: the checkpoint has 1 tensor of it" in text
    assert "optim: the checkpoint has 1 tensor of it" in text
    with without_warning():
        # Another number of ranks; weights alone; some of them by name; and what is said.
        assert loaded(lambda rank: trainer(3, rank=rank)).unasked == ()
        report = loaded(lambda rank: {"model": trainer(3)["model"]})
        assert "optim.state.layers.0.w.exp_avg" in report.unasked
        assert "no rank:" in str(report)
        loaded(lambda rank: {"model": {"layers.2.w": torch.zeros(2)}})
        loaded(lambda rank: trainer(2, rank=rank), waive={"layers.2": "a smaller model"})
        loaded(lambda rank: without_optim(rank, {}), allow_partial_load=True)


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
