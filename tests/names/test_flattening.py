"""A nested state dict is flattened as torch flattens it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcp_placements import PlacementLoadPlanner, PlacementSavePlanner


class Opaque:
    """A value of a type that torch does not know."""


def nested() -> dict[str, Any]:
    w = torch.ones(2)
    return {
        "model": OrderedDict(a=w, b={"c": torch.nn.Parameter(w), 3: w}, none={}),
        "optim": {
            "state": {0: {"step": 1, "lr": 0.5, "m": [w, {"x": w}], "words": ["p", "q"]}},
            "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99)}, {}],
        },
        "a.b": None,
        "object": Opaque(),
        "tuple": (w, w),
        "flag": True,
    }


@pytest.mark.parametrize("flat", [True, False])
def test_planners_have_the_values_that_torch_would_give_them(flat: bool) -> None:
    save, load = (
        PlacementSavePlanner(flatten_state_dict=flat),
        PlacementLoadPlanner(flatten_state_dict=flat),
    )
    values = nested()
    wanted = flatten_state_dict(values)[0] if flat else values
    save.set_up_planner(values, None, True)
    assert list(save.state_dict) == list(wanted)
    load.set_up_planner(values, None, False)
    assert list(load.state_dict) == list(wanted)
    assert type(values["object"]) is Opaque
    assert load.state_dict["object"] is values["object"]
