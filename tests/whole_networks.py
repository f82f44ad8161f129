"""Small networks of which everything trains, as users hand them over, and as benchmarks of the field have.

Images have three channels and 32 x 32 pixels. Each network is named in a config by its function here. Those
of tests are smooth: where a rounding changes the sign of what a ReLU gets, or the largest of a window,
gradients jump, and updates of two ways to compute the same are further apart than `tests.rounding` can say.
"""

from __future__ import annotations

from torch import Tensor, nn

CLASSES = 10


def convolutions(
    inputs: int, widths: tuple[int, int], hidden: int, dropout: float = 0.0, smooth: bool = True
) -> nn.Module:
    """Two convolutions of 5 x 5 with pooling, two linear layers; of 32 x 32 pixels 5 x 5 are left."""
    first, second = widths
    activation, pool = (nn.GELU, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    return nn.Sequential(
        nn.Conv2d(inputs, first, 5),
        activation(),
        pool(2),
        nn.Conv2d(first, second, 5),
        activation(),
        pool(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(second * 25, hidden),
        activation(),
        nn.Dropout(dropout),
        nn.Linear(hidden, CLASSES),
    )


def cnn() -> nn.Module:
    """A narrow one of two convolutions."""
    return convolutions(3, (4, 6), 16)


def dropping_cnn() -> nn.Module:
    """The same with dropout."""
    return convolutions(3, (4, 6), 16, dropout=0.3)


class Grey(nn.Module):
    """One channel of three."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


def grey_cnn() -> nn.Module:
    """Two convolutions of images of one channel, as of handwritten characters."""
    return nn.Sequential(Grey(), *convolutions(1, (4, 6), 16))  # type: ignore[misc]


def perceptron(hidden: int = 16, inputs: int = 3 * 32 * 32) -> nn.Module:
    """Two hidden layers; the first one has LayerNorm."""
    layers = (nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, hidden))
    return nn.Sequential(nn.Flatten(), *layers, nn.GELU(), nn.Linear(hidden, CLASSES))


class Block(nn.Module):
    """Two convolutions of 3 x 3 with GroupNorm, and a connection around them.

    Args:
        inputs: Channels that it gets.
        width: Channels that it returns.
        stride: Of the first convolution.
        activation: Follows each norm.
    """

    def __init__(self, inputs: int, width: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.act = activation()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, width)
        self.around = nn.Identity() if inputs == width else nn.Conv2d(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        around: Tensor = self.around(x)
        out: Tensor = self.act(h + around)
        return out


class ResNet(nn.Module):
    """A residual network with GroupNorm.

    Args:
        widths: Channels of each block.
        activation: Follows each norm.
    """

    def __init__(self, widths: tuple[int, ...], activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 2, 1)
        before = (widths[0], *widths[:-1])
        strides = [1] + [2] * (len(widths) - 1)
        rows = zip(before, widths, strides, strict=True)
        self.parts = nn.Sequential(*(Block(*row, activation) for row in rows))
        self.fc = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.parts(self.stem(x))
        scores: Tensor = self.fc(h.mean((2, 3)))
        return scores


def resnet() -> nn.Module:
    """A narrow one of two blocks."""
    return ResNet((4, 8))
