"""Files say which save wrote them, so that a save that was cut off is never loaded as a mixture."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

from dcp_placements import (
    PlacementError,
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementLoadPlanner,
    PlacementSavePlanner,
)
from dcp_placements.offline import verify
from dcp_placements.testing import FakeDTensor, World
from tests.remote_scenes import FsspecReader, FsspecWriter
from tests.storage_scenes import Flipped, flipped_registry

OLD = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)
NEW = OLD + 100
WORLD = World(2)
WRITERS: dict[str, Any] = {"torch": dcp.FileSystemWriter, "ours": PlacementFileSystemWriter}
READERS: dict[str, Any] = {"torch": dcp.FileSystemReader, "ours": PlacementFileSystemReader}
by_writer = pytest.mark.parametrize("writer", WRITERS)
by_reader = pytest.mark.parametrize("reader", READERS)


def state(whole: torch.Tensor, world: World = WORLD) -> Callable[[int], dict[str, Any]]:
    """Return what each rank holds: rows, a replica, an object."""

    def of(rank: int) -> dict[str, Any]:
        mesh = world.mesh(rank, fsdp=world.size)
        return {
            "w": FakeDTensor.distribute(whole, mesh, [Shard(0)]),
            "bias": whole[0].clone(),
            "note": [float(whole[0, 0])],
        }

    return of


def save(
    path: Path,
    whole: torch.Tensor,
    writer: Callable[[int], Any],
    **options: Any,
) -> None:
    WORLD.save(path, state(whole), lambda rank: PlacementSavePlanner(**options), writer)


def failing(make: Any, path: Path, when: str, **options: Any) -> Callable[[int], Any]:
    """Return writers of which that of rank 1 stops after planning, or half-way through its file."""

    def of(rank: int) -> Any:
        writer = make(path, **options)
        if rank == 1:
            write = writer.write_data

            def write_data(plan: Any, planner: Any) -> Any:
                if when == "half":
                    before = set(path.iterdir())
                    write(plan, planner).wait()
                    for file in set(path.glob("__1_*")) - before or path.glob("__1_*"):
                        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                raise OSError(errno.EIO, "Input/output error")

            writer.write_data = write_data
        return writer

    return of


def cut_off(path: Path, make: Any, when: str, **options: Any) -> None:
    """Save, then save other values over it, which fails on rank 1."""
    save(path, OLD, lambda rank: make(path), **options)
    with pytest.raises(CheckpointException, match="Input/output error"):
        save(path, NEW, failing(make, path, when), **options)


def loaded(path: Path, world: World, reader: Any, **options: Any) -> str | None:
    """Load; return the error's text, or None after a proof that all values are the older ones."""
    held = [state(torch.zeros(8, 6) - 1, world)(rank) for rank in range(world.size)]
    try:
        world.load(
            path,
            held.__getitem__,
            lambda rank: PlacementLoadPlanner(**options),
            lambda rank: reader(path),
        )
    except CheckpointException as error:
        return str(error)
    wanted = state(OLD, world)
    for rank, found in enumerate(held):
        assert found["w"].to_local().equal(wanted(rank)["w"].to_local())
        assert found["bias"].equal(OLD[0])
        assert found["note"] == [0.0]
    return None


@pytest.mark.parametrize("when", ["planned", "half"])
@pytest.mark.parametrize("ranks", [2, 1, 3])
@by_reader
@by_writer
def test_m19_m45_a_save_that_was_cut_off_leaves_the_old_checkpoint_or_is_refused(
    tmp_path: Path, writer: str, reader: str, ranks: int, when: str
) -> None:
    cut_off(tmp_path, WRITERS[writer], when)
    found = [verify(tmp_path), verify(tmp_path, contents=True)]
    result = loaded(tmp_path, World(ranks), READERS[reader])
    if writer == "ours":
        assert result is None
        assert [one.sound for one in found] == [True, True]
        return
    for one in found:
        faults = [fault for fault in one.faults if fault.kind == "mixed_generations"]
        assert "__0_0.distcp" in {file for fault in faults for file in fault.files}
        assert any("was written by save" in fault.message for fault in faults)
    assert result is not None
    assert "__0_0.distcp: was written by save " in result
    assert ", and .metadata is that of save " in result
    assert "a later save into the same directory was cut off" in result
    assert "way out:" in result


