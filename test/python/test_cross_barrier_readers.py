"""Training without the optimizer's barrier: what torch makes of a model reads its parameters updated."""

import copy
import os
import pickle
import warnings

import pytest

from test_cross_barrier import WIDTH, distributed, due, late, same
from test_ops import hvd


def scripted():
    """A model that torch.jit scripts or traces behind step() reads what is updated, and its steps wait from then on."""
    import torch
    x = torch.ones(1, WIDTH)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for convert in (torch.jit.script, lambda model: torch.jit.trace(model, x)):
        for children in (torch.nn.Tanh, torch.nn.Identity):
            with late(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), children(), torch.nn.Linear(WIDTH, 1))
                optimizer = distributed(model)
                step(model, optimizer)
                assert due() == 4
                copied = convert(copy.deepcopy(model))
                step(model, optimizer)
                assert due() == 4, "a copy makes no step wait"
                made = convert(model)
                for _ in range(2):
                    assert torch.equal(made(x), model(x)) and not torch.equal(copied(x), made(x))
                    step(model, optimizer)
                    assert due() == 0
            said = [str(one.message) for one in caught if "ScriptModule, whose C++ code" in str(one.message)]
            assert len(said) == 1, [str(one.message) for one in caught]


def two_layers():
    import torch
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def transforms():
    """{name: (prepare: model -> made, read: (model, made, x) -> tensor)}; what torch makes of a model, made in front of a step
    and read behind it, or made and read behind it."""
    import io
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    call = torch.func.functional_call

    def saved(thing):
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def of_vector(vector, x):
        model = two_layers()
        vector_to_parameters(vector, model.parameters())
        return model(x)

    def loaded(state, x):
        model = two_layers()
        model.load_state_dict(state)
        return model(x)

    def exported(model, strict=False):
        return torch.export.export(model, (torch.ones(1, WIDTH),), strict=strict)

    def exported_file(program):
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file).module()

    def averaged(model):
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        return average

    def stacked(model, x):
        parameters, buffers = torch.func.stack_module_state([model])
        return call(model, {name: p[0] for name, p in parameters.items()}, x)

    def itself(model):
        return model

    return {
        "fx": (torch.fx.symbolic_trace, lambda model, made, x: made(x)),
        "fx behind": (itself, lambda model, made, x: torch.fx.symbolic_trace(model)(x)),
        "make_fx": (lambda model: make_fx(model)(torch.ones(1, WIDTH)), lambda model, made, x: made(x)),
        "functional_call": (itself, lambda model, made, x: call(two_layers(), dict(model.named_parameters()), x)),
        "functional_call of itself": (itself, lambda model, made, x: call(model, {}, x)),
        "stack_module_state": (itself, lambda model, made, x: stacked(model, x)),
        "parameters_to_vector": (itself, lambda model, made, x: of_vector(parameters_to_vector(model.parameters()), x)),
        "deepcopy": (itself, lambda model, made, x: copy.deepcopy(model)(x)),
        "pickle": (itself, lambda model, made, x: pickle.loads(pickle.dumps(model))(x)),
        "save": (itself, lambda model, made, x: saved(model)(x)),
        "save state_dict": (itself, lambda model, made, x: loaded(saved(model.state_dict()), x)),
        "AveragedModel": (itself, lambda model, made, x: averaged(model)(x)),
        "export": (exported, lambda model, made, x: made.module()(x)),
        "export's module": (lambda model: exported(model).module(), lambda model, made, x: made(x)),
        "export behind": (itself, lambda model, made, x: exported(model).module()(x)),
        "export strict": (lambda model: exported(model, True).module(), lambda model, made, x: made(x)),
        "export strict behind": (itself, lambda model, made, x: exported(model, True).module()(x)),
        "export's state_dict": (exported, lambda model, made, x: call(two_layers(), made.state_dict, x)),
        "export's parameters": (exported, lambda model, made, x: call(two_layers(), dict(made.named_parameters()), x)),
        "export saved": (exported, lambda model, made, x: exported_file(made)(x)),
        "export unflattened": (exported, lambda model, made, x: torch.export.unflatten(made)(x)),
        "export decomposed": (exported, lambda model, made, x: made.run_decompositions().module()(x))}


