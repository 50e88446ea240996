"""Every command, and stock torch, on one save whose ``.metadata`` has an index, or has none."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from dcp_placements.cli.app import COMMANDS
from dcp_placements.storage.index_file import MAGIC
from dcp_placements.storage.stock_pickle import MARKER_NBYTES, marked_digest
from dcp_placements.testing import World
from tests.offline_scenes import Ran, Run, save_sharded, wholes
from tests.storage_scenes import blank, load, pickle_nbytes, same, sharded

RULES = ("--rules", "tests.offline_scenes:rules_by_ep")
EP, EP_FSDP = ("--mesh", "ep=4"), ("--mesh", "ep=2,fsdp=2", "--fsdp", "fsdp")

ARGUMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "inspect": (("ckpt",), ("ckpt", "--keys"), ("ckpt", "layers.0.experts.w1"), ("ckpt", "--json")),
    "draw": (("ckpt", "-o", "all.svg"), ("ckpt", "layers.0.experts.w1", "-o", "w1.svg")),
    "megatron": (("ckpt",),),
    "verify": (("ckpt",), ("ckpt", "--contents"), ("ckpt", "--contents", "--json")),
    "diff": (("ckpt", "ckpt"), ("ckpt", "other", "--json"), ("other", "ckpt")),
    "rehearse": (("ckpt", *RULES, *EP), ("ckpt", *RULES, *EP_FSDP, "--json")),
    "doctor": (("ckpt", "--experts-per-layer", "8"), ("ckpt", "--json")),
    "merge-metadata": (("ckpt",),),
    "import": (
        (
            "ckpt",
            "imported",
        ),
    ),
    "export": (("ckpt", "hf"), ("ckpt", "hf32", "--dtype", "float32", "--json")),
    "reshard": (("ckpt", "resharded", *RULES, *EP),),
}


def cut_to(start: int) -> Callable[[Path, Run], None]:
    def cut(path: Path, run: Run) -> None:
        save_sharded(path)
        data = (path / ".metadata").read_bytes()
        head = b"\x80\x03" if start else b""
        (path / ".metadata").write_bytes(head + data[start : pickle_nbytes(data)])

    return cut


def merged(path: Path, run: Run) -> None:
    save_sharded(path, stock_metadata=False)
    assert run("merge-metadata", path).code == 0


FORMS: dict[str, Callable[[Path, Run], None]] = {
    "index": lambda path, run: save_sharded(path),
    "merged": merged,
    "pickle": cut_to(MARKER_NBYTES),
    "lost index": cut_to(0),
}
"""``.metadata`` as saved; with the index first and the pickle later; the pickle alone; and without
the index that the pickle names."""

Result = tuple[dict[tuple[str, ...], Ran], dict[str, bytes]]


NOTE = re.compile(r"^.*the index of \.metadata cannot be used: .*\n.*--rewrite\n", re.M)


def but_sizes(ran: Ran) -> Ran:
    """Return what was printed, without the size of ``.metadata``.

    Notes that the index cannot be used are left out, too.
    """
    out = re.sub(r"\.metadata\D*?[\d.,]+( [KM]iB| B)?", ".metadata", ran.out)
    return replace(ran, out=out, err=NOTE.sub("", ran.err))


@pytest.fixture
def run_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Result, list[str]]]:
    """Return a function that runs all commands on one form of the same save."""

    def runs(form: str) -> tuple[Result, list[str]]:
        (tmp_path / form).mkdir()
        monkeypatch.chdir(tmp_path / form)
        # Names of files carry the id of the save.
        monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1 << 127))
        FORMS[form](Path("ckpt"), run)
        save_sharded(Path("other"), step=2, add=1.0)
        given = {path.name for path in Path().iterdir()}
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            printed = {
                (command, *arguments): run(command, *arguments)
                for command in COMMANDS
                for arguments in ARGUMENTS[command]
            }
        notes = [note for one in printed.values() for note in NOTE.findall(one.err)]
        ran = {command: but_sizes(one) for command, one in printed.items()}
        # The names of its files are derived from the bytes of the source.
        given.add("resharded")
        resharded = load(Path("resharded"), blank(wholes()), dcp.FileSystemReader("resharded"))
        assert all(same(resharded[key], value) for key, value in wholes().items())
        files = {
            str(path): path.read_bytes()
            for path in sorted(Path().rglob("*"))
            if path.is_file() and path.parts[0] not in given
        }
        return (ran, files), notes

    return runs


def test_every_command_is_equal_with_and_without_the_index(
    run_all: Callable[[str], tuple[Result, list[str]]],
) -> None:
    assert set(ARGUMENTS) == set(COMMANDS)
    (expected, files), notes = run_all("index")
    assert notes == []
    failed = {command[0] for command, ran in expected.items() if ran.code == 2}
    assert failed == {"megatron", "merge-metadata"}
    assert {"all.svg", "w1.svg", "hf32/model.safetensors", "hf/model.safetensors"} <= {*files}
    for form in [form for form in FORMS if form != "index"]:
        (ran, made), notes = run_all(form)
        for command, one in expected.items():
            assert ran[command] == one, (form, command)
        assert made.keys() == files.keys()
        assert [name for name, content in files.items() if made[name] != content] == []
        is_lost = form == "lost index"
        assert all("cannot be used: it is missing" in note for note in notes)
        # Every command reads the metadata, but those of other files.
        assert (len(notes) >= len(COMMANDS) - 2) is is_lost
        content = Path("ckpt", ".metadata").read_bytes()
        assert content.endswith(MAGIC) is (form == "merged")
        assert (marked_digest(content) is None) is (form == "pickle")


@pytest.mark.parametrize("form", FORMS)
def test_stock_torch_loads_every_form(form: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FORMS[form](path, run)
    whole = wholes()
    loaded = load(path, blank(whole) | {"step": 0}, dcp.FileSystemReader(path))
    assert loaded.pop("step") == 1
    assert all(same(loaded[key], value) for key, value in whole.items())
    world = World(3)
    whole = {key: value for key, value in whole.items() if value.ndim}
    ranks: list[dict[str, Any]] = world.load(
        path,
        lambda rank: sharded(world, rank, whole, 0, empty=True),
        lambda rank: DefaultLoadPlanner(),
    )
    for rank, state in enumerate(ranks):
        for key, value in whole.items():
            rows = -(-len(value) // 3)
            assert same(state[key].to_local(), value[rank * rows : (rank + 1) * rows])
