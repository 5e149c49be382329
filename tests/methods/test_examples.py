"""The methods of docs/methods.md and docs/method-examples.md, against loops and closed forms."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from minitask import MiniTask, TinyTokens, loss_of
from selftask.batch import Batch
from selftask.registry import HOOKS, METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = "\n".join((DOCS / f"{n}.md").read_text("utf-8") for n in ("methods", "method-examples"))
NONE = torch.zeros(0, dtype=torch.int64)
SMALL = {"out_dim": 5, "hidden_dim": 7, "bottleneck": 4, "momentum": 0.9, "mask_probability": 1.0}


@pytest.fixture
def example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], ModuleType]]:
    """Import a file of the page; its names are registered for one test."""
    loaded = []

    def load(name: str) -> ModuleType:
        text = re.search(rf"```python\n(# {name}\.py\n.*?)```", PAGE, re.DOTALL)
        assert text is not None
        (tmp_path / f"{name}.py").write_text(text[1], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for registry in (METHODS, HOOKS):  # what selftask itself registered meanwhile stays
        for name, thing in [*registry._registered.items()]:
            if thing.__module__ in loaded:
                del registry._registered[name], registry._addresses[name]


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_nnclr_contrasts_nearest_neighbors(example: Callable[[str], ModuleType]) -> None:
    """Eq. 2 of NNCLR in both directions, as loops."""
    kind = example("my_nnclr").NNCLR
    method = kind(kind.Config(out_dim=4, queue_size=9, temperature=0.2)).double()
    output = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    terms = []
    for view in range(2):
        for image in range(3):
            cosines = [_cosine(output[view, image, 0], row) for row in method.queue.rows]
            nearest = method.queue.rows[cosines.index(max(cosines))]
            exps = [math.exp(_cosine(nearest, other) / 0.2) for other in output[1 - view, :, 1]]
            terms.append(-math.log(exps[image] / sum(exps)))
    assert loss_of(method, output).item() == pytest.approx(sum(terms) / 6, rel=1e-6)


def _dinov2(method: Any, **config: Any) -> MiniTask:
    task = MiniTask(method, {**SMALL, **config}, backbone=TinyTokens, sizes=(8, 8))
    draws = torch.Generator().manual_seed(7)
    task.views = [torch.randn(24, 3, 9, 9, dtype=torch.float64, generator=draws) for _ in range(2)]
    return task


def test_a_term_of_a_subclass_is_that_of_a_hook(example: Callable[[str], ModuleType]) -> None:
    """Both teachers are copies of the network at first; a renewed one is DINOv2's own."""
    module = example("gram")
    task = _dinov2(module.GramDINOv2, gram_weight=3.0, renew_every=2)
    hooked, hook = _dinov2("dinov2"), module.GramTerm(weight=3.0)
    run_hooks = hooked.run_hooks

    def with_term(point: str) -> None:
        run_hooks(point)
        if point == "on_loss_and_meter":
            hook.on_loss_and_meter(hooked)

    hooked.run_hooks = with_term  # type: ignore[method-assign]
    plain = _dinov2("dinov2").run(1)
    task.run(1)
    hooked.run(1)
    both = [(a, b) for a, b in zip(task.grads[0], hooked.grads[0], strict=True) if a is not None]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in both)  # type: ignore[arg-type]
    changed = zip(task.grads[0], plain.grads[0], strict=True)
    assert not all(a is None or torch.allclose(a, b) for a, b in changed)  # type: ignore[arg-type]
    patches = task.last_batch.output.features.patches
    target = task.last_batch["gram"]
    gram = [
        (_cosine(image[i], image[j]) - _cosine(other[i], other[j])) ** 2
        for image, other in zip(patches, target, strict=True)
        for i in range(9)
        for j in range(9)
    ]
    expected = 3.0 * sum(gram) / len(gram)
    assert float(task.last_batch.terms["gram"]) == pytest.approx(expected, rel=1e-9)
    assert float(hooked.logged["gram"]) == pytest.approx(expected / 3.0, rel=1e-9)
    task.run(1)
    pairs = zip(task.loss.gram_teacher.parameters(), task.loss.teacher.parameters(), strict=True)
    assert all(torch.equal(old, now) for old, now in pairs)


def test_a_teacher_of_a_family_follows(example: Callable[[str], ModuleType]) -> None:
    kind = example("slow").Slow
    task = MiniTask(kind, {"out_dim": 4, "momentum": 0.9})
    before = [p.clone() for p in task.loss.teacher.parameters()]
    task.run(1)
    pairs = zip(before, task.loss.teacher.parameters(), task.base_model.parameters(), strict=True)
    for old, now, student in pairs:
        assert torch.allclose(now, 0.9 * old + 0.1 * student, rtol=0, atol=1e-12)
    exported = task.loss.export_backbone(task.base_model)
    assert exported is task.loss.teacher.network.backbone


def test_clips_are_slow_and_steady(example: Callable[[str], ModuleType]) -> None:
    """First and second differences over time, as loops; a uniform motion is steady."""
    kind = example("steady").Steady
    method = kind(kind.Config(steady_weight=2.0, spread_weight=0.5))
    output = torch.randn(4, 5, 3, dtype=torch.float64)
    x = output.tolist()
    rows = [(b, d) for b in range(5) for d in range(3)]
    slow = sum((x[t + 1][b][d] - x[t][b][d]) ** 2 for t in range(3) for b, d in rows) / 45
    steady = sum(
        (x[t + 2][b][d] - 2 * x[t + 1][b][d] + x[t][b][d]) ** 2 for t in range(2) for b, d in rows
    )
    terms = method(output, Batch(views={}, labels=NONE, index=NONE, key=NONE, output=output))
    assert float(terms["slow"]) == pytest.approx(slow, rel=1e-12)
    assert float(terms["steady"]) == pytest.approx(2.0 * steady / 30, rel=1e-12)
    hinges = [
        max(0.0, 1 - math.sqrt(float(f.var(dim=0)[d]) + 1e-4)) for f in output for d in (0, 1, 2)
    ]
    assert float(terms["variance"]) == pytest.approx(0.5 * sum(hinges) / 12, rel=1e-9)
    uniform = output[0] + torch.arange(4.0)[:, None, None] * output[1]
    moving = Batch(views={}, labels=NONE, index=NONE, key=NONE, output=uniform)
    assert float(method(uniform, moving)["steady"]) == pytest.approx(0, abs=1e-20)


def test_rotations_are_classes(example: Callable[[str], ModuleType]) -> None:
    task = MiniTask(example("my_rotation").MyRotation, {}, sizes=(8,))
    task.run(1)
    images = task.views[0][:8]
    for turns, view in enumerate(task.last_batch.input):
        assert torch.equal(view, torch.rot90(images, turns, (2, 3)))
    scores, classes = task.loss.meter_input(task.last_batch.output, task.last_batch)
    assert classes.tolist() == [turns for turns in range(4) for _ in range(8)]
    rows = zip(scores.detach(), classes, strict=True)
    losses = [float(torch.logsumexp(row, 0) - row[turns]) for row, turns in rows]
    assert task.losses[0] == pytest.approx(sum(losses) / 32, rel=1e-9)
