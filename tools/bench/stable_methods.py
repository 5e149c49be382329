"""Methods of stable-pretraining for ``method_step.py``, with the update of its callback.

A method is a module: views, a list of (B, 3, H, W), -> loss. ``parts`` are the arguments that
selftask's method was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from loguru import logger
from method_parts import PATCH
from random_tokenizer import RandomTokenizer
from stable_pretraining import methods
from stable_pretraining.backbone import MLP, TeacherStudentWrapper
from torch import Tensor, nn

Call = Callable[[nn.Module, list[Tensor]], Any]  # method, views -> an output with a loss


class WithTeachers(nn.Module):
    """A method whose teachers are updated in each step, as by ``TeacherStudentCallback``."""

    def __init__(self, method: nn.Module, call: Call) -> None:
        super().__init__()
        self.method, self.call = method, call
        self.teachers = [m for m in method.modules() if isinstance(m, TeacherStudentWrapper)]

    def forward(self, views: list[Tensor]) -> Tensor:
        for teacher in self.teachers:
            teacher.update_ema_coefficient(0, 1)
            teacher.update_teacher()
        return self.call(self.method, views).loss


def build(name: str, backbone: Any, parts: dict[str, Any]) -> nn.Module:
    """Return stable-pretraining's method of that name."""
    logger.disable("stable_pretraining")
    method = _BUILD[name](backbone, parts)
    return WithTeachers(method, _CALL.get(name, lambda module, views: module(*views)))


_CALL: dict[str, Call] = {
    "dinov2": lambda method, views: method(global_views=views[:2], local_views=views[2:]),
    "dinov3": lambda method, views: method(global_views=views[:2], local_views=views[2:]),
    "lejepa": lambda method, views: method(global_views=views[:2], local_views=views[2:]),
    "ibot": lambda method, views: method(global_views=views),
    "pirl": lambda method, views: method(views[0], views[0]),  # it cuts the image into tiles
}
_SIZES = {"image_size": 32, "patch_size": PATCH}


def _heads(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "projector_hidden_dim": parts["hidden_dim"],
        "projector_bottleneck_dim": parts["bottleneck"],
        "n_cls_prototypes": parts["out_dim"],
        "n_patch_prototypes": parts["out_dim"],
        "mask_ratio": parts["mask_ratio"][0],
        "image_size": 32,
    }


def _dinov3(backbone: Any, parts: dict[str, Any]) -> nn.Module:
    num = backbone.num_reg_tokens
    backbone.reg_token, backbone.num_reg_tokens, backbone.num_prefix_tokens = None, 0, 1
    options = {"n_register_tokens": num, "koleo_weight": parts["koleo_weight"]}
    return methods.DINOv3(backbone, **options, **_heads(parts))  # adds its own registers


def _igpt(backbone: Any, parts: dict[str, Any]) -> nn.Module:
    name = "vit_small_patch16_224"  # it makes any transformer of timm causal
    vit = timm.create_model(name, img_size=32, patch_size=PATCH, num_classes=0)
    return methods.iGPT(vit, **_SIZES)


def _lejepa(backbone: Any, parts: dict[str, Any]) -> nn.Module:
    hidden = parts["hidden_dim"]
    widths = [hidden, hidden, parts["out_dim"]]
    projector = MLP(backbone.embed_dim, widths, norm_layer="batch_norm", activation_layer=nn.ReLU)
    method = methods.LeJEPA("vit_small_patch16_224", projector, n_slices=parts["num_slices"])
    method.backbone = backbone
    return method


def _pirl(backbone: Any, parts: dict[str, Any]) -> nn.Module:
    length, dim = parts["num_negatives"], parts["out_dim"]
    method = methods.PIRL(backbone, projector_dim=dim, queue_length=length, jigsaw_grid=2)
    method.queue.append(torch.randn(length, dim))  # full, as after the first epoch
    return method


_BUILD: dict[str, Callable[[Any, dict[str, Any]], nn.Module]] = {
    "beit": lambda vit, parts: methods.BEiT(
        vit,
        RandomTokenizer(),
        RandomTokenizer.num_tokens,
        mask_ratio=parts["mask_ratio"],
        **_SIZES,
    ),
    "cmae": lambda vit, parts: methods.CMAE(
        vit, mask_ratio=parts["mask_ratio"], projector_dim=parts["out_dim"], **_SIZES
    ),
    "crossmae": lambda vit, parts: methods.CrossMAE(
        vit,
        parts["decoder_dim"],
        parts["decoder_depth"],
        parts["decoder_heads"],
        parts["mask_ratio"],
        parts["predicted_ratio"],
        image_size=32,
    ),
    "data2vec": lambda vit, parts: methods.Data2Vec(
        vit, parts["top_blocks"], parts["mask_ratio"], image_size=32
    ),
    "dinov2": lambda vit, parts: methods.DINOv2(vit, **_heads(parts)),
    "dinov3": _dinov3,
    "ibot": lambda vit, parts: methods.iBOT(vit, **_heads(parts)),
    "igpt": _igpt,
    "ijepa": lambda vit, parts: methods.IJEPA(
        vit, parts["predictor_dim"], parts["predictor_depth"]
    ),
    "lejepa": _lejepa,
    "maskfeat": lambda vit, parts: methods.MaskFeat(
        vit, mask_ratio=parts["mask_ratio"], n_hog_bins=parts["num_bins"], **_SIZES
    ),
    "mocov3": lambda vit, parts: methods.MoCov3(
        vit, (parts["hidden_dim"], parts["hidden_dim"], parts["out_dim"]), parts["hidden_dim"]
    ),
    "msn": lambda vit, parts: methods.MSN(
        vit,
        parts["hidden_dim"],
        parts["out_dim"],
        parts["num_prototypes"],
        parts["mask_ratio"],
        image_size=32,
    ),
    "nepa": lambda vit, parts: methods.NEPA(32, PATCH, embed_dim=vit.embed_dim, num_heads=6),
    "pirl": _pirl,
    "simmim": lambda vit, parts: methods.SimMIM(vit, mask_ratio=parts["mask_ratio"], **_SIZES),
    "vicregl": lambda vit, parts: methods.VICRegL(
        vit, projector_dim=parts["out_dim"], image_size=32
    ),
    "wmse": lambda resnet, parts: methods.WMSE(resnet, (parts["hidden_dim"], parts["out_dim"])),
}
