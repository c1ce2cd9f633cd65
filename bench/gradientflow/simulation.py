"""Training by sparse chunks with all ranks played by one process.

It has the steps, and the bits, of a job whose ranks use tally.torch.DistributedOptimizer(sparse=...) on a machine each.

SPDX-License-Identifier: Apache-2.0
"""

import torch

from tally.torch.horovod.sparse_chunks import Chunks, History, GradientLayout, restore, save


def tree(inputs):
    """The sum as Tally nests it: T(lo, lo + m) + T(lo + m, hi), m the largest power of two below hi - lo."""
    if len(inputs) == 1:
        return inputs[0]
    m = 1 << ((len(inputs) - 1).bit_length() - 1)
    return tree(inputs[:m]) + tree(inputs[m:])


class Simulation:
    """`ranks` ranks that hold one model.

    optimizer: a torch.optim.SGD.  options: SparseChunks.
    order: names of parameters, in the order in which backward makes their gradients.  None: from the output to the input.
    dense: steps that send everything, before the ranks agree on that order.
    keep: 1, or the momentum, as in Algorithm 1 of GradientFlow.
    states: what state_dicts() of an earlier simulation has returned.
    """

    def __init__(self, model, optimizer, options, ranks, order=None, dense=0, keep=1.0, states=None):
        self.parameters = dict(model.named_parameters())
        self.optimizer, self.options, self.dense, self.keep = optimizer, options, dense, keep
        self.order = order or [*reversed(self.parameters)]
        self._names = {id(p): name for name, p in self.parameters.items()}
        if states is None:
            chunks = Chunks(options, GradientLayout({name: self.parameters[name] for name in self.order}))
            self.histories = [History(chunks, keep=keep) for _ in range(ranks)]
        else:
            self.histories = [restore(state, rank, options, self.parameters) for rank, state in enumerate(states)]
            for history in self.histories:
                history.chunks = self.chunks  # one process has them once

    @property
    def chunks(self):
        return self.histories[0].chunks

    def _lay_out(self):
        layout = GradientLayout({name: self.parameters[name] for name in self.order})
        before, chunks = self.histories, Chunks(self.options, layout)
        self.histories = [History(chunks, keep=self.keep) for _ in before]
        for history, old in zip(self.histories, before):
            history.take(old)
        chunks.choose_all()

    def exchange(self, backward):
        """The gradients of a step, averaged, as DistributedOptimizer.synchronize() leaves them.

        backward: called with the number of each rank; computes that rank's gradients."""
        is_dense, self.dense = self.dense > 0, self.dense - 1
        if self.dense == -1:
            self._lay_out()
        own = []
        for rank, history in enumerate(self.histories):
            self.optimizer.zero_grad()
            backward(rank)
            gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
            for name, gradient in gradients.items():
                history.add_dense(name, gradient, {}) if is_dense else history.add(name, gradient)
            own.append(gradients)
        (self._send_all if is_dense else self._send_chosen)(own)

    def _send_all(self, own):
        for name, p in self.parameters.items():
            p.grad = tree([gradients[name] for gradients in own]) / len(own)
        finite = all(p.grad.isfinite().all() for p in self.parameters.values())
        self.chunks.advance_dense()
        for history in self.histories:
            history.settle_dense(finite)

    def _send_chosen(self, own):
        chunks = self.chunks
        message = tree([history.message(rank == 0) for rank, history in enumerate(self.histories)])
        for begin, end, chosen in chunks.runs(chunks.chosen):
            if chosen:
                sums = tree([history.gradients[begin:end] for history in self.histories])
                self.histories[0].gradients[begin:end] = sums / len(own)
        outcome = chunks.outcome(message)
        chunks.advance(outcome)
        for history in self.histories:
            if outcome.finite:
                history.put_off()
            history.settle(outcome.finite)
        layout, gradients = chunks.layout, self.histories[0].gradients
        for name, p in self.parameters.items():
            begin = layout.begins[name]
            p.grad = gradients[begin:begin + p.numel()].view_as(p)

    def step(self, backward):
        """exchange(), then the optimizer's step."""
        self.exchange(backward)
        if self.chunks.is_dense():
            self.optimizer.step()
        else:
            self.chunks.update(self.optimizer.param_groups, self.optimizer.state, self._names)

    def state_dicts(self):
        """What each rank's state_dict() has of its history."""
        return [save(history, rank) for rank, history in enumerate(self.histories)]
