"""The models of `workloads.py` for PyTorch: the same mathematics.

Layers, epsilons and momenta are those of Keras; the layout of images is
PyTorch's. What a user of PyTorch would not write apart is one here too: the
three projections of attention are one `Linear`.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from peer_data import FEATURES
from peer_data import NUM_CLASSES
from peer_data import ROWS
from peer_data import SEQUENCE
from peer_data import VOCABULARY
from torch import nn

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class TorchWorkload:
    """A model and its optimizer; the data are those of Keras.

    Attributes:
        build: Returns the model.
        optimizer: Returns the optimizer for its parameters.
        images: Whether the input is an image, in the layout of Keras.
    """

    build: Callable[[], nn.Module]
    optimizer: Optimizer
    images: bool = False


def _batch_norm(channels: int, epsilon: float = 1e-3) -> nn.BatchNorm2d:
    # The momentum of PyTorch is the share of the new value, not of the old.
    return nn.BatchNorm2d(channels, eps=epsilon, momentum=0.01)


def mlp() -> nn.Module:
    widths = (1024, 2048, 2048, 2048, 2048)
    parts: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], NUM_CLASSES))


def cnn() -> nn.Module:
    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            _batch_norm(outputs),
            nn.ReLU(),
        ]

    parts = conv(3, 64)
    inputs = 64
    for filters in (64, 128, 256):
        parts += [*conv(inputs, filters), *conv(filters, filters)]
        parts.append(nn.MaxPool2d(2))
        inputs = filters
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(inputs, NUM_CLASSES))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output."""
        batch, length, width = x.shape
        heads = self.projections(x).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm block of a Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width, eps=1e-3)
        self.attention = Attention(width, 4)
        self.second_norm = nn.LayerNorm(width, eps=1e-3)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output."""
        x = x + self.attention(self.first_norm(x))
        return x + self.contract(F.gelu(self.expand(self.second_norm(x))))


class Transformer(nn.Module):
    """A decoder that predicts the next character."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.norm = nn.LayerNorm(width, eps=1e-3)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output."""
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.tokens(x) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class Bottleneck(nn.Module):
    """A block of ResNet v1, which strides in its first convolution."""

    def __init__(self, inputs: int, filters: int, stride: int, project: bool):
        super().__init__()
        outputs = 4 * filters
        self.shortcut = (
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride),
                _batch_norm(outputs, 1.001e-5),
            )
            if project
            else nn.Identity()
        )
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, filters, 1, stride),
            _batch_norm(filters, 1.001e-5),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            _batch_norm(filters, 1.001e-5),
            nn.ReLU(),
            nn.Conv2d(filters, outputs, 1),
            _batch_norm(outputs, 1.001e-5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output."""
        return F.relu(self.shortcut(x) + self.residual(x))


def resnet50() -> nn.Module:
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3),
        _batch_norm(64, 1.001e-5),
        nn.ReLU(),
        # Keras pads with zeros, the same after a ReLU.
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = 64
    for filters, blocks, stride in (
        (64, 3, 1),
        (128, 4, 2),
        (256, 6, 2),
        (512, 3, 2),
    ):
        for index in range(blocks):
            first = index == 0
            parts.append(
                Bottleneck(inputs, filters, stride if first else 1, first)
            )
            inputs = 4 * filters
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(inputs, NUM_CLASSES))


def embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(ROWS, 32),
        nn.Flatten(),
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )


class Lstm(nn.Module):
    """Two LSTM layers and a head on the last output."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, width, num_layers=2, batch_first=True)
        # Keras has one bias where PyTorch adds two.
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output."""
        return self.head(self.lstm(x)[0][:, -1])


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, eps=1e-7, fused=True)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, fused=True)


WORKLOADS = {
    "mlp": TorchWorkload(mlp, _adam),
    "cnn": TorchWorkload(cnn, _adam, images=True),
    "transformer": TorchWorkload(Transformer, _adam),
    "resnet50": TorchWorkload(resnet50, _sgd, images=True),
    "embedding": TorchWorkload(embedding, _adam),
    "lstm": TorchWorkload(Lstm, _adam),
}


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy from logits, in float32."""
    logits = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(logits, targets.reshape(-1))
