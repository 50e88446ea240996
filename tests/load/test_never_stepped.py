"""Optimizer state that a checkpoint lacks: of a parameter that never took a step it is reset, with
a warning where that changes it; of any other it is a key that is missing.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import FILL, arange, assert_same, load, refused, same_bits, save, warned
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import PlacementFileSystemReader, PlacementLoadPlanner, PlacementSavePlanner
from dcp_placements.testing import FakeDTensor, World

READERS: dict[str, Any] = {"torch's": dcp.FileSystemReader, "ours": PlacementFileSystemReader}
by_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
State = dict[str, Any]


def weights(*names: str) -> State:
    return {name: arange(3, 2, start=10 * at + 1) for at, name in enumerate(names)}


def states(*names: str) -> State:
    """Return the state of parameters; all numbers differ."""
    return {
        name: {
            "step": torch.tensor(4.0 + at),
            "exp_avg": arange(3, 2, start=100 * at + 101),
            "exp_avg_sq": arange(3, 2, start=100 * at + 151),
        }
        for at, name in enumerate(names)
    }


def filled(value: Any, number: float) -> Any:
    """Return the same with one number in all tensors."""
    if isinstance(value, dict):
        return {key: filled(entry, number) for key, entry in value.items()}
    return torch.full_like(value, number) if isinstance(value, torch.Tensor) else value


def trained(model: State, state: State, *names: str) -> State:
    """Return a model and its optimizer, which has the model's parameters, or ``names``."""
    groups = [{"lr": 0.1, "params": [*(names or model)]}]
    return {"model": model, "optim": {"state": state, "param_groups": groups}}


def fresh(*names: str, number: float = FILL) -> State:
    """Return the template of an optimizer that has stepped these."""
    return filled(trained(weights(*names), states(*names)), number)


def flattened(state_dict: State) -> State:
    """Return the same with flattened optimizer state."""
    optim = state_dict["optim"]
    entries = optim["state"].items()
    flat = {f"state.{name}.{key}": one for name, held in entries for key, one in held.items()}
    for group in optim["param_groups"]:
        flat |= {f"param_groups.{name}.lr": group["lr"] for name in group["params"]}
    return {**state_dict, "optim": flat}


BOTH = ("embed", "head")
SAVED = trained(weights(*BOTH), states("embed"))
"""What most checkpoints here hold: two parameters, of which the first one has state."""


@dataclass(frozen=True)
class Rollback:
    """A load into an optimizer that has stepped more parameters than the checkpoint.

    Attributes:
        wanted: What the load leaves.
        reset: The parameters whose state is reset.
        asked: What is loaded into.
        saved: What the checkpoint holds.
        options: Of the planner.
        quiet: Whether nothing of what was there is lost.
    """

    wanted: State
    reset: tuple[str, ...] = ("head",)
    asked: Callable[[], State] = lambda: fresh(*BOTH)
    saved: State = field(default_factory=lambda: SAVED)
    options: State = field(default_factory=dict)
    quiet: bool = False


def left(**state: Any) -> State:
    """Return what a load of ``SAVED`` leaves, by the state of ``head``."""
    return trained(weights(*BOTH), {**states("embed"), **state})


ZERO = filled(states("head"), 0)


def just_made() -> State:
    """Return the template of an optimizer that has just made its state: ``step`` already 1."""
    made = fresh(*BOTH, number=0)
    for state in made["optim"]["state"].values():
        state["step"] = torch.tensor(1.0)
    return made


def with_a_number() -> State:
    made = fresh(*BOTH)
    made["optim"]["state"]["head"]["step"] = 9
    return made


def tied() -> State:
    made = fresh(*BOTH)
    for part in (made["model"], made["optim"]["state"]):
        part["head"] = part["embed"]
    return made


def one_step_for_all() -> State:
    made = fresh(*BOTH)
    state = made["optim"]["state"]
    state["head"]["step"] = state["embed"]["step"]
    return made