def transform(names):
    """Each of these reads what the barrier would have left, behind each step, and no step waits for it."""
    import torch
    x = torch.full((1, WIDTH), 0.5)

    def train(cross, prepare, read, early):
        torch.manual_seed(0)
        model = two_layers()
        made = prepare(model) if early else None
        optimizer = distributed(model, cross)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            model(x + step).sum().backward()
            optimizer.step()
            assert not cross or due() == 4
            made = prepare(model) if made is None else made
            seen.append(read(model, made, x).detach().clone().numpy())
        optimizer.synchronize()
        return seen

    every = transforms()
    for name in names:
        prepare, read = every[name]
        for early in (False, True):
            with late(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mine = train(True, prepare, read, early)
                theirs = train(False, prepare, read, early)
            assert same(mine, theirs) and len({value.tobytes() for value in mine}) == 3, (name, early)


def look_again():
    """Two optimizers: the first one's look at what is new takes nothing from the second's."""
    import torch
    x = torch.ones(1, WIDTH)
    with late(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [two_layers(), two_layers()]
        optimizers = [hvd().DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                                 [("%d.%s" % (i, name), p) for name, p in model.named_parameters()],
                                                 cross_barrier=True) for i, model in enumerate(models)]
        scripts = [torch.jit.script(model) for model in models]
        for model, made, optimizer in zip(models, scripts, optimizers):
            optimizer.zero_grad()
            model(x).sum().backward()
            before = made(x).clone()
            optimizer.step()
            assert due() == 0 and not torch.equal(before, made(x))


def sharing():
    """Memory that another process reads: it is up to date behind step(), and its steps wait from then on."""
    import torch
    from multiprocessing.reduction import ForkingPickler
    x = torch.ones(1, WIDTH)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    def read_by_another(model):
        """The model's output in a process that reads its memory past all gates."""
        there, here = os.pipe()
        child = os.fork()
        if child == 0:
            with open(here, "wb", buffering=0) as file:
                total = 0.0
                for layer in (model[0], model[2]):
                    total += sum(dict.__getitem__(layer._parameters, name).detach().numpy().sum() for name in ("weight", "bias"))
                file.write(repr(float(total)).encode())
            os._exit(0)
        os.close(here)
        with open(there, "rb") as file:
            result = float(file.read())
        assert os.waitpid(child, 0)[1] == 0
        return result

    ways = {"share_memory": (lambda model: model.share_memory(), False), "share_memory_": (
        lambda model: [p.share_memory_() for p in model.parameters()], False),
        "before": (lambda model: model.share_memory(), True),
        "sent": (lambda model: ForkingPickler.dumps(model), False)}
    for name, (share, early) in ways.items():
        with late(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = two_layers()
            if early:
                share(model)
            optimizer = distributed(model)
            step(model, optimizer)
            assert early or due() == 4
            if not early:
                share(model)
            for _ in range(2):
                assert due() == 0, name
                total = sum(p.detach().numpy().sum() for layer in (model[0], model[2]) for p in (layer.weight, layer.bias))
                assert abs(read_by_another(model) - total) < 1e-5
                step(model, optimizer)
            optimizer.synchronize()
        said = [str(one.message) for one in caught if "shared memory, where another process" in str(one.message)]
        assert len(said) == 1, (name, [str(one.message) for one in caught])


@pytest.mark.parametrize("case", (scripted, look_again, sharing), ids=lambda case: case.__name__)
def test_case(two, case):
    two(case)


@pytest.mark.parametrize("names", (
    ("fx", "fx behind", "make_fx"), ("functional_call", "functional_call of itself", "stack_module_state", "parameters_to_vector"),
    ("deepcopy", "pickle", "save", "save state_dict", "AveragedModel"),
    ("export", "export's module", "export behind"), ("export strict", "export strict behind"),
    ("export's state_dict", "export's parameters", "export saved", "export unflattened", "export decomposed")),
    ids=lambda names: names[0])
def test_transform(two, names):
    two(transform, names, timeout=300)
