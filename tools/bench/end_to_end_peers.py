"""Contestants of ``end_to_end.py``: each trains endlessly, as its library documents it.

    python tools/bench/end_to_end_peers.py CONTESTANT CONTEST float32|fast IMAGES OUT MARKS

Runs until it is killed. After each optimizer step one byte is written to the file descriptor MARKS.
All use one thread and one worker process, the same architecture, heads, views and batch. The rest,
such as the interpolation of crops, is the default of each library. ``fast`` means
``train.precision=auto`` in selftask, and autocast to bfloat16 in the others.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import method_parts

SGD = {"lr": 0.01, "momentum": 0.9}
ADAMW = {"lr": 1e-4, "weight_decay": 0.05}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Contest:
    """One training: a method, its backbone, and images of 32 pixels or photographs."""

    method: str
    backbone: str
    size: int  # of the images, in pixels
    batch: int

    @property
    def parts(self) -> dict[str, Any]:
        return method_parts.CONTESTS["lightly"][self.method].parts

    @property
    def crops(self) -> tuple[float, int] | None:
        """Share of an image between large and small crops, and the number of small ones."""
        return {"dino": (0.4, 6), "dinov2": (0.32, 8)}.get(self.method)

    @property
    def is_transformer(self) -> bool:
        return self.backbone.startswith("vit")

    def network(self, **options: Any) -> Any:
        """Return the backbone of torchvision or timm, or the small network for all."""
        from torch import nn

        if self.is_transformer:
            import timm

            return timm.create_model(f"{self.backbone}_patch16_224", num_classes=0, **options)
        if self.backbone == "small_resnet":
            from selftask.models.backbones.small_resnet import SmallResNetConfig

            return SmallResNetConfig().build()
        import torchvision

        network = torchvision.models.resnet18()
        if self.size == 32:
            network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
        network.embed_dim = network.fc.in_features
        return network


CONTESTS = {
    "simclr, 32 pixels": Contest("simclr", "resnet18", 32, 16),
    "simclr, small network": Contest("simclr", "small_resnet", 32, 128),
    "simclr, 224 pixels": Contest("simclr", "resnet18", 224, 8),
    "moco, 32 pixels": Contest("moco", "resnet18", 32, 16),
    "byol, 32 pixels": Contest("byol", "resnet18", 32, 16),
    "barlow, 32 pixels": Contest("barlow", "resnet18", 32, 16),
    "dino, 224 pixels": Contest("dino", "vit_tiny", 224, 4),
    "dinov2, 224 pixels": Contest("dinov2", "vit_tiny", 224, 4),
    "mae, 224 pixels": Contest("mae", "vit_small", 224, 4),
}


def selftask(contest: Contest, fast: bool, images: str, out: str) -> None:
    """Run ``selftask train`` with default hooks."""
    from selftask.cli.main import main

    blur = "{name: gaussian_blur, p: %s, sigma: [0.1, 2.0]}"
    jitter = "{name: color_jitter, brightness: %s, contrast: %s, saturation: %s, hue: %s, p: 0.8}"
    gray, normalize = "{name: grayscale, p: 0.2}", "{name: normalize, stats: imagenet}"

    def view(size: int, scale: str, *then: str, bicubic: bool = False) -> str:
        kind = "bicubic" if bicubic else "bilinear"
        crop = f"{{name: random_resized_crop, size: {size}, scale: {scale}, interpolation: {kind}}}"
        return f"transforms: [{', '.join([crop, 'horizontal_flip', *then, normalize])}]"

    if contest.crops:
        color = jitter % (0.4, 0.4, 0.2, 0.1), gray
        between, count = contest.crops
        large, small = f"[{between}, 1]", f"[0.05, {between}]"
        views = (
            f"first: {{{view(224, large, *color, blur % 1.0)}}}, "
            f"second: {{{view(224, large, *color, blur % 0.1, '{name: solarize, p: 0.2}')}}}, "
            f"local: {{count: {count}, {view(96, small, *color, blur % 0.5)}}}"
        )
    elif contest.method == "mae":
        views = f"main: {{count: 1, {view(224, '[0.2, 1]', bicubic=True)}}}"
    else:
        color = jitter % (0.8, 0.8, 0.8, 0.2), gray
        last = [blur % 0.5] if contest.size > 32 else []
        views = f"main: {{count: 2, {view(contest.size, '[0.08, 1]', *color, *last)}}}"
    stem = ", stem: cifar" if contest.backbone == "resnet18" and contest.size == 32 else ""
    dynamic = ", dynamic_img_size: true" if contest.crops else ""
    parts = ", ".join(f"{key}: {str(value).lower()}" for key, value in contest.parts.items())
    optimizer = (
        f"{{name: adamw, lr: {ADAMW['lr']}, weight_decay: {ADAMW['weight_decay']}}}"
        if contest.is_transformer
        else f"{{name: sgd, lr: {SGD['lr']}, sgd_momentum: {SGD['momentum']}}}"
    )
    recipe = Path(out) / "recipe.yaml"
    recipe.write_text(
        f"data: {images}\nviews: {{{views}}}\neval: {{transforms: [normalize]}}\n"
        f"backbone: {{name: {contest.backbone}{stem}{dynamic}}}\n"
        f"method: {{name: {contest.method}, {parts}}}\noptimizer: {optimizer}\n"
    )
    words = [f"out={out}/run", f"train.batch_size={contest.batch}", "train.max_steps=1000000"]
    words += [f"train.precision={'auto' if fast else 'float32'}", "train.device=cpu"]
    main(["train", str(recipe), *words, "train.threads=1", "data.num_workers=1"])


def lightly(contest: Contest, fast: bool, images: str, out: str) -> None:
    """Train in the loop of lightly's PyTorch examples."""
    import lightly_methods
    import torch
    from lightly import transforms
    from lightly.data import LightlyDataset

    if contest.crops:
        between, count = contest.crops
        transform = transforms.DINOTransform(
            global_crop_scale=(between, 1), local_crop_scale=(0.05, between), n_local_views=count
        )
    elif contest.method == "mae":
        transform = transforms.MAETransform()
    else:
        blur = 0.5 if contest.size > 32 else 0.0
        transform = transforms.SimCLRTransform(input_size=contest.size, gaussian_blur=blur)
    dataset = LightlyDataset(images, transform=transform)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=contest.batch, shuffle=True, drop_last=True, num_workers=1
    )
    options = {"dynamic_img_size": True} if contest.crops else {}
    network = contest.network(**options)
    if hasattr(network, "fc"):
        network.fc = torch.nn.Identity()
    method = lightly_methods.build(contest.method, network, contest.parts)
    optimizer = _optimizer(contest)([p for p in method.parameters() if p.requires_grad])
    while True:
        for views, *_ in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                loss = method(views)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def lightly_train(contest: Contest, fast: bool, images: str, out: str) -> None:
    """Run ``lightly_train.pretrain``."""
    import lightly_train

    parts = contest.parts
    if contest.method == "dino":
        transform: dict[str, Any] = {
            "random_resize": {"min_scale": 0.4},
            "local_view": {"random_resize": {"min_scale": 0.05, "max_scale": 0.4}},
        }
        arguments = {
            "hidden_dim": parts["hidden_dim"],
            "bottleneck_dim": parts["bottleneck"],
            "output_dim": parts["out_dim"],
            "student_freeze_last_layer_steps": 0,
        }
    else:
        transform = {"image_size": (contest.size, contest.size)}
        if contest.size == 32:
            transform["gaussian_blur"] = None
        arguments = {"hidden_dim": parts["hidden_dim"], "output_dim": parts["out_dim"]}
    network: Any = contest.network() if not contest.is_transformer else None
    if contest.backbone == "small_resnet":
        network = _wrapped(network)
    lightly_train.pretrain(
        out=f"{out}/run",
        data=images,
        model=network or f"timm/{contest.backbone}_patch16_224",
        method=contest.method,
        method_args=arguments,
        transform_args=transform,
        batch_size=contest.batch,
        epochs=1000,
        num_workers=1,
        accelerator="cpu",
        precision="bf16-mixed" if fast else "auto",
        optim="adamw" if contest.is_transformer else "sgd",
        optim_args=ADAMW if contest.is_transformer else SGD,
        model_args=None if network else {"dynamic_img_size": True, "pretrained": False},
    )


