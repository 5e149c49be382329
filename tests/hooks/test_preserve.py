"""The hook ``preserve``: a term that holds the features to those at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.logs import read_metrics
from selftask.models.features.extract import extract
from selftask.task import Task

ON = "hooks.preserve.weight=2.0"


def assert_equal(task: Task, other: Task) -> None:
    for ours, theirs in ((task.base_model, other.base_model), (task.loss, other.loss)):
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dinov2", "simclr"])  # a transformer; BatchNorm
def test_weight_0_is_the_run_without_it(method: str, tmp_path: Path) -> None:
    without = tiny.train(method, tmp_path, "without")
    off = tiny.train(method, tmp_path, "off", "hooks.preserve.weight=0")
    assert_equal(off, without)
    rows = [row for row in read_metrics(tmp_path / "off/metrics.jsonl") if "loss" in row]
    assert all("preserve" not in row for row in rows)
    cosines = [row["start_cosine"] for row in rows]
    assert cosines[-1] < cosines[0]
    assert cosines[0] == 1.0 or method == "simclr"  # whose statistics have moved by then
    held = tiny.train(method, tmp_path, "held", "hooks.preserve.weight=100")
    values = [row["start_cosine"] for row in read_metrics(tmp_path / "held/metrics.jsonl")]
    assert values[-1] > cosines[-1], "it holds the features"
    assert not torch.equal(*(torch.cat([p.flatten() for p in t.base_model.parameters()])
                             for t in (held, without)))  # fmt: skip


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    whole = tiny.train("mae", tmp_path, "whole", ON)
    tiny.train("mae", tmp_path, "half", ON, "train.stop_at=7")
    resumed = tiny.train("mae", tmp_path, "half", ON)
    assert_equal(resumed, whole)
    assert "preserve" in [*read_metrics(tmp_path / "whole/metrics.jsonl")][-1]


def test_value_and_gradient_are_those_of_the_cosine(tmp_path: Path) -> None:
    """Against torch's cosine_similarity, after the weights have moved."""
    task = tiny.task("dinov2", tmp_path, "run", ON)
    task.prepare()
    hook = task.named_hooks["preserve"]
    hook.on_start(task)
    backbone = task.base_model.backbone
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    task.on_phase_start()
    task.last_batch = batch = next(task.batches)
    hook.on_forward(task)
    backbone.zero_grad()
    batch.added_terms["preserve"].backward()
    gradients = {name: p.grad.clone() for name, p in backbone.named_parameters()}

    backbone.zero_grad()
    backbone.eval()
    now, start = (extract(part, batch.all_views[0]) for part in (backbone, hook.start))
    wanted = (
        1
        - torch.stack(
            [
                F.cosine_similarity(now.pooled, start.pooled, dim=1).mean(),
                F.cosine_similarity(now.patches, start.patches, dim=2).mean(),
            ]
        ).mean()
    )
    (2 * wanted).backward()
    torch.testing.assert_close(batch.added_terms["preserve"], 2 * wanted, atol=1e-5, rtol=1e-5)
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)
    batch.local_loss = torch.tensor(1.0, requires_grad=True)
    torch.testing.assert_close(batch.local_loss, 1 + batch.added_terms["preserve"])
    assert set(batch.terms) == {"preserve"}
    task.close()


@pytest.mark.parametrize(
    "word",
    ["train.step=sam", "parallel=fsdp", "parallel.activation_checkpointing=blocks"],
)
def test_what_it_does_not_go_with(word: str) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.preserve\.weight"):
        load_config("dino/digits", [ON, word])


def test_the_start_has_the_running_statistics(tmp_path: Path) -> None:
    """Not those of ``precise_bn``, which are of the new images."""
    precise = "hooks.precise_bn={batches: 2, batch_size: 8}"
    task = tiny.task("simclr", tmp_path, "run", ON, precise)
    task.prepare()
    before = {name: value.clone() for name, value in task.base_model.backbone.state_dict().items()}
    task.on_start()
    task.close()
    start = task.named_hooks["preserve"].start.state_dict()
    assert any("running_mean" in name for name in start)
    assert not tiny.differences(dict(start), before)
