"""Trainers that a declaration can be wrong about: what they cut, how, and what is handed over.

Each cuts by hand, with plain slicing. For example a model with two KV heads on four ranks, where
neighbours have the same head::

    "kv_copies": Odd(shapes, {"k_proj": copied("tp", 2, 2)}, {"tp": 4}, ...)
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

Positions = Mapping[str, int]
Shapes = dict[str, tuple[int, ...]]
Part = Callable[[torch.Tensor, Positions], torch.Tensor]

RIGHT, NONE, OPEN, GRANTED = "right", "no block", "commented", "granted"
"""What is handed over: the truth; nothing; what is wrong, where a comment of its line says what
else it may be; what is wrong as the head of the block says what is taken for granted."""


_NUMBER = re.compile(r"(?:weight)?\d+$")


class List(NamedTuple):
    """Numbers that each rank counts from 0: ``List(1, "pp", [2, 2])`` of ``layers.3.w``.

    Attributes:
        level: Which number of a key.
        axis: Whose ranks share them out.
        counts: How many each has; by the number before it where that makes a difference.
        word: Only of keys with this part.
        step: Numbers from one of a rank to its next.
    """

    level: int
    axis: str
    counts: Sequence[int] | Mapping[int, Sequence[int]]
    word: str = ""
    step: int = 1


class Odd(NamedTuple):
    """A trainer.

    Attributes:
        shapes: Of the unsharded model.
        cuts: By a part of keys, what a rank holds of them; the first that a key has counts.
        meshes: Their axes.
        expected: What is handed over, without and with ``whole=``.
        lists: Numbers that ranks count from 0.
        ones: Parts of keys of tensors with ones alone.
    """

    shapes: Shapes
    cuts: Mapping[str, Part]
    meshes: Sequence[Mapping[str, int]]
    expected: tuple[str, str]
    lists: Sequence[List] = ()
    ones: Sequence[str] = ()

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the unsharded tensors."""
        generator = torch.Generator().manual_seed(0)
        whole = {}
        for key, shape in self.shapes.items():
            value = torch.randn(shape, generator=generator)
            is_norm = key.endswith("norm.weight")
            is_constant = is_norm or any(word in key for word in self.ones)
            whole[key] = torch.ones(shape) if is_constant else value
        return whole

    def cut(self, key: str, value: torch.Tensor, at: Positions) -> tuple[str, torch.Tensor] | None:
        """Return the key and the part of a rank; None where it has none."""
        components = key.split(".")
        places = [n for n, component in enumerate(components) if _NUMBER.match(component)]
        for each in self.lists:
            if each.word not in key:
                continue
            place = places[each.level]
            text = components[place].rstrip("0123456789")
            number = int(components[place][len(text) :])
            counts = each.counts
            if isinstance(counts, Mapping):
                counts = counts[int(key.split(".")[places[each.level - 1]])]
            if each.step > 1:
                owner, own = number % each.step, number // each.step
            else:
                owner = next(n for n in range(len(counts)) if number < sum(counts[: n + 1]))
                own = number - sum(counts[:owner])
            if owner != at[each.axis]:
                return None
            components[place] = f"{text}{own}"
        for word, part in self.cuts.items():
            if word in key:
                value = part(value, at)
                break
        return ".".join(components), value


def along(axis: str, count: int = 2, dim: int = 0) -> Part:
    """Cut a dim over an axis."""
    return lambda value, at: value.chunk(count, dim)[at[axis]]


def rows(axis: str = "tp", count: int = 2) -> Part:
    """Cut rows over an axis."""
    return along(axis, count)


def columns(axis: str = "tp", count: int = 2) -> Part:
    """Cut columns over an axis."""
    return along(axis, count, 1)