def _wrapped(network: Any) -> Any:
    """Return a network of selftask as lightly-train's documentation wraps one."""
    from torch import nn

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def get_model(self) -> Any:
            return self.network

        def feature_dim(self) -> int:
            return self.network.embed_dim

        def forward_features(self, x: Any) -> Any:
            return {"features": self.network(x)[:, :, None, None]}

        def forward_pool(self, x: Any) -> Any:
            return {"pooled_features": x["features"]}

    return Wrapper()


def stable_pretraining(contest: Contest, fast: bool, images: str, out: str) -> None:
    """Train a method of stable-pretraining with Lightning's Trainer."""
    import lightning
    import stable_pretraining as spt
    import torch
    import torchvision
    from stable_pretraining import methods
    from stable_pretraining.callbacks import TeacherStudentCallback
    from stable_pretraining.data import transforms as t

    def view(size: int, scale: tuple[float, float], strength: float, blur: float) -> Any:
        steps = [t.RGB(), t.RandomResizedCrop(size, scale=scale), t.RandomHorizontalFlip(p=0.5)]
        if strength:
            other = (0.8, 0.8, 0.8, 0.2) if strength == 1 else (0.4, 0.4, 0.2, 0.1)
            steps += [t.ColorJitter(*other, p=0.8), t.RandomGrayscale(p=0.2)]
        steps += [t.PILGaussianBlur(p=blur)] if blur else []
        return t.Compose(*steps, t.ToImage(mean=MEAN, std=STD))

    parts = contest.parts
    widths = parts.get("hidden_dim"), parts.get("out_dim")
    options = {"dynamic_img_size": True} if contest.method == "dino" else {}
    network = contest.network(**options)
    if hasattr(network, "fc"):
        network.fc = torch.nn.Identity()
    build: dict[str, Callable[[], Any]] = {
        "simclr": lambda: methods.SimCLR(network, widths, parts["temperature"]),
        "moco": lambda: methods.MoCov2(network, widths, parts["queue_size"], parts["temperature"]),
        "byol": lambda: methods.BYOL(network, widths, widths),
        "barlow": lambda: methods.BarlowTwins(network, widths),
        "dino": lambda: methods.DINO(network, widths[0], parts["bottleneck"], widths[1]),
        "mae": lambda: methods.MAE(
            network, parts["decoder_dim"], parts["decoder_depth"], parts["decoder_heads"]
        ),
    }
    method = build[contest.method]()
    passes = method.forward

    def forward(self: Any, batch: Any, stage: str) -> dict[str, Any]:
        views = [made["image"] for made in batch["views"]]
        if contest.method == "dino":
            return {"loss": passes(views[:2], views[2:]).loss}
        return {"loss": passes(*views).loss}

    method.forward = types.MethodType(forward, method)
    method.optim = {"optimizer": _optimizer(contest), "interval": "step"}
    if contest.method == "dino":
        views = [view(224, (0.4, 1), 0.5, blur) for blur in (1.0, 0.1)]
        views += [view(96, (0.05, 0.4), 0.5, 0.5)] * 6
    elif contest.method == "mae":
        views = [view(224, (0.2, 1), 0, 0)]
    else:
        views = [view(contest.size, (0.08, 1), 1, 0.5 * (contest.size > 32))] * 2
    folder = torchvision.datasets.ImageFolder(images)
    dataset = spt.data.FromTorchDataset(
        folder, names=["image", "label"], transform=t.MultiViewTransform(views)
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=contest.batch, shuffle=True, drop_last=True, num_workers=1
    )
    trainer = lightning.Trainer(
        max_epochs=1000,
        accelerator="cpu",
        precision="bf16-mixed" if fast else "32-true",
        callbacks=[TeacherStudentCallback()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(method, spt.data.DataModule(train=loader))


def _optimizer(contest: Contest) -> Callable[[Any], Any]:
    import torch

    if contest.is_transformer:
        return partial(torch.optim.AdamW, **ADAMW)
    return partial(torch.optim.SGD, **SGD)


LACKS = {  # methods that a library does not have, or with another network, masks or terms
    "lightly-train": {"moco", "byol", "barlow", "mae", "dinov2"},
    "stable-pretraining": {"dinov2"},
}
CONTESTANTS: dict[str, Callable[[Contest, bool, str, str], None]] = {
    "selftask": selftask,
    "lightly": lightly,
    "lightly-train": lightly_train,
    "stable-pretraining": stable_pretraining,
}


def main() -> None:
    name, contest, precision, images, out, marks = sys.argv[1:]
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def mark(*_: Any) -> None:
        os.write(int(marks), b".")

    torch.set_num_threads(1)
    register_optimizer_step_post_hook(mark)
    CONTESTANTS[name](CONTESTS[contest], precision == "fast", images, out)


if __name__ == "__main__":
    main()
