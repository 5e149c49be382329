"""A method for any training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from selftask.api.batches import as_batch, check_batch, per_image
from selftask.batch import Batch
from selftask.config.compose.provenance import Layers
from selftask.config.run_length import Clock, RunLength
from selftask.config.schema import ViewConfig
from selftask.config.schema_reader import Reader
from selftask.config.values.section_schema import Schema
from selftask.errors import UserError, check_known
from selftask.hooks.base import defines
from selftask.methods.base import Method
from selftask.models.build import with_embed_dim
from selftask.optim.param_groups import freeze_for_good, frozen_until
from selftask.registry import METHODS
from selftask.task.frozen import FrozenParameters


class Learner(nn.Module):
    """Backbone, head and method as one module, whose forward pass returns the loss.

    ::

        learner = selftask.Learner("moco", backbone, steps=1000, batch_size=256)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.03)
        for views in loader:
            loss = learner(views)
            optimizer.zero_grad()
            loss.backward()
            learner.after_backward()  # DINO and SwAV freeze a layer at first
            optimizer.step()
            learner.update()  # update teacher and queue

    Its state dict holds network, teacher, queue and progress. With several ranks, each computes its
    part of the loss over all ranks; wrap the learner in DDP.

    Args:
        method: Name of a method, or a method object or class.
        backbone: Images (B, C, H, W) -> features (B, E), trained in place.
        steps: Number of optimizer steps of the training, for the schedules of teacher and
            temperatures.
        batch_size: Number of samples of a batch, over all ranks.
        num_images: Number of images of the data set. It sets the size of a memory of all images,
            and the length of an epoch, in which some options are given, such as DINO's
            ``freeze_last_layer``. None takes the whole training as one epoch.
        channels: Number of channels of the images.
        seed: Seed of masks and other random draws of the method.
        **options: Fields of the method's ``Config``; none are allowed for a method object.

    Raises:
        UserError: If the method or an option is unknown, a value is invalid, or the backbone does
            not fit the method. Also for methods that act before each epoch, such as
            ``deepcluster``, need captions, or undo the normalization of the views, such as ``mfm``;
            use ``selftask.train``.
    """

    def __init__(
        self,
        method: str | Method | type[Method],
        backbone: nn.Module,
        *,
        steps: int,
        batch_size: int,
        num_images: int | None = None,
        channels: int = 3,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        loss = _build(method, options)
        if "captions" in loss.requires:
            raise UserError(
                f"{type(loss).__name__} needs a tokenizer, which a Learner does not have; train it "
                "with selftask.train"
            )
        if defines(loss, "on_phase_start"):
            raise UserError(
                f"{type(loss).__name__} acts before each epoch (on_phase_start), and a "
                "Learner has no epochs; train it with selftask.train"
            )
        samples = steps * batch_size if num_images is None else num_images
        if min(steps, batch_size) < 1 or samples < batch_size:
            raise UserError(
                f"Learner: steps={steps}, batch_size={batch_size}, num_images={num_images}: steps "
                "and batch_size must be at least 1, and num_images at least batch_size"
            )
        length = RunLength(num_samples=samples, batch_size=batch_size, max_steps=steps)
        self._task = _TaskOfLearner(length, channels, seed, loss)
        backbone = with_embed_dim(backbone, type(backbone).__name__, channels)
        loss.check_backbone(backbone)
        self.network = self._task.base_model = loss.build_network(backbone, self._task)
        loss.setup(self._task)
        self.method = self._task.loss = loss
        rules, modules = loss.group_rules(), [("network", self.network), ("loss", loss)]
        freeze_for_good(modules, [], rules)
        self._frozen = FrozenParameters(frozen_until(modules, rules, length))

    @property
    def backbone(self) -> nn.Module:
        """The backbone to keep: the network's, or in some methods the teacher's."""
        return self.method.export_backbone(self.network)

    def forward(
        self,
        views: Tensor | list[Tensor] | Mapping[str, list[Tensor]] | Batch,
        *,
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            views: A float view (B, C, H, W) of the images, or a list of them; a dict of lists by
                group for methods with named groups; a ``Batch`` for methods that need crop boxes.
            labels: Integer labels (B,), for methods that need them.
            index: Index (B,) of each image in the data set, for methods with a memory of all
                images. Pass a tensor on the CPU; the host would have to wait for one on a GPU.

        Raises:
            UserError: If ``views`` is none of these, if views, labels, indices or crop boxes that
                the method requires are missing, or if ``labels`` or ``index`` are not integers
                (B,).
        """
        task = self._task
        batch = as_batch(views, task.clock.batch, task.length.batches_per_epoch)
        size, device = len(batch.index), batch.index.device
        if labels is not None:
            batch.labels = per_image(labels, "labels", size, device)
        has_index = index is not None or isinstance(views, Batch)
        check_batch(self.method, batch, has_index=has_index)
        if index is not None:
            numbers = per_image(index, "index", size, torch.device("cpu"))
            if "index" in self.method.requires:
                _check_index(numbers, task.data_module.num_images)
            batch.index = numbers.to(device, non_blocking=True)
            batch.key = torch.stack([batch.key[:, 0], numbers], dim=1)
        task.train, task.device, task.last_batch = self.training, batch.index.device, batch
        self.method.prepare_batch(batch, task)
        batch.output = self.network(batch.input)
        self.method.on_forward(task)
        batch.local_loss = self.method(batch.output, batch)
        return batch.local_loss

    def after_backward(self) -> None:
        """Let the method modify or drop gradients; call it before the optimizer's step."""
        self._frozen.drop_gradients(self._task.steps_done)
        self.method.on_backward(self._task)

    def update(self) -> None:
        """Update teacher, queue and schedules; call it after the optimizer's step."""
        self.method.on_update(self._task)
        self._task.clock.advance()
        self._task.last_batch = None  # its graph could be neither copied nor pickled

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self._task.clock.steps_done}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the result of ``get_extra_state``."""
        self._task.clock.steps_done = self._task.clock.batch = state["steps"]


class _TaskOfLearner:
    """Minimal substitute for ``Task``, with the attributes that methods use."""

    loss: Method
    base_model: nn.Module
    last_batch: Batch | None
    device: torch.device

    def __init__(self, length: RunLength, channels: int, seed: int, method: Method) -> None:
        self.length, self.clock, self.train = length, Clock(length), True
        self.data_module = SimpleNamespace(
            num_images=length.num_samples,
            channels=channels,
            num_classes=0,
            train_source=None,
            val_sources={},
        )
        self.config = SimpleNamespace(
            train=SimpleNamespace(seed=seed),
            method=SimpleNamespace(name=type(method).__name__),
            views=_smallest_views(method),
            init=SimpleNamespace(backbone=None),
            eval=SimpleNamespace(transforms=[]),
        )
        self.logged: dict[str, Any] = {}
        self.should_log = self.has_test_phases = False

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()  # the caller's own applies

    @property
    def where(self) -> float:
        return self.clock.where

    @property
    def steps_done(self) -> int:
        return self.clock.steps_done

    def log(self, name: str, value: Any) -> None:
        self.logged[name] = value


def _check_index(index: Tensor, num_images: int) -> None:
    """Raise UserError if an index is outside a memory of ``num_images``."""
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= num_images:
        raise UserError(
            f"index: from {low} to {high}, and the memory has {num_images} images; give the number "
            "of images of the data set as num_images"
        )


def _smallest_views(method: Method) -> dict[str, ViewConfig]:
    """Return groups of views, each with the smallest number that the method declares."""
    groups = method.views if isinstance(method.views, dict) else {"main": method.views}
    return {
        name: ViewConfig(count=number[0] if isinstance(number, tuple) else number, transforms=[])
        for name, number in groups.items()
    }


def _build(method: str | Method | type[Method], options: dict[str, Any]) -> Any:
    """Return the method object.

    Raises UserError for an unknown name, an invalid option, or options beside a method object.
    """
    if isinstance(method, Method):
        if options:
            raise UserError(
                f"Learner: {', '.join(options)}: the method is an object, which has its own "
                f"options; give them to {type(method).__name__}.Config"
            )
        return method
    kind = METHODS[method] if isinstance(method, str) else method
    names = [field.name for field in dataclasses.fields(kind.Config)]
    for name in options:
        check_known(name, names, f"{kind.__name__} has no option {name!r}")
    objects = {name: value for name, value in options.items() if not _is_plain(value)}
    plain = {name: value for name, value in options.items() if name not in objects}
    reader = Reader(Layers(), [])
    read = reader.fields(plain, Schema.of(kind.Config, str(kind.__name__), without=objects), ())
    if reader.problems:
        raise UserError("\n".join(f"{kind.__name__}: {text}" for text in reader.problems))
    return kind(kind.Config(**read, **objects))


def _is_plain(value: Any) -> bool:
    """Return True if a recipe could have this value; others, such as a module, are not checked."""
    if isinstance(value, dict | list):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str)
