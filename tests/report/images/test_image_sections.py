"""Sections with images of a tiny run: made, kept, and what they say if something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from selftask.config.load import to_yaml
from selftask.data.inspect.contact_sheet import to_pixels
from selftask.methods.mae import unpatchify
from selftask.models.network import PatchOutput
from selftask.report.images import sections as made
from selftask.report.images.cache import SectionCache
from selftask.report.images.reconstructions import visualize
from selftask.report.images.sections import ImageSections
from selftask.report.page import Section
from selftask.task import Task

ALL = {"views", "neighbors", "map-of-embeddings", "classes", "patch-tokens", "reconstructions"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """MAE, which has patches and reconstructions, after one epoch."""
    task = tiny.train("mae", tmp_path_factory.mktemp("images"), "run", "train.epochs=1")
    (task.out / "config.yaml").write_text(to_yaml(task.config), encoding="utf-8")
    return task


@pytest.fixture
def run(trained: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder, without sections of other tests."""
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "copy"
    shutil.copytree(trained.out, folder)
    return folder


def sections(run: Path, **options: object) -> dict[str, Section]:
    options = {"tell": lambda text: None, "images": 24, **options}
    return {section.id: section for section in ImageSections(run=run, **options).make()}


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("computed again")


def test_a_run_shows_all_kinds_of_images(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []
    actual = sections(run, tell=results.append)
    assert actual.keys() == ALL
    assert all("data:image" in actual[name].html for name in ALL - {"classes"})
    assert any("24 training images" in line for line in results)
    assert sum(len(section.html) for section in actual.values()) < 3_000_000

    monkeypatch.setattr(made, "gather", refuse)  # a second report is read from the folder
    monkeypatch.setattr(made, "views_of", refuse)
    monkeypatch.setattr(made, "reconstructions_of", refuse)
    again = sections(run)
    assert {key: again[key] for key in ALL} == actual


def test_other_weights_are_looked_at_again(run: Path) -> None:
    before = sections(run)["neighbors"]
    backbone = run / "export" / "backbone.pt"
    state = torch.load(backbone)
    torch.save({key: torch.randn_like(value) for key, value in state.items()}, backbone)
    after = sections(run)["neighbors"]
    assert after.html != before.html


@pytest.mark.parametrize("steps", [-1, 1])
def test_the_newest_checkpoint_counts_more_than_an_export_of_another_step(
    run: Path, steps: int
) -> None:
    facts = run / "export" / "backbone.json"
    content = json.loads(facts.read_text())
    facts.write_text(json.dumps({**content, "step": content["step"] + steps}))
    results: list[str] = []
    assert "neighbors" in sections(run, tell=results.append)
    assert any("step_" in line for line in results)


def test_data_that_is_gone_or_changed_is_told(run: Path, trained: Task) -> None:
    path = trained.out.parent / "digits.npz"
    whole = path.read_bytes()
    with np.load(path) as kept:
        arrays = dict(kept)
    try:
        np.savez(path, **{name: rows[:50] for name, rows in arrays.items()})
        changed = sections(run)
        assert "80 images before, 50 now" in changed["views"].html
        path.unlink()
        gone = sections(run)
        assert "digits.npz" in gone["views"].html and "Not shown" in gone["features"].html
    finally:
        path.write_bytes(whole)
    assert sections(run).keys() == ALL, "what failed is not kept"


def test_a_damaged_cache_is_made_anew(run: Path) -> None:
    assert sections(run).keys() == ALL
    cached = SectionCache(run)
    assert cached.get("views", cached._groups["views"]["key"])
    cached._path.write_text('{"format": "1 0", "groups"')
    assert sections(run).keys() == ALL


def test_sections_of_another_user_are_not_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SectionCache(run)
    first.put("views", "key", [Section("Views", "<p>made</p>", "views")])
    assert SectionCache(run).get("views", "key")
    monkeypatch.setattr("os.getuid", lambda: first._path.stat().st_uid + 1)
    assert SectionCache(run).get("views", "key") is None


def test_a_run_without_weights_shows_its_views(run: Path) -> None:
    shutil.rmtree(run / "export")
    shutil.rmtree(run / "checkpoints")
    assert sections(run).keys() == {"views"}
    (run / "config.yaml").unlink()
    assert sections(run) == {}


def test_a_perfect_prediction_is_the_image(trained: Task) -> None:
    """Pixels go into patches, lose their mean and deviation, and come back."""
    batch = next(trained.data_module.train_batches(0))
    trained.last_batch = batch
    trained.loss.prepare_batch(batch, trained)
    trained.loss.on_forward(trained)
    shown = trained.loss.visualize(PatchOutput(batch["pixels"][:, None], None), batch)
    assert torch.allclose(shown["reconstruction"], shown["image"], atol=1e-4)
    hidden = (shown["masked"] == 0).all(dim=1)
    mask = batch["mask"]
    share = mask.predict.shape[2] / mask.keep.shape[1]
    assert hidden.float().mean() >= share / (1 + share) - 1e-6
    assert torch.equal(shown["masked"][0][:, ~hidden[0]], shown["image"][0][:, ~hidden[0]])


def test_patches_make_the_image_again() -> None:
    from selftask.methods.mae import patchify

    images = torch.rand(2, 5, 12, 20)
    assert torch.equal(unpatchify(patchify(images, 4), (3, 5), 4), images)


def test_simmim_shows_the_prediction_where_it_was_masked() -> None:
    from selftask.methods.simmim import SimMIM

    images = torch.rand(2, 3, 8, 12)
    batch = type("Batch", (dict,), {"all_views": [images]})()
    batch["mask"] = torch.tensor([[[True, False, False], [False, False, True]]]).expand(2, -1, -1)
    shown = SimMIM(SimMIM.Config()).visualize(
        PatchOutput(torch.zeros_like(images) - 1, None), batch
    )
    assert (shown["reconstruction"][:, :, :4, :4] == -1).all()
    assert (shown["reconstruction"][:, :, 4:, 8:] == -1).all()
    assert torch.equal(shown["reconstruction"][:, :, :4, 4:], images[:, :, :4, 4:])
    assert (shown["masked"] == 0).float().mean() == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("method", ["simmim", "data2vec", "ijepa"])
def test_masked_methods_show_their_masks(method: str, tmp_path: Path) -> None:
    task = tiny.task(method, tmp_path)
    task.prepare()
    shown, names = visualize(task, task.sources)
    gray = to_pixels(torch.zeros(1, 3, 1, 1), task.config.views["main"].transforms)[0]
    task.close()
    assert len(names) == len(shown["image"]) == 6 and len(shown) >= 2
    for name, images in shown.items():
        if name in ("image", "reconstruction"):
            continue
        kept = (images == shown["image"]).all(axis=3)
        hidden = (images == gray).all(axis=3)
        assert (kept | hidden).all(), "pixels are seen as they are, or gray"
        assert 0.05 < kept.mean() < 1.0, name
