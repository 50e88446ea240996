"""What is sent in one message."""

from __future__ import annotations

import pytest
import torch

from dcp_placements.exchange import sending
from dcp_placements.exchange.sending import batches


def test_batches_hold_every_element_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "SENT_NBYTES", 64)
    tensors = [torch.arange(40.0).reshape(8, 5), torch.arange(3.0), torch.tensor(7.0)]
    tensors.append(torch.arange(12.0).reshape(3, 4).t())
    found = [*batches(tensors)]
    assert all(sum(tensor.nbytes for tensor in batch) <= 64 for batch in found)
    values = torch.cat([tensor.reshape(-1) for batch in found for tensor in batch])
    assert torch.equal(values, torch.cat([tensor.reshape(-1) for tensor in tensors]))
