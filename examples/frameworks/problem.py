"""What the examples beside this one train: a small network on made-up data, split over the ranks.

SPDX-License-Identifier: Apache-2.0
"""

import hashlib

import torch

STEPS, BATCH = 12, 8


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def dataset():
    """All samples; the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :4] * 2 + x[:, 4:8])


def batches(rank, size):
    """This rank's batches."""
    x, y = dataset().tensors
    for step in range(STEPS):
        begin = (step * size + rank) * BATCH % 512
        yield x[begin:begin + BATCH], y[begin:begin + BATCH]


def report(model, rank):
    """Print the loss and a digest of the parameters, which is the same on all ranks."""
    with torch.no_grad():
        x, y = dataset().tensors
        loss = torch.nn.functional.mse_loss(model(x), y).item()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    print("rank %d: loss %.4f, parameters %s" % (rank, loss, digest), flush=True)
