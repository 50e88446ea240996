"""The unsharded model that a command compares with: from a Hugging Face directory, or a function.

A directory of safetensors files has every shape in their headers. One with ``config.json`` alone
names a class of transformers, which is made on ``meta``; no code of the directory is run::

    whole_of("DeepSeek-V3")     {"model.embed_tokens.weight": (129280, 7168), ...}
    whole_of("my_models:make")  what make() returns
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.offline.checkpoint import SourceOptions
from dcp_placements.offline.sources.safetensors_source import Safetensors
from dcp_placements.storage.store import StorageOptions, Store, open_store
from dcp_placements.table.whole import WholeModel

CONFIG = "config.json"
CONFIG_NBYTES = 1 << 20

ModelSource = str | os.PathLike[str] | Callable[[], Any] | Any
"""A path, a function, or what ``whole=`` of the planners takes."""


def whole_of(source: ModelSource, storage_options: StorageOptions = None) -> WholeModel:
    """Return the unsharded model.

    Args:
        source: A directory of safetensors files, or one with ``config.json``, or one of these files
            or their index; a function without arguments that returns what ``whole=`` of the
            planners takes; or that itself. Directories and files may be URLs.
        storage_options: Options that fsspec passes to the file system of a URL.

    Raises:
        CannotLook: There is no such file, or it does not say the shapes; the function fails, or
            what it returns is no model.
    """
    if isinstance(source, str | os.PathLike):
        return WholeModel.of(_of_path(os.fspath(source), storage_options))
    try:
        return WholeModel.of(source() if _is_function(source) else source)
    except PlacementError as error:
        raise CannotLook(str(error)) from error
    except Exception as error:  # of a user's function
        raise CannotLook(f"whole: the function failed: {type(error).__name__}: {error}") from error


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "state_dict")


def _of_path(path: str, storage_options: StorageOptions) -> Any:
    """Return the shapes by key, or the module, that a path says.

    Raises:
        CannotLook: It says none.
    """
    folder, name = open_store(path, storage_options, restricted=True), ""
    entry = folder.entry()
    if entry is None:
        raise CannotLook(f"{path}: no such file or directory, of the whole model")
    if entry.nbytes is not None:
        parent, _, name = path.rpartition("/")
        folder = open_store(parent or os.curdir, storage_options, restricted=True)
    names = folder.names()
    if Safetensors.is_in(names) and name != CONFIG:
        checkpoint = Safetensors.of(folder, SourceOptions())
        if checkpoint.absent:
            lacking, file = next(iter(checkpoint.absent.items()))
            raise CannotLook(f"{path}: the index names {lacking} in {file}, which lacks it")
        is_one_file = name.endswith(".safetensors")
        return {
            key: tensor.shape
            for key, tensor in checkpoint.tensors.items()
            if not is_one_file or tensor.files == (name,)
        }
    if CONFIG in names:
        return _of_config(folder)
    raise CannotLook(
        f"{path}: neither safetensors files nor {CONFIG}, which say the shapes of a model\n"
        "    way out:     the directory of a Hugging Face model; or MODULE:FUNC, a function that "
        "returns {key: shape} or a module on meta"
    )


def _of_config(folder: Store) -> Any:
    """Return the module, on ``meta``, of the class that the ``config.json`` of a folder names.

    Raises:
        CannotLook: transformers is not installed, or has no such class.
    """
    config = f"{folder.path}/{CONFIG}"
    try:
        with folder.open(CONFIG) as stream:
            values = json.loads(stream.read(CONFIG_NBYTES))
        named = values["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CannotLook(f"{config}: names no class under 'architectures': {error}") from error
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CannotLook(
            f"{config}: the shapes of {named} are made by transformers: {error}\n"
            "    way out:     pip install transformers; or the safetensors files of the model"
        ) from error
    kind = getattr(transformers, str(named), None)
    if kind is None:
        raise CannotLook(f"{config}: transformers {transformers.__version__} has no {named}")
    try:
        with torch.device("meta"):
            return kind(kind.config_class.from_dict(values))
    except Exception as error:  # of a config that is anybody's
        raise CannotLook(f"{config}: {named}: {type(error).__name__}: {error}") from error
