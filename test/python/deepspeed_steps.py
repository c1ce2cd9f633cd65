"""Steps of DeepSpeed on this job's ranks: ZeRO's stages 0 to 3 and a pipeline, with clipped gradients.

    deepspeed_steps.py BACKEND STORE

Rank 0 prints the losses and the gradients' norms as a line of JSON that begins with "steps "."""

import json
import os
import sys

import torch

import tally.torch
from test_ddp import group


def layers():
    torch.manual_seed(1)
    return [torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(2, 6, generator=generator)
        yield x, x[:, :2].tanh()


def train(deepspeed, stage):
    """A few steps; `stage`: None for the pipeline.  Returns losses and norms."""
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
              "gradient_clipping": 0.1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage or 0}}
    if stage is None:
        from deepspeed.pipe import PipelineModule
        config["gradient_accumulation_steps"] = 2
        model = PipelineModule(layers(), num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    else:
        model = torch.nn.Sequential(*layers())
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.5, 0.9), config=config)
    data, told = batches(0 if stage is None else tally.torch.rank()), []
    for _ in range(3):
        if stage is None:
            loss = engine.train_batch(data_iter=data)
        else:
            x, y = next(data)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        told.append((float(loss), float(engine.get_global_grad_norm() or 0)))
    return told


def main():
    tally.torch.init()
    os.environ.update(RANK=str(tally.torch.rank()), WORLD_SIZE=str(tally.torch.size()), LOCAL_RANK=str(tally.torch.rank()),
                      LOCAL_SIZE=str(tally.torch.size()), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
    with group(sys.argv[1], sys.argv[2]):
        import deepspeed
        deepspeed.ops.__compatible_ops__.clear()  # else it compiles sums in shared memory of its own
        deepspeed.init_distributed(dist_backend=sys.argv[1], auto_mpi_discovery=False)
        told = {str(stage): train(deepspeed, stage) for stage in (0, 1, 2, 3, None)}
    if tally.torch.rank() == 0:
        print("steps " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
