"""projects/cifar_speedrun: the layer of patches against NumPy, and the script within its budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tiny

ROWS = (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([5, 6, 7, 8]))
FIRST = (0, 2, 4, 6)  # images of which the four filters start
PROJECT = tiny.ROOT / "projects" / "cifar_speedrun"


@pytest.fixture
def patches(forget_names: None) -> Iterator[ModuleType]:
    sys.path.insert(0, str(PROJECT))
    sys.modules.pop("patches", None)
    import patches

    yield patches
    del sys.modules["patches"]


@pytest.mark.parametrize("both_signs", [False, True])
def test_features_equal_a_loop_over_patches(both_signs: bool, patches: ModuleType) -> None:
    config = patches.PatchBankConfig(filters=5, patch_size=3, threshold=0.1, both_signs=both_signs)
    bank = config.build().double()
    width = 3 * 3 * 3
    bank.mean.copy_(torch.randn(width) / 10)
    bank.whitening.copy_(torch.randn(width, width) / 5)
    images = torch.randn(10, 3, 8, 8, dtype=torch.float64)  # more than are computed at once
    filters = bank.filters.detach().numpy()
    filters = filters / np.linalg.norm(filters, axis=1, keepdims=True)
    if both_signs:
        filters = np.concatenate([filters, -filters])
    features = bank(images).detach().view(10, 4, len(filters))
    assert features[0].numel() == bank.embed_dim
    for image, actual in zip(images.numpy(), features.numpy(), strict=True):
        projection = np.zeros((6, 6, len(filters)))
        for y in range(6):
            for x in range(6):
                patch = image[:, y : y + 3, x : x + 3].ravel()
                patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 0.0025)
                patch = (patch - bank.mean.numpy()) @ bank.whitening.numpy()
                projection[y, x] = filters @ patch
        active = np.maximum(projection - 0.1, 0)
        cells = [active[y : y + 3, x : x + 3].mean(axis=(0, 1)) for y in (0, 3) for x in (0, 3)]
        np.testing.assert_allclose(actual, cells, atol=1e-12)


def test_patches_are_whitened_and_filters_are_patches(patches: ModuleType) -> None:
    """The covariance of all patches becomes the identity, but for their mean, which is always 0."""
    bank = patches.PatchBankConfig(filters=4, patch_size=3).build().double()
    images = torch.rand(9, 3, 12, 12, dtype=torch.float64)
    batches = [SimpleNamespace(all_views=[images[part]], index=part) for part in ROWS]
    data = SimpleNamespace(num_images=9, iterate_all=lambda: iter(batches))
    task = SimpleNamespace(base_model=SimpleNamespace(backbone=bank), data_module=data)
    method = patches.PatchKMeans(patches.PatchKMeans.Config(ridge=1e-9))
    method._read_patches(task)

    flat = bank.contrast_normalized(images)
    whitened = ((flat - bank.mean) @ bank.whitening).flatten(0, 1)
    flat_direction = torch.full((27, 27), 1 / 27, dtype=torch.float64)
    expected = torch.eye(27, dtype=torch.float64) - flat_direction
    torch.testing.assert_close(whitened.T.cov(correction=0), expected, atol=1e-4, rtol=0)
    starts = [bank.similarities(images[[image]])[0, 50, place] for place, image in enumerate(FIRST)]
    torch.testing.assert_close(torch.stack(starts), torch.ones(4, dtype=torch.float64))


def colors(folder: Path) -> Path:
    """Noise of three colors, one folder each: train and test."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 10)):
        for label, color in enumerate(np.eye(3)):
            (folder / part / str(label)).mkdir(parents=True)
            for place in range(count):
                noise = draws.uniform(0, 255, (32, 32, 3)) * (0.5 + color / 2)
                image = Image.fromarray(noise.astype(np.uint8))
                image.save(folder / part / str(label) / f"{place}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["patches", "network", "both"])
def test_speedrun_script_trains_and_prints_its_table(recipe: str, tmp_path: Path) -> None:
    data = colors(tmp_path / "data")
    own = ["patches:backbone.filters=20", "patches:train.epochs=1"]
    own += ["network:backbone.width=8", "network:method.hidden_dim=16"]
    words = [sys.executable, str(PROJECT / "run.py"), str(data), "--recipe", recipe, "--seeds", "1"]
    words += ["--minutes", "0.01", "train.batch_size=40", "train.threads=1", "data.num_workers=0"]
    done = tiny.run([*words, *own], tmp_path)
    assert done.returncode == 0, done.stderr
    table = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert [line[1].strip() for line in table[2:]] == ["untrained", recipe]
    assert float(table[-1][6]) > 0.8  # colors are easy
    for part in ("patches", "network") if recipe == "both" else (recipe,):
        last = f"runs/speedrun/{recipe}_seed_1/{part}/stage_{0 if part == 'patches' else 2}"
        assert tiny.status(tmp_path / last)["state"] == "finished"
    again = tiny.run([*words, *own, "--evaluate"], tmp_path)
    assert again.stdout.splitlines()[-1].split("|")[5:] == table[-1][5:]


@pytest.mark.slow
def test_the_same_on_more_ranks(tmp_path: Path) -> None:
    check = [sys.executable, "-m", "selftask", "check", str(PROJECT / "patches.yaml")]
    done = tiny.run(check, tmp_path)
    assert "SAME: patch_kmeans" in done.stdout, done.stdout + done.stderr
