"""Columns of ``metrics.jsonl``: unit, meaning, and which component writes them.

Columns are described nowhere else; ``selftask explain`` and the documentation show these texts.
Does not import torch.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Column(NamedTuple):
    """One column, or several whose names have a variable part in capitals (``lr/GROUP``)."""

    name: str
    unit: str
    text: str
    written_by: str = "every run"

    def matches(self, name: str) -> bool:
        """Return whether this is the description of the column ``name``."""
        pattern = re.sub(r"[A-Z]+", "[A-Za-z0-9_.-]+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


_HEALTH, _EVAL = "hook `health`, a default", "`eval.evaluations`, at step 0, `eval.every`, the end"
_DEVICE = "runs on CUDA and XPU devices"
_DEVICES = "runs on CUDA, XPU and MPS devices"

COLUMNS = (
    Column("step", "steps", "Finished optimizer steps."),
    Column("epoch", "epochs", "Finished epochs, with a fraction."),
    Column("loss", "", "Mean loss of the steps since the row before, over all ranks."),
    Column("loss_median", "", "Median loss of these steps."),
    Column("lr", "", "Learning rate of the first parameter group, at this step."),
    Column("lr/GROUP", "", "Learning rate of a parameter group.", "groups whose rates differ"),
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
    Column("svm_top1", "0 to 1", "Accuracy of linear SVMs on frozen features.", _EVAL),
    Column("svm_map", "0 to 1", "Mean average precision of linear SVMs.", _EVAL),
    Column("svm_N_labels_top1", "0 to 1", "Accuracy of SVMs with N labels per class.", _EVAL),
    Column("svm_N_labels_map", "0 to 1", "Mean average precision with N labels per class.", _EVAL),
    Column("eval_s", "s", "Time of the evaluation.", _EVAL),
    Column("eval_images_per_s", "images/s", "Images whose features were computed.", _EVAL),
    Column("val_loss", "", "The method's loss on `data.val`.", "`eval.loss`"),
    Column(
        "test_accuracy_top_K",
        "0 to 1",
        "Share of images whose class is among the K best.",
        "`meters`",
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
    Column(
        "invariance",
        "",
        "Term of the loss: two views have the same embedding.",
        "`barlow`, `vicreg`",
    ),
    Column("redundancy", "", "Term of the loss: components are uncorrelated.", "`barlow`"),
    Column("variance", "", "Term of the loss: components vary over images.", "`vicreg`"),
    Column("covariance", "", "Term of the loss: components are uncorrelated.", "`vicreg`"),
    Column(
        "kl", "", "Term of the loss: divergence of the student from its targets.", "`dino`, `swav`"
    ),
    Column(
        "teacher_entropy",
        "",
        "Term of the loss: entropy of the teacher's targets. 0 is collapse to one prototype, the "
        "loss at chance is collapse to equal probabilities.",
        "`dino`",
    ),
    Column("assignment_entropy", "", "Term of the loss: entropy of the assignments.", "`swav`"),
    Column("dino_global", "", "Term of the loss: DINO between global views.", "`dinov2`"),
    Column("dino_local", "", "Term of the loss: DINO of local views.", "`dinov2`"),
    Column("ibot", "", "Term of the loss: masked patches.", "`dinov2`"),
    Column("koleo", "", "Term of the loss: embeddings are spread evenly.", "`dinov2`"),
    Column("global_TERM", "", "Term of the loss, of whole views.", "`vicregl`"),
    Column("local_TERM", "", "Term of the loss, of cells.", "`vicregl`"),
    Column(
        "largest_cluster",
        "0 to 1",
        "Share of images in the largest cluster; 1 is collapse.",
        "`deepcluster`",
    ),
    Column("temperature", "", "Learned temperature.", "`clip`"),
    Column("single", "", "Term of the loss: whole images.", "`densecl`"),
    Column("dense", "", "Term of the loss: cells of the feature maps.", "`densecl`"),
    Column(
        "cross_entropy", "", "Term of the loss: masked views have the teacher's targets.", "`msn`"
    ),
    Column(
        "me_max",
        "",
        "Term of the loss: divergence of the mean prediction from the prior; 0 is all prototypes "
        "used as the prior says.",
        "`msn`",
    ),
    Column("nce", "", "Term of the loss: each image is told from noise.", "`npid`"),
    Column("info_nce", "", "Term of the loss: each image among its negatives.", "`npid`"),
    Column("softmax", "", "Term of the loss: each image among all images.", "`npid`"),
    Column("proximal", "", "Term of the loss: distance from the memory.", "`npid`"),
    Column("image", "", "Term of the loss: whole images.", "`pirl`"),
    Column("tiles", "", "Term of the loss: jigsaw tiles.", "`pirl`"),
    Column("distillation", "", "Term of the loss: distance from the teacher.", "`distill`"),
    Column("labels", "", "Term of the loss: cross-entropy with labels.", "`distill`"),
    Column("METRIC_layerN", "", "A metric of hidden layer N.", "`eval.layers`"),
    Column("SET/METRIC", "", "A metric of a named validation set.", "`data.val_sets`"),
    Column("val_TERM", "", "A term of that loss.", "`eval.loss`"),
    Column("test_METER_METRIC", "", "A meter of a test phase.", "`meters`"),
    Column("AVERAGE_test_METRIC", "", "A test phase with averaged weights.", "hooks `ema`, `swa`"),
)
"""Descriptions of columns. The first match applies, so more specific names come first."""


def describe_column(name: str) -> Column | None:
    """Return the description of a column, or None for an unknown one, such as your own metric."""
    return next((column for column in COLUMNS if column.matches(name)), None)
