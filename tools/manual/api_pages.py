"""Pages of the Python API by autodoc, and the modules that they show."""

from __future__ import annotations

PARTS = {
    "api-training": (
        "Train, load, loop",
        (
            "What `import selftask` offers: `selftask.train`, `selftask.create_task`, "
            "`selftask.load`, `selftask.Task`, `selftask.Trainer`, `selftask.Learner`. How to "
            "use them is in "
            "[Python API](../python.md)."
        ),
        (
            *("api.training", "api.model", "api.evaluation", "api.predictor"),
            *("api.trainer", "api.learner"),
            *("task.task", "task.recorder", "batch"),
        ),
    ),
    "api-methods": (
        "Methods, hooks and steps",
        (
            "The base classes of what you write yourself, and the functions that register it: "
            "[write a method](../methods.md), [train steps](../train-steps.md)."
        ),
        (
            *("methods.base", "hooks.base", "hooks.writers.base", "registry"),
            *("registry.class_source",),
            *("train_steps.standard", "train_steps.accumulate", "train_steps.sam"),
            *("train_steps.grad_cache", "train_steps.manual", "config.fields", "errors"),
        ),
    ),
    "api-models": (
        "Features and building blocks",
        (
            "Features of any backbone in one form, and the parts from which methods are made. B: "
            "images on this rank, W: ranks, V: views, D: features, N: patches."
        ),
        (
            *("models.features.extract", "models.features.tokens", "models.features.adapter"),
            *("models.heads", "models.teacher", "models.feature_queue", "models.memory_bank"),
            *("models.weights.frozen",),
            *(
                "models.clustering",
                "models.masks",
                "models.block_mask",
                "models.predictors.patch_predictor",
            ),
            *("models.losses.contrast", "models.losses.koleo", "models.losses.variance_covariance"),
            *("models.precision", "models.network", "models.weights.trained"),
        ),
    ),
    "api-distributed": (
        "Ranks and random numbers",
        "Collectives with gradients, and random numbers that depend on neither rank nor resume.",
        ("distributed.collectives", "random", "random.keyed", "random.permutation", "random.views"),
    ),
    "api-data": (
        "Data and schedules",
        (
            "The contracts of sources, transforms and samplers ([data](../data.md), "
            "[transforms](../transforms.md), [samplers](../samplers.md)), and of schedules."
        ),
        (
            *("data.source", "data.transforms.transform", "data.sampling.sampler"),
            *("data.tokenizers.base", "optim.schedules", "optim.curves", "config.run_length"),
        ),
    ),
}
"""File name -> (title, introduction, modules of the package)."""


def api_pages() -> dict[str, str]:
    """Return file name -> MyST text of every page."""
    return {f"{name}.md": _page(*part) for name, part in PARTS.items()}


def _page(title: str, introduction: str, modules: tuple[str, ...]) -> str:
    parts = [f"# {title}", introduction]
    for module in modules:
        parts.append(f"## selftask.{module}")
        parts.append(f"```{{eval-rst}}\n.. automodule:: selftask.{module}\n   :members:\n```")
    return "\n\n".join(parts) + "\n"
