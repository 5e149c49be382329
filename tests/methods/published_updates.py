"""Updates of the published code of ImageNet recipes: rules, rates and who decays, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from selftask.equivalence.tiny_recipe import EPS

STEPS, EPOCHS, WARMUP, BATCH = 6, 3, 2, 8
Rule = Callable[..., tuple[np.ndarray, dict[str, Any]]]


def sgd(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
    """torch.optim.SGD with momentum 0.9."""
    v = 0.9 * state.get("v", 0.0) + g + decay * w
    return w - lr * v, {"v": v}


def larc(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
    """apex' LARC(SGD, trust_coefficient=0.001, clip=False): main_swav.py, main_deepclusterv2.py.

    With the small version's eps; apex' own stands in tests/optim/test_lars.py.
    """
    norm_w, norm_g = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
    if norm_w and norm_g:
        g = 0.001 * norm_w / (norm_g + decay * norm_w + EPS) * (g + decay * w)
    return sgd(w, g, state, lr, 0.0)


def lars(classic: bool, separate: bool = False, trust: float = 0.001) -> Rule:
    """SimCLR's lars_optimizer.py (classic), BYOL's optimizers.py and Barlow's main.py (not).

    TWIST's lars.py adds the norms of gradient and decay (separate).
    """

    def rule(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
        if w.ndim > 1:  # neither decay nor adaptation of biases and norms
            norm_w, alone = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
            g = g + decay * w
            norm_g = alone + decay * norm_w if separate else np.sqrt((g * g).sum())
            g = g * (trust * norm_w / norm_g if norm_w and norm_g else 1.0)
        v = 0.9 * state.get("v", 0.0) + (lr if classic else 1.0) * g
        return w - (1.0 if classic else lr) * v, {"v": v}

    return rule


def lars_of_supcon(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
    """With the loss of utils.py, 0.07 times as large: it moves what is not adapted less."""
    return lars(True)(w, g, state, lr if w.ndim > 1 else 0.07 * lr, decay)


def lars_of_zerocl(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
    """Its main.py: eta 0.02, and 0.0048 instead of 0.3 for biases and norms."""
    return lars(False, trust=0.02)(w, g, state, lr if w.ndim > 1 else 0.016 * lr, decay)


def adamw(beta: float) -> Rule:
    """torch.optim.AdamW, which counts the steps of each parameter; with the small version's eps."""

    def rule(w: np.ndarray, g: np.ndarray, state: dict, lr: float, decay: float) -> tuple:
        t = state.get("t", 0) + 1
        m = 0.9 * state.get("m", 0.0) + 0.1 * g
        v = beta * state.get("v", 0.0) + (1 - beta) * g * g
        step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - beta**t)) + EPS)
        return w - lr * (decay * w + step), {"m": m, "v": v, "t": t}

    return rule


def everything(name: str, shape: tuple[int, ...]) -> bool:
    return True


def weights(name: str, shape: tuple[int, ...]) -> bool:
    """All but biases and what has one dimension; the mask token is (1, 1, D) in that code."""
    return len(shape) > 1 or name.endswith("mask_token")


def weights_but_tokens(name: str, shape: tuple[int, ...]) -> bool:
    """All but biases, norms, tokens and positions: no_weight_decay of SimMIM's transformers."""
    return len(shape) > 1 and not name.endswith(("_token", "pos_embed"))


def weights_and_mask_token(name: str, shape: tuple[int, ...]) -> bool:
    """Of BEiT's code, which data2vec takes over: no class token, no positions."""
    return weights_but_tokens(name, shape) or name.endswith("mask_token")


def weights_but_prototypes(name: str, shape: tuple[int, ...]) -> bool:
    """Of MSN: prototypes are a group of their own, without decay."""
    return weights(name, shape) and "prototypes" not in name


def full_rate(name: str, step: int) -> float:
    return 1.0


def rate_of_dinov2(name: str, step: int) -> float:
    """param_groups.py and train.py: 0.9 for each layer above, 0.2 for patches, 0 for last layers.

    For a backbone of two blocks, and two steps in which the last layers wait.
    """
    if "last_layer" in name:
        return float(step >= 2)
    if name == "network.mask_token" or name.startswith(
        tuple(f"network.backbone.{name}" for name in ("cls_token", "reg_token", "pos_embed"))
    ):
        return 0.9**3
    if name.startswith("network.backbone.patch_embed"):
        return 0.2 * 0.9**3
    if name.startswith("network.backbone.blocks."):
        return float(0.9 ** (2 - int(name.split(".")[3])))
    return 1.0


