"""What the configuration of a quantized model says of its scheme: ``quantization_config``.

transformers keeps it in ``config.json``, ModelOpt in ``hf_quant_config.json``. The files' names and
shapes say most of a scheme; here it is named, and the sizes of blocks are::

    {"quant_method": "fp8", "weight_block_size": [128, 128]}     Declared(blocks=((128, 128),))
    {"quant_method": "gptq", "bits": 4}                          Declared(unknown=("is gptq",))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_placements.errors import CannotLook
from dcp_placements.short_text import format_name
from dcp_placements.storage.store import Store

_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4")
_FORMATS = (
    *("dense", "mixed-precision", "naive-quantized", "float-quantized", "int-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MXFP4", "MXFP8"),
    "MIXED_PRECISION",
)
_MOST_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Declared:
    """What a model's configuration says of its quantization.

    Attributes:
        blocks: Sizes of blocks of a matrix: of rows, and of columns.
        unknown: What it names that has no formula here, as text behind a name.
        has_zero_points: Whether all quantized weights have zero points.
    """

    blocks: tuple[tuple[int, int], ...] = ()
    unknown: tuple[str, ...] = ()
    has_zero_points: bool = False


def declared_of(directory: Store) -> Declared:
    """Return what the configuration beside a model's files says; nothing where there is none.

    Raises:
        CannotLook: It is no JSON of that form, or may not be opened.
    """
    blocks: dict[tuple[int, int], None] = {}
    unknown: list[str] = []
    names = directory.names()
    symmetric: set[bool] = set()
    for name in ("config.json", "hf_quant_config.json"):
        if name not in names:
            continue
        try:
            with directory.open(name) as stream:
                document = json.loads(stream.read(_MOST_NBYTES))
            for section in _sections(document):
                blocks |= dict.fromkeys(_block_sizes(section))
                unknown += _unknown(section)
                symmetric |= {of.get("symmetric") is not False for of in _weight_arguments(section)}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CannotLook(
                f"{directory.path}/{name}: no quantization_config can be read from it: "
                f"{format_name(error)}\n"
                "    way out:     config.json of the model, as the Hub has it"
            ) from error
    return Declared(tuple(blocks), tuple(dict.fromkeys(unknown)), symmetric == {False})


def _sections(document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a configuration that describe a quantization."""
    holders = [document, *[document.get(name) for name in ("text_config", "llm_config")]]
    for holder in holders:
        for name in ("quantization_config", "compression_config", "quantization"):
            if section := (holder or {}).get(name):
                yield section


def _block_sizes(section: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the sizes of blocks that a section declares."""
    if (sizes := section.get("weight_block_size")) is not None:
        yield _pair(sizes)
    if section.get("quant_algo") == "FP8_PB_WO":
        yield (128, 128)
    for weights in _weight_arguments(section):
        if (sizes := weights.get("block_structure")) is not None:
            yield _pair(sizes)
        if weights.get("strategy") == "group" and weights.get("group_size"):
            yield _pair((1, weights["group_size"]))


def _pair(sizes: Any) -> tuple[int, int]:
    rows, columns = sizes
    if not all(type(size) is int and size > 0 for size in (rows, columns)):
        raise ValueError(f"blocks of {sizes}")
    return rows, columns


def _weight_arguments(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what the groups of compressed-tensors say of their weights."""
    for group in (section.get("config_groups") or {}).values():
        if weights := group.get("weights"):
            yield weights


def _unknown(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a section names that has no formula here."""
    method = section.get("quant_method")
    if method is not None and method not in _METHODS:
        yield f"names quant_method {method!r}, for which there is no formula here"
    groups = (section.get("config_groups") or {}).values()
    for form in dict.fromkeys([section.get("format"), *[group.get("format") for group in groups]]):
        if method == "compressed-tensors" and form is not None and form not in _FORMATS:
            yield f"names the format {form!r}, for which there is no formula here"
    if method is None and "bits" in section and "quant_algo" not in section:
        yield f"names {section['bits']} bits and no quant_method, as MLX does"
    layers = (section.get("quantized_layers") or {}).values()
    algorithms = [section.get("quant_algo"), *[layer.get("quant_algo") for layer in layers]]
    for algorithm in dict.fromkeys(algorithms):
        if algorithm is not None and algorithm not in _ALGORITHMS:
            yield f"names quant_algo {algorithm!r}, for which there is no formula here"
    if section.get("transform_config"):
        yield "has a transform_config: the weights are of a model that rotates its inputs"
    if (sparsity := section.get("sparsity_config")) and sparsity.get("format", "dense") != "dense":
        yield f"names the sparse format {sparsity['format']!r}, which is not read here"
