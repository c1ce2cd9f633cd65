"""16-bit gradients, float32 masters and LARS: what large batches need, with tally.torch.

    build/bin/tally run -n 4 -k 2 -- python3 examples/lars.py

Trains the network of horovod_style.py in bfloat16 on scikit-learn's handwritten digits.  Gradients are bfloat16, and so half as
many bytes go over the network; each rank holds masters of the parameters in float32, and updates these.  Prints rank 0's loss
and accuracy, and from each rank a checksum of its parameters at the end, which are the same on all.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import zlib

import torch
import torch.nn.functional as F
from horovod_style import Digits, make_model
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import tally.torch as hvd


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling for parameters of 16 bits (You, Gitman, Ginsburg: "Large Batch Training of
    Convolutional Networks", 2017, algorithm 1), on float32 masters.  Of each parameter w with gradient g:

        local = trust |w| / (|g| + weight_decay |w|)
        v     = momentum v + lr local (g + weight_decay w)
        w     = w - v

    The trust ratio `local` makes an update as large as its layer's weights allow, whatever the gradient's length.  Parameters
    of one dimension (biases) have neither it nor weight decay, as is usual.  w, g and v are float32; the model gets w rounded.
    """

    def __init__(self, parameters, lr, momentum=0.9, weight_decay=5e-4, trust=0.02):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._descend(p, group)
        return loss

    def load_state_dict(self, state_dict):
        """Like the optimizer's own, which makes state of the parameters' type; this one's stays float32."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for p, number in zip(group["params"], saved["params"]):
                for key, value in state_dict["state"].get(number, {}).items():
                    self.state[p][key] = value.to(p.device, torch.float32, copy=True)

    def _descend(self, p, group):
        state = self.state[p]
        if not state:
            state["master"], state["momentum"] = p.float(), torch.zeros_like(p, dtype=torch.float32)
        w, v, g = state["master"], state["momentum"], p.grad.float()
        rate = group["lr"]
        if p.dim() > 1:
            w_norm, g_norm = w.norm(), g.norm()
            g = g.add(w, alpha=group["weight_decay"])
            bound = g_norm + group["weight_decay"] * w_norm
            if w_norm > 0 and bound > 0:
                rate = rate * group["trust"] * (w_norm / bound).item()
        v.mul_(group["momentum"]).add_(g, alpha=rate)
        w.sub_(v)
        p.copy_(w)


def accuracy(model):
    test = Digits(train=False)
    with torch.no_grad():
        return (model(test.images.bfloat16()).argmax(1) == test.labels).float().mean().item()


def main(args):
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # ranks differ until the broadcast
    data = Digits(train=True)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    model = make_model().bfloat16()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(Lars(model.parameters(), args.lr), named_parameters=model.named_parameters())
    # The rate rises over an epoch and then falls with the square of what is left, as in the paper.
    steps, rise = args.epochs * len(loader), len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / rise, 1) * (1 - t / steps) ** 2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.bfloat16()).float(), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print("epoch %d  loss %.4f  accuracy %.3f" % (epoch + 1, mean, accuracy(model)), flush=True)
    bits = b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in model.parameters())
    print("rank %d: parameters %08x" % (hvd.rank(), zlib.crc32(bits)), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="16-bit gradients, float32 masters and LARS")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="images of one rank in one step")
    parser.add_argument("--lr", type=float, default=1.5, help="learning rate at its highest")
    parser.add_argument("--seed", type=int, default=1)
    torch.set_num_threads(1)
    main(parser.parse_args())
