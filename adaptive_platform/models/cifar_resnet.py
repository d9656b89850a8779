"""Small residual networks for images of about 32x32 (He et al. 2015, arXiv 1512.03385, 4.2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CifarBlock", "CifarResNet"]


class CifarBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map `[N, channels_in, H, W]` to `[N, channels, H/stride, W/stride]`."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class CifarResNet(nn.Module):
    """`6 n + 2` layers: a 3x3 convolution, three stages of n blocks (16, 32, 64 channels), a head.

    78,042 parameters for n = 1 and 272,474 for n = 3, with ten classes.
    """

    def __init__(self, blocks_per_stage: int, num_classes: int) -> None:
        """Make a network for three-channel images of any size from 4x4 up."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = []
        channels_in = 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            blocks = []
            for index in range(blocks_per_stage):
                blocks.append(CifarBlock(channels_in, channels, stride if index == 0 else 1))
                channels_in = channels
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[N, 3, H, W]` to logits `[N, num_classes]`."""
        features = self.stages(F.relu(self.bn1(self.conv1(images))))
        return self.fc(features.mean(dim=(2, 3)))