def copied(axis: str, parts: int, copies: int) -> Part:
    """Cut rows into fewer parts than an axis has ranks: neighbours have copies."""
    return lambda value, at: value.chunk(parts)[at[axis] // copies]


def joined(*sizes: int, axis: str = "tp", count: int = 2) -> Part:
    """Cut the rows of each of several tensors that are joined."""
    return lambda value, at: torch.cat(
        [part.chunk(count)[at[axis]] for part in value.split([*sizes])]
    )


def both(first: Part, second: Part) -> Part:
    """Cut what another has cut."""
    return lambda value, at: second(first(value, at), at)


def uncut(value: torch.Tensor, at: Positions) -> torch.Tensor:
    """Cut nothing."""
    return value


def several(count: int, **shapes: tuple[int, ...]) -> Shapes:
    """Return the shapes of layers, with ``__`` for dots."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {f"layers.{n}.{name}": shape for n in range(count) for name, shape in names.items()}


def listed(layers: Mapping[int, int], name: str = "experts.{}.w1.weight") -> Shapes:
    """Return the shapes of numbered experts, so many in each layer."""
    return {
        f"layers.{layer}.{name.replace('{}', str(expert))}": (6, 8)
        for layer, count in layers.items()
        for expert in range(count)
    }


NORM = several(2, norm__weight=(8,))
TP, EP, PP = [{"tp": 2}], [{"ep": 2}], [{"pp": 2}]
MLP = {"layers.0.mlp.up_proj.weight": (12, 8), "layers.0.mlp.down_proj.weight": (8, 12)}
ATTENTION = {"layers.0.attn.q_proj.weight": (16, 8), "layers.0.attn.o_proj.weight": (8, 16)}
CUT: dict[str, Part] = {
    "norm": uncut,
    "q_proj": rows(),
    "up_proj": rows(),
    "o_proj": columns(),
    "down_proj": columns(),
}
PACKED = {"layers.0.moe.experts.w1": (4, 6, 8)}
EXPERTS: dict[str, Part] = {"experts": rows("ep")}


def _mamba(value: torch.Tensor, at: Positions) -> torch.Tensor:
    gate, inner, b, c, step = value.split([8, 8, 4, 4, 2])
    rank = at["tp"]
    return torch.cat([gate.chunk(2)[rank], inner.chunk(2)[rank], b, c, step.chunk(2)[rank]])


def _heads(value: torch.Tensor, at: Positions) -> torch.Tensor:
    query, key, other = value.split([8, 4, 4])
    rank = at["tp"]
    return torch.cat([query.chunk(4)[rank], key.chunk(2)[rank // 2], other.chunk(2)[rank // 2]])


def _padded(value: torch.Tensor, at: Positions) -> torch.Tensor:
    return torch.cat([value.chunk(2)[at["tp"]], torch.zeros(3, 8)])


ODD: dict[str, Odd] = {
    # Copies, drift and what is constant.
    "kv_copies": Odd(
        {**NORM, **ATTENTION, "layers.0.attn.k_proj.weight": (4, 8)},
        {
            "q_proj": rows(count=4),
            "k_proj": copied("tp", 2, 2),
            "o_proj": columns(count=4),
        },
        [{"tp": 4}],
        (RIGHT, RIGHT),
    ),
    "joined_kv_copies": Odd(
        {**NORM, "layers.0.attn.qkv_proj.weight": (16, 8), "layers.0.attn.o_proj.weight": (8, 8)},
        {"qkv": _heads, "o_proj": columns(count=4)},
        [{"tp": 4}],
        (OPEN, NONE),
    ),
    "one_kv_head": Odd(
        {**NORM, "layers.0.attn.q_proj.weight": (16, 8), "layers.0.attn.k_proj.weight": (2, 8)},
        {"q_proj": rows(count=4)},
        [{"tp": 4}],
        (RIGHT, RIGHT),
    ),
    "experts_twice": Odd(
        {**NORM, **PACKED},
        {"experts": lambda value, at: value.chunk(2)[at["ep"] % 2]},
        [{"ep": 4}],
        (RIGHT, RIGHT),
    ),
    "layers_cut_and_whole": Odd(
        {**NORM, "layers.0.mlp.up_proj.weight": (6, 8), "layers.1.mlp.up_proj.weight": (12, 8)},
        {"layers.1.mlp": rows()},
        TP,
        (NONE, RIGHT),
    ),
    "experts_cut_and_whole": Odd(
        {**NORM, "layers.0.moe.experts.w1": (2, 6, 8), "layers.1.moe.experts.w1": (4, 6, 8)},
        {"layers.1.moe": rows("ep")},
        EP,
        (NONE, RIGHT),
    ),
    "counters": Odd(
        {**NORM, **PACKED, "layers.0.moe.tokens_seen": (4,)},
        {**EXPERTS, "tokens": lambda value, at: value + at["ep"]},
        EP,
        (OPEN, NONE),
    ),
    "expert_bias_zero": Odd(
        {
            **NORM,
            **PACKED,
            "layers.0.moe.experts.w1_bias": (4, 6),
            "layers.0.moe.experts.bias": (4, 6),
        },
        EXPERTS,
        EP,
        (OPEN, RIGHT),
        ones=["bias"],
    ),
    "q_norm_of_ones": Odd(
        {**NORM, **ATTENTION, "layers.0.attn.q_norm.weight": (16,)},
        {"q_norm": rows(), **CUT},
        TP,
        (OPEN, RIGHT),
    ),
    "listed_bias_zero": Odd(
        {**NORM, **listed({0: 4}), **{key[:-6] + "bias": (6,) for key in listed({0: 4})}},
        {},
        EP,
        (RIGHT, RIGHT),
        [List(1, "ep", [2, 2], "experts")],
        ["bias"],
    ),
    "expert_scales": Odd(
        {**NORM, **PACKED, "layers.0.moe.experts.scale": (4,)}, EXPERTS, EP, (RIGHT, RIGHT)
    ),
    "vectors": Odd(
        {**NORM, **MLP, "layers.0.mlp.su": (12,)},
        {**CUT, "su": rows()},
        TP,
        (RIGHT, RIGHT),
    ),
    # Which dim is cut.
    "grouped_experts": Odd(
        {**NORM, "layers.0.mlp.experts.weight1": (8, 24), "layers.0.mlp.experts.weight2": (24, 8)},
        {"weight1": columns("ep"), "weight2": rows("ep")},
        EP,
        (RIGHT, RIGHT),
    ),
    "experts_of_two_dims": Odd(
        {**NORM, "blocks.0.moe.w_in": (8, 24), "blocks.0.moe.w_out": (24, 8)},
        {"w_in": columns("ep"), "w_out": rows("ep")},
        EP,
        (RIGHT, RIGHT),
    ),
    "experts_lie_last": Odd(
        {**NORM, "layers.0.experts.w1": (6, 8, 4)},
        {"experts": along("ep", dim=2)},
        EP,
        (GRANTED, RIGHT),
    ),
    "norms_of_heads": Odd(
        {
            "layers.0.attn.q_norm.weight": (4,),
            "layers.0.attn.q_proj.weight": (8, 8),
            "layers.0.attn.o_proj.weight": (8, 8),
            **MLP,
        },
        CUT,
        TP,
        (RIGHT, RIGHT),
    ),
    "frequencies": Odd({"layers.0.rotary.inv_freq": (4,), **ATTENTION}, CUT, TP, (RIGHT, RIGHT)),
    "a_vector_as_long_as_a_shard": Odd(
        {
            "layers.0.ssm.A": (12,),
            "layers.0.mlp.up_proj.weight": (24, 8),
            "layers.0.mlp.down_proj.weight": (8, 24),
        },
        CUT,
        TP,
        (RIGHT, RIGHT),
    ),
    "embedding_on_hidden": Odd(
        {**NORM, **MLP, "embed_tokens.weight": (16, 8)},
        {**CUT, "embed": columns()},
        TP,
        (OPEN, RIGHT),
    ),
    "square_shards": Odd(
        {**NORM, "layers.0.mlp.up_proj.weight": (16, 8), "layers.0.mlp.fc_out.weight": (8, 16)},
        {**CUT, "fc_out": columns()},
        TP,
        (OPEN, RIGHT),
    ),
    "square_shards_transposed": Odd(
        {**NORM, "layers.0.mlp.c_fc.weight": (8, 16), "layers.0.mlp.c_proj.weight": (16, 8)},
        {"c_fc": columns(), "c_proj": rows()},
        TP,
        (OPEN, RIGHT),
    ),
    "adapters": Odd(
        {
            **NORM,
            "layers.0.mlp.down_proj.lora_A.weight": (2, 12),
            "layers.0.mlp.down_proj.lora_B.weight": (8, 2),
            "layers.0.mlp.up_proj.lora_A.weight": (2, 8),
            "layers.0.mlp.up_proj.lora_B.weight": (12, 2),
        },
        {"down_proj.lora_A": columns(), "up_proj.lora_B": rows()},
        TP,
        (RIGHT, RIGHT),
    ),
    "adapters_as_wide_as_a_norm": Odd(
        {
            "layers.0.q_norm.weight": (4,),
            "layers.0.mlp.down_proj.lora_A.weight": (4, 12),
            "layers.0.mlp.up_proj.lora_B.weight": (12, 4),
        },
        {"lora_A": columns(), "lora_B": rows()},
        TP,
        (RIGHT, RIGHT),
    ),
    "two_projections": Odd(
        {
            "enc.norm.weight": (8,),
            "dec.norm.weight": (8,),
            "enc.proj.weight": (8, 12),
            "dec.proj.weight": (12, 8),
        },
        {"enc.proj": columns(), "dec.proj": rows()},
        TP,
        (RIGHT, RIGHT),
    ),
    "shards_in_another_order": Odd(
        {**NORM, "layers.0.moe.experts.w1": (24, 8)},
        {"experts": both(rows(), rows("ep"))},
        [{"ep": 2, "tp": 2}],
        (OPEN, OPEN),
    ),
    "round_robin": Odd(
        {**NORM, **PACKED}, {"experts": lambda value, at: value[at["ep"] :: 2]}, EP, (GRANTED,) * 2
    ),
    "padding_of_each_rank": Odd(
        {**NORM, "embed_tokens.weight": (50, 8), "layers.0.mlp.up_proj.weight": (12, 8)},
        {**CUT, "embed": _padded},
        TP,
        (OPEN, GRANTED),
    ),
    "uneven_vocabulary": Odd(
        {**NORM, "embed_tokens.weight": (11, 8)}, {"embed": rows()}, TP, (RIGHT, RIGHT)
    ),
    # Several tensors in one.
    "gate_up_by_shape": Odd(
        {**NORM, "layers.0.mlp.fc1.weight": (24, 8), "layers.0.mlp.fc2.weight": (8, 12)},
        {"fc1": joined(12, 12), "fc2": columns()},
        TP,
        (RIGHT, RIGHT),
    ),
    "gate_up_of_another_name": Odd(
        {
            **NORM,
            "layers.0.mlp.dense_h_to_4h.weight": (24, 8),
            "layers.0.mlp.dense_4h_to_h.weight": (8, 12),
        },
        {"h_to_4h": joined(12, 12), "4h_to_h": columns()},
        TP,
        (RIGHT, RIGHT),
    ),
    "fc1_alone": Odd(
        {
            **NORM,
            "layers.0.mlp.linear_fc1.weight": (24, 8),
            "layers.0.mlp.linear_fc2.weight": (8, 24),
        },
        {"fc1": rows(), "fc2": columns()},
        TP,
        (RIGHT, RIGHT),
    ),
    "mamba": Odd(
        {
            **NORM,
            "layers.0.mixer.in_proj.weight": (26, 8),
            "layers.0.mixer.out_proj.weight": (8, 8),
            "layers.0.mixer.A_log": (2,),
        },
        {"in_proj": _mamba, "out_proj": columns(), "A_log": rows()},
        TP,
        (NONE, NONE),
    ),
    "qkv_by_heads": Odd(
        {**NORM, "layers.0.attn.qkv.weight": (24, 8), "layers.0.attn.proj.weight": (8, 8)},
        {"qkv": rows(), "proj": columns()},
        TP,
        (OPEN, OPEN),
    ),
    "qkv_with_a_gate": Odd(
        {**NORM, "layers.0.attn.qkv_proj.weight": (24, 8), "layers.0.attn.o_proj.weight": (8, 8)},
        {"qkv": joined(16, 4, 4), "o_proj": columns()},
        TP,
        (OPEN, OPEN),
    ),
    "qkv_with_a_bias": Odd(
        {
            **NORM,
            "layers.0.attn.qkv_proj.weight": (16, 8),
            "layers.0.attn.qkv_proj.bias": (16,),
            "layers.0.attn.o_proj.weight": (8, 8),
        },
        {"qkv": joined(8, 4, 4), "o_proj": columns()},
        TP,
        (RIGHT, RIGHT),
    ),
    # Names that ranks count from 0.
    "layers_with_other_counts": Odd(
        {**NORM, **listed({0: 3, 1: 4})},
        {},
        EP,
        (NONE, NONE),
        [List(1, "ep", {0: [2, 1], 1: [2, 2]}, "experts")],
    ),
    "glued_numbers_with_other_counts": Odd(
        {**NORM, **listed({0: 2, 1: 3}, "experts.w1.weight{}")},
        {},
        EP,
        (NONE, NONE),
        [List(1, "ep", {0: [1, 1], 1: [2, 1]}, "experts")],
    ),
    "stages_with_other_counts": Odd(
        {**NORM, **listed({0: 4, 1: 2})},
        {},
        [{"pp": 2, "ep": 2}],
        (NONE, NONE),
        [List(0, "pp", [1, 1]), List(1, "ep", {0: [2, 2], 1: [1, 1]}, "experts")],
    ),
    "a_stage_without_experts": Odd(
        {**NORM, **several(2, attn__q_proj__weight=(16, 8)), **listed({0: 2})},
        {},
        [{"pp": 2, "ep": 2}],
        (RIGHT, RIGHT),
        [List(0, "pp", [1, 1]), List(1, "ep", [1, 1], "experts")],
    ),
    "glued_numbers": Odd(
        {**NORM, **listed({0: 4}, "experts.w1.weight{}")},
        {},
        EP,
        (RIGHT, RIGHT),
        [List(1, "ep", [2, 2], "experts")],
    ),
    "lists_in_lists": Odd(
        {
            **several(1, norm__weight=(8,)),
            **listed({0: 4}, "groups.0.experts.{}.w1"),
            **listed({0: 4}, "groups.1.experts.{}.w1"),
        },
        {},
        EP,
        (RIGHT, RIGHT),
        [List(2, "ep", [2, 2], "experts")],
    ),
    "a_group_of_each_rank": Odd(
        {
            **several(1, norm__weight=(8,)),
            **listed({0: 4}, "groups.0.experts.{}.w1"),
            **listed({0: 4}, "groups.1.experts.{}.w1"),
        },
        {},
        EP,
        (OPEN, RIGHT),
        [List(1, "ep", [1, 1], "experts")],
    ),
    "heads_of_each_rank": Odd(
        {**NORM, **listed({0: 4}, "attn.heads.{}.weight")},
        {},
        TP,
        (OPEN, RIGHT),
        [List(1, "tp", [2, 2], "heads")],
    ),
    "experts_in_turn": Odd(
        {**NORM, **listed({0: 4})},
        {},
        EP,
        (OPEN, OPEN),
        [List(1, "ep", [2, 2], "experts", step=2)],
    ),
    "interleaved_stages": Odd(
        several(4, mlp__weight=(4, 6)),
        {},
        PP,
        (OPEN, OPEN),
        [List(0, "pp", [2, 2], step=2)],
    ),
    "an_axis_of_another_name": Odd(
        {**NORM, **several(2, mlp__up_proj__weight=(12, 8), mlp__down_proj__weight=(8, 12))},
        {"up_proj": rows("model"), "down_proj": columns("model")},
        [{"model": 2}],
        (OPEN, RIGHT),
    ),
    "experts_over_an_axis_of_another_name": Odd(
        {**NORM, "layers.0.experts.up": (16, 6, 8)},
        {"experts": rows("mp")},
        [{"mp": 2}],
        (OPEN, RIGHT),
    ),
}


def drawn_lists(seed: int) -> tuple[Odd, bool]:
    """Return a trainer with numbered experts, and whether all layers have as many of them.

    Args:
        seed: What is drawn: layers, stages, counts, names.
    """
    draw = random.Random(seed)
    count = draw.choice([1, 2, 3, 4])
    first = draw.randint(1, count - 1) if count > 1 and draw.random() < 0.5 else 0
    is_even = draw.random() < 0.4
    experts = {n: 4 if is_even else draw.choice([0, 2, 3, 4]) for n in range(count)}
    if not any(experts.values()):
        experts[0] = 4
    name = draw.choice(["experts.{}.w1.weight", "experts.w1.weight{}"])
    shapes = several(count, norm__weight=(8,), attn__q_proj__weight=(16, 8))
    halves = {n: [-(-number // 2), number // 2] for n, number in experts.items()}
    lists = [List(1, "ep", halves, "experts")]
    axes = {"ep": 2, "tp": 2} if draw.random() < 0.5 else {"ep": 2}
    if first:
        lists = [*lists, List(0, "pp", [first, count - first])]
        axes = {"pp": 2, **axes}
    cuts = {"q_proj": rows()} if "tp" in axes else {}
    odd = Odd({**shapes, **listed(experts, name)}, cuts, [axes], (RIGHT, RIGHT), lists)
    return odd, len(set(experts.values()) - {0}) == 1 and 3 not in experts.values()
