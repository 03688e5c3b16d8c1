"""Forwards that replace those of modules for one pass in one thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from selfspec.models.module_quantizer import recording_inputs
from selfspec.runtime.module_hooks import callers_of, in_this_thread, replacing, stepping

X = torch.ones(1, 2)


@pytest.fixture
def linear():
    return nn.Linear(2, 2)


def in_another_thread(function):
    """What a function returns in a thread of its own."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


def test_a_forward_is_replaced_in_its_thread_alone(linear):
    own = linear(X)
    with replacing({linear: lambda x: x * 0}):
        assert not linear(X).any()
        assert torch.equal(in_another_thread(lambda: linear(X)), own)
    assert torch.equal(linear(X), own)
    assert "forward" not in linear.__dict__


def test_passes_of_several_threads_overlap(linear):
    """Each thread has its forwards, whoever leaves first; then the module is as it was."""
    own = linear(X)
    both, done = threading.Barrier(2), []

    def passing(factor, stay):
        with replacing({linear: lambda x: x * factor}):
            both.wait()
            mine = linear(X)
            if stay:
                leaving.wait()
                mine = linear(X)
            done.append((factor, mine))

    leaving = threading.Event()
    first = threading.Thread(target=passing, args=(2, True))
    second = threading.Thread(target=passing, args=(3, False))
    first.start(), second.start()
    second.join()
    assert torch.equal(linear(X), own)
    leaving.set()
    first.join()
    assert {factor: outputs.tolist() for factor, outputs in done} == {2: [[2, 2]], 3: [[3, 3]]}
    assert "forward" not in linear.__dict__


def test_an_instances_own_forward_comes_back_after_an_error(linear):
    def patched(x):
        return x + 1

    linear.forward = patched
    with replacing({linear: lambda x: x * 0}):
        assert not linear(X).any()
        assert torch.equal(in_another_thread(lambda: linear(X)), X + 1)
    with pytest.raises(ZeroDivisionError), replacing({linear: lambda x: x / 0 / (1 // 0)}):
        linear(X)
    assert linear.__dict__["forward"] is patched


def test_a_hook_sees_the_calls_of_its_thread_alone(linear):
    seen = []
    hook = linear.register_forward_hook(in_this_thread(lambda *_: seen.append(1)))
    in_another_thread(lambda: linear(X))
    assert not seen
    linear(X)
    assert seen == [1]
    hook.remove()


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
    with replacing(stepping([module])):
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


def test_only_this_threads_passes_are_recorded(linear):
    """A pass of another thread, which began before or ends after, takes nothing from this one's records."""

    class Keeping:
        def update(self):
            pass

    cache, outer = Keeping(), nn.Sequential(linear)
    linear.register_forward_hook(lambda *_: cache.update())
    with callers_of(cache, ("update",), [outer]) as callers:
        in_another_thread(lambda: outer(X))
    assert callers == []
    with recording_inputs(outer) as inputs:
        in_another_thread(lambda: outer(X))
    assert inputs == {}
