"""A path or URL as a source: the names of its files decide which class reads them.

Commands ask for ``open_source(path)``; the format's class says which of the options it takes::

    open_source("step-100")                                         Dcp
    open_source("actor", files="m_{rank}.pt", rules=rules, axes={"ep": 2})    RankFiles
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dcp_placements.errors import CannotLook
from dcp_placements.items import quiet_gc
from dcp_placements.offline.checkpoint import AnySource, Checkpoint, SourceOptions
from dcp_placements.offline.directory import existing_directory
from dcp_placements.offline.sources.dcp_source import Dcp
from dcp_placements.offline.sources.rank_names import rank_file_names
from dcp_placements.offline.sources.safetensors_source import Safetensors
from dcp_placements.offline.sources.saved_files_source import EngineItems, MegatronFiles, RankFiles
from dcp_placements.rules.mesh_axes import MeshAxes
from dcp_placements.storage.store import StorageOptions, Store
from dcp_placements.storage.wrong_path import no_checkpoint

_SPELLED = {"rules": "--rules, --source-rules", "axes": "--mesh, --source-mesh"}
"""Options of commands, where their names are not those of ``open_source``."""

FORMATS: tuple[type[Checkpoint], ...] = (Dcp, EngineItems, Safetensors, MegatronFiles, RankFiles)


def open_source(
    path: AnySource,
    *,
    files: str | None = None,
    rules: Callable[..., Any] | None = None,
    axes: MeshAxes | None = None,
    vocab_size: int | None = None,
    expert_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    storage_options: StorageOptions = None,
) -> Checkpoint:
    """Return the checkpoint at a path; the names of its files decide which format it has.

    Args:
        path: Directory or URL of a DCP checkpoint, of safetensors files, of Megatron's
            ``mp_rank_*`` directories, of a torch file per rank, or of items of
            ``torch_checkpointing``. An opened checkpoint is returned as it is.
        files: Files per rank: their name with ``{rank}`` for the rank's number, such as
            ``"shard_{rank}.pt"``; by default verl's, or the only names that end in ``rank_N``.
        rules: Files per rank and items: ``mesh -> Placements``, as for ``rehearse``: what each rank
            of the world that saved would declare. None where DTensors say all.
        axes: Files per rank and items: the mesh of all ranks, for the rules: sizes by axis name,
            the last axis fastest in rank order.
        vocab_size: Megatron: rows of the vocabulary without padding; by default from the run's
            arguments, and all rows if they do not say.
        expert_parallel_size: Megatron: argument of ``megatron_layout``; needed if the directory is
            ambiguous.
        expert_tensor_parallel_size: Megatron: tensor-parallel size of the experts, if the files
            hold no arguments.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There are no such files, or files of several formats; or an option belongs to
            another format; or files cannot be read, or are refused.
        PlacementError: Ranks' files are missing, contradict each other, or do not make whole
            tensors.
    """
    options = SourceOptions(
        files, rules, axes, vocab_size, expert_parallel_size, expert_tensor_parallel_size
    )
    if isinstance(path, Checkpoint):
        if options.given:
            raise _not_for(next(iter(options.given)), "what is opened already")
        return path
    directory = existing_directory(path, storage_options)
    kind = RankFiles if files is not None else _format_in(directory)
    for name in options.given:
        if name not in kind.takes:
            raise _not_for(name, kind.subject)
    with quiet_gc():
        return kind.of(directory, options)


def open_pair(
    a: AnySource, b: AnySource, *, storage_options: StorageOptions = None, **options: Any
) -> tuple[Checkpoint, Checkpoint]:
    """Return two sources; each option is for those of the two whose format takes it.

    Args:
        a: Argument of ``open_source``.
        b: Another one.
        storage_options: Argument of ``open_source``.
        options: Further arguments of ``open_source``. ``files`` is for a directory with such files.

    Raises:
        CannotLook: As ``open_source``; or neither of them takes an option.
    """
    given = SourceOptions(**options)
    of_both: list[dict[str, Any]] = []
    for side in (a, b):
        wanted: tuple[str, ...] = ()
        if given.given and not isinstance(side, Checkpoint):
            directory = existing_directory(side, storage_options)
            has_files = given.files and rank_file_names(directory.names(), given.files)
            wanted = RankFiles.takes if has_files else _format_in(directory).takes
            if not has_files:
                wanted = tuple(name for name in wanted if name != "files")
        of_both.append({name: value for name, value in given.given.items() if name in wanted})
    for name in given.given:
        if not any(name in of_side for of_side in of_both):
            raise _not_for(name, f"{_path_text(a)} and {_path_text(b)}")
    first, second = (
        open_source(side, storage_options=storage_options, **of_side)
        for side, of_side in zip((a, b), of_both, strict=True)
    )
    return first, second


def _not_for(name: str, subject: str) -> CannotLook:
    """Return the error of an option of ``open_source`` that a source does not take."""
    spelled = _SPELLED.get(name, f"--{name.replace('_', '-')}")
    return CannotLook(f"{name}= ({spelled}) is not for {subject}\n    way out:     leave it out")


def _path_text(source: AnySource) -> str:
    return source.path if isinstance(source, Checkpoint) else os.fspath(source)


def _format_in(directory: Store) -> type[Checkpoint]:
    """Return the class of the files in a directory.

    Raises:
        CannotLook: There are none, or those of several formats.
    """
    names = directory.names()
    kinds = [kind for kind in FORMATS if kind.is_in(names)]
    kinds = [kind for kind in kinds if kind.is_beside_others] or kinds
    if len(kinds) > 1:
        raise CannotLook(
            f"{directory.path}: files of several formats: "
            f"{', '.join(kind.subject for kind in kinds)}\n"
            "    way out:     a directory with one of them"
        )
    if not kinds:
        raise no_checkpoint(directory, CannotLook)
    return kinds[0]
