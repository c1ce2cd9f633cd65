"""A sampler that knows the processed samples: Horovod's elastic sampler.

SPDX-License-Identifier: Apache-2.0
"""

import random

import torch

from ... import _job


class ElasticSampler(torch.utils.data.Sampler):
    """Splits a data set over the ranks, without the samples that an interrupted epoch has processed already.

    dataset: of known length.  shuffle: the same order on all ranks, a new one in each epoch.  seed: of that order.
    Call set_epoch() at the end of each epoch, and record_batch() after each batch.
    """

    def __init__(self, dataset, shuffle=True, seed=0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices = set()
        self.reset()

    def set_epoch(self, epoch):
        """Begin an epoch, with no sample processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx, batch_size):
        """Record that this rank has processed its batch number `batch_idx` of `batch_size` samples."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices):
        """Record that these samples have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx, batch_size):
        """The samples of this rank's batch number `batch_idx`."""
        begin = batch_idx * batch_size
        return self.indices[begin:begin + batch_size]

    def state_dict(self):
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict):
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self):
        """Split the remaining samples equally over the present ranks; some samples come twice."""
        self.rank, self.num_replicas = _job.rank(), _job.size()
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(left)
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        wanted = self.num_samples * self.num_replicas
        padded = (left * (1 + wanted // max(1, len(left))))[:wanted]
        self.indices = padded[self.rank:wanted:self.num_replicas]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return self.num_samples
