"""Export of the backbone at the end of a run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.config.schema import Config
from selftask.distributed.collectives import is_primary
from selftask.hooks.base import Hook, Task
from selftask.logs.stages import stage
from selftask.models.weights.export import metadata, save_backbone, shown
from selftask.registry import register_hook


@register_hook("export")
@dataclass(eq=False, kw_only=True)
class ExportBackbone(Hook):
    """Writes ``export/backbone.pt``, ``.safetensors`` and ``.json`` when the run ends.

    The weights are those of the hook ``ema`` or ``swa`` if its ``export`` is set. Additional
    backbones of the method are written to the folders ``export/NAME``.
    """

    priority: ClassVar[int] = 80

    def on_end(self, task: Task) -> None:
        average = next((key for key, hook in task.averages.items() if hook.export), None)
        context = task.averages[average].in_place(task) if average else nullcontext()
        with stage("export", at_once=True), context:
            backbone = task.export_backbone()
            meta = facts(task.config, task.steps_done, task.data_module.channels, average)
            if is_primary():
                save_backbone(backbone, task.out / "export", meta)
            for name, architecture in task.loss.further_backbones().items():
                student = task.export_backbone(name)
                if is_primary():
                    of_student = {**meta, "architecture": shown(architecture)}
                    save_backbone(student, task.out / "export" / name, of_student)


def facts(config: Config, step: int, channels: int, average: str | None = None) -> dict[str, Any]:
    """Return the metadata of exported weights: architecture, input, origin.

    Args:
        config: The config of the run.
        step: Number of finished steps.
        channels: Number of channels of the images.
        average: Name of the weight average, such as ``ema``; None for the network's own weights.
    """
    return metadata(
        config.backbone,
        config.eval.transforms,
        channels=channels,
        method=config.method.name,
        step=step,
        recipe=config.recipe,
        **({} if average is None else {"weights": average}),
    )
