"""Every command opens every source: a table of commands and formats, each cell run.

The truth of each source is its whole tensors, saved by torch's planner in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hazard_scenes import assert_same
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from dcp_placements import CheckpointPlacement, PlacementError, Placements
from dcp_placements.errors import CannotLook
from dcp_placements.offline import Checkpoint, diff, open_pair, open_source
from dcp_placements.offline.sources.opening import FORMATS
from dcp_placements.testing.megatron import MegatronModel, MegatronRun, write_legacy
from tests.offline_scenes import Run, save_hugging_face, save_sharded, wholes

MEGATRON = MegatronModel(layers=2, experts=8, shared_ffn=0)


def by_ep(mesh: Any) -> Placements:
    """Return what a rank declares, of the world that saved and of the one that is to load."""
    return Placements({"experts": CheckpointPlacement(mesh, {"ep": Shard(0)})})


def halves() -> list[dict[str, torch.Tensor]]:
    """Return the state dicts of two ep ranks, without what says how they are cut."""
    return [
        {
            key: whole.chunk(2)[rank].clone() if "experts" in key else whole
            for key, whole in wholes().items()
        }
        for rank in range(2)
    ]


class Source(NamedTuple):
    """A source: what it holds, how it is opened, and the name under which ``inspect`` shows it."""

    save: Callable[[Path], object]
    truth: Callable[[], dict[str, torch.Tensor]]
    format: str
    options: tuple[str, ...] = ()
    exported: Callable[[str], str] = str  # from a key to its name in an export


def save_ranks(path: Path, name: str) -> None:
    path.mkdir()
    for rank, state in enumerate(halves()):
        torch.save(state, path / name.format(rank=rank))


def save_items(path: Path, *, ours: bool) -> None:
    module = pytest.importorskip("tests.engines.test_saved_items")
    if ours:
        module.save(path, halves(), lambda rank, size: by_ep(module.ep(rank, size)))
    else:
        module.save_theirs(path, halves())


def of_item() -> dict[str, torch.Tensor]:
    return {f"model.{key}": value for key, value in wholes().items()}


def without_item(key: str) -> str:
    return key.removeprefix("model.")


DECLARED = ("rules", "tests.cli.test_sources:by_ep", "mesh", "ep=2")

SOURCES = {
    "dcp": Source(save_sharded, wholes, "dcp"),
    "index alone": Source(lambda path: save_sharded(path, stock_metadata=False), wholes, "dcp"),
    "safetensors": Source(lambda path: save_hugging_face(path, wholes()), wholes, "safetensors"),
    "verl": Source(
        lambda path: save_ranks(path, "model_world_size_2_rank_{rank}.pt"),
        wholes,
        "rank_files",
        DECLARED,
    ),
    "home-made": Source(
        lambda path: save_ranks(path, "shard-{rank}.pth"),
        wholes,
        "rank_files",
        (*DECLARED, "files", "shard-{rank}.pth"),
    ),
    "megatron": Source(
        lambda path: write_legacy(path, MEGATRON, MegatronRun(tp=2, ep=2, etp=1)),
        MEGATRON.truth,
        "megatron",
    ),
    "engine": Source(
        lambda path: save_items(path, ours=True),
        of_item,
        "torch_checkpointing",
        exported=without_item,
    ),
    "engine's own": Source(
        lambda path: save_items(path, ours=False),
        of_item,
        "torch_checkpointing",
        DECLARED,
        exported=without_item,
    ),
}

TARGET = ("--rules", "tests.cli.test_sources:by_ep", "--mesh", "ep=4")

COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": (),
    "verify": ("--contents",),
    "diff": ("truth", "--prefix", ""),
    "rehearse": TARGET,
    "doctor": ("--experts-per-layer", "8"),
    "draw": ("-o", "drawn.svg"),
    "export": ("out",),
    "import": ("out",),
    "reshard": ("out", *TARGET),
}
WITH_RULES_OF_THEIR_OWN = ("rehearse", "reshard")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a directory with a source, ``it``, and with its truth."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("source")
            SOURCES[name].save(folders[name] / "it")
            dcp.save(dict(SOURCES[name].truth()), checkpoint_id=folders[name] / "truth")
        return folders[name]

    return save


def options_of(source: Source, command: str) -> list[str]:
    """Return the options that a source needs, as a command spells them."""
    given = dict(zip(source.options[::2], source.options[1::2], strict=True))
    prefix = "source-" if command in WITH_RULES_OF_THEIR_OWN else ""
    spelled = {name if name == "files" else prefix + name: value for name, value in given.items()}
    return [text for name, value in spelled.items() for text in (f"--{name}", value)]


def loaded(path: Path, truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what torch's planner reads of a checkpoint in one process."""
    state = {key: torch.zeros_like(value) for key, value in truth.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_opens_every_source(
    saved: Callable[[str], Path],
    command: str,
    name: str,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, folder = SOURCES[name], saved(name)
    monkeypatch.chdir(tmp_path)
    given = [str(folder / text) if text == "truth" else text for text in COMMANDS[command]]
    ran = run(command, folder / "it", *given, *options_of(source, command), "--json")
    truth = source.truth()
    if command == "import" and source.format == "dcp":
        assert ran.code == 1, ran
        assert "this is a DCP checkpoint already" in ran.err
        return
    assert ran.code == (1 if command == "diff" and name in HAS_OBJECTS else 0), ran
    document = ran.json
    match command:
        case "inspect":
            assert document["format"] == source.format
            shapes = {key: tensor["shape"] for key, tensor in document["tensors"].items()}
            assert shapes == {key: [*tensor.shape] for key, tensor in truth.items()}
        case "verify":
            assert document["checked"]["tensors"] == len(truth)
            assert document["checked"]["bytes"] >= sum(tensor.nbytes for tensor in truth.values())
        case "diff":
            differing = [difference["fqn"] for difference in document["differences"]]
            assert differing == ([*HAS_OBJECTS[name]] if name in HAS_OBJECTS else [])
            assert document["compared"]["tensors"] == len(truth)
        case "rehearse":
            assert len(document["ranks"]) == 4
            assert document["unique_bytes"] == sum(tensor.nbytes for tensor in truth.values())
        case "doctor":
            assert document["tensors"]
            assert {tensor["stored"] for tensor in document["tensors"].values()} == {8}
        case "draw":
            assert (tmp_path / "drawn.svg").stat().st_size
        case "export":
            (file,) = (tmp_path / "out").glob("*.safetensors")
            assert_same(load_file(file), {source.exported(key): truth[key] for key in truth})
        case "import" | "reshard":
            assert_same(loaded(tmp_path / "out", truth), truth)


HAS_OBJECTS = {"dcp": ("step",), "index alone": ("step",)}
"""Keys of a source that its truth, of tensors alone, lacks."""


def test_the_table_has_every_format() -> None:
    named = {source.format for source in SOURCES.values()}
    assert named == {getattr(kind, "format", "dcp") for kind in FORMATS}


@pytest.mark.parametrize("name", ["verl", "home-made", "engine's own"])
def test_ranks_files_without_what_they_need_are_refused_by_every_command(
    saved: Callable[[str], Path],
    name: str,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = saved(name)
    monkeypatch.chdir(tmp_path)
    for command, given in COMMANDS.items():
        given = tuple(str(folder / text) if text == "truth" else text for text in given)
        ran = run(command, folder / "it", *given)
        assert ran.code in (1, 2), (command, ran)
        assert not ran.out, (command, ran)
        if name == "home-made":
            assert "--files" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_options_of_two_sources_are_for_those_that_take_them(
    saved: Callable[[str], Path], run: Run
) -> None:
    ranks, truth = saved("home-made") / "it", saved("home-made") / "truth"
    options = options_of(SOURCES["home-made"], "diff")
    for pair in ((ranks, truth), (truth, ranks), (ranks, saved("engine's own") / "it")):
        ran = run("diff", *pair, *options, "--json")
        has_prefix = pair[1] == saved("engine's own") / "it"
        assert ran.code == (1 if has_prefix else 0), ran
    ran = run("diff", truth, truth, "--files", "shard-{rank}.pth")
    assert ran.code == 2
    assert "files= (--files) is not for" in ran.err
    with pytest.raises(CannotLook, match=r"vocab_size= \(--vocab-size\) is not for"):
        open_pair(ranks, truth, files="shard-{rank}.pth", vocab_size=8)
    with pytest.raises(CannotLook, match=r"rules= \(--rules, --source-rules\) is not for a DCP"):
        open_source(truth, rules=by_ep)
    with pytest.raises(CannotLook, match=r"axes= .* is not for what is opened already"):
        open_source(open_source(truth), axes={"ep": 2})


def test_an_opened_source_is_returned_as_it_is(saved: Callable[[str], Path]) -> None:
    source = open_source(saved("dcp") / "it")
    assert open_source(source) is source
    assert isinstance(source, Checkpoint)
    assert diff(*open_pair(source, saved("dcp") / "it")).same


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    save_hugging_face(tmp_path / "it", wholes())
    torch.save({}, tmp_path / "it" / "m_rank_0.pt")
    with pytest.raises(CannotLook, match=r"files of several formats: safetensors files, a torch"):
        open_source(tmp_path / "it")
    with pytest.raises(PlacementError, match="hold no tensor of a model"):
        open_source(tmp_path / "it", files="m_rank_{rank}.pt")
