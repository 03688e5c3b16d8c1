from __future__ import annotations

import torch

from selfspec.machine import machine, peak_growth, read_bandwidth

CPU = torch.device("cpu")


def test_memory_is_read_at_a_speed_that_can_be():
    assert 1e8 < read_bandwidth(4_000_000, CPU) < 1e13


def test_growth_is_a_gpu_s():
    with peak_growth(CPU) as grown:
        pass
    assert grown == []


def test_the_machine_has_a_name():
    assert machine(CPU)
