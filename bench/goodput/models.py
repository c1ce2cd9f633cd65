#!/usr/bin/env python3
"""The gradients of six models: names and sizes of their tensors, computed from the layers.

    bench/goodput/models.py                # tensors and parameters of each, beside the literature's figure
    bench/goodput/models.py resnet50       # its tensors, in the order of the forward pass

They are the models of BytePS's evaluation (OSDI 2020, section 7), named as their PyTorch implementations name them.
goodput.py sums such a list as training would.  SPDX-License-Identifier: Apache-2.0
"""

import sys


class Layers:
    """Collects (name, number of elements) of what is trained, in the order of the forward pass."""

    def __init__(self):
        self.tensors = []

    def add(self, name, *shape):
        count = 1
        for d in shape:
            count *= d
        self.tensors.append((name, count))

    def conv(self, name, inputs, outputs, kernel, bias=False):
        self.add(name + ".weight", outputs, inputs, kernel, kernel)
        if bias:
            self.add(name + ".bias", outputs)

    def linear(self, name, inputs, outputs, bias=True):
        self.add(name + ".weight", outputs, inputs)
        if bias:
            self.add(name + ".bias", outputs)

    def norm(self, name, features):
        """Batch or layer normalization."""
        self.add(name + ".weight", features)
        self.add(name + ".bias", features)


def resnet50():
    net = Layers()
    net.conv("conv1", 3, 64, 7)
    net.norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}."
            for i, (a, b, kernel) in enumerate(((inputs, width, 1), (width, width, 3), (width, 4 * width, 1)), 1):
                net.conv(f"{name}conv{i}", a, b, kernel)
                net.norm(f"{name}bn{i}", b)
            if block == 0:
                net.conv(name + "downsample.0", inputs, 4 * width, 1)
                net.norm(name + "downsample.1", 4 * width)
            inputs = 4 * width
    net.linear("fc", 2048, 1000)
    return net.tensors


