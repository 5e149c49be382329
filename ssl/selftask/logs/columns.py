"""Columns of ``metrics.jsonl``: unit, meaning, and which component writes them.

Those of a method are declared by its class (``Method.columns``), all others here; ``selftask
explain`` and the documentation show these texts. Does not import torch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from selftask.registry import METHODS


class Column(NamedTuple):
    """Description of a column, or of several: capitals are a variable part (``lr/GROUP``)."""

    name: str
    unit: str
    text: str
    written_by: str = "every run"

    def matches(self, name: str) -> bool:
        """Return True if this describes the column ``name``."""
        pattern = re.sub(r"[A-Z]+", "[A-Za-z0-9_.-]+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


_HEALTH, _EVAL = "hook `health`, a default", "`eval.evaluations`, at step 0, `eval.every`, the end"
_PROBE = "hook `online_probe`"
_DEVICE = "runs on CUDA and XPU devices"
_DEVICES = "runs on CUDA, XPU and MPS devices"

_GENERAL = (
    Column("step", "steps", "Finished optimizer steps."),
    Column("epoch", "epochs", "Finished epochs, with a fraction."),
    Column("loss", "", "Mean loss of the steps since the row before, over all ranks."),
    Column("loss_median", "", "Median loss of these steps."),
    Column("lr", "", "Learning rate of the first parameter group, at this step."),
    Column(
        "lr/GROUP",
        "",
        "Learning rate of a parameter group, or of a further optimizer.",
        "groups whose rates differ, `optimizers`",
    ),
    Column("weight_decay", "", "Largest weight decay of all groups.", "runs with weight decay"),
    Column("images_per_s", "images/s", "Images of all ranks per second, evaluations included."),
    Column(
        "data_wait",
        "0 to 1",
        "Share of the time in which the step waited for data, on the rank that waited longest. "
        "Above 0.2, more `data.num_workers` or `data.cache` may help.",
    ),
    Column("step_s", "s", "Mean time of a step, with evaluations and checkpoints in between."),
    Column("step_s_median", "s", "Median time of a step, without what happens between steps."),
    Column("eta_s", "s", "Remaining time at the mean pace of this attempt."),
    Column("eta_recent_s", "s", "Remaining time at the pace since the row before."),
    Column(
        "unreadable_images",
        "images",
        "Training images that could not be read and were replaced, in all epochs and on all ranks; "
        "`bad_files.txt` lists them.",
        "the end of an epoch, if there are any",
    ),
    Column("memory_mb", "MiB", "Largest resident memory of a process so far."),
    Column(
        "device_memory_mb",
        "MiB",
        "Largest memory allocated on a device since the row before, so that a peak is in the row "
        "of its steps; the largest of all rows is that of the run.",
        _DEVICE,
    ),
    Column(
        "device_reserved_mb",
        "MiB",
        "Largest memory reserved by torch's allocator on a device since the row before. Far above "
        "`device_memory_mb`, memory is fragmented.",
        _DEVICE,
    ),
    Column("device_memory_now_mb", "MiB", "Memory allocated on a device at this row.", _DEVICES),
    Column("device_reserved_now_mb", "MiB", "Memory reserved on a device at this row.", _DEVICES),
    Column(
        "chance_loss",
        "",
        "Loss of a network that knows nothing.",
        f"{_HEALTH}; methods with a known loss at chance",
    ),
    Column(
        "chance_ratio",
        "",
        "Loss divided by that of a network that knows nothing: 1 is chance, below 1 something is "
        "learned.",
        f"{_HEALTH}; methods with a known loss at chance",
    ),
    Column(
        "emb_std",
        "0 to 1",
        "Spread of the embeddings' directions: standard deviation of each component of the "
        "normalized embeddings, times the root of their width. 1 is spread evenly, 0 means that "
        "all images have the same embedding (collapse).",
        _HEALTH,
    ),
    Column(
        "mean_cosine",
        "-1 to 1",
        "Mean cosine of the embeddings of two images; 1 is collapse.",
        _HEALTH,
    ),
    Column(
        "effective_rank",
        "dimensions",
        "Number of directions in which embeddings vary: exponential of the entropy of the "
        "normalized singular values. Close to 1 is collapse, in one direction.",
        _HEALTH,
    ),
    Column("knn_top1", "0 to 1", "Accuracy of k nearest neighbors, first k of `k`.", _EVAL),
    Column("knn_top1_kK", "0 to 1", "Accuracy of K nearest neighbors, further k of `k`.", _EVAL),
    Column("linear_top1", "0 to 1", "Accuracy of logistic regression on frozen features.", _EVAL),
    Column("linear_N_labels_top1", "0 to 1", "The same with N labels per class.", _EVAL),
    Column("linear_N_percent_top1", "0 to 1", "The same with N % of the labels.", _EVAL),
    Column("probe_PROTOCOL_top1", "0 to 1", "Accuracy of a probe by a paper's protocol.", _EVAL),
    Column("probe_PROTOCOL_held_out_top1", "0 to 1", "That on held-out images.", _EVAL),
    Column("probe_PROTOCOL_lr", "", "Learning rate of the tested head.", _EVAL),
    Column("probe_PROTOCOL_weight_decay", "", "Its weight decay.", _EVAL),
    Column("probe_PROTOCOL_blocks", "", "Its number of blocks.", _EVAL),
    Column("svm_top1", "0 to 1", "Accuracy of linear SVMs on frozen features.", _EVAL),
    Column("svm_map", "0 to 1", "Mean average precision of linear SVMs.", _EVAL),
    Column("svm_N_labels_top1", "0 to 1", "Accuracy of SVMs with N labels per class.", _EVAL),
    Column("svm_N_percent_top1", "0 to 1", "Accuracy of SVMs with N % of the labels.", _EVAL),
    Column("svm_N_percent_map", "0 to 1", "Mean average precision with N % of them.", _EVAL),
    Column("svm_N_labels_map", "0 to 1", "Mean average precision with N labels per class.", _EVAL),
    Column(
        "cluster_nmi",
        "0 to 1",
        "Normalized mutual information of the classes and k-means clusters of the features.",
        _EVAL,
    ),
    Column("cluster_ari", "-0.5 to 1", "Adjusted Rand index of these clusters.", _EVAL),
    Column(
        "cluster_purity",
        "0 to 1",
        "Share of images in the most frequent class of their cluster.",
        _EVAL,
    ),
    Column(
        "cluster_accuracy",
        "0 to 1",
        "Share of images whose cluster is that of their class, one cluster for each class.",
        _EVAL,
    ),
    Column("rankme", "1 to width", "RankMe of the features: entropy of singular values.", _EVAL),
    Column("alpha", "", "Decay of the eigenvalues of the features, alpha-ReQ; best near 1.", _EVAL),
    Column("nesum", "1 to width", "Sum of these eigenvalues over the largest.", _EVAL),
    Column(
        "feature_uniformity", "below 0", "Uniformity of the features; lower is more uniform.", _EVAL
    ),
    Column("lidar", "1 to width", "LiDAR of views of images: rank of what they differ in.", _EVAL),
    Column("feature_alignment", "0 to 4", "Mean squared distance of views of an image.", _EVAL),
    Column(
        "cluster_learnability",
        "0 to 1",
        "Share of images whose nearest other image is in the same cluster of k-means.",
        _EVAL,
    ),
    Column("intrinsic_dimension", "", "Dimension of the features by TwoNN.", _EVAL),
    Column(
        "train_probe_top1",
        "0 to 1",
        "Accuracy of a linear classifier trained beside the network, on the training images since "
        "the row before, each predicted before the update with it.",
        _PROBE,
    ),
    Column(
        "train_knn_top1",
        "0 to 1",
        "Accuracy of k-NN on the training images since the row before, with the latest images as "
        "neighbors.",
        _PROBE,
    ),
    Column("probe_top1", "0 to 1", "Accuracy of this classifier on `data.val`.", _PROBE),
    Column("probe_lr", "", "Learning rate of the classifier that these columns show.", _PROBE),
    Column("ms_probe", "ms", "Time of a step that the hook takes.", _PROBE),
    Column("segmentation_HEAD_miou", "0 to 1", "Mean IoU of segmentation by a head.", _EVAL),
    Column("segmentation_HEAD_accuracy", "0 to 1", "Share of correct pixels.", _EVAL),
    Column("segmentation_HEAD_class_accuracy", "0 to 1", "Its mean over classes.", _EVAL),
    Column(
        "correspondence_pck_DISTANCE",
        "0 to 1",
        "Share of patches of a warped view whose match in the image is within a distance.",
        _EVAL,
    ),
    Column("correspondence_chance_DISTANCE", "0 to 1", "The same of random matches.", _EVAL),
    Column("correspondence_distance", "sides", "Mean distance of a match from its place.", _EVAL),
    Column("eval_s", "s", "Time of the evaluation.", _EVAL),
    Column("eval_images_per_s", "images/s", "Images whose features were computed.", _EVAL),
    Column("val_loss", "", "The method's loss on `data.val`.", "`eval.loss`"),
    Column(
        "test_accuracy_top_K",
        "0 to 1",
        "Share of images whose class is among the K best.",
        "`meters`",
    ),
    Column(
        "train_METER_VALUE",
        "",
        "A value of a meter over the training images since the last row.",
        "hook `train_meters`",
    ),
    Column(
        "preserve",
        "",
        "Term of the loss: weight times 1 - cosine of the features and those at the start, mean of "
        "pooled features and of patches.",
        "hook `preserve`, while its weight is above 0",
    ),
    Column(
        "start_cosine",
        "-1 to 1",
        "Mean cosine of the pooled features of an image and those at the start; 1 at first. Low "
        "values say that the features are others, not whether they are better.",
        "hook `preserve`",
    ),
    Column("grad_norm", "", "Norm of the gradient before clipping.", "hook `clip_gradients`"),
    Column("grad_norm/PART", "", "Norm of a part's gradient.", "hook `gradient_norms`"),
    Column("weight_norm/PART", "", "Norm of a part's weights.", "hook `gradient_norms`"),
    Column(
        "update_ratio/PART",
        "",
        "Norm of a part's update over that of its weights.",
        "hook `gradient_norms`",
    ),
    Column(
        "gradient_noise_scale",
        "samples",
        "Batch size above which larger batches help little.",
        "hook `gradient_noise`",
    ),
    Column(
        "activations/LAYER/STATISTIC",
        "",
        "mean, std, zeros or rank of a layer's output.",
        "hook `activations`",
    ),
    Column(
        "ms_SECTION",
        "ms",
        "Time of a section of a step: read, forward, loss, backward, reduce, update, hooks.",
        "hook `timing`",
    ),
    Column("METRIC_layerN", "", "A metric of hidden layer N.", "`eval.layers`"),
    Column("METRIC_teacher", "", "Of the EMA teacher's features.", _PROBE),
    Column("SET/METRIC", "", "A metric of a named validation set.", "`data.val_sets`"),
    Column("val_TERM", "", "A term of that loss.", "`eval.loss`"),
    Column("test_METER_METRIC", "", "A meter of a test phase.", "`meters`"),
    Column("AVERAGE_test_METRIC", "", "A test phase with averaged weights.", "hooks `ema`, `swa`"),
)
"""Columns of all methods. The first match applies, so more specific names come first."""


def columns() -> list[Column]:
    """Return all descriptions; those that methods declare (``Method.columns``) come first."""
    made: dict[tuple[str, str], list[str]] = {}
    for method in METHODS.names():
        for name, text in METHODS.declared(method, "columns", {}).items():
            made.setdefault((name, text), []).append(f"`{method}`")
    return [
        *(Column(name, "", text, ", ".join(names)) for (name, text), names in made.items()),
        *_GENERAL,
    ]


def describe_column(name: str) -> Column | None:
    """Return the description of a column, or None for an unknown one, such as your own metric."""
    return next((column for column in columns() if column.matches(name)), None)
