"""This machine's GPU, with the functions that fake_device.py has, so that the tests written for that one run on this one.

Flow: instead() puts this module where a test's function imports fake_device -> install() makes Devices with chunks and
a pool of the test's size; tensor() makes tensors, read() copies them to the host.
"""

import contextlib
import sys

import torch

from tally.torch import device


def tensor(values, place="cuda:0"):
    """A tensor of these values, which are there once the current stream has come so far."""
    return torch.empty_like(values, device=place).copy_(values)


def read(one):
    """What the current stream finds in a tensor."""
    return one.cpu()


def moved():
    """As fake_device's, which alone can count."""
    return 0, 0


def pinned():
    return 0


@contextlib.contextmanager
def install(seed=0, chunk_bytes=1 << 20, pool_bytes=1 << 25, places=("cuda:0",), patience_s=1000):
    """Devices of these names; yields them.  At the end all pinned memory must be back.  The order of streams is the
    GPU's own, so `seed` has no effect; nor has the size of the pool on the library's."""
    made = [device.Device(device.Cuda(place), chunk_bytes, pool_bytes) for place in map(torch.device, places)]
    with placed(places, made, patience_s):
        yield made


@contextlib.contextmanager
def placed(places, made, patience_s):
    """Within this context the Devices `made` are those of these names.  At the end all pinned memory must be back."""
    before = dict(device._devices)
    device._devices.update({torch.device(place): one for place, one in zip(places, made)})
    usual, device.PATIENCE_S = device.PATIENCE_S, patience_s
    try:
        yield
        with device._carrier.changed:
            assert device._carrier.changed.wait_for(lambda: not any(one.pool.out for one in made), 30), (
                "pinned memory that did not come back")
    finally:
        device.PATIENCE_S = usual
        device._devices.clear()
        device._devices.update(before)


@contextlib.contextmanager
def instead():
    """Within this context `import fake_device` finds this module."""
    before = sys.modules.get("fake_device")
    sys.modules["fake_device"] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules["fake_device"]
        if before is not None:
            sys.modules["fake_device"] = before
