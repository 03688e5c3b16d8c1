"""Noise on the device is the sampler's own, whatever order rounds ask for it in."""

from __future__ import annotations

import torch

from selfspec.runtime.device_noise import NUMBERS, POSITIONS, StreamNumbers, TiedNoise
from selfspec.speculation.sampling import Sampler

LIKE = torch.empty(7)


def check(noise, row, sampler, positions):
    found = noise.at(torch.tensor([list(positions)]), slice(row, row + 1))[0]
    torch.testing.assert_close(found, torch.stack([sampler.noise_of(p, LIKE) for p in positions]), rtol=0, atol=0)


def test_noise_of_positions_that_rounds_read():
    noise, samplers = TiedNoise(3, 7, torch.device("cpu")), [Sampler(temperature=1.0, seed=i) for i in range(2)]
    for first in (5, 5, 9, 30, 40, 41, 66):
        for row, sampler in ((0, samplers[0]), (2, samplers[1])):
            noise.send(row, sampler, first, first + 20)
            check(noise, row, sampler, range(first, first + 20))
    for sampler, first in ((samplers[1], 66), (samplers[0], 3), (samplers[0], 200), (samplers[0], 10)):
        noise.send(0, sampler, first, first + POSITIONS)  # another text in the same row, or one that goes on elsewhere
        check(noise, 0, sampler, range(first, first + POSITIONS))


def test_noise_is_drawn_before_a_round_asks_for_it():
    noise, sampler = TiedNoise(1, 7, torch.device("cpu")), Sampler(temperature=1.0, seed=1)
    noise.send(0, sampler, 4, 6)
    assert sorted(noise._rows[0].drawn) == list(range(6, 4 + POSITIONS))


def test_how_many_rows_of_noise_are_kept():
    assert TiedNoise.fits(32, 128256)
    assert not TiedNoise.fits(64, 128256)


def test_numbers_of_each_rows_stream():
    """The numbers that the sampler would draw next, however many were used before; a new sampler replaces a row's."""
    numbers = StreamNumbers(3, torch.device("cpu"))
    samplers, plain = ([Sampler(temperature=1.0, seed=i, tied=False) for i in range(3)] for _ in range(2))
    steps = ((0, 0, 7), (2, 1, 500), (0, 0, 480), (0, 0, 40), (2, 1, 3), (0, 2, 1), (0, 0, 1), (2, 1, 0))
    for row, number, used in steps:
        sampler, other = samplers[number], plain[number]
        numbers.send(row, sampler, 50)
        first = torch.full((3,), sampler.numbers_used)
        other.skip(sampler.numbers_used - other.numbers_used)
        assert numbers.at(first, 50, slice(0, 3))[row].tolist() == other.upcoming(50)
        sampler.skip(used)


def test_numbers_are_sent_once_for_many_rounds():
    numbers, sampler, sent = StreamNumbers(1, torch.device("cpu")), Sampler(temperature=1.0, seed=0, tied=False), []
    for _ in range(2 * NUMBERS // 5):
        before = numbers.values.clone()
        numbers.send(0, sampler, 50)
        sent.append(not torch.equal(before, numbers.values))
        sampler.skip(5)
    assert sum(sent) == 3