def rate_of_simsiam(name: str, step: int) -> float:
    """--fix-pred-lr: the predictor keeps the peak, all else follows a cosine by epochs."""
    if not name.startswith("network.head.predictor"):
        return 1.0
    return 2 / (1 + math.cos(math.pi * (step // (STEPS // EPOCHS)) / EPOCHS))


@dataclass(frozen=True)
class Published:
    """What the code does to a parameter; lr for the full batch as its scripts give it."""

    rule: Rule
    decays: Callable[[str, tuple[int, ...]], bool]
    lr: float  # peak, at the batch of the small version
    end_lr: float = 0.0
    start_lr: float = 0.0
    warmup: int = WARMUP
    decay: float = 0.0
    end_decay: float | None = None
    by_epoch: bool = False
    stretch: float = 1.0  # length of the cosines in lengths of the run
    jump: bool = False  # timm's cosine: of the whole run, behind the warm-up's rise to the peak
    rate: Callable[[str, int], float] = full_rate  # factor of the lr of a parameter at a step
    milestones: tuple[int, ...] = ()  # steps after which the lr is a tenth, instead of a cosine
    settings: tuple[str, ...] = ()  # of the recipe's small version

    def lr_at(self, step: int) -> float:
        if self.by_epoch:
            step = step // (STEPS // EPOCHS) * (STEPS // EPOCHS)
        if step < self.warmup:
            return self.start_lr + (self.lr - self.start_lr) * step / self.warmup
        if self.milestones:
            return float(self.lr * 0.1 ** sum(step >= milestone for milestone in self.milestones))
        start = 0 if self.jump else self.warmup
        angle = math.pi * (step - start) / (self.stretch * STEPS - start)
        return self.end_lr + (self.lr - self.end_lr) * 0.5 * (1 + math.cos(angle))

    def decay_at(self, step: int) -> float:
        if self.end_decay is None:
            return self.decay
        half = 0.5 * (1 + math.cos(math.pi * step / (self.stretch * STEPS)))
        return self.end_decay + (self.decay - self.end_decay) * half


MFM = Published(
    adamw(0.95),
    weights,
    3e-4 * BATCH / 512,
    2.5e-6 * BATCH / 512,
    2.5e-7 * BATCH / 512,
    decay=0.05,
    jump=True,
)
DINOV2 = Published(
    adamw(0.999),
    weights,
    0.004 * math.sqrt(BATCH / 1024),
    1e-6 * math.sqrt(BATCH / 2048),
    decay=0.04,
    end_decay=0.4,
    rate=rate_of_dinov2,
    settings=(
        (
            "optimizer.groups=[{match: backbone.patch_embed, lr: 0.2},"
            "{match: mask_token, lr: 0.729},"
            '{match: "*.last_layer", schedule: {name: cosine, zero_until: 2 steps}}]'
        ),
    ),
)
SHARE = BATCH / 256  # of an lr that is scaled with the batch
CODE = {
    "simclr/resnet50_imagenet": Published(lars(True), weights, 0.3 * SHARE, decay=1e-6),
    "byol/resnet50_imagenet": Published(lars(False), weights, 0.2 * SHARE, decay=1.5e-6),
    "barlow/resnet50_imagenet": Published(
        lars(False), weights, 0.2 * SHARE, 0.0002 * SHARE, decay=1e-6
    ),
    "vicreg/resnet50_imagenet": Published(
        lars(False), weights, 0.2 * SHARE, 0.0002 * SHARE, decay=1e-6
    ),
    "vicregl/resnet50_imagenet": Published(
        lars(False), weights, 0.2 * SHARE, 0.0002 * SHARE, decay=1e-6
    ),
    "vicregl/convnext_small_imagenet": Published(
        adamw(0.999), weights, 5e-4 * SHARE, 5e-7 * SHARE, decay=0.05
    ),
    "swav/resnet50_imagenet": Published(larc, everything, 4.8, 0.0048, 0.3, decay=1e-6),
    "swav/resnet50_imagenet_batch256": Published(
        larc, everything, 0.6, 0.0006, warmup=0, decay=1e-6
    ),
    "deepcluster/resnet50_imagenet": Published(larc, everything, 4.8, 0.0048, 0.3, decay=1e-6),
    "moco/resnet50_imagenet": Published(sgd, everything, 0.03, warmup=0, decay=1e-4, by_epoch=True),
    "densecl/resnet50_imagenet": Published(
        sgd, everything, 0.03, warmup=0, decay=1e-4, by_epoch=True
    ),
    "simsiam/resnet50_imagenet": Published(
        sgd,
        everything,
        0.05 * SHARE,
        warmup=0,
        decay=1e-4,
        by_epoch=True,
        rate=rate_of_simsiam,
    ),
    "mec/resnet50_imagenet": Published(sgd, everything, 0.5 * SHARE, decay=1e-5),
    "mocov3/resnet50_imagenet": Published(lars(False), weights, 0.3 * SHARE, decay=1e-6),
    "mocov3/vit_small_imagenet": Published(adamw(0.999), everything, 1.5e-4 * SHARE, decay=0.1),
    "msf/resnet50_imagenet": Published(sgd, everything, 0.05, warmup=0, decay=1e-4, by_epoch=True),
    "directclr/resnet50_imagenet": Published(
        lars(False), weights, 4.8 * BATCH / 4096, 0.0048 * BATCH / 4096, decay=1e-6
    ),
    "mmcr/resnet50_imagenet": Published(
        lars(False), weights, 0.6 * SHARE, 0.0006 * SHARE, decay=1e-6
    ),
    "pixpro/resnet50_imagenet": Published(
        lars(False), weights, SHARE, 1e-6 * BATCH / 1024, 0.01 * SHARE, decay=1e-5
    ),
    "obow/resnet50_imagenet": Published(sgd, everything, 0.03, 3e-5, decay=1e-4),
    "twist/resnet50_imagenet": Published(
        lars(True, separate=True), weights, 0.5 * SHARE, 0.0005 * SHARE, decay=1.5e-6
    ),
    "supervised/resnet50_imagenet": Published(sgd, everything, 0.1 * SHARE, warmup=0, decay=1e-4),
    "dino/vit_small_imagenet": Published(
        adamw(0.999), weights, 0.0005 * SHARE, 5e-7 * SHARE, decay=0.04, end_decay=0.4
    ),
    "ibot/vit_small_imagenet": Published(
        adamw(0.999), weights, 0.0005 * SHARE, 2.5e-7 * SHARE, decay=0.04, end_decay=0.4
    ),
    "dinov2/vit_large_imagenet": DINOV2,
    "dinov3/vit_large_imagenet": DINOV2,  # no other rules
    "npid/resnet50_imagenet": Published(
        sgd,
        everything,
        0.03,
        warmup=0,
        decay=1e-4,
        milestones=(STEPS // EPOCHS, 2 * STEPS // EPOCHS),
        settings=("optimizer.schedule.milestones=[1 epoch, 2 epochs]",),
    ),
    "msn/vit_small_imagenet": Published(
        adamw(0.999),
        weights_but_prototypes,
        1e-3,
        1e-6,
        2e-4,
        decay=0.04,
        end_decay=0.4,
        stretch=1.25,
        settings=("optimizer.groups=[{match: loss.prototypes, weight_decay: 0.0}]",),
    ),
    "simmim/swin_base_imagenet": Published(
        adamw(0.999),
        weights_but_tokens,
        2e-4 * BATCH / 512,
        1e-5 * BATCH / 512,
        1e-6 * BATCH / 512,
        decay=0.05,
        jump=True,
        settings=("method.mask_size=8",),
    ),
    "simmim/vit_base_imagenet": Published(
        adamw(0.999),
        weights_but_tokens,
        1e-4 * BATCH / 512,
        start_lr=5e-7 * BATCH / 512,
        decay=0.05,
        milestones=(2 * STEPS // EPOCHS,),
        settings=(
            "method.mask_size=8",
            "optimizer.schedule={name: multistep, milestones: [2 epochs], factor: 0.1}",
        ),
    ),
    "data2vec/vit_base_imagenet": Published(
        adamw(0.999),
        weights_and_mask_token,
        2e-3,
        1e-5,
        decay=0.05,
        settings=("optimizer.groups=[{match: mask_token, weight_decay: 0.05}]",),
    ),
    "maskfeat/vit_base_imagenet": Published(
        adamw(0.999),
        weights,
        2e-4 * SHARE,
        1e-6 * SHARE,
        1e-6 * SHARE,
        decay=0.05,
        settings=("optimizer.groups=[{match: mask_token, weight_decay: 0.05}]",),
    ),
    "pirl/resnet50_imagenet": Published(
        sgd, weights, 0.03 * SHARE, 3e-5 * SHARE, warmup=0, decay=1e-4, by_epoch=True
    ),
    "mae/vit_base_imagenet": Published(adamw(0.95), weights, 1.5e-4 * SHARE, decay=0.05),
    "ijepa/vit_base_imagenet": Published(
        adamw(0.999), weights, 1e-3, 1e-6, 2e-4, decay=0.04, end_decay=0.4
    ),
    "mfm/vit_base_imagenet": replace(MFM, decays=weights_but_tokens),
    "mfm/resnet50_imagenet": MFM,
    "vqkd/vit_base_imagenet": Published(
        adamw(0.99), weights_but_tokens, 5e-5 * BATCH / 128, 2.5e-6 * BATCH / 128, decay=1e-4
    ),
    "cae/vit_base_imagenet": Published(adamw(0.999), weights, 1.5e-3, 1e-5, decay=0.05),
    "seed/resnet18_imagenet": Published(sgd, everything, 0.03, warmup=0, decay=1e-4, by_epoch=True),
    "unic/vit_base_imagenet": Published(
        adamw(0.99),
        weights,
        3e-4 * SHARE,
        5e-7 * SHARE,
        decay=0.03,
        settings=("method.ladder=[0]",),
    ),
    "nepa/vit_base_imagenet": Published(adamw(0.95), weights, 3e-4 * SHARE, decay=0.05),
    "aim/vit_600m_imagenet": Published(  # paper, lightly; its small version has a token
        adamw(0.95), weights_but_tokens, 1e-3, decay=0.05
    ),
    "igpt/causal_vit_imagenet": Published(adamw(0.95), everything, 3e-3),  # the paper: no decay
    "zerocl/resnet50_imagenet": Published(
        lars_of_zerocl,
        weights,
        0.3 * SHARE,
        0.0003 * SHARE,
        decay=1e-6,
        settings=("optimizer.groups=[{type: _BatchNorm, lr: 0.016}]",),
    ),
    "supcon/resnet50_imagenet": Published(
        lars_of_supcon,
        weights,
        0.4 * SHARE,
        decay=0.0143,
        settings=(
            'optimizer.groups=[{type: _BatchNorm, lr: 0.07},{match: "head.*.bias", lr: 0.07}]',
        ),
    ),
    "corinfomax/resnet50_imagenet": Published(
        sgd, everything, 0.2, 1e-6, 3e-3, decay=1e-4, by_epoch=True
    ),
    "lejepa/vit_small_imagenette": Published(
        adamw(0.999),
        everything,
        2e-3,
        1e-3,
        2e-5,
        decay=0.05,  # MINIMAL.md
    ),
}

NOT_REPLAYED = {  # docs/parity.md says so
    "adco/resnet50_imagenet",
    "beit/vit_base_imagenet",  # extends data2vec/vit_base_imagenet
    "capi/vit_large_imagenet",
    "clsa/resnet50_imagenet",
    "cmae/vit_base_imagenet",  # extends mae/vit_base_imagenet
    "cmc/resnet50_imagenet",
    "compress/resnet18_imagenet",  # the rule of npid/resnet50_imagenet with a factor of 0.2
    "crossmae/vit_base_imagenet",
    "data2vec2/vit_base_imagenet",
    "dbot/vit_base_imagenet",  # extends mae/vit_base_imagenet
    "dcl/resnet50_imagenet",  # lightly's warm-up is a step ahead
    "detcon/resnet50_imagenet",  # extends byol/resnet50_imagenet
    "dinov2/vitg14_imagenet",  # the rules of vit_large_imagenet with other numbers
    "distill_features/vit_small_imagenet",
    "esvit/swin_tiny_imagenet",  # extends dino/vit_small_imagenet
    "fcmae/convnextv2_base_imagenet",
    "ibot/vit_small_imagenet_attmask",  # extends ibot/vit_small_imagenet
    "jigsaw/resnet50_imagenet",
    "milan/vit_base_imagenet",
    "mixmim/swin_base_imagenet",  # extends mae/vit_base_imagenet
    "nnclr/resnet50_imagenet",
    "odc/resnet50_imagenet",
    "pcl/resnet50_imagenet",
    "relative_location/resnet50_imagenet",
    "ressl/resnet50_imagenet",
    "rotation/resnet50_imagenet",
    "sela/resnet50_imagenet",  # extends npid/resnet50_imagenet
    "spark/resnet50_imagenet",
    "supervised/linear_resnet50_imagenet",  # trains one layer by torch's SGD
}
