"""Images that a method makes of a batch: masks, reconstructions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from selftask.config.schema import Config
from selftask.data.inspect.contact_sheet import first_batch, to_pixels
from selftask.data.loading.open_data import Sources
from selftask.methods.base import Method
from selftask.models.eval_mode import in_eval_mode
from selftask.registry import METHODS
from selftask.report.images.sprite import Sprite, image_section, short_names
from selftask.report.page import Section, render
from selftask.task import Task
from selftask.task.loaded import config_to_load

BUDGET = 250_000  # largest size of the images, in characters
NUM_IMAGES = 6
_SIDE = 112


def visualizes(method: str) -> bool:
    """Return whether a method may have images to show; True for an unknown one."""
    return method not in METHODS or METHODS[method].visualize is not Method.visualize


def reconstructions_of(config: Config, sources: Sources, checkpoint: Path) -> Section:
    """Return the report section "Masks and reconstructions".

    It shows the images of ``Method.visualize`` for the first training samples of epoch 0, and is
    empty if there are none. The network is built and loaded in a temporary run folder.

    Args:
        config: Config of the run.
        sources: Data of the run.
        checkpoint: Checkpoint with the weights of the network.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            config_to_load(replace(config, meters={}), checkpoint, Path(folder), {}),
            sources=sources,
        )
        try:
            task.prepare()
            rows, names = visualize(task, sources)
        finally:
            task.close()
    note = f"What {config.method.name} makes of the first images of epoch 0, with its own masks."
    return reconstruction_section(rows, names, note)


@torch.no_grad()
def visualize(task: Task, sources: Sources) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the images of ``Method.visualize`` by name, and the names of the B samples.

    Images are uint8 (B, H, W, C). ``last_batch`` of the task is replaced, and ``on_forward`` may
    record statistics: use a task that is not trained further.
    """
    batch = first_batch(task.config, sources, NUM_IMAGES)
    batch.views = {name: [v.to(task.device) for v in group] for name, group in batch.views.items()}
    task.last_batch = batch
    with in_eval_mode(task.base_model), in_eval_mode(task.loss):
        task.loss.prepare_batch(batch, task)
        with task.autocast():
            batch.output = task.base_model(batch.input)
            task.loss.on_forward(task)
            made = task.loss.visualize(batch.output, batch)
    transforms = task.config.views[next(iter(batch.views))].transforms
    pixels = {name: to_pixels(image.float().cpu(), transforms) for name, image in made.items()}
    return pixels, short_names([sources.train.path(index) for index in batch.index.tolist()])


def reconstruction_section(
    columns: Mapping[str, np.ndarray], names: Sequence[str], note: str
) -> Section:
    """Return the section with a row of images for each sample.

    Args:
        columns: Images (B, H, W, C) uint8 by name; if there are none, the section is empty.
        names: Names of the B samples.
        note: Paragraph above the images, plain text.
    """
    if not columns:
        return Section("Masks and reconstructions", "", "reconstructions")
    sprite = Sprite("made", _SIDE, BUDGET)
    rows = [
        ([images[row] for images in columns.values()], name, "") for row, name in enumerate(names)
    ]
    html = render("images.rows", note, sprite, list(columns), rows)
    return image_section("Masks and reconstructions", html, "reconstructions", sprite)