def interleaved() -> State:
    """Columns of one memory, of which one is of both."""
    made, columns = fresh(*BOTH), torch.full((3, 4), float(FILL))
    for at, name in enumerate(BOTH):
        made["optim"]["state"][name]["exp_avg"] = columns[:, at : at + 2]
    return made


def with_nested_state(*stepped: str) -> State:
    """Shampoo and its like keep dicts within a parameter's state."""
    blocks = {"0": {"left": torch.ones(2, 2)}, "1": {"right": torch.ones(3, 3)}}
    held = {"blocks": blocks, "step": torch.tensor(4.0)}
    return trained(weights(*BOTH), {name: copy.deepcopy(held) for name in stepped})


KEPT = trained(weights("embed"), states("embed"))
WARM = fresh("lora", number=7)
LORA = trained({**weights("embed"), **WARM["model"]}, {**states("embed"), **WARM["optim"]["state"]})
ROLLBACKS: dict[str, Rollback] = {
    "m78: state that was stepped": Rollback(left(**ZERO)),
    "m22: state that was just made": Rollback(left(**ZERO), asked=just_made, quiet=True),
    "m23: state that was just made, in a partial load": Rollback(
        left(**ZERO), asked=just_made, quiet=True, options={"allow_partial_load": True}
    ),
    "m78: in a partial load": Rollback(left(**ZERO), options={"allow_partial_load": True}),
    "m78: a step that is a number": Rollback(
        left(head={**ZERO["head"], "step": 0}), asked=with_a_number
    ),
    "m78: state that was read under a tied key stays": Rollback(
        trained(
            {"embed": weights("embed")["embed"], "head": weights("embed")["embed"]},
            dict.fromkeys(BOTH, states("embed")["embed"]),
        ),
        (),
        asked=tied,
        saved=trained(dict.fromkeys(BOTH, weights("embed")["embed"]), states("embed")),
        quiet=True,
    ),
    "m78: a step of all parameters stays": Rollback(
        left(head={**ZERO["head"], "step": states("embed")["embed"]["step"]}),
        asked=one_step_for_all,
    ),
    "m78: of state that overlaps what was read the rest is reset": Rollback(
        left(
            head={
                **ZERO["head"],
                "exp_avg": torch.stack(
                    [states("embed")["embed"]["exp_avg"][:, 1], torch.zeros(3)], dim=1
                ),
            }
        ),
        asked=interleaved,
    ),
    **{
        f"m78: a parameter that keeps its weight keeps its state: {options}": Rollback(
            LORA,
            (),
            partial(fresh, "embed", "lora", number=7),
            KEPT,
            options,
            quiet=True,
        )
        for options in (
            {"allow_partial_load": True},
            {"optional": ["*lora*"], "waive": {"model.lora": "new"}},
            {"optional": ["model", "param_groups.lora"], "waive": {"model": "new"}},
        )
    },
    "m123: optional state of a parameter that is read": Rollback(
        left(**ZERO), options={"optional": ["optim.state.head"]}
    ),
    "m123: a parameter that keeps its weight, and torch's dummy step": Rollback(
        trained(
            {**weights("embed"), **just_made()["model"]} | {"embed": weights("embed")["embed"]},
            {**states("embed"), **ZERO},
        ),
        (),
        just_made,
        KEPT,
        {"allow_partial_load": True},
        quiet=True,
    ),
    # ``model.block.embed`` is read, and ``model.embed`` stays.
    "m78: a parameter whose name is the end of another's": Rollback(
        trained(
            {**weights("block.embed"), "embed": fresh("embed")["model"]["embed"]},
            {**states("block.embed"), **fresh("embed")["optim"]["state"]},
        ),
        (),
        partial(fresh, "block.embed", "embed"),
        trained(weights("block.embed"), states("block.embed")),
        {"allow_partial_load": True},
        quiet=True,
    ),
    "m123: no optimizer state at all, which is optional": Rollback(
        trained(weights(*BOTH), filled(states(*BOTH), 0)),
        BOTH,
        saved={"model": weights(*BOTH)},
        options={"optional": ["optim"]},
    ),
    "m123: no optimizer state at all, in a partial load": Rollback(
        trained(weights(*BOTH), filled(states(*BOTH), 0)),
        BOTH,
        just_made,
        {"model": weights(*BOTH)},
        {"allow_partial_load": True},
        quiet=True,
    ),
    "an optimizer that was saved before its first step": Rollback(
        trained(weights(*BOTH), filled(states(*BOTH), 0)),
        BOTH,
        just_made,
        trained(weights(*BOTH), {}),
        quiet=True,
    ),
    # Whatever it is before a first step: nested state is nothing that is known.
    "nested state, as a whole, which is optional": Rollback(
        trained(
            weights(*BOTH),
            {
                "embed": with_nested_state("embed")["optim"]["state"]["embed"],
                "head": {
                    **with_nested_state("head")["optim"]["state"]["head"],
                    "step": torch.tensor(0.0),
                },
            },
        ),
        asked=partial(with_nested_state, *BOTH),
        saved=with_nested_state("embed"),
        options={"optional": ["optim.state.head"]},
    ),
}


