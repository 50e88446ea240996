"""The names of the files in which verl's FSDP trainers leave a model: one per rank.

Of a world of 8 ranks, in ``global_step_N/actor``::

    model_world_size_8_rank_0.pt .. _rank_7.pt        the model: DTensors of FSDP2
    optim_world_size_8_rank_0.pt ..                   the optimizer's state, by position
    extra_state_world_size_8_rank_0.pt ..             schedule and random states
    huggingface/, fsdp_config.json                    configuration
"""

from __future__ import annotations

import re

_MODEL = re.compile(r"model_world_size_(\d+)_rank_(?:\d+|\{rank\})\.pt")
_BESIDE = {
    "optim_world_size_": "optimizer state by position: no file has the names of its parameters",
    "extra_state_world_size_": "schedule and random states: of the run, not of the model",
}


def world_size_of(name: str) -> int | None:
    """Return how many ranks saved, by the name of a model's file; None of another file.

    >>> world_size_of("model_world_size_8_rank_3.pt"), world_size_of("optim_world_size_8_rank_3.pt")
    (8, None)
    """
    match = _MODEL.fullmatch(name)
    return None if match is None else int(match[1])


def why_left_out(name: str) -> str | None:
    """Return why a file of verl's is no part of the model; None of other files."""
    return next((why for head, why in _BESIDE.items() if name.startswith(head)), None)
