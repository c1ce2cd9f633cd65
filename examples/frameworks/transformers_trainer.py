"""Hugging Face's Trainer over the backend "tally", with a tiny model made here:

    torchrun --standalone --nproc-per-node 2 examples/frameworks/transformers_trainer.py

SPDX-License-Identifier: Apache-2.0
"""

import hashlib
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tally.torch  # noqa: F401  registers the backend; not needed where Tally was installed by pip


class Sentences(torch.utils.data.Dataset):
    """Numbers that count up, modulo the vocabulary."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(12) + index) % 32
        return {"input_ids": ids, "labels": ids}


def main():
    dist.init_process_group("tally")  # before the Trainer makes a group of its own
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2,
                                       bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                                      save_strategy="no", disable_tqdm=True, learning_rate=1e-2, logging_strategy="no")
        trainer = Trainer(model, arguments, train_dataset=Sentences())
        trainer.train()
    model.eval()
    data = Sentences()
    whole = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        loss = model(**whole).loss.item()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    print("rank %d: loss %.4f, parameters %s" % (dist.get_rank(), loss, digest), flush=True)
    assert arguments.world_size == dist.get_world_size() and dist.get_backend() == "tally"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
