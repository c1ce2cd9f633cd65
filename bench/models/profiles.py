#!/usr/bin/env python3
"""How long the layers of seven models compute on a V100, and what each of them has to sum.

    bench/models/profiles.py               # per-step times of each, and where they are from
    bench/models/profiles.py vgg16         # its layers

A layer's time is its share of the model's multiplications; the whole of a step is published, or follows from a published
rate (SOURCES).  Forward takes a third and backward two thirds, as each multiplies once and twice as much.
SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "goodput"))

import models as lists  # noqa: E402

FORWARD_SHARE = 1 / 3

# Of one V100, float32.
RESNET50_IMAGES_PER_S = 405  # Lambda, "RTX 2080 Ti Deep Learning Benchmarks with TensorFlow", 2019, column V100
TRANSFORMER_TOKENS_PER_S = 7635  # NVIDIA DeepLearningExamples, PyTorch/Translation/Transformer, V100 16 GB, 2560 tokens
# Of one P100, synthetic data: TensorFlow's guide "Benchmarks", 2017.  Their ratio gives the others on a V100.
P100_IMAGES_PER_S = {"resnet50": 219, "vgg16": 154, "alexnet": 2987}


@dataclasses.dataclass
class Layer:
    """One step of the forward chain.  tensors: [(name, number of elements)]; macs: multiplications of a forward for one
    sample; forward_s and backward_s: of a batch."""

    name: str
    tensors: list
    macs: float
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def bytes(self):
        return 4 * sum(count for _, count in self.tensors)


@dataclasses.dataclass
class Profile:
    """A model on one GPU.  Samples are images or tokens."""

    name: str
    layers: list
    batch: int
    unit: str
    source: str

    @property
    def bytes(self):
        return sum(layer.bytes for layer in self.layers)

    @property
    def forward_s(self):
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self):
        return sum(layer.backward_s for layer in self.layers)

    def scaled(self, total_bytes, seconds):
        """The same with tensors of so many bytes in all, at most its own, and times so many times as long."""
        scale = min(1.0, total_bytes / self.bytes)
        layers = [
            Layer(
                layer.name,
                [(name, max(1, round(count * scale))) for name, count in layer.tensors],
                layer.macs,
                layer.forward_s * seconds,
                layer.backward_s * seconds,
            )
            for layer in self.layers
        ]
        return Profile(self.name, layers, self.batch, self.unit, self.source)


# --- where each weight is applied: positions of a convolution's output, or tokens ------------------------


def of_vgg16(name):
    place = int(name.split(".")[1])
    if name.startswith("classifier"):
        return 1
    return {0: 224, 2: 224, 5: 112, 7: 112, 10: 56, 12: 56, 14: 56, 17: 28, 19: 28, 21: 28}.get(place, 14) ** 2


def of_resnet50(name):
    if name == "conv1.weight":
        return 112**2
    if not name.startswith("layer"):
        return 1  # fc
    stage, block, which = name.split(".")[:3]
    size = 112 >> int(stage[5:])
    # The stride is in the 3 x 3 convolution of a stage's first block: what is before it sees the larger image.
    return (2 * size if which == "conv1" and block == "0" and stage != "layer1" else size) ** 2


def of_alexnet(name):
    return {"features.0": 55, "features.3": 27}.get(name.rsplit(".", 1)[0], 13 if "features" in name else 1) ** 2


def of_ugatit(name):
    """Generators at 256 x 256 see three images for each of the batch (translation, cycle, identity), discriminators two."""
    part = name.split(".", 1)[1]
    if name.startswith("dis"):
        place = part.split(".")
        size = 256 >> (1 + (int(place[1]) - 1) // 3) if place[0] == "model" else 256 >> (5 if name[3] == "G" else 3)
        return 2 * (size**2 if "fc" not in part else 1)
    block, _, rest = part.partition(".")
    at = {"DownBlock": {"1": 256, "5": 128}, "UpBlock2": {"2": 128, "7": 256, "11": 256}}
    size = at.get(block, {}).get(rest.split(".")[0], 64)
    return 3 * (1 if block in ("gap_fc", "gmp_fc", "FC", "gamma", "beta") else size**2)


def of_text(name):
    """A token each, but for tables that are looked up."""
    return 0 if "embed" in name or ".wte." in name or ".wpe." in name else 1


def alexnet():
    """torchvision's."""
    net = lists.Layers()
    for place, inputs, outputs, kernel in ((0, 3, 64, 11), (3, 64, 192, 5), (6, 192, 384, 3), (8, 384, 256, 3), (10, 256, 256, 3)):
        net.conv(f"features.{place}", inputs, outputs, kernel, bias=True)
    net.linear("classifier.1", 9216, 4096)
    net.linear("classifier.4", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return net.tensors


# {model: (tensors, where its weights are applied, batch of a GPU, unit, table that is the output's weight too)}
MODELS = {
    "resnet50": (lists.resnet50, of_resnet50, 32, "images", None),
    "vgg16": (lists.vgg16, of_vgg16, 32, "images", None),
    "alexnet": (alexnet, of_alexnet, 128, "images", None),
    "transformer": (lists.transformer, of_text, 512, "tokens", "embed_tokens.weight"),
    "bert-large": (lists.bert_large, of_text, 2048, "tokens", "bert.embeddings.word_embeddings.weight"),
    "gpt2": (lists.gpt2, of_text, 1024, "tokens", "transformer.wte.weight"),
    "ugatit": (lists.ugatit, of_ugatit, 2, "images", None),
}


def multiplies(name):
    """Whether a tensor is a weight that multiplies: a matrix or a kernel, no bias or normalization."""
    return name.endswith(".weight") and not any(word in name for word in ("bn", "norm", "Norm", "ln_", "downsample.1"))


def layers_of(model):
    """The chain: a layer for each weight that multiplies.  What multiplies nothing (biases, normalizations, tables) belongs
    to the layer before it.  A table that is the output's weight too multiplies once more at the end, where it has no tensor:
    its gradient is complete only when backward has come to its first use."""
    tensors, applied, _, _, tied = MODELS[model]
    chain = []
    for name, count in tensors():
        macs = count * applied(name) if multiplies(name) else 0
        if macs or not chain:
            chain.append(Layer(name.rsplit(".", 1)[0], [], macs))
        chain[-1].tensors.append((name, count))
    if tied:
        chain.append(Layer("output", [], dict(tensors())[tied]))
    return chain


def published():
    """{model: (seconds of a step, where that is from)}"""
    macs = {model: sum(layer.macs for layer in layers_of(model)) for model in MODELS}
    step = {"resnet50": (1 / RESNET50_IMAGES_PER_S, "Lambda 2019: 405 images/s")}
    for model in ("vgg16", "alexnet"):
        rate = RESNET50_IMAGES_PER_S * P100_IMAGES_PER_S[model] / P100_IMAGES_PER_S["resnet50"]
        step[model] = (1 / rate, f"ResNet-50's, times {P100_IMAGES_PER_S[model]}/219 as on a P100 (TensorFlow 2017)")
    step["transformer"] = (1 / TRANSFORMER_TOKENS_PER_S, "NVIDIA DeepLearningExamples: 7635 tokens/s")
    for model, like in (("bert-large", "transformer"), ("gpt2", "transformer"), ("ugatit", "resnet50")):
        step[model] = (step[like][0] * macs[model] / macs[like], f"{like}'s multiplications a second")
    return {model: (seconds * MODELS[model][2], source) for model, (seconds, source) in step.items()}


def profile(model):
    _, _, batch, unit, _ = MODELS[model]
    seconds, source = published()[model]
    layers = layers_of(model)
    macs = sum(layer.macs for layer in layers)
    for layer in layers:
        layer.forward_s = seconds * FORWARD_SHARE * layer.macs / macs
        layer.backward_s = seconds * (1 - FORWARD_SHARE) * layer.macs / macs
    return Profile(model, layers, batch, unit, source)


def main():
    for model in sys.argv[1:]:
        if model not in MODELS:
            sys.exit(f"profiles: there is no {model}, only {', '.join(MODELS)}")
        for layer in profile(model).layers:
            print(f"{layer.bytes:11} bytes {1e3 * layer.forward_s:8.3f} ms {1e3 * layer.backward_s:8.3f} ms  {layer.name}")
    if len(sys.argv) > 1:
        return
    print(f"{'model':12} {'batch':>12} {'layers':>6} {'bytes':>11} {'GMAC':>8} {'forward':>9} {'backward':>9}")
    for model in MODELS:
        p = profile(model)
        print(
            f"{model:12} {p.batch:5} {p.unit:6} {len(p.layers):6} {p.bytes:11} {sum(layer.macs for layer in p.layers) / 1e9:8.3f} "
            f"{1e3 * p.forward_s:6.1f} ms {1e3 * p.backward_s:6.1f} ms  {p.source}"
        )


if __name__ == "__main__":
    main()
