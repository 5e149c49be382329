"""Columns of ``metrics.jsonl``: unit, meaning, and which component writes them.

Columns of a method are declared by its class (``Method.columns``), all others here. ``selftask
explain`` and the documentation show these texts. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from selftask.registry import METHODS


class Column(NamedTuple):
    """Description of a column, or of several whose names have a variable part.

    Attributes:
        name: Name of the column; variable parts are in capitals, as in ``lr/GROUP``. METRIC is the
            name of another column.
        unit: Unit, or range such as ``0 to 1``; empty if there is none.
        text: Meaning of the values.
        written_by: What writes the column: methods, a hook, a config key, or kinds of runs.
    """

    name: str
    unit: str
    text: str
    written_by: str


_GENERAL = """
every run
step | steps | Finished optimizer steps.
epoch | epochs | Finished epochs, with a fraction.
loss |  | Mean loss of the steps since the previous row, over all ranks.
loss_median |  | Median loss of the steps since the previous row.
lr |  | Learning rate of the first parameter group, at this step.

groups whose rates differ, `optimizers`
lr/GROUP |  | Learning rate of a parameter group, or of an additional optimizer.

runs with weight decay
weight_decay |  | Largest weight decay of all groups.

every run
images_per_s | images/s | Images of all ranks per second, evaluations included.
data_wait | 0 to 1 | Share of the time in which the step waited for data, on the rank that
  waited longest. Above 0.2, more `data.num_workers` or `data.cache` may help.
step_s | s | Mean time of a step, with evaluations and checkpoints in between.
step_s_median | s | Median time of a step, without what happens between steps.
eta_s | s | Remaining time at the mean pace of this attempt.
eta_recent_s | s | Remaining time at the pace since the previous row.

the end of an epoch, if there are any
unreadable_images | images | Training images that could not be read and were replaced, in all
  epochs and on all ranks; `bad_files.txt` lists them.

every run
memory_mb | MiB | Largest resident memory of a process so far.

runs on CUDA and XPU devices
device_memory_mb | MiB | Largest memory allocated on a device since the previous row, so that a
  peak is in the row of its steps; the largest of all rows is that of the run.
device_reserved_mb | MiB | Largest memory reserved by torch's allocator on a device since the
  previous row. Far above `device_memory_mb`, memory is fragmented.

runs on CUDA, XPU and MPS devices
device_memory_now_mb | MiB | Memory allocated on a device at this row.
device_reserved_now_mb | MiB | Memory reserved on a device at this row.

hook `health`, a default; methods with a known loss at chance
chance_loss |  | Loss of a network that knows nothing.
chance_ratio |  | Loss divided by that of a network that knows nothing: 1 is chance, below 1
  something is learned.

hook `health`, a default
emb_std | 0 to 1 | Spread of the embeddings' directions: standard deviation of each component of
  the normalized embeddings, times the root of their width. 1 is spread evenly, 0 means that all
  images have the same embedding (collapse).
mean_cosine | -1 to 1 | Mean cosine of the embeddings of two images; 1 is collapse.
effective_rank | dimensions | Number of directions in which embeddings vary: exponential of the
  entropy of the normalized singular values. Close to 1 is collapse, in one direction.

methods whose targets are probabilities of prototypes
target_entropy | nats | Mean entropy of the targets of images, in DINO and those after it the
  teacher's. 0 is collapse to one prototype; the loss at chance, if the student agrees with its
  targets, is collapse to equal probabilities.

`eval.evaluations`, at step 0, `eval.every`, the end
knn_top1 | 0 to 1 | Accuracy of k nearest neighbors, first k of `k`.
knn_top1_kK | 0 to 1 | Accuracy of K nearest neighbors, for other K of `k`.
linear_top1 | 0 to 1 | Accuracy of logistic regression on frozen features.
linear_N_labels_top1 | 0 to 1 | Accuracy of logistic regression with N labels per class.
linear_N_percent_top1 | 0 to 1 | Accuracy of logistic regression with N % of the labels.
probe_PROTOCOL_top1 | 0 to 1 | Accuracy of a probe by a paper's protocol.
probe_PROTOCOL_held_out_top1 | 0 to 1 | Accuracy of the probe on held-out training images.
probe_PROTOCOL_lr |  | Learning rate of the tested head of the probe.
probe_PROTOCOL_weight_decay |  | Weight decay of the tested head of the probe.
probe_PROTOCOL_blocks |  | Number of last blocks whose features the tested head of the probe gets.
svm_top1 | 0 to 1 | Accuracy of linear SVMs on frozen features.
svm_map | 0 to 1 | Mean average precision of linear SVMs.
svm_N_labels_top1 | 0 to 1 | Accuracy of SVMs with N labels per class.
svm_N_percent_top1 | 0 to 1 | Accuracy of SVMs with N % of the labels.
svm_N_percent_map | 0 to 1 | Mean average precision of SVMs with N % of the labels.
svm_N_labels_map | 0 to 1 | Mean average precision of SVMs with N labels per class.
cluster_nmi | 0 to 1 | Normalized mutual information of the classes and k-means clusters of the
  features.
cluster_ari | -0.5 to 1 | Adjusted Rand index of the classes and k-means clusters of the features.
cluster_purity | 0 to 1 | Share of images in the most frequent class of their cluster.
cluster_accuracy | 0 to 1 | Share of images whose cluster is that of their class, one cluster
  for each class.
rankme | 1 to width | RankMe of the features: exponential of the entropy of their singular values.
alpha |  | Decay of the eigenvalues of the features, alpha-ReQ; best near 1.
nesum | 1 to width | NESum: sum of the eigenvalues of the features divided by the largest.
feature_uniformity | below 0 | Uniformity of the features; lower is more uniform.
lidar | 1 to width | LiDAR: effective number of directions in which images differ, relative to the
  spread of views of an image.
