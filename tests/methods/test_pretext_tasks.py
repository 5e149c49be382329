"""Rotation, jigsaw and relative location: their classes are what was done to the images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitask import MiniTask
from selftask.data.transforms.pretext import permutations
from selftask.errors import UserError
from selftask.methods.families.pretext import TilesNetwork
from selftask.methods.jigsaw import Jigsaw
from selftask.methods.relative_location import RelativeLocation


@pytest.mark.parametrize("all_rotations", [True, False])
def test_each_rotation_turns_back(all_rotations: bool) -> None:
    task = MiniTask("rotation", {"all_rotations": all_rotations}, sizes=(8,))
    task.run(1)
    batch = task.last_batch
    (images,) = batch.all_views
    classes = batch["classes"]
    assert classes.shape == (4 if all_rotations else 1, len(images))
    assert set(classes.flatten().tolist()) == {0, 1, 2, 3}
    for view, turns in zip(batch.input, classes, strict=True):
        back = [torch.rot90(image, -int(k), (1, 2)) for image, k in zip(view, turns, strict=True)]
        assert torch.equal(torch.stack(back), images)
    scores, numbers = task.loss.meter_input(batch.output, batch)
    assert batch.local_loss.item() == pytest.approx(F.cross_entropy(scores, numbers).item())


def test_only_squares_are_rotated() -> None:
    task = MiniTask("rotation", {}, sizes=(8,))
    batch = SimpleNamespace(all_views=[torch.zeros(2, 3, 8, 6)])
    with pytest.raises(UserError, match="rotation turns squares, and views have 8x6 pixels"):
        task.loss.prepare_batch(batch, task)


class Mean(nn.Module):
    """A backbone whose features are the means of the channels."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def numbered_tiles(num_tiles: int, num_images: int) -> list[Tensor]:
    """Tiles whose pixels are 10 * image + tile."""
    images = 10.0 * torch.arange(num_images)
    return [(images + tile)[:, None, None, None].expand(-1, 1, 2, 2) for tile in range(num_tiles)]


def test_a_head_sees_the_tiles_of_one_image_in_the_order_of_its_class() -> None:
    method = Jigsaw(Jigsaw.Config(num_permutations=24))
    method.num_classes, orders = 24, torch.from_numpy(permutations(4, 24)).long()
    method.register_buffer("orders", orders)
    key = torch.stack([torch.zeros(300, dtype=torch.int64), torch.arange(300)], dim=1)
    task = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(seed=3)))
    arranged, classes = method.arrange(SimpleNamespace(key=key), task)
    network = TilesNetwork(Mean(), nn.Flatten())
    seen = network((numbered_tiles(4, 300), arranged))  # (300, 1, 4)
    for image in range(300):
        expected = 10 * image + orders[classes[image, 0]]
        assert seen[image, 0].tolist() == expected.tolist()
    assert sorted(set(classes.flatten().tolist())) == list(range(24))


def test_neighbors_are_numbered_row_by_row_around_the_center() -> None:
    method = RelativeLocation(RelativeLocation.Config(hidden_dim=8))
    tiles = numbered_tiles(9, 2)
    arranged, classes = method.arrange(SimpleNamespace(views={"tiles": tiles}), SimpleNamespace())
    seen = TilesNetwork(Mean(), nn.Flatten())((tiles, arranged))  # (2, 8, 2)
    assert seen[1, :, 0].tolist() == [14] * 8
    assert seen[1, :, 1].tolist() == [10, 11, 12, 13, 15, 16, 17, 18]
    assert classes[1].tolist() == list(range(8))


def test_permutations_are_those_of_vissl() -> None:
    """Its generator that maximizes the least Hamming distance, from the identity, for 4 tiles."""
    figures = [0, 1, 2, 3, 1, 0, 3, 2, 2, 3, 0, 1, 3, 2, 1, 0, 0, 2, 3, 1, 0, 3, 1, 2]
    assert permutations(4, 6).flatten().tolist() == figures
