"""``installed``: frameworks that pass no planner save and load by the Placements of the context."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from dcp_placements import (
    MeshCoordinate,
    PlacementError,
    PlacementLoadPlanner,
    Placements,
    PlacementSavePlanner,
    installed,
)
from tests.torchrun import forked, tail

NAMES = ("_save_state_dict", "_ThreadBasedAsyncCheckpointExecutor")
PLACEMENTS = Placements(None)
STATE = {"model": {"w": torch.arange(6.0)}, "step": 3}


class Writer(dcp.FileSystemWriter):
    """Keeps the planner that it is given."""

    planner: Any = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.planner = planner
        return super().write_data(plan, planner)


class Reader(dcp.FileSystemReader):
    """Keeps the planner that it is given."""

    planner: Any = None

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.planner = planner
        return super().read_data(plan, planner)


class TheirSavePlanner(DefaultSavePlanner):
    """A framework's own, which plans by torch's class, by name."""

    def create_local_plan(self) -> dcp.SavePlan:
        return DefaultSavePlanner.create_local_plan(self)


class TheirLoadPlanner(DefaultLoadPlanner):
    """A framework's own, which plans by torch's class, by name."""

    def create_local_plan(self) -> dcp.LoadPlan:
        return DefaultLoadPlanner.create_local_plan(self)


def seams() -> list[Any]:
    found = [getattr(state_dict_saver, name) for name in NAMES]
    return [*found, state_dict_loader._load_state_dict]


def test_a_save_and_a_load_without_planner_use_ours(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    target = {"model": {"w": torch.zeros(6)}, "step": 0}
    with installed(PLACEMENTS):
        save(STATE, storage_writer=writer)
        dcp.load(target, storage_reader=reader)
    assert type(writer.planner) is PlacementSavePlanner
    assert type(reader.planner) is PlacementLoadPlanner
    assert target["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert target["step"] == 3


def test_rules_and_rename_of_the_placements_apply(tmp_path: Path) -> None:
    placements = Placements({"renamed.w": None}, rename=lambda key: key.replace("model", "renamed"))
    with installed(placements):
        dcp.save({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path)
    plain = {"renamed.w": torch.zeros(6)}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert plain["renamed.w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_deprecated_save_state_dict_is_served_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with installed(PLACEMENTS), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dcp.save_state_dict(STATE, writer, None, 0, True, DefaultSavePlanner())
    assert type(writer.planner) is PlacementSavePlanner


def test_options_of_torchs_default_planners_are_carried_over(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    theirs = DefaultSavePlanner(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
    target = {"model": {"w": torch.zeros(6)}, "new": torch.ones(2)}
    with installed(PLACEMENTS):
        dcp.save(STATE, storage_writer=writer, planner=theirs)
        dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (writer.planner.flatten_sharded_tensors, writer.planner.flatten_state_dict) == (
        False,
        True,
    )
    assert writer.planner.dedup_save_to_lowest_rank
    assert reader.planner.allow_partial_load
    assert target["new"].tolist() == [1, 1]


def test_m82_options_of_installed_reach_every_save_and_load(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    target = {"model": {"w": torch.zeros(6)}, "new": torch.ones(2)}
    options = {
        "save": {"on_conflict": "warn", "waive": {"w": "drifts"}},
        "load": {"allow_partial_load": True, "cast": "allow"},
    }
    with installed(PLACEMENTS, **options):
        dcp.save(STATE, storage_writer=writer)
        dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner())
    assert (writer.planner.on_conflict, writer.planner.waive) == ("warn", {"w": "drifts"})
    assert reader.planner.allow_partial_load
    assert target["new"].tolist() == [1, 1]
    assert target["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PlacementError, match=r"installed\(save=.*'digest'"):
        installed(PLACEMENTS, save={"digest": "full"})
    with pytest.raises(PlacementError, match="on_conflict='never'"):
        installed(PLACEMENTS, save={"on_conflict": "never"})


@pytest.mark.parametrize("other", [Placements({"w": None}), Placements(None)])
def test_m83_another_declaration_of_another_thread_is_refused(other: Placements) -> None:
    """A thread of a framework uses the one that there is; a second one would change it."""
    refused: list[str] = []

    def enter() -> None:
        try:
            with installed(other):
                refused.append("entered")
        except PlacementError as error:
            refused.append(str(error))

    with installed(PLACEMENTS):
        with installed(other):  # of one thread they nest
            pass
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert (refused == ["entered"]) == (other == PLACEMENTS)
    assert refused == ["entered"] or "another thread is inside installed()" in refused[0]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert refused[1] == "entered"


@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_frameworks_own_planner_is_left_alone_and_named(tmp_path: Path, kind: str) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path)
    writer, reader = Writer(tmp_path), Reader(tmp_path)

    def call() -> Any:
        if kind == "save":
            dcp.save(STATE, storage_writer=writer, planner=TheirSavePlanner())
            return writer.planner
        target = {"model": {"w": torch.zeros(6)}, "step": 0}
        dcp.load(target, storage_reader=reader, planner=TheirLoadPlanner())
        return reader.planner

    name = "TheirSavePlanner" if kind == "save" else "TheirLoadPlanner"
    with installed(PLACEMENTS), pytest.warns(UserWarning, match=name):
        assert type(call()).__name__ == name
    with installed(PLACEMENTS, strict=True), pytest.raises(PlacementError, match=name):
        call()


def test_a_planner_of_ours_that_is_passed_serves_as_it_is(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    ours = PlacementSavePlanner(digests="full")
    with installed(PLACEMENTS, strict=True):
        dcp.save(STATE, storage_writer=writer, planner=ours)
    assert writer.planner is ours


def test_a_planner_that_was_left_alone_before_is_named_and_refused_again(
    tmp_path: Path,
) -> None:
    theirs, ours = TheirSavePlanner(), PlacementSavePlanner()
    with installed(PLACEMENTS):
        for _ in range(2):
            dcp.save(STATE, checkpoint_id=tmp_path, planner=ours)
            with pytest.warns(UserWarning, match="TheirSavePlanner"):
                dcp.save(STATE, checkpoint_id=tmp_path, planner=theirs)
            with pytest.warns(UserWarning, match="TheirSavePlanner"):
                async_save(STATE, checkpoint_id=tmp_path, planner=theirs).result()
    with installed(PLACEMENTS, strict=True), pytest.raises(PlacementError, match="TheirSave"):
        dcp.save(STATE, checkpoint_id=tmp_path, planner=theirs)


def test_a_planner_that_has_no_hash_is_served(tmp_path: Path) -> None:
    @dataclass
    class WithoutHash(DefaultSavePlanner):
        def __post_init__(self) -> None:
            super().__init__()

    writer = Writer(tmp_path)
    with installed(PLACEMENTS, strict=True):
        dcp.save(STATE, storage_writer=writer, planner=WithoutHash())
    assert isinstance(writer.planner, WithoutHash)
    assert isinstance(writer.planner, PlacementSavePlanner)


def test_an_async_save_that_plans_after_the_context_is_ours(tmp_path: Path) -> None:
    left = threading.Event()

    class Late(Writer):
        """Waits, as the disk may, until the context is left."""

        def storage_meta(self) -> Any:
            assert left.wait(20)
            return super().storage_meta()

    writer = Late(tmp_path)
    with installed(PLACEMENTS):
        future = async_save(STATE, storage_writer=writer)
    left.set()
    future.result()
    assert type(writer.planner) is PlacementSavePlanner


def test_an_async_save_called_before_the_context_keeps_its_planner(tmp_path: Path) -> None:
    entered = threading.Event()

    class Late(Writer):
        """Begins, as a busy thread may, when the context is entered."""

        def reset(self, *args: Any, **kwargs: Any) -> None:
            assert entered.wait(20)
            super().reset(*args, **kwargs)

    writer = Late(tmp_path)
    future = async_save(STATE, storage_writer=writer)
    with installed(PLACEMENTS):
        entered.set()
        future.result()
    assert type(writer.planner) is DefaultSavePlanner


def test_what_a_framework_has_put_over_torchs_functions_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NeMo AutoModel does with ``execute_save``: its own takes whatever torch's does."""
    executor = getattr(state_dict_saver, NAMES[1])
    original = executor.execute_save

    def of_a_framework(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(executor, "execute_save", of_a_framework)
    writer = Writer(tmp_path)
    with installed(PLACEMENTS):
        async_save(STATE, storage_writer=writer).result()
    assert type(writer.planner) is PlacementSavePlanner


def test_what_was_there_is_restored_nested_reentered_and_after_errors(tmp_path: Path) -> None:
    before = seams()
    inner = Placements(None, rename=lambda key: f"inner.{key}")
    with installed(PLACEMENTS):
        assert seams() != before
        with installed(inner):
            dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "inner")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "outer")
    assert seams() == before
    twice = installed(PLACEMENTS)
    with twice, installed(inner):
        with twice:
            dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "again")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "left")
    assert seams() == before
    with pytest.raises(RuntimeError, match="its own"), installed(PLACEMENTS):
        raise RuntimeError("its own")
    assert seams() == before
    written = {"inner": "inner.w", "outer": "w", "again": "w", "left": "inner.w"}
    for place, key in written.items():
        metadata = dcp.FileSystemReader(tmp_path / place).read_metadata()
        assert list(metadata.state_dict_metadata) == [key]


