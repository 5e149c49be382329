"""The opening lines of a log, beside numbers counted elsewhere."""

from __future__ import annotations

import torch
import torchvision

from selftask.config.load import load_config
from selftask.models.summary import opening_lines


def test_the_opening_lines_name_what_is_trained() -> None:
    data = ["data.path=images", "data.val=null", "out=runs/mine"]
    config = load_config("dino/vit_small_imagenet", data)
    network, method = torch.nn.Module(), torch.nn.Linear(1000, 2000, bias=False)
    network.backbone = torchvision.models.resnet18()  # 11,689,512, as torchvision's page says
    network.frozen = torch.nn.Linear(1000, 1000).requires_grad_(False)
    run, model = opening_lines(config, network, method)
    assert run == "run: dino/vit_small_imagenet, out=runs/mine, seed 0"
    assert model == (
        "model: dino on vit_small of 11.7 M parameters; 13.7 M are trained, the head's included; "
        "views: 1 first of 224 x 224 pixels, 1 second of 224 x 224 pixels, 8 local of 96 x 96 "
        "pixels"
    )
