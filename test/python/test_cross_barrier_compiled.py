"""Training without the optimizer's barrier under torch.compile."""

import subprocess
import sys
import warnings

import jobs
from test_cross_barrier import WIDTH, distributed, due, late, loss_of, make_model, same, values


def compiled():
    """Gates in front of what is compiled, and none inside; compiled as a whole the barrier stays."""
    import torch
    from torch._dynamo.utils import counters

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.other(self.one(x).tanh()) + self.one.bias

    def train(cross, prepare):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(make_model(), Block())
        optimizer = distributed(model, cross)
        model = prepare(model) or model
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return values(model), due()

    def wrap_block(model):
        model[1] = torch.compile(model[1], backend="eager", fullgraph=True)

    def compile_block(model):
        model[1].compile(backend="eager", fullgraph=True)

    def wrap_all(model):
        return torch.compile(model, backend="eager")

    def compile_all(model):
        model.compile(backend="eager")

    for prepare, some in ((wrap_block, True), (compile_block, True), (wrap_all, False), (compile_all, False)):
        counters.clear()
        with late(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine, left = train(True, prepare)
        assert not some or counters["stats"]["unique_graphs"] == 1, "compiled once, in one piece"
        said = [str(one.message) for one in caught if "compiled as a whole" in str(one.message)]
        assert len(said) == (0 if some else 1), (prepare, said)
        theirs, _ = train(False, prepare)
        assert same(mine, theirs), prepare


def compiled_functions():
    """A compiled function that reads modules past all others finds them updated, whenever it was compiled: behind the first
    step(), before the optimizer was made, and anew behind a reset."""
    import torch
    from tally.torch.crossing import gates

    class Own(torch.nn.Linear):
        pass

    def train(cross, early, reset):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), Own(WIDTH, WIDTH))
        function = torch.compile(lambda x: model[2](model[1](model[0](x).tanh())).square().mean(), backend="eager")
        x = torch.ones(2, WIDTH)
        if early:
            function(x)
        optimizer = distributed(model, cross)
        bare, left = len(gates._bare.intersection(model)), []
        for step in range(4):
            if reset and step == reset:
                torch._dynamo.reset()
            optimizer.zero_grad()
            (function(x * step) if step else model(x).sum()).backward()
            assert not cross or due() == 0
            optimizer.step()
            left.append(due())
        return values(model), bare, left

    for early, reset in ((False, 0), (True, 0), (False, 1), (False, 2)):
        with late():
            mine, bare, left = train(True, early, reset)
        hears = hasattr(torch._dynamo, "callback_handler")  # PyTorch 2.3
        assert bare == (2 if hears and not early else 0), "no hook in front of torch's own"
        assert left == [6] * 4
        theirs, _, _ = train(False, early, reset)
        assert same(mine, theirs), (early, reset)


def test_import_leaves_the_compiler_out():
    """It takes seconds to import."""
    program = ("import sys, torch, torch.distributed, torch.nn.parallel; before = 'torch._dynamo' in sys.modules; "
               "import tally.torch; assert ('torch._dynamo' in sys.modules) == before")
    subprocess.run([sys.executable, "-c", program], env=jobs.environment(), check=True)


def test_compiled(two):
    two(compiled, timeout=300)


def test_compiled_functions(two):
    two(compiled_functions, timeout=300)