def test_what_somebody_else_put_over_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict_saver, NAMES[0], getattr(state_dict_saver, NAMES[0]))
    calls = []
    with installed(PLACEMENTS):
        ours = getattr(state_dict_saver, NAMES[0])

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        setattr(state_dict_saver, NAMES[0], theirs)
    assert getattr(state_dict_saver, NAMES[0]) is theirs
    writer = Writer(tmp_path)
    dcp.save(STATE, storage_writer=writer)
    assert type(writer.planner) is DefaultSavePlanner
    assert calls == [1]


def test_rules_that_are_no_placements_are_refused() -> None:
    rules: Any = {"w": MeshCoordinate}
    with pytest.raises(PlacementError, match="Placements"), installed(rules):
        pass


TRAINER = '''
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from dcp_placements import Placements, Renumber, contiguous, installed

EXPERTS = 4


class Layer(nn.Module):
    def __init__(self, ids):
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in ids])


class Model(nn.Module):
    def __init__(self, ids):
        super().__init__()
        self.layers = nn.ModuleList([Layer(ids) for _ in range(2)])


class Trainer:
    """It has no rename and no planner; its experts are numbered from 0 on every rank."""

    def __init__(self, mesh, ids, seed):
        self.model = Model(ids)
        self.ids, self.seed = ids, seed
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.drawn(name, parameter.shape, 0))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        named = list(self.model.named_parameters())
        experts = [parameter for name, parameter in named if "experts" in name]
        others = [parameter for name, parameter in named if "experts" not in name]
        groups = [{"params": experts, "lr": 0.01}, {"params": others, "lr": 0.02}]
        self.optimizer = torch.optim.AdamW(groups)
        for name, parameter in named:
            gradient = self.drawn(name, parameter.shape, 1)
            if mesh is not None:
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient
        self.optimizer.step()

    def drawn(self, name, shape, kind):
        parts = name.split(".")
        if "experts" in parts:
            parts[3] = str(self.ids[int(parts[3])])
        seed = int.from_bytes(".".join(parts).encode(), "big") % 10007
        values = torch.Generator().manual_seed(2 * (seed + self.seed) + kind)
        return torch.randn(shape, generator=values)

    def save(self, path):
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)

    def load(self, path):
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim
        )


def numbered(ep, at):
    ids = contiguous([EXPERTS // ep] * ep, at)
    return ids, Placements(None, rename=Renumber("experts.{}", ids, total=EXPERTS))


def flat(values, head=""):
    if not isinstance(values, dict):
        return {head[:-1]: values}
    return {k: v for key, one in values.items() for k, v in flat(one, f"{head}{key}.").items()}


if __name__ == "__main__":
    meshes = {
        ep: init_device_mesh("cpu", (ep, 4 // ep), mesh_dim_names=("ep", "fsdp"))
        for ep in (1, 2, 4)
    }
    ids, placements = numbered(2, meshes[2].get_local_rank("ep"))
    with installed(placements):
        Trainer(meshes[2]["fsdp"], ids, 0).save("saved")
    for ep, mesh in meshes.items():
        ids, placements = numbered(ep, mesh.get_local_rank("ep"))
        resumed = Trainer(mesh["fsdp"], ids, 99)
        with installed(placements):
            resumed.load("saved")
        model, optim = get_state_dict(resumed.model, resumed.optimizer)
        whole = Trainer(None, range(EXPERTS), 0)
        model_of, optim_of = get_state_dict(whole.model, whole.optimizer)
        here = {**flat(model), **flat(optim["state"], "state.")}
        there = {**flat(model_of), **flat(optim_of["state"], "state.")}
        wrong = []
        for name, value in here.items():
            parts = name.split(".")
            if "experts" in parts:
                at = parts.index("experts") + 1
                parts[at] = str(ids[int(parts[at])])
            expected = there[".".join(parts)]
            if hasattr(value, "to_local"):
                expected = distribute_tensor(
                    expected, value.device_mesh, value.placements, src_data_rank=None
                ).to_local()
                value = value.to_local()
            if not torch.equal(value, expected):
                wrong.append(name)
        rates = [group["lr"] for group in optim["param_groups"]]
        if wrong or rates != [0.01, 0.02]:
            raise AssertionError((ep, wrong, rates))
        if dist.get_rank() == 0:
            print("RESUMED", ep, len(here))
    dist.destroy_process_group()
'''


