"""Copies of experts that are chosen often, so that the devices of a mesh have equally much to do. No JAX here.

Tokens that choose an expert with copies are divided among them. A device's work is in proportion to its tokens."""

from collections.abc import Sequence

import numpy as np


def placed(counts: Sequence[int] | np.ndarray, devices: int, copies: int) -> list[int]:
    """Which expert each slot has, one device's slots after the other's. Each device has slots for its part of all experts, and
    `copies` more.

    `counts` say how often each expert was chosen. The expert whose copies have most to do gets the next copy. Then, from the
    most to the least that one of them has to do, each goes to the device that has least to do so far and lacks that expert."""
    most = len(counts) // devices + copies
    number = _copies(np.asarray(counts, float), devices, most * devices - len(counts))
    share = np.asarray(counts, float) / number
    held: list[list[int]] = [[] for _ in range(devices)]
    work = np.zeros(devices)
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(number[expert]):
            room = [device for device in range(devices) if len(held[device]) < most]
            best = min(
                room, key=lambda device: (expert in held[device], work[device], len(held[device]), device)
            )
            held[best].append(expert)
            work[best] += share[expert]
    return [expert for mine in held for expert in sorted(mine)]


def _copies(counts: np.ndarray, devices: int, more: int) -> np.ndarray:
    """How many slots each expert has, of which there are `more` than experts: at most one a device, unless there are too many."""
    number = np.ones(len(counts), int)
    for _ in range(more):
        number[np.argmax(np.where(number < devices, counts / number, -1.0))] += 1
    return number


def expert_slots(placed: Sequence[int], experts: int) -> np.ndarray:
    """`[X, R]` of int32: the slots of each expert, as often as the expert with most copies has them; tokens take turns."""
    found: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(placed):
        found[expert].append(slot)
    most = max(map(len, found))
    return np.array([[slots[i % len(slots)] for i in range(most)] for slots in found], np.int32)


def imbalance(counts: Sequence[int] | np.ndarray, placed: Sequence[int], devices: int) -> float:
    """The largest work of a device over the mean: 1 where all have the same."""
    number = np.bincount(placed, minlength=len(counts))
    share = np.asarray(counts, float) / np.maximum(number, 1)
    work = share[np.asarray(placed)].reshape(devices, -1).sum(1)
    return float(work.max() / work.mean()) if work.any() else 1.0
