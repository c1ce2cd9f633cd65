"""Lightning's Trainer, in three ways:

    torchrun --standalone --nproc-per-node 2 examples/frameworks/lightning_ddp.py --way backend
    torchrun --standalone --nproc-per-node 2 examples/frameworks/lightning_ddp.py --way hook
    torchrun --standalone --nproc-per-node 2 examples/frameworks/lightning_ddp.py --way cross_barrier

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import tally.torch

from problem import BATCH, STEPS, dataset, make_model, report


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TallyHook(lightning.Callback):
    """Registers the hook, on any device: DDPStrategy leaves out on the CPU what it is given as ddp_comm_hook."""

    def on_train_start(self, trainer, module):
        trainer.strategy.model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)


class CrossBarrier(lightning.Callback):
    """Has the optimizer's step() return before gradients are averaged."""

    def on_train_start(self, trainer, module):
        tally.torch.cross_barrier(trainer.strategy.model, trainer.optimizers[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "hook", "cross_barrier"), default="backend")
    way = parser.parse_args().way
    strategy = DDPStrategy(process_group_backend="tally" if way == "backend" else "gloo",
                           gradient_as_bucket_view=way == "cross_barrier")
    callbacks = {"backend": [], "hook": [TallyHook()], "cross_barrier": [CrossBarrier()]}[way]
    trainer = lightning.Trainer(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
                                num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy=strategy,
                                callbacks=callbacks, max_steps=STEPS,
                                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(dataset(), batch_size=BATCH))
    report(module.model, trainer.global_rank)
    # Lightning leaves Gloo's group to the end of the process, where one of its threads may want the interpreter that
    # has just ended: "terminate called without an active exception".
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