@pytest.mark.dist
def test_m81_a_trainer_that_is_not_edited_resumes_in_other_topologies(tmp_path: Path) -> None:
    """FSDP2 and expert parallelism, torch's default form of optimizer state, three user lines."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    done = forked(tmp_path / "trainer.py", ranks=4, cwd=tmp_path)
    resumed = [line for line in done.stdout.splitlines() if line.startswith("RESUMED")]
    assert resumed == ["RESUMED 1 80", "RESUMED 2 48", "RESUMED 4 32"], tail(done)


def test_a_context_that_is_never_entered_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="never entered"):
        installed(PLACEMENTS)

    def install_in_vain() -> None:
        context = installed(PLACEMENTS, strict=True)
        assert context is not None

    with pytest.warns(UserWarning, match="never entered"):
        install_in_vain()


def test_a_context_that_is_entered_in_any_way_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ExitStack() as stack:
            stack.enter_context(installed(PLACEMENTS))
        with installed(PLACEMENTS), pytest.raises(PlacementError):
            installed(PLACEMENTS, save={"digest": "full"})  # refused, so that none is there
        context = installed(PLACEMENTS)
        context.__enter__()
        context.__exit__(None, None, None)
        del context


def test_a_context_that_is_left_over_at_the_end_of_a_process_says_nothing() -> None:
    program = (
        "from dcp_placements import Placements, installed\nkept = installed(Placements(None))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
