"""Linear probes that are trained along with the network.

B images of this rank, V views, E features, L learning rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.data.labels import is_labeled
from selftask.distributed.accelerator import forked_rng, is_accelerator, record_event
from selftask.distributed.collectives import all_reduce_sum, world_size
from selftask.errors import UserError
from selftask.hooks.base import Hook, Task
from selftask.hooks.mixup import unmixed
from selftask.hooks.watching.timing import milliseconds
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode
from selftask.models.feature_queue import LabeledQueue
from selftask.models.features.extract import pooled
from selftask.models.features.layer_outputs import LayerOutputs
from selftask.models.linear_probes import LinearProbes
from selftask.models.network import Network
from selftask.models.teacher import Teacher
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("online_probe")
@dataclass(eq=False, kw_only=True)
class OnlineProbe(Hook):
    """Trains linear classifiers on the detached features of each batch, and logs their accuracy.

    The features are those of the first view, which the step computes anyway. Gradients, weights and
    random draws of the network are the same as without the hook. ``train_probe_top1`` is the
    accuracy on the training images since the last row; each image is predicted before a classifier
    learns from it. Evaluations add ``probe_top1``, the accuracy on ``data.val`` with the transforms
    of evaluations. Both are reported for the learning rate with the highest recent accuracy on
    training images, ``probe_lr``. With ``k``, ``train_knn_top1`` is the accuracy of k-NN on
    training images, with the latest ``queue_size`` images as neighbors. Columns of hidden layers
    end with the layer, as in ``probe_top1_layer3``, and those of the teacher with ``_teacher``.
    ``ms_probe`` is the mean time that the hook takes in a step, in milliseconds.
    """

    priority: ClassVar[int] = 60  # before the row is written
    evaluates: ClassVar[bool] = True

    lr: list[float] = setting([1.0, 3.0, 10.0], above=0, nonempty=True)
    """Learning rates, each with its own classifier. Features (B, E) are standardized and divided by
    sqrt(E).
    """
    layers: list[int] = setting([])
    """Hidden layers of the backbone that also have classifiers, in addition to its output: mean of
    the patches, as in ``eval.layers``. Negative numbers count from the last layer.
    """
    teacher: bool = False
    """Whether there are also classifiers of the output of the EMA teacher's backbone, for the first
    view that the teacher computes in the step.
    """
    k: int = setting(0, min=0)
    """Number of neighbors among the latest images that vote for the class of an image, such as 20;
    0: no k-NN.
    """
    queue_size: int = setting(4096, min=1)
    """Number of latest training images among which k-NN finds neighbors."""
    num_classes: int | None = setting(None, min=2)
    """Number of classes; null: that of the data, if the labels are known before images are read."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        train = config["train"]
        if self.k > self.queue_size:
            yield f"k: {self.k} is more than queue_size: {self.queue_size}"
        step = train["step"]["name"]
        if self.layers and (train["compile"] or step == "compiled"):
            yield "layers: a compiled model shows no hidden layers; use train.compile=false"
        if self.layers and step == "grad_cache":
            yield "layers: train.step=grad_cache passes parts of a batch; use train.step=standard"

    def __post_init__(self) -> None:
        # by the end of their columns: "", "_layer3", "_teacher"
        self.probes: dict[str, LinearProbes] = {}
        self.queue: LabeledQueue | None = None
        self.loaded: dict[str, Any] = {}
        self.clock: Callable[[], Any] = time.perf_counter
        self.times: list[tuple[Any, Any]] = []  # start and end, since the last row
        self.steps = 0  # since the last row

    def on_start(self, task: Task) -> None:
        if not is_labeled(task.data_module.train_source):
            raise UserError("hooks.online_probe: the images of data have no labels to learn")
        self.classes = self.num_classes or task.data_module.num_classes
        if not self.classes:
            raise UserError(
                "hooks.online_probe.num_classes is missing: the labels of these images are not "
                "known before they are read"
            )
        try:
            self.hidden = LayerOutputs(task.base_model.backbone, self.layers)
        except UserError as error:
            raise UserError(f"hooks.online_probe: {error}") from None
        if self.teacher and not isinstance(_teacher_network(task), Network):
            raise UserError(
                f"hooks.online_probe.teacher: {task.config.method.name} has no EMA teacher with "
                "pooled features; use teacher=false"
            )
        if is_accelerator(task.device):
            self.clock = partial(record_event, task.device, timing=True)

    # -- training -------------------------------------------------------------------------------

    def before_step(self, task: Task) -> None:
        for learner in self._learners():
            learner.clear()  # a skipped step leaves sums
        self.hidden.start()

    def on_loss_and_meter(self, task: Task) -> None:
        if not task.train:
            return
        with self._timed():
            labels = unmixed(task, task.last_batch.labels)
            if labels.ndim > 1:
                raise UserError("hooks.online_probe: one label for each image is expected")
            embedding = getattr(task.base_model, "embedding", None)  # (V * B, E), view after view
            if embedding is None or len(embedding) % len(labels):
                raise UserError(
                    "hooks.online_probe: the network keeps no pooled features of each view; see "
                    "Network.extract and Network.pooled"
                )
            if self.k:
                first = embedding[: len(labels)].float()
                self._queue(first).add(first, labels)
            columns = _by_column(embedding, self.hidden.take())
            if self.teacher:
                columns["_teacher"] = _teacher_embedding(task, len(labels))
            for name, features in columns.items():
                first = features[: len(labels)].float()
                self._probe(name, first).add(first, labels)

    def on_update(self, task: Task) -> None:
        with self._timed():
            for learner in self._learners():
                learner.update()
        self.steps += 1
        if task.should_log:
            for name, probe in self.probes.items():
                task.log(f"train_probe_top1{name}", probe.take_accuracy()[probe.best])
                task.log(f"probe_lr{name}", probe.lr[probe.best])
            if self.queue is not None and (accuracy := self.queue.take_accuracy()) is not None:
                task.log("train_knn_top1", accuracy)
            task.log("ms_probe", sum(starmap(milliseconds, self.times)) / self.steps)
            self.times.clear()
            self.steps = 0

    def on_step(self, task: Task) -> None:
        self.hidden.stop()  # here, since a skipped step has no update

    def release(self) -> None:
        if hasattr(self, "hidden"):
            self.hidden.stop()

    def on_end(self, task: Task) -> None:
        if {"ms_probe", "step_s_median"} <= task.history.keys():
            probe_ms = task.history["ms_probe"].median()
            step_ms = 1e3 * task.history["step_s_median"].median()
            text = "online_probe: %.2f of the %.1f milliseconds of a step (%.1f %%)"
            log.info(text, probe_ms, step_ms, 100 * probe_ms / step_ms)

    def _learners(self) -> list[LinearProbes | LabeledQueue]:
        return [*self.probes.values(), *([] if self.queue is None else [self.queue])]

    def _queue(self, features: Tensor) -> LabeledQueue:
        """Return the queue, which is built when the width of the features is known."""
        if self.queue is None:
            sizes = self.queue_size, features.shape[1], self.classes, self.k
            self.queue = LabeledQueue(*sizes, features.device)
            state = self.loaded.pop("knn", {})
            if _sizes(state) == _sizes(self.queue.state_dict()):
                self.queue.load_state_dict(state)
        return self.queue

    def _probe(self, name: str, features: Tensor) -> LinearProbes:
        """Return the classifiers of a layer, which are built when its width is known."""
        if name not in self.probes:
            probe = LinearProbes(self.lr, features.shape[1], self.classes, features.device)
            state, sizes = self.loaded.pop(name, {}), _sizes(probe.state_dict())
            if _sizes(state) == sizes:
                probe.load_state_dict(state)
            elif state:
                log.warning("hooks.online_probe: other classes or rates; the probes start anew")
            self.probes[name] = probe
        return self.probes[name]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self.clock()
        yield
        self.times.append((start, self.clock()))

    # -- evaluation -----------------------------------------------------------------------------

    def before_evaluation(self, task: Task) -> None:
        """Log the accuracy on the labeled validation sets, which are divided among the ranks.

        A network that is sharded over ranks is not evaluated.
        """
        if not self.probes or (task.config.parallel.reduce == "fsdp" and world_size() > 1):
            return
        task.sync_buffers()
        for set_name in task.data_module.labeled_sets:
            for name, accuracy in self._evaluate(task, set_name).items():
                column = f"probe_top1{name}"
                task.log(f"{set_name}/{column}" if set_name else column, accuracy)

    @torch.no_grad()
    def _evaluate(self, task: Task, set_name: str) -> dict[str, Tensor]:
        """Return the accuracies on a validation set, by column suffix such as ``_layer3``."""
        backbone = task.base_model.backbone
        teacher = _teacher_network(task).backbone if self.teacher else nn.Identity()
        # hits of each learning rate, images
        counts = {name: torch.zeros(len(self.lr) + 1, device=task.device) for name in self.probes}
        with in_eval_mode(backbone), in_eval_mode(teacher), forked_rng():
            self.hidden.start()
            for batch in task.data_module.test_samples(set_name):
                images = batch.all_views[0].to(task.device, non_blocking=True)
                labels = batch.labels.to(task.device, non_blocking=True)
                columns = _by_column(pooled(backbone, images), self.hidden.take())
                if self.teacher:
                    columns["_teacher"] = pooled(teacher, images)
                for name, x in columns.items():
                    counts[name][:-1] += self.probes[name].count_hits(x.float(), labels)
                    counts[name][-1] += (labels >= 0).sum()
            self.hidden.stop()
        sums = {name: all_reduce_sum(count) for name, count in counts.items()}
        return {
            name: sums[name][probe.best] / sums[name][-1] for name, probe in self.probes.items()
        }

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        learned: dict[str, nn.Module] = {**self.probes}
        if self.queue is not None:
            learned["knn"] = self.queue
        return {**self.loaded, **{name: dict(one.state_dict()) for name, one in learned.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = dict(state)
        self.probes, self.queue = {}, None  # built from it with the next batch


def _sizes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


def _by_column(output: Tensor, hidden: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the features of the backbone's output and of layers, by column suffix."""
    return {"": output, **{f"_layer{number}": x for number, x in hidden.items()}}


def _teacher_network(task: Task) -> Any:
    """Return the network of the method's EMA teacher, or None."""
    teacher = getattr(task.loss, "teacher", None)
    return teacher.network if isinstance(teacher, Teacher) else None


def _teacher_embedding(task: Task, num_images: int) -> Tensor:
    """Return the teacher's pooled features of this step, (V * B, E), view after view.

    Raises UserError if they are not those of this rank's images.
    """
    embedding: Tensor | None = _teacher_network(task).embedding
    if embedding is None or len(embedding) % num_images:
        raise UserError(
            "hooks.online_probe.teacher: the teacher's features are not those of this rank's "
            "images, as with shuffled BatchNorm on several ranks; use teacher=false"
        )
    return embedding