@by_reader
@pytest.mark.parametrize("form", [dict, flattened], ids=["nested", "flattened"])
@pytest.mark.parametrize("name", ROLLBACKS)
def test_state_that_the_checkpoint_lacks(
    tmp_path: Path, name: str, form: Callable[[State], State], reader: Any
) -> None:
    scene = ROLLBACKS[name]
    saver = PlacementSavePlanner()
    saved = form(scene.saved) if "optim" in scene.saved else scene.saved
    dcp.save(saved, checkpoint_id=tmp_path, planner=saver, no_dist=True)
    held = scene.saved.get("optim", {"state": {}, "param_groups": []})
    names = [name for group in held["param_groups"] for name in group["params"]]
    lacking = [name for name in names if name not in held["state"]]
    assert saver.report.stateless == tuple(lacking if held["state"] else ())
    state, planner = form(scene.asked()), PlacementLoadPlanner(**scene.options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(state, storage_reader=reader(tmp_path), planner=planner, no_dist=True)
    assert_same(state, form(scene.wanted))
    texts = [str(one.message) for one in caught if "optimizer" in str(one.message)]
    assert len(texts) == (not scene.quiet)
    for text in (*texts, *planner.report.warnings):
        plural = "s" if len(scene.reset) > 1 else ""
        assert f"that of {len(scene.reset)} parameter{plural} was reset to its beginning" in text
        assert scene.reset[0] in text
    assert planner.report.stateless == scene.reset


def without(state_dict: State, name: str, key: str) -> State:
    del state_dict["optim"]["state"][name][key]
    return state_dict


def named(name: str, *, number: float | None = None) -> State:
    """Return two parameters of which the first one has state, under a name of its own."""
    made = trained(weights("w", "v"), {name: states("w")["w"]}, name, "v")
    return made if number is None else filled(made, number)


def partly_nested() -> State:
    made = with_nested_state(*BOTH)
    del made["optim"]["state"]["head"]["blocks"]["1"]
    return made


LACKS = "the checkpoint lacks this key"
REFUSED: dict[str, tuple[State, State, tuple[str, ...]]] = {
    "m22: a part of the state": (
        without(trained(weights(*BOTH), states(*BOTH)), "head", "exp_avg_sq"),
        fresh(*BOTH),
        ("optim.state.head.exp_avg_sq: ", "rank 0"),
    ),
    "a part of nested state": (
        partly_nested(),
        with_nested_state(*BOTH),
        ("lacks this state of a parameter whose",),
    ),
    # A checkpoint of weights alone is no optimizer that never stepped.
    "m22: no optimizer state at all": (
        {"model": weights("w")},
        trained(weights("w"), states("w")),
        ("optim.", "state.w"),
    ),
    **{
        f"state under the name {there} that is asked for as {here}": (
            named(there),
            named(here, number=FILL),
            (f"asked for:   optim.state.{here}, ", f"there are:   optim.state.{there}\n"),
        )
        for there, here in (("w", "_orig_mod.w"), ("_orig_mod.w", "w"))
    },
    # Whether its parameters were never stepped or have other names, nothing tells.
    "an optimizer alone": (
        trained(weights("a"), states("a")),
        {"optim": trained({}, states("b"), "b")["optim"]},
        ("asked for:   optim.state.b, ", "there are:   optim.state.a\n"),
    ),
    "options of a parameter that the save had frozen": (
        flattened(trained(weights(*BOTH), states("embed"), "embed")),
        flattened(trained(weights(*BOTH), states(*BOTH))),
        (
            f"optim.param_groups.head.lr: {LACKS}",
            "the optimizer that was saved had no such parameter",
            'optional=["param_groups.<parameter>"]',
        ),
    ),
    "options of another optimizer": (
        flattened(SAVED),
        {
            **flattened(SAVED),
            "optim": {**flattened(SAVED)["optim"], "param_groups.head.betas": 0.9},
        },
        (f"optim.param_groups.head.betas: {LACKS}", "saved by another optimizer"),
    ),
    # What is not named in groups is no optimizer state.
    "an optimizer that was saved alone, without its groups": (
        {"state": states("embed")},
        {"state": states(*BOTH)},
        (
            f"state.head.exp_avg, state.head.exp_avg_sq, state.head.step: {LACKS}",
            "it is known by param_groups",
        ),
    ),
    "m115: state of which nobody knows how it begins": (
        with_nested_state("embed"),
        with_nested_state(*BOTH),
        ("optim.state.head.blocks.0.left", "before a first step is not known", "optional="),
    ),
}


@pytest.mark.parametrize("partly", [False, True], ids=["strict", "partial"])
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_is_missing_is_refused(tmp_path: Path, name: str, partly: bool) -> None:
    saved, asked, facts = REFUSED[name]
    if partly and "a part of" not in name:
        pytest.skip("a partial load leaves out what is missing as a whole")
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    with refused() as refusal:
        load(World(1), tmp_path, lambda rank: asked, allow_partial_load=partly)
    refusal.says(*facts)
    assert "state.embed" not in refusal.text


@pytest.mark.parametrize(
    "saved", [{"optim": SAVED["optim"]}, SAVED], ids=["saved alone", "saved with its model"]
)
def test_an_optimizer_that_is_loaded_alone_is_reset_as_well(tmp_path: Path, saved: State) -> None:
    dcp.save(saved, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    asked = {"optim": fresh(*BOTH)["optim"]}
    with warned():
        _, (report,) = load(World(1), tmp_path, lambda rank: asked)
    assert report.stateless == ("head",)
    assert_same(asked["optim"]["state"], {**states("embed"), **ZERO})


@by_reader
def test_m78_a_load_that_fails_resets_nothing(tmp_path: Path, reader: Any) -> None:
    save(World(1), tmp_path, lambda rank: SAVED)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    state = fresh(*BOTH)
    with pytest.raises(CheckpointException):
        dcp.load(
            state, storage_reader=reader(tmp_path), planner=PlacementLoadPlanner(), no_dist=True
        )
    assert_same(state["optim"]["state"]["head"], fresh("head")["optim"]["state"]["head"])


def test_m78_sharded_state_is_reset_on_every_rank(tmp_path: Path) -> None:
    world = World(4)

    def state(rank: int, *names: str, fill: bool = False) -> State:
        def shard(seed: int) -> FakeDTensor:
            whole = torch.full((8, 3), FILL) if fill else arange(8, 3, start=seed)
            return FakeDTensor.distribute(whole.float(), world.mesh(rank, fsdp=4), [Shard(0)])

        optim = {n: {"step": torch.tensor(4.0), "exp_avg": shard(5)} for n in names}
        return trained({name: shard(1) for name in ("a", "b")}, optim)

    save(world, tmp_path, lambda rank: state(rank, "a"))
    with warned():
        loaded, reports = load(world, tmp_path, lambda rank: state(rank, "a", "b", fill=True))
    for rank in range(4):
        optim = loaded[rank]["optim"]["state"]
        assert optim["b"]["step"] == 0
        assert not optim["b"]["exp_avg"].to_local().any()
        assert same_bits(optim["a"]["exp_avg"].to_local(), arange(8, 3, start=5).chunk(4)[rank])
        assert any("was reset" in warning for warning in reports[rank].warnings)


@pytest.mark.parametrize("partly", [False, True])
def test_m78_a_rank_none_of_whose_parameters_was_stepped_resets_their_state(
    tmp_path: Path, partly: bool
) -> None:
    """The state of another rank's parameter shows that the optimizer was saved."""

    def saved(rank: int) -> State:
        return trained(weights("ab"[rank]), {} if rank else states("a"))

    save(World(2), tmp_path, saved)
    with warned() as texts:
        loaded, reports = load(
            World(2), tmp_path, lambda rank: fresh("ab"[rank]), allow_partial_load=partly
        )
    assert_same(loaded[0], saved(0))
    assert_same(loaded[1], trained(weights("b"), filled(states("b"), 0)))
    assert (reports[1].stateless, reports[1].missing) == (("b",), ())
    assert "was reset to its beginning" in texts[0]


@by_reader
def test_m78_a_load_resets_its_own_state_alone(tmp_path: Path, reader: Any) -> None:
    """Two loads of one planner: both are planned, then the first one is read."""
    save(World(1), tmp_path, lambda rank: SAVED)
    planner = PlacementLoadPlanner()
    held = [fresh(*BOTH) for _ in range(2)]
    reads = []
    for state in held:
        source = reader(tmp_path)
        metadata = source.read_metadata()
        planner.set_up_planner(state, metadata, True)
        source.set_up_storage_reader(metadata, True)
        plan = source.prepare_local_plan(planner.create_local_plan())
        (plan,) = source.prepare_global_plan(planner.create_global_plan([plan]))
        reads.append((source, planner.finish_plan(plan)))
    for at, (source, plan) in enumerate(reads):
        with warned():
            source.read_data(plan, planner).wait()
        assert_same(held[at], left(**ZERO))
        if at == 0:
            assert_same(held[1], fresh(*BOTH))


@pytest.mark.parametrize("name", [*READERS, "restricted"])
def test_m99_a_load_that_is_refused_after_its_last_item_has_reset_nothing(
    tmp_path: Path, name: str
) -> None:
    """Another save begins in the file, and its id is there, when the last item was read."""
    saved = flattened(trained(weights("a"), states("a"), "a", "b"))
    saved["model"]["b"] = torch.arange(30_000)  # more than a reader holds in its buffer
    save(World(1), tmp_path, lambda rank: saved)
    (file,) = tmp_path.glob("*.distcp")
    (save_id,) = {*re.findall(rb"dcp_placements save (\w+)\n", file.read_bytes())}

    class Interrupted(PlacementLoadPlanner):
        commits = 0

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().commit_tensor(read_item, tensor)
            self.commits += 1
            if self.commits == 5:
                with file.open("r+b") as stream:
                    held = stream.read().replace(save_id, save_id[::-1])
                    stream.seek(0)
                    stream.write(held)

    state = flattened(fresh("a", "b"))
    state["model"]["b"] = torch.zeros(30_000, dtype=torch.int64)
    reader: Any = READERS.get(name) or partial(PlacementFileSystemReader, restricted=True)
    with pytest.raises(CheckpointException, match="was written by save"):
        dcp.load(state, storage_reader=reader(tmp_path), planner=Interrupted(), no_dist=True)
    held = {key: one for key, one in state["optim"].items() if "state.b" in key}
    assert_same(
        held, {f"state.b.{key}": one for key, one in filled(states("b")["b"], FILL).items()}
    )
