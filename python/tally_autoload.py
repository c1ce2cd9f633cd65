"""Registers the backend "tally", so that init_process_group("tally") needs no import of tally.torch.

PyTorch calls this by itself: when a backend of that name is asked for (entry point "torch.distributed.backends", PyTorch
2.14 and later), or when PyTorch is imported ("torch.backends", 2.5 and later).  It imports nothing of Tally until a group
is made.

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import os


def register():
    """Make the backend's name known to torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "TALLY"):
        dist.Backend.register_backend("tally", _create, extended_api=True, devices=["cpu"])


def _create(*arguments):
    # A script's folder comes before the packages.  To import what lies there could run the script again.
    spec = importlib.util.find_spec("tally")
    places = spec and spec.submodule_search_locations
    if spec and not any(os.path.exists(os.path.join(place, "torch", "__init__.py")) for place in places or ()):
        raise ImportError("%s hides the Python package tally: rename it" % spec.origin)
    from tally.torch.group.making import create

    return create(*arguments)
