"""Optimizers of the user whose methods and attributes have any names, in a DistributedOptimizer."""

from test_ops import hvd


def with_names():
    """A user's optimizer with methods and attributes of names that Tally's classes might take.  Returns those that do."""
    import torch
    t = hvd()

    class Own(torch.optim.SGD):
        """Each private name is a method of its own, which step() calls."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self._order, self._handles, self._sent = "order", "handles", "sent"

        def _update(self, p):
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])

        def _slots(self):
            return [p for group in self.param_groups for p in group["params"]]

        def _clip(self):
            return "clip"

        def rescale(self):
            return "rescale"

        def step(self, closure=None):
            assert (self._order, self._handles, self._sent) == ("order", "handles", "sent")
            assert (self._clip(), self.rescale()) == ("clip", "rescale")
            for p in self._slots():
                self._update(p)

    model = torch.nn.Linear(4, 4)
    optimizer = t.DistributedOptimizer(Own(model.parameters(), lr=1.0), model.named_parameters())
    t.broadcast_parameters(model.state_dict(), 0)
    before = model.bias.detach().clone()
    model(torch.ones(1, 4)).sum().mul(t.rank() + 1).backward()
    optimizer.step()
    return torch.equal(model.bias, before - (t.size() + 1) / 2)


def test_names_of_a_users_optimizer(two):
    assert two(with_names) == [True] * 2


def test_all_that_is_not_horovods_has_a_prefix():
    """Also what our classes inherit from each other.  sparse= takes torch.optim.SGD alone, so SparseOptimizer's may have any names."""
    from tally.torch.crossing.deferred import Original
    from tally.torch.ddp import cross_barrier as ddp
    from tally.torch.horovod import cross_barrier as horovod
    public = {"state", "step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "synchronize", "skip_synchronize",
              "set_backward_passes_per_step"}
    for kind in Original, horovod.CrossBarrier, ddp.CrossBarrier:
        names = {name for one in kind.__mro__ if one is not object for name in vars(one) if not name.startswith("__")}
        assert not {name for name in names - public if not name.startswith("_tally_")}, kind
