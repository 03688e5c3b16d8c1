"""Patches of modules for one pass: nothing stays, and what they do is what they say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from selfspec.runtime.module_hooks import callers_of, stepping


class Sum(nn.Module):
    """A recurrent module that starts from zero whenever it gets several tokens."""

    def __init__(self):
        super().__init__()
        self.state = torch.zeros(1, 1, 2)

    def forward(self, hidden_states, scale=1.0):
        before = self.state if hidden_states.shape[1] == 1 else 0
        out = before + scale * hidden_states.cumsum(1)
        self.state = out[:, -1:]
        return out, None


@pytest.mark.parametrize("named", [False, True])
def test_stepping_runs_one_token_after_the_other(named):
    module, x = Sum(), torch.arange(6.0).view(1, 3, 2)
    with stepping([module]):
        first, nothing = module(hidden_states=x, scale=2.0) if named else module(x, 2.0)
        second, _ = module(x[:, :1], 2.0)
    torch.testing.assert_close(first, 2 * x.cumsum(1))
    torch.testing.assert_close(second, 2 * x.sum(1, keepdim=True) + 2 * x[:, :1])
    assert nothing is None
    assert "forward" not in vars(module)


def test_who_calls_a_method_is_found():
    class Cache:
        def update(self, x):
            return x + 1

    class Mixer(nn.Module):
        def __init__(self, inner=None):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return cache.update(x) if self.inner is None else self.inner(x)

    cache = Cache()
    inner = Mixer()
    outer = Mixer(inner)
    with callers_of(cache, ("update",), [outer]) as callers:
        assert outer(torch.zeros(1)) == 1
    assert callers == [inner]
    assert not vars(cache)
    assert not inner._forward_pre_hooks
    assert not inner._forward_hooks
