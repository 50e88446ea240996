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
from pathlib import Path
from typing import Any

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.offline.checkpoint import SourceOptions
from dcp_placements.offline.directory import existing_directory
from dcp_placements.offline.sources.safetensors_source import Safetensors
from dcp_placements.table.whole import WholeModel

CONFIG = "config.json"

ModelSource = str | os.PathLike[str] | Callable[[], Any] | Any
"""A path, a function, or what ``whole=`` of the planners takes."""


def whole_of(source: ModelSource) -> WholeModel:
    """Return the unsharded model.

    Args:
        source: A directory of safetensors files, or one with ``config.json``, or one of these files
            or their index; a function without arguments that returns what ``whole=`` of the
            planners takes; or that itself.

    Raises:
        CannotLook: There is no such file, or it does not say the shapes; the function fails, or
            what it returns is no model.
    """
    if isinstance(source, str | os.PathLike):
        return WholeModel.of(_of_path(Path(source)))
    try:
        return WholeModel.of(source() if _is_function(source) else source)
    except PlacementError as error:
        raise CannotLook(str(error)) from error
    except Exception as error:  # of a user's function
        raise CannotLook(f"whole: the function failed: {type(error).__name__}: {error}") from error


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "state_dict")


def _of_path(path: Path) -> Any:
    """Return the shapes by key, or the module, that a path says.

    Raises:
        CannotLook: It says none.
    """
    if not path.exists():
        raise CannotLook(f"{path}: no such file or directory, of the whole model")
    is_named = path.is_file()
    folder = path.parent if is_named else path
    headers = sorted(folder.glob("*.safetensors")) and not (is_named and path.name == CONFIG)
    if headers:
        checkpoint = Safetensors.of(existing_directory(folder), SourceOptions())
        if checkpoint.absent:
            name, file = next(iter(checkpoint.absent.items()))
            raise CannotLook(f"{path}: the index names {name} in {file}, which lacks it")
        is_one_file = path.suffix == ".safetensors"
        return {
            key: tensor.shape
            for key, tensor in checkpoint.tensors.items()
            if not is_one_file or tensor.files == (path.name,)
        }
    if (folder / CONFIG).is_file():
        return _of_config(folder / CONFIG)
    raise CannotLook(
        f"{path}: neither safetensors files nor {CONFIG}, which say the shapes of a model\n"
        "    way out:     the directory of a Hugging Face model; or MODULE:FUNC, a function that "
        "returns {key: shape} or a module on meta"
    )


def _of_config(config: Path) -> Any:
    """Return the module, on ``meta``, of the class that a ``config.json`` names.

    Raises:
        CannotLook: transformers is not installed, or has no such class.
    """
    try:
        named = json.loads(config.read_text())["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
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
            return kind(kind.config_class.from_json_file(str(config)))
    except Exception as error:  # of a config that is anybody's
        raise CannotLook(f"{config}: {named}: {type(error).__name__}: {error}") from error
