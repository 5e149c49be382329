"""Opening lines and costs, beside fvcore's counters, closed formulas and published figures."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from torch import nn

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.models.summary import module_costs, opening_lines


def test_the_opening_lines_name_what_is_trained() -> None:
    data = ["data.path=images", "data.val=null", "out=runs/mine"]
    config = load_config("dino/vit_small_imagenet", data)
    network, method = torch.nn.Module(), torch.nn.Linear(1000, 2000, bias=False)
    network.backbone = torchvision.models.resnet18()  # 11,689,512, as torchvision's page says
    network.frozen = torch.nn.Linear(1000, 1000).requires_grad_(False)
    run, model = opening_lines(config, network, method, 3)
    assert run == "run: dino/vit_small_imagenet, out=runs/mine, seed 0"
    assert model == (
        "model: dino on vit_small of 11.7 M parameters, 1.81 G multiply-adds per image of "
        "224 x 224 pixels; 13.7 M are trained, the head's included; "
        "views: 1 first of 224 x 224 pixels, 1 second of 224 x 224 pixels, 8 local of 96 x 96 "
        "pixels"
    )


def test_as_fvcore_counts() -> None:
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.ReLU()),
        *(nn.Conv2d(8, 16, 5, groups=2, bias=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 12 * 12, 10, bias=False)),
    )
    image = torch.randn(1, 3, 32, 32)
    cost = module_costs(network, 32)[0]
    assert cost.macs == FlopCountAnalysis(network, image).total()
    assert cost.activations == ActivationCountAnalysis(network, image).total()
    assert all(parameter.device.type == "cpu" for parameter in network.parameters())
    assert network.training


def test_published_figures() -> None:
    with torch.device("meta"):
        network = torchvision.models.resnet50()
    resnet = module_costs(network, 224)[0]
    assert resnet.macs / 1e9 == pytest.approx(4.09, abs=0.01)  # torchvision's table, GFLOPS
    assert resnet.activations / 1e6 == pytest.approx(11.1, abs=0.05)  # timm's benchmarks


def test_vision_transformer() -> None:
    depth, width, heads, tokens, patch = 2, 32, 4, 17, 8
    vit = timm.models.VisionTransformer(
        img_size=32, patch_size=patch, embed_dim=width, depth=depth, num_heads=heads, num_classes=0
    )
    linear = 12 * width**2  # qkv 3, projection 1, mlp 4 + 4
    attention = 2 * tokens * width  # q k^T and its product with v, a token
    patches = 16 * 3 * patch**2 * width
    torch.manual_seed(3)
    assert module_costs(vit, 32)[0].macs == patches + depth * tokens * (linear + attention)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


def test_what_depends_on_values_raises() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.mean() > 0 else -x

    with pytest.raises(RuntimeError):
        module_costs(Chooses(), 4)


def test_the_parts_against_fvcore_and_autograd() -> None:
    """Multiply-adds and activations by module as fvcore's; memory as autograd keeps it."""
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * 14 * 14, 10, bias=False),
    )
    image = torch.randn(1, 3, 16, 16)
    macs = FlopCountAnalysis(network, image).unsupported_ops_warnings(False).by_module()
    elements = ActivationCountAnalysis(network, image).unsupported_ops_warnings(False).by_module()
    costs = {cost.name: cost for cost in module_costs(network, 16)}
    assert list(costs) == ["", "0", "0.0", "0.1", "0.2", "1", "2"]
    for name in ("0.0", "2"):
        assert (costs[name].macs, costs[name].activations) == (macs[name], elements[name])
    assert costs["0.0"].saved_bytes == 4 * 3 * 16 * 16  # its input
    assert costs["0.2"].saved_bytes == 4 * 8 * 14 * 14  # its output
    assert costs[""].macs == macs["0.0"] + macs["2"] == costs["0"].macs + costs["2"].macs
    assert costs["0.1"].parameters == 16 and costs["0"].parameters == 16 + 8 * 27

    kept: dict[int, torch.Tensor] = {}  # of a real forward pass, by address
    own = {tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(torch.randn(64, 3, 16, 16))
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 64
    assert output.requires_grad and costs[""].saved_bytes == pytest.approx(real, rel=0.01)
    assert costs[""].saved_bytes >= costs["0"].saved_bytes > costs["0.0"].saved_bytes > 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simclr", "backbone=torchvision:resnet18", "--size", "224", "--depth=1"]
    assert main(["model-summary", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole = next(line for line in lines if line.startswith("(all)"))
    assert whole.split()[2:4] == ["11,176,512", "1,813,561,344"]  # without the classifier
    assert [line.split()[0] for line in lines if " Sequential " in line] == [
        *("layer1", "layer2", "layer3", "layer4")
    ]
