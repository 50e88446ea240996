"""What a Megatron directory is: by names, by what is in the files, by what is asked of it."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from dcp_placements import PlacementError
from dcp_placements.offline import (
    CannotLook,
    import_checkpoint,
    megatron_layout,
    open_source,
)
from dcp_placements.offline.sources.mapped_files import load_torch_file
from dcp_placements.storage.store import open_store
from dcp_placements.testing.megatron import MegatronModel, MegatronRun, write_legacy
from tests.convert.hostile import Hostile
from tests.offline_scenes import Run

SMALL = MegatronModel(layers=4, dense_layers=1)

LAYOUTS: list[tuple[MegatronRun, str, str | None, str]] = [
    (MegatronRun(), "1D", None, "mp_rank_00"),
    (MegatronRun(tp=2), "1D", None, "mp_rank_00 mp_rank_01"),
    (MegatronRun(tp=2, cp=2), "1D", None, "mp_rank_00 mp_rank_01"),
    (MegatronRun(tp=2, pp=2), "2D", "pp", "00_000 01_000 00_001 01_001"),
    (MegatronRun(tp=2, pp=2, vpp=2), "2D", "pp", "00_000 01_000 00_001 01_001"),
    (MegatronRun(tp=2, ep=2), "3D", "ep", "00_000 01_000 00_001 01_001"),
    (MegatronRun(tp=2, ep=2, etp=1), "3D", "ep", "00_000 01_001"),
    (MegatronRun(tp=2, ep=4, etp=1), "3D", "ep", "00_000 01_001 00_002 01_003"),
    (MegatronRun(tp=4, ep=2, etp=1), "3D", "ep", "00_000 01_001 02_000 03_001"),
    (MegatronRun(tp=1, pp=2, ep=2), "3D", None, "00_000_000 00_000_001 00_001_000 00_001_001"),
    (
        MegatronRun(tp=2, pp=2, ep=2, etp=1),
        "3D",
        None,
        "00_000_000 01_000_001 00_001_000 01_001_001",
    ),
]


def name(run: MegatronRun) -> str:
    said = {k: getattr(run, k) for k in ("tp", "pp", "ep", "etp", "cp", "vpp")}
    return "-".join(f"{k}{v}" for k, v in said.items() if v not in (None, 1) or k == "tp")


def strip(folder: Path, *keys: str) -> None:
    """Take entries out of every file, so that they cannot tell."""
    for file in folder.glob("*/model_optim_rng.pt"):
        held = tree_map_only(
            torch.Tensor, torch.clone, load_torch_file(open_store(file.parent), file.name)
        )
        torch.save({key: value for key, value in held.items() if key not in keys}, f"{file}.new")
        os.replace(f"{file}.new", file)


@pytest.mark.parametrize("with_args", [True, False], ids=["args", "no-args"])
@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: name(row[0]))
def test_every_layout_is_told_from_the_files(row: Any, with_args: bool, tmp_path: Path) -> None:
    megatron, layout, second, names = row
    folder = write_legacy(tmp_path, SMALL, megatron, args=with_args)
    wanted = {each if each.startswith("mp") else f"mp_rank_{each}" for each in names.split()}
    assert {entry.name for entry in folder.iterdir()} == wanted
    found = megatron_layout(tmp_path)
    assert (found.layout, found.second_field, found.mismatches) == (layout, second, ())
    assert found.fields == 1 + (megatron.pp > 1) + (megatron.ep > 1)
    told_why = "with EP, ranks are addressed by (tp, pp, ep)" in found.reason
    assert told_why == (found.layout == "3D" and found.fields < 3)
    assert found.fits
    assert found.loader == ("EP-aware" if megatron.ep > 1 else "non-EP")
    fields = ("_PPP" if megatron.pp > 1 else "") + ("_EEE" if megatron.ep > 1 else "")
    assert found.pattern == f"iter_0000010/mp_rank_TT{fields}/model_optim_rng.pt"
    assert found.files == tuple(sorted(f"{each}/model_optim_rng.pt" for each in wanted))
    for rank in megatron.writers():
        at = found.coordinates[megatron.directory(rank)]
        assert (at.tp, at.pp, at.ep) == (rank.tp, rank.pp, rank.ep)
        if with_args or megatron.etp == 1:
            assert at.etp == rank.etp


def test_names_alone_are_ambiguous_and_the_expert_size_settles_it(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path, SMALL, MegatronRun(tp=2, ep=2), args=False)
    strip(folder, "model")
    found = megatron_layout(tmp_path)
    assert (found.layout, found.loader, found.fits) == ("ambiguous", None, False)
    assert "--expert-parallel-size" in found.reason
    assert found.mismatches == ()
    assert found.pattern.startswith("iter_0000010/mp_rank_TT_XXX/")
    as_experts = megatron_layout(tmp_path, expert_parallel_size=2)
    assert (as_experts.layout, as_experts.fields, as_experts.second_field) == ("3D", 2, "ep")
    assert (as_experts.loader, as_experts.mismatches) == ("EP-aware", ())
    as_stages = megatron_layout(tmp_path, expert_parallel_size=1)
    assert (as_stages.layout, as_stages.second_field, as_stages.loader) == ("2D", "pp", "non-EP")
    # A pipeline size does not decide: what does is that no expert size stands beside it.
    assert megatron_layout(tmp_path, pipeline_parallel_size=2).second_field == "pp"
    both = megatron_layout(tmp_path, pipeline_parallel_size=2, expert_parallel_size=2)
    assert (both.second_field, both.loader) == ("ep", "EP-aware")
    assert both.pattern.startswith("iter_0000010/mp_rank_TT_PPP_EEE/")
    assert "--pipeline-parallel-size 2, but on disk 1" in both.mismatches


@pytest.mark.parametrize("names", ["9" * 200, "99999999_000", "00_99999999_000"])
def test_more_ranks_than_any_run_has_are_one_message(names: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / f"mp_rank_{names}").mkdir()
    for arguments in (["megatron", tmp_path], ["import", tmp_path, "out"]):
        assert "more ranks wrote files than any run has" in run.fails(*arguments)


def test_arguments_of_more_ranks_than_any_run_has_are_one_message(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 10**12, "pipeline_model_parallel_size": 1}
    (tmp_path / "mp_rank_00").mkdir()
    held = {"args": argparse.Namespace(**sizes), "model": {"w": torch.ones(2)}}
    torch.save(held, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CannotLook, match="more ranks wrote files than any run has"):
        megatron_layout(tmp_path)


@pytest.mark.parametrize(
    ("names", "etp"),
    [("00_000 01_001", 1), ("00_000 01_001 02_002 03_003", 1), ("00_000 01_000 02_001 03_001", 2)],
)
def test_a_diagonal_is_3d_by_the_names_alone(names: str, etp: int, tmp_path: Path) -> None:
    """Two fields look like TP and PP; but stages would make a grid."""
    folder = tmp_path / "iter_0000010"
    for name in names.split():
        (folder / f"mp_rank_{name}").mkdir(parents=True)
        torch.save({"iteration": 10}, folder / f"mp_rank_{name}" / "model_optim_rng.pt")
    found = megatron_layout(tmp_path)
    assert (found.layout, found.fields, found.second_field) == ("3D", 2, "ep")
    assert (found.loader, found.fits) == ("EP-aware", True)
    assert (found.sizes.pp, found.sizes.etp) == (1, etp)
    assert "names leave out a pipeline of one stage" in found.reason


@pytest.mark.parametrize("run", [MegatronRun(tp=2, pp=2, ep=2, etp=1), MegatronRun(tp=1, ep=2)])
def test_where_experts_take_part_it_is_3d_though_a_name_lacks_a_field(
    run: MegatronRun, tmp_path: Path
) -> None:
    folder = write_legacy(tmp_path, SMALL, run)
    for directory in sorted(folder.iterdir()):
        shorter = directory.with_name(directory.name.rpartition("_")[0])
        if not shorter.exists():
            directory.rename(shorter)
        else:
            shutil.rmtree(directory)
    found = megatron_layout(tmp_path)
    assert (found.layout, found.loader, found.fits) == ("3D", "EP-aware", False)
    assert found.fields == (1 if run.pp == 1 else 2)
    assert f"names of such a run have {found.fields + 1} fields" in found.reason
    assert any("incomplete: 0 of" in expected for expected in found.mismatches)


@pytest.mark.parametrize(
    ("run", "given", "expected"),
    [
        (
            MegatronRun(tp=2, pp=2),
            {"tensor": 4, "pipeline": 1, "expert": 8},
            [
                "--tensor-parallel-size 4, but on disk 2",
                "--pipeline-parallel-size 1, but on disk 2",
                "--expert-parallel-size 8, but on disk 1",
            ],
        ),
        (MegatronRun(tp=2, pp=2), {"tensor": 2, "pipeline": 2}, []),
        (
            MegatronRun(tp=2),
            {"expert": 2},
            ["--expert-parallel-size 2, but on disk 1", "needs an expert coordinate"],
        ),
        (MegatronRun(tp=2, ep=2), {"tensor": 2}, ["no --expert-parallel-size is given"]),
        (
            MegatronRun(tp=4, ep=2, etp=1, early_writers=True),
            {},
            ["2 of 4 directories, no mp_rank_02_000, mp_rank_03_001; Megatron-Core 0.12 to 0.18"],
        ),
        (
            MegatronRun(tp=1, ep=2, etp=2),
            {},
            ["expert-tensor-parallel size 2 does not divide tensor-parallel size 1"],
        ),
    ],
)
def test_sizes_that_do_not_fit_are_told(
    run: MegatronRun, given: dict[str, int], expected: list[str], tmp_path: Path
) -> None:
    write_legacy(tmp_path, SMALL, run)
    sizes: dict[str, Any] = {f"{axis}_parallel_size": size for axis, size in given.items()}
    found = megatron_layout(tmp_path, **sizes).mismatches
    assert len(found) == len(expected)
    assert all(text in line for text, line in zip(expected, found, strict=True))


def test_a_rank_without_its_file_and_a_torn_file_are_incomplete(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path, SMALL, MegatronRun(tp=2, pp=2))
    (folder / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    torn = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    torn.write_bytes(torn.read_bytes()[:5000])
    shutil.rmtree(folder / "mp_rank_00_001")
    message = "\n".join(megatron_layout(tmp_path).mismatches)
    assert "mp_rank_00_000/model_optim_rng.pt: incomplete: there is no such file" in message
    assert "mp_rank_01_001/model_optim_rng.pt: incomplete" in message
    assert "3 of 4 directories, no mp_rank_00_001" in message


def test_what_another_run_left_behind_is_told(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path, SMALL, MegatronRun(tp=2, pp=2))
    write_legacy(tmp_path, SMALL, MegatronRun(tp=4))
    message = "\n".join(megatron_layout(folder).mismatches)
    assert "names with different numbers of fields, mp_rank_TT and mp_rank_TT_XXX" in message
    assert "args inside the files are of several runs" in message


def test_files_of_several_iterations_are_told(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path, SMALL, MegatronRun(tp=2), iteration=10)
    later = write_legacy(tmp_path, SMALL, MegatronRun(tp=2), iteration=20)
    name = "mp_rank_01/model_optim_rng.pt"
    os.replace(later / name, folder / name)
    (expected,) = megatron_layout(folder).mismatches
    assert expected == "the files are of several iterations: 10 in mp_rank_00; 20 in mp_rank_01"


def test_the_tracker_chooses_the_iteration(tmp_path: Path) -> None:
    write_legacy(tmp_path, SMALL, MegatronRun(), iteration=20)
    write_legacy(tmp_path, SMALL, MegatronRun(tp=2), iteration=10)
    assert megatron_layout(tmp_path).path.name == "iter_0000010"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("30")
    with pytest.raises(CannotLook, match=r"'30'.*\n.*iter_0000010, iter_0000020"):
        megatron_layout(tmp_path)
    tracker.unlink()
    with pytest.raises(CannotLook, match="several iterations"):
        megatron_layout(tmp_path)
    (tmp_path / "iter_0000010").rename(tmp_path / "release")
    tracker.write_text("release\n")
    assert megatron_layout(tmp_path).path.name == "release"


def test_m102_a_tracker_of_many_digits_is_one_message(tmp_path: Path, run: Run) -> None:
    write_legacy(tmp_path, SMALL, MegatronRun(), iteration=10)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7" * 5_000)
    err = run.fails("megatron", tmp_path)
    assert err.startswith(f"dcp-placements: {tmp_path}: latest_checkpointed_iteration.txt says")
    assert "found:       iter_0000010" in err
    assert len(err) < 1000


def test_a_dcp_directory_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / ".metadata").touch()
    for look in (megatron_layout, open_source):
        with pytest.raises(CannotLook, match=r"a DCP checkpoint.*\n.*rename=Stack"):
            look(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_01", "mp_rank_01/model_optim_rng.pt", "iter_0000010"])
def test_m150_a_link_out_of_the_directory_is_refused(tmp_path: Path, run: Run, name: str) -> None:
    folder = write_legacy(tmp_path / "run", SMALL, MegatronRun(tp=2))
    linked = folder.parent / name if name.startswith("iter") else folder / name
    (tmp_path / "disk").mkdir()
    linked.rename(tmp_path / "disk" / "moved")
    linked.symlink_to(tmp_path / "disk" / "moved")
    given = tmp_path / "run" if name.startswith("iter") else folder
    for command in (("megatron",), ("inspect",), ("import", tmp_path / "out")):
        ran = run(command[0], given, *command[1:])
        assert ran.code, command
        printed = ran.out + ran.err
        assert "leads out of the directory" in printed
        assert "cp -rL" in printed
    assert not (tmp_path / "out").exists()
    shutil.copytree(given, tmp_path / "copy")
    assert not run("megatron", tmp_path / "copy").code


def test_a_tracker_that_is_a_fifo_is_refused(tmp_path: Path, run: Run) -> None:
    write_legacy(tmp_path, SMALL, MegatronRun(), iteration=10)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    assert "it is no plain file" in run.fails("megatron", tmp_path)


@pytest.mark.parametrize("form", ["protocol 2", "protocol 4", "plain pickle", "old format"])
def test_a_hostile_pickle_is_refused_and_nothing_runs(form: str, tmp_path: Path, run: Run) -> None:
    folder = write_legacy(tmp_path / "ckpt", SMALL, MegatronRun())
    file = folder / "mp_rank_00" / "model_optim_rng.pt"
    trap = {"args": Hostile(tmp_path / "ran"), "model": {}}
    if form == "plain pickle":
        file.write_bytes(pickle.dumps(trap))
    elif form == "old format":
        torch.save(trap, file, _use_new_zipfile_serialization=False)
    else:
        torch.save(trap, file, pickle_protocol=int(form[-1]))
    with pytest.raises(CannotLook):
        load_torch_file(open_store(file.parent), file.name)
    ran = run("megatron", folder)
    assert ran.code == (2 if "protocol" in form else 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "made", [{"tp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "ep": 2}, {"pp": 3}, {"ep": 3, "etp": 1}]
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_file_under_the_name_of_another_rank_is_refused(
    tmp_path: Path, made: dict[str, int], copied: bool
) -> None:
    model = replace(SMALL, layers=6, experts=6)
    folder = write_legacy(tmp_path / "run", model, MegatronRun(**made))
    assert megatron_layout(folder).fits
    *_, one, other = sorted(folder.glob("*/model_optim_rng.pt"))
    held = other.read_bytes()
    shutil.copyfile(one, other)
    if not copied:
        one.write_bytes(held)
    message = "\n".join(megatron_layout(folder).mismatches)
    assert ("files of the same contents" if copied else "written by rank") in message
    assert one.parent.name in message
    assert other.parent.name in message
    with pytest.raises(PlacementError, match=other.parent.name):
        import_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_a_converter_wrote_as_one_rank_are_no_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = MegatronRun.writers
    monkeypatch.setattr(
        MegatronRun, "writers", lambda run: [replace(rank, number=0) for rank in writers(run)]
    )
    write_legacy(tmp_path, SMALL, MegatronRun(tp=2, ep=2))
    assert megatron_layout(tmp_path).mismatches == ()


class AttributeOf:
    """Pickled as ``getattr`` of a class and a name."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, "register")


