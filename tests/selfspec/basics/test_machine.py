from __future__ import annotations

import torch

from selfspec.basics.machine import machine, peak_growth, process_peak, read_bandwidth

CPU = torch.device("cpu")


def test_memory_is_read_at_a_speed_that_can_be():
    assert 1e8 < read_bandwidth(4_000_000, CPU) < 1e13


def test_growth_is_a_gpu_s():
    with peak_growth(CPU) as grown:
        pass
    assert grown == []


def test_the_machine_has_a_name():
    assert machine(CPU)


def test_what_was_held_counts_after_it_is_gone():
    before = process_peak()
    held = torch.ones((before or 0) // 4 + 16 * 2**20)
    size = held.numel() * 4
    del held
    after = process_peak()
    assert after is None or after >= size
