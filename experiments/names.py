"""How nets, data sets and optimizers are called in titles and pictures."""

from __future__ import annotations

MODELS = {
    "mlp_500_300": "MLP (500, 300)",
    "mlp_32_16": "MLP (32, 16)",
    "usps_mlp": "MLP (30, 30, 30)",
    "logistic": "logistic regression",
    "lenet5": "LeNet5",
    "cnn": "CNN",
    "resnet20": "ResNet-20",
}
DATA = {
    "mnist": "MNIST",
    "fmnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "usps_3v5": "USPS 3 against 5",
}
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "iblr": "iBLR"}
CURVATURE = {
    "optimizer": "its own curvature",
    "diagonal": "a diagonal GGN",
    "kronecker": "K-FAC",
}


def net_on(model: str, data: str) -> str:
    """As in "LeNet5 on MNIST"."""
    return f"{MODELS[model]} on {DATA[data]}"