@pytest.mark.parametrize("owner", [pathlib.PurePosixPath, torch.Tensor])
def test_getattr_is_called_for_nothing(tmp_path: Path, owner: type) -> None:
    torch.save({"args": AttributeOf(owner)}, tmp_path / "member.pt")
    member = load_torch_file(open_store(tmp_path), "member.pt")["args"]
    assert member.by in ("builtins.getattr", "__builtin__.getattr")
    named, name = member.args
    assert (named.name, name) == (f"{owner.__module__}.{owner.__name__}", "register")


def test_arguments_keep_their_values_and_classes_become_stand_ins(tmp_path: Path) -> None:
    folder = write_legacy(tmp_path, SMALL, MegatronRun(tp=2))
    held = load_torch_file(open_store(folder), "mp_rank_01/model_optim_rng.pt")
    args = held["args"].fields
    assert args["tensor_model_parallel_size"] == 2
    assert args["params_dtype"].name == "torch.bfloat16"
    kind = "megatron.core.transformer.enums.AttnBackend"
    backend = args["attention_backend"]
    # Python 3.11 before 3.11.4 pickles the name of the member.
    assert (backend.by, backend.args) == (kind, (5,)) or backend.args[0].name == kind


def test_the_command_prints_what_the_function_returns(tmp_path: Path, run: Run) -> None:
    write_legacy(tmp_path, SMALL, MegatronRun(tp=2, ep=4, etp=1))
    ran = run("megatron", tmp_path, "--json")
    result = json.loads(ran.out)
    assert ran.code == 0
    keys = {"layout", "fields", "reason", "pattern", "loader", "mismatches", "files", "fits"}
    assert set(result) == keys, "as the guide of cli lists them"
    assert (result["layout"], result["fields"], result["loader"]) == ("3D", 2, "EP-aware")
    assert result["files"][1] == "mp_rank_00_002/model_optim_rng.pt"
    text = run("megatron", tmp_path).out
    assert "    layout:    3D\n    fields:    2\n" in text
    assert "; 3D, though names have 2 fields: with EP, ranks are addressed by (tp, pp, ep)" in text
    ran = run("megatron", tmp_path, "--expert-parallel-size", 8, "--tensor-parallel-size", 2)
    assert ran.code == 1
    assert "mismatch:  --expert-parallel-size 8, but on disk 4" in ran.out
    assert run("megatron", tmp_path / "nothing").code == 2
