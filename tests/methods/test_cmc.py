"""CMC against its equations as loops, its memory, and the towers of its backbone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from figures import draw
from selftask.api.model import load
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.errors import ConfigError, UserError
from selftask.methods.cmc import CMC
from selftask.models.build import build_backbone
from selftask.models.features.extract import extract, offers, pooled
from selftask.models.memory_bank import MemoryBank

NONE = torch.empty(0, dtype=torch.int64)
INDEX, NEGATIVES = [2, 5, 0], [[1, 3], [6, 6], [4, 2]]
TAU = 0.3


def _cosine(feature: list[float], entry: list[float]) -> float:
    product = math.fsum(x * y for x, y in zip(feature, entry, strict=True))
    return product / math.hypot(*feature) / math.hypot(*entry)


def _method(loss: Any) -> CMC:
    method = CMC(CMC.Config(out_dim=4, num_negatives=2, temperature=TAU, loss=loss)).double()
    method.memory = MemoryBank(7, 2, 4).double()
    return method


def _batch(**added: Tensor) -> Batch:
    added = {"negatives": torch.tensor(NEGATIVES), **added}
    return Batch(views={}, labels=NONE, index=torch.tensor(INDEX), key=NONE, added=added)


def test_loss_is_that_of_equations_2_and_3() -> None:
    """Each output against the entry of the other tower, among those of the negatives; summed."""
    method, output = _method("info_nce"), 3 * draw(0, 1, 3, 2, 4)
    seen = _remembered(method)
    losses = []
    for image, (own, others) in enumerate(zip(INDEX, NEGATIVES, strict=True)):
        for tower, other_tower in ((0, 1), (1, 0)):
            feature = output[0, image, tower].tolist()
            scores = [
                math.exp(_cosine(feature, seen[number][other_tower]) / TAU)
                for number in (own, *others)
            ]
            losses.append(-math.log(scores[0] / math.fsum(scores)))
    assert method(output, _batch()).item() == pytest.approx(math.fsum(losses) / 3, rel=1e-12)


def test_nce_is_that_of_the_authors() -> None:
    """-log P / (P + K / N) of positives, -log (K / N) / (P + K / N) of noise; P = exp(cos/tau) / Z.

    NCECriterion of HobbitLong/CMC without the 1e-7 of its denominators.
    """
    method, output, z = _method("nce"), 3 * draw(0, 1, 3, 2, 4), 9.0
    seen, noise = _remembered(method), 2 / 7
    losses = []
    for image, (own, others) in enumerate(zip(INDEX, NEGATIVES, strict=True)):
        for tower, other_tower in ((0, 1), (1, 0)):
            feature = output[0, image, tower].tolist()
            for number in (own, *others):
                p = math.exp(_cosine(feature, seen[number][other_tower]) / TAU) / z
                losses.append(-math.log((p if number == own else noise) / (p + noise)))
    batch = _batch(normalizer=torch.tensor(z, dtype=torch.float64))
    assert method(output, batch).item() == pytest.approx(math.fsum(losses) / 3, rel=1e-12)


def _remembered(method: CMC) -> list[list[list[float]]]:
    """Outputs of both towers for each image, which the memory then holds."""
    seen = draw(1, 7, 2, 4)
    method.memory.update(torch.arange(7), method.entries_of(seen))
    return seen.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("loss", "expected"), [("info_nce", 2 * math.log(3)), ("nce", None)])
def test_chance_is_the_loss_of_equal_entries(loss: Any, expected: float | None) -> None:
    method = _method(loss)
    method.memory.rows.fill_(0.5)
    output, z = torch.ones(1, 3, 2, 4).double(), 7 * math.exp(1 / TAU)
    value = method(output, _batch(normalizer=torch.tensor(z, dtype=torch.float64))).item()
    assert value == pytest.approx(method.chance_loss, rel=1e-9)
    assert expected is None or value == pytest.approx(expected)


def test_each_direction_trains_its_tower_alone(tmp_path: Path) -> None:
    """The entries have no gradient: colors do not follow the lightness that they are compared with.

    After a step, the entry of an image is half its outputs, exchanged.
    """
    task = tiny.task("cmc", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start()
    before = task.loss.memory.rows.clone()
    task.step()
    index, output = task.last_batch.index, task.last_batch.output[0].detach()
    unit = F.normalize(output, dim=2)
    expected = torch.stack([before[index, 0] + unit[:, 1], before[index, 1] + unit[:, 0]], dim=1)
    expected = F.normalize(expected, dim=2)
    torch.testing.assert_close(task.loss.memory.rows[index], expected)

    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    lightness, colors = batch.output.unbind(2)
    loss = task.loss(torch.stack([lightness, colors.detach()], dim=2), batch)
    stems = [tower.stem[0].weight for tower in task.base_model.backbone.towers]
    first, second = torch.autograd.grad(loss, stems)
    assert first.any() and not second.any()
    task.close()


# -- the backbone ----------------------------------------------------------------------------------

TOWERS = [{"name": "small_resnet", "width": 8}, {"name": "vit_micro", "depth": 1}]


def _towers(channels: list[int], of_data: int = 3) -> Any:
    args = {"towers": TOWERS, "channels": channels}
    return build_backbone(Component(name="channel_towers", args=args), of_data)


def test_a_tower_sees_its_channels_alone() -> None:
    backbone = _towers([1, 2]).eval()
    images = draw(0, 2, 3, 32, 32).float()
    lightness, colors = backbone.towers
    expected = torch.cat([pooled(lightness, images[:, :1]), pooled(colors, images[:, 1:])], dim=1)
    assert torch.equal(backbone(images), expected)
    assert expected.shape == (2, backbone.embed_dim)


def test_hidden_layers_are_those_of_one_tower_after_the_other() -> None:
    backbone = _towers([1, 2]).eval()
    images, numbers = draw(0, 2, 3, 32, 32).float(), (0, 3, 4)
    features = extract(backbone, images, layers=(*numbers, -1))
    lightness, colors = backbone.towers  # four layers and one
    expected = extract(lightness, images[:, :1], layers=(0, 3)).hidden
    assert backbone.num_layers == 5 and sorted(features.hidden) == [0, 3, 4]
    assert all(torch.equal(features.hidden[n].patches, expected[n].patches) for n in (0, 3))
    last = extract(colors, images[:, 1:], layers=(0,)).hidden[0]
    assert torch.equal(features.hidden[4].patches, last.patches)
    torch.testing.assert_close(features.pooled, backbone(images))
    assert offers(backbone) == {"hidden"}


def test_towers_share_the_channels_of_the_data() -> None:
    assert _towers([4, 1], 5)(draw(0, 2, 5, 32, 32).float()).shape[0] == 2
    with pytest.raises(UserError, match=r"backbone.channels: \[1, 1\], of sum 2; the data have 3"):
        _towers([1, 1])
    with pytest.raises(ConfigError, match=r"backbone\.channels: \[1, 1, 1\], and there are 2"):
        load_config("cmc/digits", ["backbone.channels=[1, 1, 1]"])
    with pytest.raises(ConfigError, match="'smal_resnet'; did you mean 'small_resnet'"):
        load_config("cmc/digits", ["backbone.towers=[smal_resnet, small_resnet]"])


def test_an_exported_run_is_loaded_with_its_towers(tmp_path: Path) -> None:
    task = tiny.train("cmc", tmp_path)
    images = draw(0, 2, 3, 32, 32).float()
    expected = task.base_model.backbone.eval()(images)
    assert torch.equal(load(tmp_path / "run")(images), expected)


def test_another_backbone_is_refused() -> None:
    with pytest.raises(UserError, match=r"backbone: cmc contrasts .* not a SmallResNet; take "):
        CMC.check_backbone(build_backbone(Component(name="small_resnet")))
