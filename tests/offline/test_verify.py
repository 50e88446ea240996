"""Whether a checkpoint is whole: every damage is found and named, and nothing else is."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_placements.offline
from dcp_placements import (
    PlacementFileSystemReader,
    PlacementFileSystemWriter,
    PlacementSavePlanner,
)
from dcp_placements.layout.sharding import Box
from dcp_placements.offline import CannotLook, verify
from dcp_placements.offline.verification import box_faults
from dcp_placements.testing import damage
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes
from tests.storage_scenes import Flipped, all_kinds, data_file

W1 = "layers.0.experts.w1"


@pytest.fixture(scope="module", params=["lean", "stock-metadata"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "step"
    save_sharded(path, lean=request.param == "lean")
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


@pytest.mark.parametrize("flags", [[], ["--contents"]])
def test_a_sound_checkpoint_is_sound(sound: Path, run: Run, flags: list[str]) -> None:
    ran = run("verify", sound, "--json", *flags)
    assert ran.code == 0, ran.out
    result = ran.json
    assert (result["sound"], result["faults"], result["notes"]) == (True, [], [])
    assert result["checked"]["tensors"] == len(wholes())


@pytest.mark.parametrize("flags", [{}, {"contents": True}])
def test_tensors_of_every_kind_are_sound(tmp_path: Path, flags: dict[str, bool]) -> None:
    dcp.save(all_kinds(), checkpoint_id=tmp_path)
    assert verify(tmp_path, **flags).faults == ()


DAMAGES: dict[str, tuple[Callable[..., Any], str, list[str], bool]] = {
    "bit flip": (damage.flip_bit, "checksum", ["--contents"], True),
    "truncation": (damage.truncate, "truncated_file", [], True),
    "missing file": (damage.remove_file, "missing_file", [], True),
    "dropped chunk": (damage.drop_chunk, "hole", [], False),
    "overlapping chunk": (damage.overlap_chunk, "overlap", [], False),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("chunk", [0, 2])
def test_every_damage_is_found_and_named(copy: Path, run: Run, name: str, chunk: int) -> None:
    harm, kind, flags, names_file = DAMAGES[name]
    file = harm(copy, W1, chunk=chunk)
    ran = run("verify", copy, "--json", *flags)
    assert ran.code == 1
    assert ran.json["sound"] is False
    (fault,) = [fault for fault in ran.json["faults"] if fault["kind"] == kind]
    assert W1 in fault["tensors"]
    if names_file:
        assert fault["files"] == [file]
    text = run("verify", copy, *flags)
    assert text.code == 1
    assert kind in text.out
    assert W1 in text.out or file in text.out


def test_the_verdict_says_whether_contents_were_read(sound: Path, run: Run) -> None:
    unread = "sizes and structure sound; contents not read (--contents)"
    assert unread in run("verify", sound).out
    text = run("verify", sound, "--contents").out
    assert f"{sound}: sound (" in text
    assert "not read" not in text


@pytest.mark.usefixtures("flipped_is_known")
@pytest.mark.parametrize("key", ["w", "step"])
def test_m88_records_that_went_through_transforms_are_checked_with_contents(
    tmp_path: Path, key: str
) -> None:
    state = {"w": torch.ones(40, 30), "step": "x" * 10_000}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Flipped()]))
    assert verify(tmp_path, contents=True).faults == ()
    table = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    (place,) = [place for index, place in table.items() if index.fqn == key]
    file = tmp_path / place.relative_path
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    file.write_bytes(data)
    (fault,) = verify(tmp_path, contents=True).faults
    assert (fault.kind, fault.tensors) == ("checksum", (key,))
    unread = verify(tmp_path)
    assert unread.faults == ()
    assert unread.notes == (
        "2 records went through transforms such as compression: only --contents checks them",
    )


@pytest.mark.usefixtures("flipped_is_known")
@pytest.mark.parametrize("key", ["w", "step"])
def test_m88_a_short_record_of_long_contents_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    state = {"w": torch.ones(3), "step": 7}
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Flipped()])
    dcp.save({key: state[key]}, storage_writer=writer)
    zeros = SimpleNamespace(read=bytes)  # as many as are asked for
    monkeypatch.setattr(Flipped, "transform_from", lambda self, stream: zeros)
    found = verify(tmp_path, contents=True, memory=1 << 20)
    assert (found.faults, len(found.notes)) == ((), 1)
    assert found.notes[0].endswith(f"so not read: {key}")


def test_many_faults_fit_a_screen(tmp_path: Path, run: Run) -> None:
    state_dict = {f"layers.{layer}.w": torch.ones(4) for layer in range(40)}
    dcp.save(state_dict, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    metadata = damage._read(tmp_path)
    for number, info in enumerate(metadata.storage_data.values()):
        info.relative_path = file.name if number % 2 else f"__{number}_0.distcp"
    for fqn in ("layers.1.w", "layers.3.w"):
        metadata.state_dict_metadata[fqn].properties.dtype = torch.int32
    damage._write(tmp_path, metadata)
    text = run("verify", tmp_path).out
    assert len(text.splitlines()) <= 40
    assert "more faults in 10 places; --all" in text
    every = run("verify", tmp_path, "--all").out
    assert "--all" not in every
    assert all(f"__{number}_0.distcp\n" in every for number in range(2, 40, 2))
    assert every.index("__2_0.distcp") < every.index("__10_0.distcp")


def test_a_half_overwritten_step_of_torch_s_writer_is_seen_by_its_ids(tmp_path: Path) -> None:
    save_sharded(tmp_path / "step", lean=False)
    save_sharded(tmp_path / "later", lean=False, step=1, add=0.5)
    names = damage.half_overwrite(tmp_path / "step", tmp_path / "later")
    assert names == [data_file(tmp_path / "step", rank).name for rank in (1, 3)]
    faults = verify(tmp_path / "step").faults
    assert {(fault.kind, fault.files) for fault in faults} == {
        ("mixed_generations", (name,)) for name in names
    }


def test_a_half_overwritten_step_of_another_layout_is_seen(copy: Path, tmp_path: Path) -> None:
    save_sharded(tmp_path / "later", ep=1)
    file = data_file(tmp_path / "later", 1).name
    names = damage.half_overwrite(copy, tmp_path / "later", [file])
    faults = verify(copy).faults
    assert faults
    assert [file for fault in faults for file in fault.files] == names * len(faults)
    kinds = {"wrong_record", "truncated_file", "mixed_generations"}
    assert {fault.kind for fault in faults} <= kinds


def test_a_younger_data_file_is_no_sign_where_files_carry_ids(copy: Path) -> None:
    written = (copy / ".metadata").stat().st_mtime
    for file in copy.glob("*.distcp"):
        os.utime(file, (written + 60, written + 60))
    found = verify(copy)
    assert found.sound
    assert not found.notes


def test_a_younger_data_file_without_an_id_is_a_note_and_no_fault(tmp_path: Path) -> None:
    copy = tmp_path
    dcp.save(wholes(), storage_writer=dcp.FileSystemWriter(copy))
    written = (copy / ".metadata").stat().st_mtime
    file = data_file(copy, 0)
    os.utime(file, (written + 60, written + 60))
    found = verify(copy)
    assert found.sound
    (note,) = found.notes
    assert file.name in note


def test_a_hugging_face_directory(tmp_path: Path, run: Run) -> None:
    save_hugging_face(tmp_path, wholes())
    assert run("verify", tmp_path).code == 0
    first, second = sorted(tmp_path.glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 3)
    (fault,) = verify(tmp_path).faults
    assert (fault.kind, fault.files) == ("truncated_file", (first.name,))
    second.unlink()
    kinds = {fault.kind: fault for fault in verify(tmp_path).faults}
    assert kinds["missing_file"].files == (second.name,)
    assert "layers.0.experts.w2" in kinds["missing_file"].tensors


def test_an_index_that_names_what_no_file_has(tmp_path: Path) -> None:
    save_hugging_face(tmp_path, wholes())
    index = tmp_path / "model.safetensors.index.json"
    name = sorted(tmp_path.glob("*.safetensors"))[0].name
    index.write_text(
        index.read_text().replace('"weight_map": {', f'"weight_map": {{"x": "{name}",')
    )
    (fault,) = verify(tmp_path).faults
    assert (fault.kind, fault.tensors, fault.files) == ("unplaced", ("x",), (name,))


def test_places_without_chunks_and_chunks_without_places(copy: Path) -> None:
    metadata = damage._read(copy)
    index, info = next(
        (index, info) for index, info in metadata.storage_data.items() if index.fqn == W1
    )
    del metadata.storage_data[index]
    metadata.storage_data[type(index)("nobody", torch.Size([0]))] = info
    damage._write(copy, metadata)
    expected = {fault.kind: fault for fault in verify(copy).faults}
    assert expected["unplaced"].tensors == (W1,)
    assert expected["unclaimed"].tensors == ("nobody",)


@pytest.mark.parametrize("at", [0, 3])
def test_an_object_that_no_longer_begins_as_a_zip_file(tmp_path: Path, at: int) -> None:
    state_dict = {"step": "x" * 10_000}
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner())
    file = data_file(tmp_path, 0)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    [fault] = verify(tmp_path, contents=True).faults
    assert (fault.kind, fault.tensors) == ("wrong_record", ("step",))


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, PlacementFileSystemWriter])
def test_what_a_load_refuses_is_not_sound(tmp_path: Path, writer: Any) -> None:
    """One bit of what follows the elements of a tensor, or ends an object."""
    whole = torch.arange(200.0)
    state: dict[str, Any] = {"w": whole, "step": "one"}
    dcp.save(state, storage_writer=writer(tmp_path), no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    sound = file.read_bytes()
    behind = sound.index(whole.numpy().tobytes()) + 800
    places = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    (end,) = [p.offset + p.length for index, p in places.items() if index.fqn == "step"]
    refused = {"w": 0, "step": 0}
    for key, at in [
        *[("w", behind + byte) for byte in range(8)],
        *[("step", at) for at in range(sound.rindex(b"PK\6\6", 0, end), end)],
    ]:
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 2]) + sound[at + 1 :])
        try:
            blank: dict[str, Any] = {"w": torch.zeros(200), "step": ""}
            dcp.load(blank, storage_reader=PlacementFileSystemReader(tmp_path), no_dist=True)
        except dcp.CheckpointException:
            refused[key] += 1
            faults = verify(tmp_path, contents=True).faults
            assert {fault.tensors for fault in faults} == {(key,)}, (key, at)
            assert len("".join(fault.message for fault in faults)) < 300
    assert refused["w"] == 8
    assert refused["step"] > 20


def test_objects_in_another_format_are_no_damage(tmp_path: Path) -> None:
    class Texts(PlacementSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(object)

    state_dict = {"a": b"a text", "b": b""}
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=Texts(digests="off"))
    assert verify(tmp_path, contents=True).sound


def test_another_dtype_in_the_metadata(copy: Path) -> None:
    metadata = damage._read(copy)
    metadata.state_dict_metadata["layers.1.attention"].properties.dtype = torch.int32
    damage._write(copy, metadata)
    faults = [fault for fault in verify(copy).faults if "layers.1.attention" in fault.tensors]
    assert {fault.kind for fault in faults} == {"wrong_record"}
    assert "torch.float32 tensor" in faults[0].message
    assert "torch.int32" in faults[0].message


def test_another_dtype_of_a_tensor_that_is_not_in_c_order(tmp_path: Path) -> None:
    """A load casts such a record to what the metadata say; verify looks at the record itself."""
    state_dict = {"w": torch.arange(6.0).reshape(3, 2).t()}
    dcp.save(state_dict, checkpoint_id=tmp_path, planner=PlacementSavePlanner(), no_dist=True)
    assert verify(tmp_path, contents=True).sound
    metadata = damage._read(tmp_path)
    metadata.state_dict_metadata["w"].properties.dtype = torch.float64
    damage._write(tmp_path, metadata)
    (fault,) = verify(tmp_path).faults
    assert fault.kind == "wrong_record"
    assert "torch.float32 tensor" in fault.message


def test_a_name_in_a_record_s_directory_that_is_not_its_part_s(copy: Path) -> None:
    """torch.load asks the directory for the parts of a record by name, and would not find it."""
    file, _, _ = damage._elements(copy, W1, 0)
    data = file.read_bytes()
    at = data.rindex(b"archive/version")
    file.write_bytes(data[:at] + b"archive/wersion" + data[at + len(b"archive/version") :])
    (fault,) = verify(copy, contents=True).faults
    assert (fault.kind, fault.files) == ("wrong_record", (file.name,))


def test_records_that_share_bytes(copy: Path) -> None:
    metadata = damage._read(copy)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "step")
    info.offset += 5
    damage._write(copy, metadata)
    kinds = {fault.kind for fault in verify(copy).faults}
    assert kinds & {"shared_bytes", "truncated_file"}


@given(st.data())
def test_faults_of_boxes_against_counting_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    box = st.tuples(
        st.tuples(*[st.integers(0, size) for size in shape]),
        st.tuples(*[st.integers(0, 3) for _ in shape]),
    ).map(lambda known: Box(*known))
    boxes = data.draw(st.lists(box, max_size=5))
    counts = torch.zeros([size + 4 for size in shape], dtype=torch.int)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    inside = counts[tuple(slice(0, size) for size in shape)]
    kinds = {kind for kind, _ in box_faults(Box((0,) * len(shape), shape), boxes)}
    assert ("hole" in kinds) == bool((inside == 0).any())
    assert ("overlap" in kinds) == bool((counts > 1).any())
    assert ("out_of_bounds" in kinds) == bool(counts.sum() > inside.sum())


def test_the_readme_lists_every_kind() -> None:
    folder = Path(dcp_placements.offline.__file__).parent
    code = "".join(
        (folder / name).read_text() for name in ("verification.py", "sources/dcp_source.py")
    )
    made = set(re.findall(r'(?:CheckpointFault\(|Finding\(|yield |from \[\()\s*"(\w+)"', code)) - {
        "digest"
    }
    readme = (Path(__file__).parents[2] / "dcp_placements" / "cli" / "README.md").read_text()
    _, _, table = readme.partition("| kind | is |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row.split("|")[1])} == made


def once(change: Callable[[], object]) -> Callable[[int, int], None]:
    """Return a ``progress`` that changes something at its first call."""
    waiting = [change]

    def progress(done: int, total: int) -> None:
        while waiting:
            waiting.pop()()

    return progress


def test_a_checkpoint_that_a_save_replaces_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    replace = once(lambda: save_sharded(tmp_path, add=1000.0, step=2))
    with pytest.raises(CannotLook, match="it was overwritten while it was read") as refused:
        verify(tmp_path, contents=True, progress=replace)
    assert "way out:     run it again when the save has ended" in str(refused.value)
    assert verify(tmp_path, contents=True).sound


def test_a_file_that_is_cut_off_meanwhile_is_a_fault(tmp_path: Path) -> None:
    save_sharded(tmp_path, lean=False)
    cut_off = once(lambda: [os.truncate(file, 100) for file in tmp_path.glob("*.distcp")])
    faults = verify(tmp_path, contents=True, progress=cut_off).faults
    assert {fault.kind for fault in faults} == {"truncated_file"}
    assert {fault.message.partition(" at ")[0] for fault in faults} == {
        "it cannot be read: the file ends"
    }, faults


def test_small_records_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({f"w.{at}": torch.ones(4) for at in range(100)}, checkpoint_id=tmp_path, no_dist=True)
    calls: list[int] = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(read(*given)) or calls[-1])
    assert verify(tmp_path, contents=True).sound
    assert len(calls) < 5
