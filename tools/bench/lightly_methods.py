"""Methods of lightly for ``method_step.py``: its modules and losses, used as its examples do.

A method is a module: views, a list of (B, 3, H, W), -> loss. ``backbone`` maps images to features
(B, E); ``parts`` are the arguments that selftask's method was given. Methods with a teacher update
it before the passes, as the examples do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightly import loss as losses
from lightly.models import modules, utils
from torch import Tensor, nn


class TwoViews(nn.Module):
    """Projection of each view by a pass of its own, and a loss of both."""

    def __init__(self, backbone: nn.Module, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.network, self.criterion = nn.Sequential(backbone, head), criterion

    def forward(self, views: list[Tensor]) -> Tensor:
        return self.criterion(*map(self.network, views))


class Views(TwoViews):
    """As ``TwoViews``, for losses that take a list."""

    def forward(self, views: list[Tensor]) -> Tensor:
        return self.criterion(list(map(self.network, views)))


class Teacher(TwoViews):
    """The first view's projection beside the second view's by an EMA teacher."""

    momentum = 0.99

    def __init__(self, backbone: nn.Module, head: nn.Module, criterion: nn.Module) -> None:
        super().__init__(backbone, head, criterion)
        self.teacher = copy.deepcopy(self.network)
        utils.deactivate_requires_grad(self.teacher)

    def forward(self, views: list[Tensor]) -> Tensor:
        utils.update_momentum(self.network, self.teacher, self.momentum)
        return self.criterion(self.network(views[0]), self.taught(views[1]))

    @torch.no_grad()
    def taught(self, view: Tensor) -> Tensor:
        return self.teacher(view)


class BYOL(Teacher):
    """Each view's prediction beside the teacher's projection of the other."""

    def __init__(self, backbone: nn.Module, head: nn.Module, predictor: nn.Module) -> None:
        super().__init__(backbone, head, losses.NegativeCosineSimilarity())
        self.predictor = predictor

    def forward(self, views: list[Tensor]) -> Tensor:
        utils.update_momentum(self.network, self.teacher, self.momentum)
        predictions = [self.predictor(self.network(view)) for view in views]
        targets = [self.taught(view) for view in views]
        return 0.5 * (
            self.criterion(predictions[0], targets[1]) + self.criterion(predictions[1], targets[0])
        )


class SimSiam(TwoViews):
    """Each view's prediction beside the other's projection."""

    def __init__(self, backbone: nn.Module, head: nn.Module, predictor: nn.Module) -> None:
        super().__init__(backbone, head, losses.NegativeCosineSimilarity())
        self.predictor = predictor

    def forward(self, views: list[Tensor]) -> Tensor:
        projections = [self.network(view) for view in views]
        predictions = list(map(self.predictor, projections))
        first, second = (projection.detach() for projection in projections)
        return 0.5 * (
            self.criterion(predictions[0], second) + self.criterion(predictions[1], first)
        )


class NNCLR(SimSiam):
    """Each view's prediction beside the neighbor of the other's projection in a queue."""

    def __init__(
        self, backbone: nn.Module, head: nn.Module, predictor: nn.Module, parts: dict[str, Any]
    ) -> None:
        super().__init__(backbone, head, predictor)
        self.criterion = losses.NTXentLoss(temperature=parts["temperature"])
        self.queue = modules.NNMemoryBankModule((parts["queue_size"], parts["out_dim"]))

    def forward(self, views: list[Tensor]) -> Tensor:
        first, second = (self.network(view) for view in views)
        predictions = self.predictor(first), self.predictor(second)
        first = self.queue(first.detach(), update=False)
        second = self.queue(second.detach(), update=True)
        return 0.5 * (
            self.criterion(first, predictions[1]) + self.criterion(second, predictions[0])
        )


class SwAV(TwoViews):
    """Assignments to prototypes of each view, predicted from the other."""

    def __init__(self, backbone: nn.Module, head: nn.Module, parts: dict[str, Any]) -> None:
        super().__init__(backbone, head, losses.SwaVLoss())
        self.prototypes = modules.SwaVPrototypes(parts["out_dim"], parts["num_prototypes"])

    def forward(self, views: list[Tensor]) -> Tensor:
        self.prototypes.normalize()
        outputs = [
            self.prototypes(nn.functional.normalize(self.network(view), dim=1)) for view in views
        ]
        return self.criterion(outputs, [])


class DINO(Teacher):
    """The teacher's distribution of each large view, predicted from all other views."""

    def __init__(self, backbone: nn.Module, dim: int, parts: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        widths = dim, parts["hidden_dim"], parts["bottleneck"], parts["out_dim"]
        heads = [modules.DINOProjectionHead(*widths) for _ in range(2)]  # weight_norm has no copy
        self.network = nn.Sequential(backbone, heads[0])
        self.teacher = nn.Sequential(copy.deepcopy(backbone), heads[1])
        utils.deactivate_requires_grad(self.teacher)
        self.criterion = losses.DINOLoss(parts["out_dim"], warmup_teacher_temp_epochs=0)

    def forward(self, views: list[Tensor]) -> Tensor:
        utils.update_momentum(self.network, self.teacher, self.momentum)
        taught = [self.taught(view) for view in views[:2]]
        return self.criterion(taught, list(map(self.network, views)), epoch=1)


class DINOv2(Teacher):
    """DINO with one head for masked patches too, and KoLeo, as in its benchmark on ImageNet."""

    def __init__(self, vit: nn.Module, dim: int, parts: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        widths = dim, parts["hidden_dim"], parts["bottleneck"], parts["out_dim"]
        heads = [modules.DINOProjectionHead(*widths, norm_last_layer=False) for _ in range(2)]
        student = modules.MaskedVisionTransformerTIMM(
            vit, antialias=False, pos_embed_initialization="skip"
        )
        self.network = nn.ModuleList([student, heads[0]])
        self.teacher = nn.ModuleList([copy.deepcopy(student), heads[1]])
        utils.deactivate_requires_grad(self.teacher)
        self.dino = losses.DINOLoss(parts["out_dim"], warmup_teacher_temp_epochs=0)
        self.ibot, self.koleo = losses.IBOTPatchLoss(parts["out_dim"]), losses.KoLeoLoss()

    def forward(self, views: list[Tensor]) -> Tensor:
        utils.update_momentum(self.network, self.teacher, self.momentum)
        student, head = self.network
        whole, local = torch.cat(views[:2]), torch.cat(views[2:])
        block = utils.random_block_mask((len(whole), *student.vit.patch_embed.grid_size))
        mask = nn.functional.pad(block.flatten(1), (1, 0))  # without the class token
        taught, taught_patches = self.taught(whole, mask)
        tokens = student.encode(whole, mask=mask)
        pooled = tokens[:, 0]
        scores = torch.cat([head(pooled), head(student.encode(local)[:, 0])])
        dino = self.dino(taught.chunk(2), scores.chunk(len(views)), epoch=1)
        ibot = self.ibot(taught_patches, head(tokens[mask]), mask=block)
        return dino + ibot + 0.1 * sum(map(self.koleo, pooled.chunk(2)))

    @torch.no_grad()
    def taught(self, whole: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        teacher, head = self.teacher
        tokens = teacher.encode(whole)
        return head(tokens[:, 0]), head(tokens[mask])


class MAE(nn.Module):
    """Pixels of masked patches, by a decoder."""

    def __init__(self, vit: nn.Module, parts: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = modules.MaskedVisionTransformerTIMM(vit=vit)
        self.ratio, self.patch = parts["mask_ratio"], vit.patch_embed.patch_size[0]
        self.decoder = modules.MAEDecoderTIMM(
            num_patches=vit.patch_embed.num_patches,
            patch_size=self.patch,
            embed_dim=vit.embed_dim,
            decoder_embed_dim=parts["decoder_dim"],
            decoder_depth=parts["decoder_depth"],
            decoder_num_heads=parts["decoder_heads"],
        )

    def forward(self, views: list[Tensor]) -> Tensor:
        (images,) = views
        size = len(images), self.backbone.sequence_length
        keep, masked = utils.random_token_mask(size, mask_ratio=self.ratio)
        tokens = self.decoder.embed(self.backbone.encode(images, idx_keep=keep))
        whole = utils.repeat_token(self.decoder.mask_token, size)
        whole = utils.set_at_index(whole, keep, tokens.type_as(whole))
        decoded = utils.get_at_index(self.decoder.decode(whole), masked)
        pixels = utils.patchify(images, self.patch)
        target = utils.get_at_index(pixels, masked - 1)  # without the class token
        return nn.functional.mse_loss(self.decoder.predict(decoded), target)


def build(name: str, backbone: Any, parts: dict[str, Any]) -> nn.Module:
    """Return lightly's method of that name."""
    return _BUILD[name](backbone, backbone.embed_dim, parts)


def _hidden(parts: dict[str, Any], dim: int) -> tuple[int, int]:
    return parts.get("hidden_dim") or dim, parts["out_dim"]


_BUILD: dict[str, Any] = {
    "simclr": lambda backbone, dim, parts: TwoViews(
        backbone,
        modules.SimCLRProjectionHead(dim, *_hidden(parts, dim), batch_norm=parts["norm"]),
        losses.NTXentLoss(temperature=parts["temperature"]),
    ),
    "dcl": lambda backbone, dim, parts: TwoViews(
        backbone,
        modules.SimCLRProjectionHead(dim, *_hidden(parts, dim), batch_norm=parts["norm"]),
        losses.DCLLoss(temperature=parts["temperature"]),
    ),
    "barlow": lambda backbone, dim, parts: TwoViews(
        backbone,
        modules.BarlowTwinsProjectionHead(dim, *_hidden(parts, dim)),
        losses.BarlowTwinsLoss(),
    ),
    "vicreg": lambda backbone, dim, parts: TwoViews(
        backbone,
        modules.BarlowTwinsProjectionHead(dim, *_hidden(parts, dim)),
        losses.VICRegLoss(),
    ),
    "frossl": lambda backbone, dim, parts: Views(
        backbone, modules.BarlowTwinsProjectionHead(dim, *_hidden(parts, dim)), losses.FroSSLLoss()
    ),
    "moco": lambda backbone, dim, parts: Teacher(
        backbone,
        modules.MoCoProjectionHead(dim, *_hidden(parts, dim)),
        losses.NTXentLoss(parts["temperature"], (parts["queue_size"], parts["out_dim"])),
    ),
    "tico": lambda backbone, dim, parts: Teacher(
        backbone, modules.BYOLProjectionHead(dim, *_hidden(parts, dim)), losses.TiCoLoss()
    ),
    "byol": lambda backbone, dim, parts: BYOL(
        backbone,
        modules.BYOLProjectionHead(dim, *_hidden(parts, dim)),
        modules.BYOLPredictionHead(parts["out_dim"], *_hidden(parts, dim)),
    ),
    "simsiam": lambda backbone, dim, parts: SimSiam(
        backbone,
        modules.SimSiamProjectionHead(dim, dim, parts["out_dim"]),
        modules.SimSiamPredictionHead(parts["out_dim"], *_hidden(parts, dim)),
    ),
    "nnclr": lambda backbone, dim, parts: NNCLR(
        backbone,
        modules.NNCLRProjectionHead(dim, *_hidden(parts, dim)),
        modules.NNCLRPredictionHead(parts["out_dim"], parts["predictor_dim"], parts["out_dim"]),
        parts,
    ),
    "swav": lambda backbone, dim, parts: SwAV(
        backbone, modules.SwaVProjectionHead(dim, *_hidden(parts, dim)), parts
    ),
    "dino": DINO,
    "dinov2": DINOv2,
    "mae": lambda backbone, dim, parts: MAE(backbone, parts),
}