@by_reader
def test_stock_files_over_ours_are_told_by_what_they_lack(tmp_path: Path, reader: str) -> None:
    """Torch's planner knows of no ids: where one should be is something else."""
    save(tmp_path, OLD, lambda rank: dcp.FileSystemWriter(tmp_path))
    older = (tmp_path / ".metadata").read_bytes()
    dcp.save({"w": torch.zeros(90, 90)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (tmp_path / ".metadata").write_bytes(older)
    result = loaded(tmp_path, WORLD, READERS[reader])
    assert result is not None
    assert "__0_0.distcp: has no save id" in result
    assert not verify(tmp_path).sound


@pytest.mark.parametrize("made", [dcp.DefaultSavePlanner, PlacementSavePlanner])
@by_writer
def test_a_save_over_an_older_checkpoint_leaves_none_of_its_files(
    tmp_path: Path, writer: str, made: Any
) -> None:
    save(tmp_path, OLD, lambda rank: WRITERS[writer](tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    before = {file.name for file in tmp_path.iterdir()}
    WORLD.save(
        tmp_path,
        state(NEW) if made is PlacementSavePlanner else lambda rank: {"w": NEW},
        lambda rank: made(),
        lambda rank: PlacementFileSystemWriter(tmp_path),
    )
    after = {file.name for file in tmp_path.iterdir()}
    assert before & after == {".metadata", "notes.txt"}
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    named = {info.relative_path for info in metadata.storage_data.values()}
    written = {name for name in after if name.endswith(".distcp")}
    assert named == written
    found = {"w": torch.zeros(8, 6)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert found["w"].equal(NEW)


def test_only_plain_files_in_this_directory_are_removed(tmp_path: Path) -> None:
    """Whatever the older metadata name, and whether they can be read."""
    inside, outside = tmp_path / "step", tmp_path / "__7_0.distcp"
    save(inside, OLD, lambda rank: dcp.FileSystemWriter(inside))
    outside.write_text("another's")
    (inside / "train.py").write_text("mine")
    (inside / "__1_0.distcp").unlink()
    (inside / "__1_0.distcp").symlink_to(outside)
    (inside / ".metadata").write_bytes(b"something else")
    save(inside, NEW, lambda rank: PlacementFileSystemWriter(inside))
    assert outside.read_text() == "another's"
    assert (inside / "train.py").read_text() == "mine"
    assert (inside / "__1_0.distcp").is_symlink()
    assert not (inside / "__0_0.distcp").exists()


def stages(path: Path, make: Any, whole: torch.Tensor) -> Iterator[None]:
    """Save on one rank; pause when it has begun, and when its data are written."""
    planner, writer = PlacementSavePlanner(), make(path)
    planner.set_up_planner({"w": whole}, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    yield
    written = writer.write_data(plan, planner).value()
    yield
    writer.finish(metadata, [written])


@pytest.mark.filterwarnings("ignore:.*another save into this directory ended")
@pytest.mark.parametrize("order", sorted({"".join(order) for order in permutations("aaabbb")}))
@pytest.mark.parametrize("older", WRITERS)
@by_writer
def test_of_two_saves_at_once_the_one_that_ends_last_is_loaded(
    tmp_path: Path, writer: str, older: str, order: str
) -> None:
    """Of torch's writer the files have the names of the older checkpoint's."""
    dcp.save({"w": OLD}, storage_writer=WRITERS[older](tmp_path), no_dist=True)
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))
    wholes = {"a": OLD + 1, "b": OLD + 2}
    saves = {
        "a": stages(tmp_path, PlacementFileSystemWriter, wholes["a"]),
        "b": stages(tmp_path, WRITERS[writer], wholes["b"]),
    }
    for name in order:
        next(saves[name], None)
    for reader in READERS.values():
        found = {"w": torch.zeros(8, 6)}
        dcp.load(found, storage_reader=reader(tmp_path), planner=PlacementLoadPlanner())
        assert found["w"].equal(wholes[order[-1]])
    assert not (set(tmp_path.glob("__0_0.distcp")) and writer == "ours"), "of the older checkpoint"


@pytest.mark.parametrize("order", ["aabbab", "bbaaab"])
def test_of_two_saves_at_once_at_a_url_the_one_that_ends_last_is_loaded(
    memory: Any, order: str
) -> None:
    dcp.save({"w": OLD}, storage_writer=FsspecWriter(memory), no_dist=True)
    makers = {"a": PlacementFileSystemWriter, "b": FsspecWriter}
    saves = {name: stages(memory, make, NEW) for name, make in makers.items()}
    for name in order:
        next(saves[name], None)
    found = {"w": torch.zeros(8, 6)}
    dcp.load(found, storage_reader=FsspecReader(memory), planner=PlacementLoadPlanner())
    assert found["w"].equal(NEW)


def test_a_save_that_fails_takes_its_files_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def stuck(descriptor: int) -> None:
        if not Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("__0_"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", stuck)
    with pytest.raises(CheckpointException, match="No space left"):
        save(tmp_path, OLD, lambda rank: PlacementFileSystemWriter(tmp_path))
    assert {file.name.split("_")[2] for file in tmp_path.glob("*.distcp")} == {"0"}


@by_reader
@by_writer
@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}])
def test_a_rank_s_files_speak_for_each_other(
    tmp_path: Path, writer: str, reader: str, options: dict[str, Any]
) -> None:
    save(tmp_path, OLD, lambda rank: WRITERS[writer](tmp_path, **options))
    assert verify(tmp_path).sound
    assert loaded(tmp_path, World(1), READERS[reader]) is None
    with pytest.raises(CheckpointException):
        save(tmp_path, NEW, failing(WRITERS[writer], tmp_path, "planned", **options))
    result = loaded(tmp_path, World(1), READERS[reader])
    assert (result is None) == (writer == "ours")
    assert verify(tmp_path).sound == (writer == "ours")


@by_reader
def test_the_file_of_each_of_a_few_threads_has_a_record_of_its_own(
    tmp_path: Path, reader: str
) -> None:
    """A rank that was cut off after one of its files: the first file still is the older save's."""
    for name, held in (("old", OLD), ("new", NEW)):
        save(
            tmp_path / name,
            held,
            lambda rank, to=tmp_path / name: dcp.FileSystemWriter(to, thread_count=3),
        )
        assert verify(tmp_path / name).notes == ()
    for file in ("__0_1.distcp", "__0_2.distcp"):
        shutil.copy(tmp_path / "new" / file, tmp_path / "old" / file)
    assert loaded(tmp_path / "old", World(1), READERS[reader]) is not None
    assert not verify(tmp_path / "old").sound


def test_verify_says_which_files_carry_no_id(tmp_path: Path) -> None:
    save(tmp_path, OLD, lambda rank: dcp.FileSystemWriter(tmp_path, thread_count=6))
    (note,) = verify(tmp_path).notes
    assert "no id of a save in __0_4.distcp: " in note
    save(tmp_path / "one", OLD, lambda rank: dcp.FileSystemWriter(tmp_path / "one"))
    assert verify(tmp_path / "one").notes == ()


@pytest.mark.parametrize("ours", [False, True])
def test_ids_go_through_the_transforms_of_files(tmp_path: Path, ours: bool) -> None:
    writer = PlacementFileSystemWriter if ours else dcp.FileSystemWriter
    save(tmp_path, OLD, lambda rank: writer(tmp_path, _extensions=[Flipped()]))
    for reader in READERS.values():

        def made(path: Path, reader: Any = reader) -> Any:
            return reader(path, _extension_registry=flipped_registry())

        assert loaded(tmp_path, World(3), made) is None


@by_reader
def test_m21_a_missing_file_is_named(tmp_path: Path, reader: str) -> None:
    save(tmp_path, OLD, lambda rank: PlacementFileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("__1_*.distcp")
    file.unlink()
    result = loaded(tmp_path, WORLD, READERS[reader])
    assert result is not None
    assert file.name in result
    if reader == "ours":
        assert f"{file.name}: the file is not there" in result
        assert "has taken its place" in result


@by_reader
@by_writer
def test_checkpoints_without_ids_are_quiet(tmp_path: Path, writer: str, reader: str) -> None:
    WORLD.save(
        tmp_path,
        lambda rank: {"w": OLD, "bias": OLD[0], "note": [0.0]},
        lambda rank: dcp.DefaultSavePlanner(),
        lambda rank: WRITERS[writer](tmp_path),
    )
    assert loaded(tmp_path, WORLD, READERS[reader]) is None
    found = verify(tmp_path)
    assert found.sound
    assert not found.notes


def test_a_writer_may_send_its_items_elsewhere(tmp_path: Path) -> None:
    """They are torch's then, and know neither their save nor what they write."""

    class Sending(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            return super().write_data(pickle.loads(pickle.dumps(plan)), planner)

    saved = {"w": torch.arange(6.0), "step": 3}
    dcp.save(saved, storage_writer=Sending(tmp_path), planner=PlacementSavePlanner(), no_dist=True)
    found = {"w": torch.zeros(6), "step": 0}
    dcp.load(found, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert found["step"] == 3
    assert torch.equal(found["w"], saved["w"])


def test_each_save_of_one_planner_has_an_id_of_its_own(tmp_path: Path) -> None:
    planners = [PlacementSavePlanner() for _ in range(2)]
    ids = set()
    for name in ("a", "b", "c"):
        WORLD.save(tmp_path / name, state(OLD), lambda rank: planners[rank])
        data = pickle.loads((tmp_path / name / ".metadata").read_bytes()).planner_data
        save_id = data["dcp_placements"]["save_id"]
        assert verify(tmp_path / name).sound
        written = (tmp_path / name / "__1_0.distcp").read_bytes()
        assert written.startswith(f"dcp_placements save {save_id}\n".encode())
        ids.add(save_id)
    assert len(ids) == 3


@pytest.mark.parametrize("key", ["dcp_placements", "dcp_placements.save.mine"])
def test_a_key_of_a_record_is_refused_and_others_are_kept(tmp_path: Path, key: str) -> None:
    """A load would take it for the id of a save."""
    state = {key: torch.ones(3), "dcp_placements.version": torch.ones(2), "w": torch.ones(1)}
    with pytest.raises(CheckpointException, match=f"{re.escape(key)}: this package has this key"):
        dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    del state[key]
    dcp.save(state, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(found, checkpoint_id=tmp_path, planner=PlacementLoadPlanner(), no_dist=True)
    assert all(value.all() for value in found.values())


class Interrupted(PlacementLoadPlanner):
    """Calls ``save`` when it has taken one more tensor than ``after``."""

    def __init__(self, after: int, save: Callable[[], None]) -> None:
        super().__init__()
        self.commits, self.after, self.save = 0, after, save

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.commits += 1
        if self.commits == self.after + 1:
            self.save()


# Of eight files of a rank four have a record of the save's id.
@pytest.mark.parametrize(
    ("reader", "files", "after"),
    [
        *((reader, 1, after) for reader in READERS for after in (0, 1, 2)),
        *((reader, 8, after) for reader in READERS for after in (0, 5, 7)),
    ],
)
def test_m99_a_save_into_files_that_are_being_read_is_refused(
    tmp_path: Path, reader: str, files: int, after: int
) -> None:
    """Torch's writer saves again when some tensors of the files were read."""
    whole = {f"w{n}": torch.full((30_000,), float(n)) for n in range(4 if files == 1 else 8)}

    def save_torch(add: float) -> None:
        writer = dcp.FileSystemWriter(tmp_path, thread_count=files)
        values = {key: value + add for key, value in whole.items()}
        dcp.save(values, storage_writer=writer, planner=PlacementSavePlanner(), no_dist=True)

    save_torch(0)
    held = {key: torch.zeros_like(value) for key, value in whole.items()}
    planner = Interrupted(after, lambda: save_torch(100))
    with pytest.raises(CheckpointException, match="was written by save"):
        dcp.load(held, storage_reader=READERS[reader](tmp_path), planner=planner, no_dist=True)


@pytest.mark.parametrize("reader", ["torch's", "plain", "restricted"])
def test_a_flipped_bit_in_the_name_of_a_rank_s_file_is_refused(tmp_path: Path, reader: str) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    world = World(2)
    world.save(
        tmp_path,
        lambda rank: {"w": FakeDTensor.distribute(whole, world.mesh(rank, fsdp=2), [Shard(0)])},
        lambda rank: PlacementSavePlanner(),
    )
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"__1_0.distcp"))
    made: Any = dcp.FileSystemReader(tmp_path)
    if reader != "torch's":
        made = PlacementFileSystemReader(tmp_path, restricted=reader == "restricted")
    state = {"w": torch.zeros(4, 3)}
    with pytest.raises(
        (CheckpointException, PlacementError), match="named as the file of ranks 0-1"
    ):
        dcp.load(state, storage_reader=made, planner=PlacementLoadPlanner(), no_dist=True)
    assert not state["w"].any()
    assert "ranks 0-1" in str(verify(tmp_path))


def test_m100_the_directory_is_synced_before_older_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, lambda rank: PlacementFileSystemWriter(tmp_path))
    calls: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def synced(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            calls.append("sync of the directory")
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        calls.append(f"rename to {Path(target).name}")
        replace(source, target)

    def removed(path: Any) -> None:
        calls.append("removal")
        unlink(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "unlink", removed)
    save(tmp_path, NEW, lambda rank: PlacementFileSystemWriter(tmp_path))
    assert calls == ["rename to .metadata", "sync of the directory", "removal", "removal"]