def vgg16():
    net = Layers()
    inputs, place = 3, 0
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            net.conv(f"features.{place}", inputs, width, 3, bias=True)
            inputs, place = width, place + 2  # a ReLU behind each
        place += 1  # a pooling behind each group
    net.linear("classifier.0", 512 * 7 * 7, 4096)
    net.linear("classifier.3", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return net.tensors


def bert_large():
    """For pre-training: with both heads; the decoder's weight is the word embedding's."""
    net = Layers()
    hidden, inner, words = 1024, 4096, 30522
    for name, rows in (("word", words), ("position", 512), ("token_type", 2)):
        net.add(f"bert.embeddings.{name}_embeddings.weight", rows, hidden)
    net.norm("bert.embeddings.LayerNorm", hidden)
    for i in range(24):
        name = f"bert.encoder.layer.{i}."
        for part in ("query", "key", "value"):
            net.linear(f"{name}attention.self.{part}", hidden, hidden)
        net.linear(name + "attention.output.dense", hidden, hidden)
        net.norm(name + "attention.output.LayerNorm", hidden)
        net.linear(name + "intermediate.dense", hidden, inner)
        net.linear(name + "output.dense", inner, hidden)
        net.norm(name + "output.LayerNorm", hidden)
    net.linear("bert.pooler.dense", hidden, hidden)
    net.linear("cls.predictions.transform.dense", hidden, hidden)
    net.norm("cls.predictions.transform.LayerNorm", hidden)
    net.add("cls.predictions.bias", words)
    net.linear("cls.seq_relationship", hidden, 2)
    return net.tensors


def gpt2():
    """The smallest, of 124 million; the head's weight is the word embedding's."""
    net = Layers()
    width = 768
    net.add("transformer.wte.weight", 50257, width)
    net.add("transformer.wpe.weight", 1024, width)
    for i in range(12):
        name = f"transformer.h.{i}."
        net.norm(name + "ln_1", width)
        net.linear(name + "attn.c_attn", width, 3 * width)
        net.linear(name + "attn.c_proj", width, width)
        net.norm(name + "ln_2", width)
        net.linear(name + "mlp.c_fc", width, 4 * width)
        net.linear(name + "mlp.c_proj", 4 * width, width)
    net.norm("transformer.ln_f", width)
    return net.tensors


def transformer():
    """Transformer (big) for WMT English to German; one embedding of 37000 word pieces serves both sides and the
    output.  Layers as fairseq names them."""
    net = Layers()
    width, inner = 1024, 4096

    def attention(name):
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            net.linear(f"{name}.{part}", width, width)
        net.norm(name + "_layer_norm", width)

    def feed_forward(name):
        net.linear(name + "fc1", width, inner)
        net.linear(name + "fc2", inner, width)
        net.norm(name + "final_layer_norm", width)

    net.add("embed_tokens.weight", 37000, width)
    for i in range(6):
        attention(f"encoder.layers.{i}.self_attn")
        feed_forward(f"encoder.layers.{i}.")
    for i in range(6):
        attention(f"decoder.layers.{i}.self_attn")
        attention(f"decoder.layers.{i}.encoder_attn")
        feed_forward(f"decoder.layers.{i}.")
    return net.tensors


def ugatit():
    """The full model at 256 x 256, as the authors' program has it by default: both generators and all four
    discriminators."""
    net = Layers()

    def generator(name, width=64, blocks=4, size=256):
        inner = 4 * width
        net.conv(name + "DownBlock.1", 3, width, 7)
        net.conv(name + "DownBlock.5", width, 2 * width, 3)
        net.conv(name + "DownBlock.9", 2 * width, inner, 3)
        for i in range(blocks):
            net.conv(f"{name}DownBlock.{12 + i}.conv_block.1", inner, inner, 3)
            net.conv(f"{name}DownBlock.{12 + i}.conv_block.5", inner, inner, 3)
        net.linear(name + "gap_fc", inner, 1, bias=False)
        net.linear(name + "gmp_fc", inner, 1, bias=False)
        net.conv(name + "conv1x1", 2 * inner, inner, 1, bias=True)
        net.linear(name + "FC.0", (size // 4) * (size // 4) * inner, inner, bias=False)  # 0.4 of all parameters
        for part in ("FC.2", "gamma", "beta"):
            net.linear(name + part, inner, inner, bias=False)
        for i in range(1, blocks + 1):
            for j in (1, 2):
                net.conv(f"{name}UpBlock1_{i}.conv{j}", inner, inner, 3)
                net.add(f"{name}UpBlock1_{i}.norm{j}.rho", inner)
        for place, inputs in ((2, inner), (7, 2 * width)):
            net.conv(f"{name}UpBlock2.{place}", inputs, inputs // 2, 3)
            for part in ("rho", "gamma", "beta"):
                net.add(f"{name}UpBlock2.{place + 1}.{part}", inputs // 2)
        net.conv(name + "UpBlock2.11", width, 3, 7)

    def discriminator(name, layers, width=64):
        net.conv(name + "model.1", 3, width, 4, bias=True)
        for i in range(layers - 2):
            net.conv(f"{name}model.{4 + 3 * i}", width, 2 * width, 4, bias=True)
            width *= 2
        net.linear(name + "gap_fc", width, 1, bias=False)
        net.linear(name + "gmp_fc", width, 1, bias=False)
        net.conv(name + "conv1x1", 2 * width, width, 1, bias=True)
        net.conv(name + "conv", width, 1, 4)

    generator("genA2B.")
    generator("genB2A.")
    for name, layers in (("disGA.", 7), ("disGB.", 7), ("disLA.", 5), ("disLB.", 5)):
        discriminator(name, layers)
    return net.tensors


# {name: (the list, the literature's number of parameters in millions, how far it may be off, where that stands)}
MODELS = {
    "resnet50": (resnet50, 25.557, 0.001, "torchvision, ResNet50_Weights"),
    "vgg16": (vgg16, 138.358, 0.001, "torchvision, VGG16_Weights; 138 in Simonyan and Zisserman, table 2"),
    "bert-large": (bert_large, 340, 5, "Devlin et al., section 3"),
    "gpt2": (gpt2, 124.4, 0.1, "OpenAI's published weights; 117 in the paper is a slip"),
    "transformer": (transformer, 213, 2, "Vaswani et al., table 3, big"),
    "ugatit": (ugatit, 670.7, 0.2, "134.0 of its light form (Chen et al., NICE-GAN) and 2 x 268.4 of FC.0"),
}


def tensors(model):
    """[(name, number of elements)] in the order of the forward pass."""
    return MODELS[model][0]()


def backward(model, scale=1.0):
    """The same in the order in which backward makes gradients, the last layer's first, and every size times `scale`:
    evenly, so that small tensors stay small beside large ones."""
    return [(name, max(1, round(count * scale))) for name, count in reversed(tensors(model))]


def main():
    if len(sys.argv) > 1:
        for model in sys.argv[1:]:
            if model not in MODELS:
                sys.exit(f"models: there is no {model}, only {', '.join(MODELS)}")
            for name, count in tensors(model):
                print(f"{count:10} {name}")
        return
    print(f"{'model':12} {'tensors':>7} {'parameters':>11} {'literature':>11} {'float32':>9} {'largest':>7}")
    for model, (_, millions, _, source) in MODELS.items():
        counts = [count for _, count in tensors(model)]
        print(
            f"{model:12} {len(counts):7} {sum(counts):11} {millions:10.5g}M {sum(counts) * 4 / 1e6:6.0f} MB "
            f"{max(counts) / sum(counts):7.2f}  {source}"
        )


if __name__ == "__main__":
    main()
