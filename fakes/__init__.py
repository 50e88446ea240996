"""Worlds of many ranks in one process, to try rules and planners without a cluster.

``FakeMesh`` and ``FakeDTensor`` stand for a ``DeviceMesh`` and a ``DTensor`` on any rank;
``World`` runs N ranks through DCP's own order of calls, with torch's real file writer and reader;
``cut`` is plain slicing of the whole tensor, the truth that a shard is compared with.
"""

from .mesh import FakeMesh
from .reference import cut
from .tensor import FakeDTensor, real_dtensor
from .world import World

__all__ = ["FakeDTensor", "FakeMesh", "World", "cut", "real_dtensor"]
