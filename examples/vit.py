"""Trains a vision transformer on scikit-learn's handwritten digits, in a plain loop.

    torchrun --standalone --nproc-per-node 2 examples/vit.py --stage 3
    python examples/vit.py --stage 0

Says how many of the held-out digits it reads rightly. Needs scikit-learn, which brings the 1,797 pictures.
"""

from __future__ import annotations

import argparse

import torch
from processes import Ranks, joined
from torch import Tensor, nn

import zero_shard

SIDE, PATCH, NUM_CLASSES, NUM_HELD_OUT = 8, 2, 10, 360


class Block(nn.Module):
    """Attention among patches, then a layer of each by itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, patches, width] for the same."""
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Pictures cut into patches, a class token before them, blocks, and a head on the class token."""

    def __init__(self, width: int = 48, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits [B, 10] for pictures [B, 1, 8, 8]."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))  # type: ignore[no-any-return]


def read_digits() -> tuple[Tensor, Tensor]:
    """Return pictures [N, 1, 8, 8] between -1 and 1 and their digits [N], shuffled once and for all."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return pictures[order], torch.tensor(digits.target)[order]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    steps: int,
    batch: int,
    ranks: Ranks,
) -> None:
    """Take steps; each rank has its rows of every batch. All ranks call."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps)
    generator = torch.Generator().manual_seed(1)
    own = slice(ranks.rank * batch // ranks.world_size, (ranks.rank + 1) * batch // ranks.world_size)
    for step in range(steps):
        rows = torch.randint(len(data[1]), (batch,), generator=generator)
        pictures = data[0][rows][own].to(ranks.device)
        loss = nn.functional.cross_entropy(model(pictures), data[1][rows][own].to(ranks.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            ranks.say(f"step {step + 1:4d}  loss {ranks.mean(loss):.4f}")


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], ranks: Ranks) -> float:
    """Return how many of the pictures are read rightly. All ranks call."""
    found = model(data[0].to(ranks.device)).argmax(1).cpu()
    return float((found == data[1]).double().mean())


def main() -> None:
    """Train, and say how well it reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, help="0 to 3")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64, help="pictures over all ranks")
    parser.add_argument("--lr", type=float, default=4e-3)
    arguments = parser.parse_args()
    with joined(timeout_s=120) as ranks:
        torch.manual_seed(0)
        model = VisionTransformer().to(ranks.device)
        config = {"stage": arguments.stage}
        optimizer = zero_shard.AdamW(model.parameters(), arguments.lr, weight_decay=0.05, module=model, config=config)
        pictures, digits = read_digits()
        held_out = pictures[:NUM_HELD_OUT], digits[:NUM_HELD_OUT]
        ranks.say(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, stage {arguments.stage}, {ranks.describe()}"
        )
        data = pictures[NUM_HELD_OUT:], digits[NUM_HELD_OUT:]
        train(model, optimizer, data, arguments.steps, arguments.batch, ranks)
        ranks.say(f"accuracy on {NUM_HELD_OUT} held-out digits: {100 * accuracy(model, held_out, ranks):.1f} %")


if __name__ == "__main__":
    main()
