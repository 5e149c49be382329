"""Every block of the how-to pages runs, in order, in a folder with images like a user's."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from page_blocks import ROOT, Block, blocks, write_files
from selftask.cli.main import main
from selftask.config.load import load_config

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("how-to-*.md"))
SHORT = ["train.batch_size=8", "train.threads=1", "data.num_workers=0", "train.max_steps=2"]
CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, tables and weights that the pages speak of."""
    home = tmp_path_factory.mktemp("how_to")
    draw = np.random.default_rng(0)
    rows = []
    for folder in ("photos", "my_images", "labeled/train", "labeled/test"):
        for label in CLASSES:
            (home / folder / label).mkdir(parents=True)
            for number in range(22):  # half of them are more than the 20 neighbors of k-NN
                path = home / folder / label / f"{number}.png"
                pixels = draw.integers(0, 255, (48, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                if folder == "photos":
                    rows.append((str(path.relative_to(home)), label))
    _table(home / "birds.csv", ("photo", "species"), rows)
    captions = [(path, f"a {label}, number {at}") for at, (path, label) in enumerate(rows)]
    _table(home / "captions.csv", ("path", "text"), captions)
    return home


def _table(path: Path, header: tuple[str, ...], rows: list[tuple[str, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def _dinov2_file(path: Path) -> None:
    """Weights as Meta released them: timm's names, and the token of masked patches."""
    import timm

    model = timm.create_model("vit_small_patch14_dinov2", pretrained=False)
    torch.save({**model.state_dict(), "mask_token": torch.zeros(1, 384)}, path)


def _dinov3_file(path: Path) -> None:
    """Weights as Meta released them: names of its own, and biases of qkv that are 0."""
    import timm

    state = timm.create_model("vit_small_patch16_dinov3", pretrained=False).state_dict()
    names = (("gamma_1", "ls1.gamma"), ("gamma_2", "ls2.gamma"), ("reg_token", "storage_tokens"))
    released = {}
    for key, value in state.items():
        for theirs, metas in names:
            key = key.replace(theirs, metas)
        released[key] = value
        if key.endswith("qkv.weight"):
            bias = torch.zeros(len(value))
            released |= {f"{key[:-6]}bias": bias, f"{key[:-6]}bias_mask": bias}
    torch.save({**released, "mask_token": torch.zeros(1, 384)}, path)


def _vissl_file(path: Path) -> None:
    """A checkpoint of VISSL: torchvision's weights under the name of its trunk."""
    import torchvision

    trunk = {
        f"_feature_blocks.{name}": value
        for name, value in torchvision.models.resnet50().state_dict().items()
        if not name.startswith("fc.")
    }
    model = {"model": {"trunk": trunk, "heads": {}}}
    torch.save({"classy_state_dict": {"base_model": model}}, path)


FILES = {
    "dinov2_vits14_pretrain.pth": _dinov2_file,
    "dinov3_vits16_pretrain.pth": _dinov3_file,
    "model_final_checkpoint_phase199.torch": _vissl_file,
}


def shortened(words: list[str]) -> list[str]:
    """The command with settings that make it a matter of seconds."""
    if words[0] not in ("train", "adapt", "finetune"):
        return words
    given = {word.partition("=")[0] for word in words}
    small = list(SHORT)
    if words[0] == "train" and words[1].startswith(("simclr", "moco")):
        small.append("backbone=small_resnet")
    if words[1].startswith("clip"):
        small.append("method={name: clip, text_dim: 16, text_depth: 1, text_heads: 2}")
    return [*words, *(word for word in small if word.partition("=")[0] not in given)]


def _needs_a_cluster(words: list[str]) -> bool:
    return words[0] in ("submit", "jobs", "cancel")


@pytest.fixture
def home(images: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> Iterator[Path]:
    """The current folder; signals are handled as before afterwards."""
    monkeypatch.chdir(images)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield images
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _run(page: str, block: Block, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in block.commands:
        if _needs_a_cluster(words):
            continue  # test_commands_for_clusters
        for name, write in FILES.items():
            if any(name in word for word in words) and not (home / name).exists():
                write(home / name)
        done = main(shortened(words))
        said = capfd.readouterr()
        assert done == 0, f"{page}: selftask {' '.join(words)}\n{said.out}\n{said.err}"
    if block.language == "python" and block.file is None:
        text = block.text.replace("range(150)", "range(2)")  # steps of a detector
        exec(compile(text, f"{page}.md", "exec"), {"__name__": "page"})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    names = write_files(page, home)
    ran = 0
    for block in blocks(page):
        _run(page, block, home, capfd)
        ran += len(block.commands) or bool(block.file) or block.language == "python"
    assert ran >= 1 and set(names) <= set(os.listdir(home))


@pytest.mark.parametrize("page", PAGES)
def test_commands_for_clusters(page: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their configs load."""
    monkeypatch.chdir(images)
    for block in blocks(page):
        for words in filter(_needs_a_cluster, block.commands):
            if words[0] == "submit":
                settings = [word.replace("=1,2,3", "=1") for word in words[2:]]
                assert load_config(words[1], settings).launch.slurm


@pytest.mark.slow
def test_released_weights_reach_the_network(home: Path) -> None:
    """Of the page's file, every tensor but the mask token; the teacher has them, too."""
    name = "dinov2_vits14_pretrain.pth"
    _dinov2_file(home / name)
    commands = [words for block in blocks("how-to-continue") for words in block.commands]
    words = next(w for w in commands if w[0] == "train" and any(name in x for x in w))
    words = [word for word in words[2:] if not word.startswith("out=")]
    released = torch.load(home / name, weights_only=True)
    config = load_config(
        "dinov2/images", [*words, *SHORT, "out=runs/released", "method.out_dim=16"]
    )
    from selftask.data.loading.open_data import open_data
    from selftask.task import Task

    task = Task(config, sources=open_data(config.data))
    task.prepare()
    for network in (task.base_model, task.loss.teacher.network):
        state = network.backbone.state_dict()
        for key, value in released.items():
            if "pos_embed" not in key and key in state:
                assert torch.equal(state[key], value), key
    task.close()