feature_alignment | 0 to 4 | Mean squared distance of the normalized features of views of an image.
cluster_learnability | 0 to 1 | Share of images whose nearest other image is in the same cluster
  of k-means.
intrinsic_dimension |  | Dimension of the features by TwoNN.

hook `online_probe`
train_probe_top1 | 0 to 1 | Accuracy of a linear classifier trained along with the network, on the
  training images since the previous row, each predicted before the update with it.
train_knn_top1 | 0 to 1 | Accuracy of k-NN on the training images since the previous row, with the
  latest images as neighbors.
probe_top1 | 0 to 1 | Accuracy of the classifier trained along with the network on `data.val`.
probe_lr |  | Learning rate of the classifier in `probe_top1` and `train_probe_top1`.
ms_probe | ms | Time of a step that the hook takes.

`eval.evaluations`, at step 0, `eval.every`, the end
segmentation_HEAD_miou | 0 to 1 | Mean IoU of segmentation by a head.
segmentation_HEAD_accuracy | 0 to 1 | Share of correct pixels in segmentation by a head.
segmentation_HEAD_class_accuracy | 0 to 1 | Mean over classes of the share of correct pixels.
correspondence_pck_DISTANCE | 0 to 1 | Share of patches of a warped view whose match in the
  image is within a distance.
correspondence_chance_DISTANCE | 0 to 1 | Share of random matches within a distance.
correspondence_distance | sides | Mean distance of a match from its true position.
eval_s | s | Time of the evaluations.
eval_images_per_s | images/s | Images of all ranks per second whose features were computed.

`eval.loss`
val_loss |  | The method's loss on `data.val`.

`meters`
test_accuracy_top_K | 0 to 1 | Share of images whose class is among the K best.

hook `train_meters`
train_METER_VALUE |  | A value of a meter over the training images since the last row.

hook `preserve`, while its weight is above 0
preserve |  | Term of the loss: weight times 1 - cosine of the features and those at the start,
  mean of pooled features and of patches.

hook `preserve`
start_cosine | -1 to 1 | Mean cosine of the pooled features of an image and those at the start;
  1 at first. Low values say that the features are others, not whether they are better.

hook `clip_gradients`
grad_norm |  | Norm of the gradient before clipping.

hook `gradient_norms`
grad_norm/PART |  | Norm of a part's gradient.
weight_norm/PART |  | Norm of a part's weights.
update_ratio/PART |  | Norm of a part's update over that of its weights.

hook `gradient_noise`
gradient_noise_scale | samples | Batch size above which larger batches help little.

hook `activations`
activations/LAYER/STATISTIC |  | mean, std, zeros or rank of a layer's output.

hook `timing`
ms_SECTION | ms | Time of a section of a step: read, forward, loss, backward, reduce, update,
  hooks.

`eval.layers`
METRIC_layerN |  | A metric of hidden layer N.

hook `online_probe`
METRIC_teacher |  | A metric of the EMA teacher's features.

hook `ema`
ema_METRIC |  | A metric of the exponential average of the weights.

hook `swa`
swa_METRIC |  | A metric of the equal average of the weights.

`data.val_sets`
SET/METRIC |  | A metric of a named validation set.

`eval.loss`
val_TERM |  | A term of the method's loss on `data.val`.

`meters`
test_METER_VALUE |  | A meter of a test phase.
"""
"""Columns that do not belong to a method.

Each block begins with what writes its columns. Then each line has name, unit and meaning; indented
lines continue it. Specific names come before general ones that also match, as ``METRIC_layerN``.
"""


def columns() -> list[Column]:
    """Return the descriptions of all columns, with those of ``Method.columns`` first.

    A column with the same text in several methods is listed once, with all of these methods.
    """
    made: dict[tuple[str, str], list[str]] = {}
    for method in METHODS.names():
        for name, text in METHODS.declared(method, "columns", {}).items():
            made.setdefault((name, text), []).append(f"`{method}`")
    return [
        *(Column(name, "", text, ", ".join(names)) for (name, text), names in made.items()),
        *_rows(_GENERAL),
    ]


def describing(name: str, rows: Sequence[Column] | None = None) -> list[Column]:
    """Return the descriptions that apply to a column of a run; empty if there is none.

    For a variant of a metric, such as ``v2/knn_top1``, those of the metric follow.

    Args:
        name: Name of the column in ``metrics.jsonl``.
        rows: The descriptions; None for ``columns()``.
    """
    rows = columns() if rows is None else rows
    exact = [row for row in rows if row.name == name]
    if exact:
        return exact[:1]
    for row in rows:
        match = _pattern(row.name).fullmatch(name) if "METRIC" in row.name else None
        if match and (inner := describing(match["metric"], rows)):
            return [row, *inner]
    plain = (row for row in rows if "METRIC" not in row.name)
    return [row for row in plain if _pattern(row.name).fullmatch(name)][:1]


def _pattern(name: str) -> re.Pattern[str]:
    """Return the regular expression of a name with variable parts."""

    def expand(part: re.Match[str]) -> str:
        return "(?P<metric>.+)" if part[0] == "METRIC" else "[A-Za-z0-9_.-]+"

    return re.compile(re.sub("[A-Z]+", expand, re.escape(name)))


def _rows(table: str) -> Iterator[Column]:
    for block in table.strip().split("\n\n"):
        written_by, *rows = block.replace("\n  ", " ").splitlines()
        for row in rows:
            name, unit, text = row.split(" | ")
            yield Column(name, unit, text, written_by)
