"""DINOv3: DINOv2 with Gram anchoring (section 4), which keeps the similarities between patches.

B: images per rank; N: patches of a global view of the student, a grid of (h, w); E: width of the
backbone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.config.values.duration import steps_in
from selftask.errors import UserError
from selftask.methods.base import Task
from selftask.methods.dinov2 import NUM_GLOBAL, DINOv2, Masks
from selftask.methods.families.ema_teacher import Schedule
from selftask.models.features.extract import FeatureExtractor
from selftask.models.heads import DINOHead
from selftask.models.network import PatchOutput
from selftask.models.precision import in_full_precision
from selftask.models.teacher import Teacher
from selftask.models.weights.load import is_on_meta
from selftask.models.weights.lora import adapted_state
from selftask.optim.schedules import build_schedule
from selftask.registry import register_method

Negatives = Literal["keep", "drop"]


@register_method("dinov3")
class DINOv3(DINOv2):
    """DINOv3 (arXiv:2508.10104): DINOv2 with the patch similarities of an earlier teacher (Gram).

    Loss: ``DINOv2 + w |S S' - G G'|^2`` of unit patch features S of the student and G of an earlier
    teacher (Gram).

    Published: ImageNet k-NN and linear top-1 of ViT-L/16 82.0 and 83.5 after 100 epochs of ImageNet
    alone (authors' README).

    Use it for long runs, in which dense features otherwise get worse.

    Differs from the authors' code:

    * Masks, KoLeo and clipping differ as in ``dinov2``.
    * The Gram term compares patches of one image; the authors' code can also compare those of a
      whole batch. The Gram teacher sees the views of the student; in later stages of the authors'
      training it sees views without color augmentation.
    * Random coordinates of RoPE are drawn for each image; in the authors' code, once for all images
      of a rank and size.
    """

    paper = "Siméoni et al., DINOv3, 2025"
    columns = {
        "gram": "Term of the loss: similarities between patches are those of an earlier teacher."
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(DINOv2.Config):
        norm_last_layer: bool = False
        """Whether the rows of the last layers keep unit length; false: the last layers are plain
        linear layers, as in the published code.
        """
        patch_out_dim: int | None = setting(None, min=1)
        """Number of prototypes of patches; null: ``out_dim``, as for images."""
        patch_hidden_dim: int | None = setting(None, min=1)
        """Width of the hidden layers of the head of patches; null: ``hidden_dim``."""
        patch_bottleneck: int | None = setting(None, min=1)
        """Width before the last layer of the head of patches; null: ``bottleneck``."""
        gram_weight: Schedule = setting(2.0, of="schedules", min=0)
        """Weight of the Gram term."""
        local_weight: Schedule = setting(1.0, of="schedules", min=0)
        """Weight of the DINO term of local views, relative to ``dino_weight``."""
        gram_start: int | str = setting("80%", duration=True)
        """Time from which the Gram term is added to the loss."""
        gram_copy: int | str = setting("20%", duration=True)
        """Time at which the teacher is copied to be the Gram teacher, before ``gram_start``. Early
        teachers have better patch features.
        """
        gram_teacher: FrozenModule | None = None
        """Trained backbone of the same architecture, such as ``RUN@STEP``, that is the initial Gram
        teacher instead of the copy at ``gram_copy``.
        """
        gram_renew_every: int | str = setting("5%", duration=True)
        """Time between the copies of the teacher to the Gram teacher after ``gram_start``."""
        gram_renewals: int = setting(3, min=0)
        """Maximum number of copies of the teacher to the Gram teacher after ``gram_start``."""
        gram_scale: float = setting(1.0, min=1)
        """How many times larger the global views of the Gram teacher are, such as 1.5. Global views
        are loaded at the larger size, and reduced for student and teacher.
        """
        gram_negatives: Negatives = "keep"
        """Whether negative similarities are kept or set to 0."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            yield from super().problems(config)
            sizes = (self.patch_out_dim, self.patch_hidden_dim, self.patch_bottleneck)
            if self.tied_heads and any(sizes):
                yield (
                    "tied_heads: images and patches share one head, so that patch_out_dim, "
                    "patch_hidden_dim and patch_bottleneck have no effect; leave them out"
                )

    gram_teacher: Teacher | None

    def build_head(self, embed_dim: int) -> nn.Module:
        config = self.config
        return self._head(embed_dim, config.out_dim, config.hidden_dim, config.bottleneck)

    def build_patch_head(self, embed_dim: int) -> nn.Module:
        config = self.config
        return self._head(
            embed_dim,
            config.patch_out_dim or config.out_dim,
            config.patch_hidden_dim or config.hidden_dim,
            config.patch_bottleneck or config.bottleneck,
        )

    def _head(self, embed_dim: int, out_dim: int, hidden: int, bottleneck: int) -> nn.Module:
        num_layers = self.config.num_layers
        head = DINOHead(
            embed_dim, out_dim, hidden=hidden, bottleneck=bottleneck, num_layers=num_layers
        )
        if not self.config.norm_last_layer:
            last = nn.Linear(bottleneck, out_dim, bias=False)
            nn.init.trunc_normal_(last.weight, std=0.02)
            head.last_layer = last  # type: ignore[assignment]
        return head

    def setup(self, task: Task) -> None:
        """Build the Gram teacher, if the run is longer than ``gram_start``.

        Raises:
            UserError: If the Gram teacher is copied after ``gram_start``, or if the weights of
                ``gram_teacher`` do not fit the backbone.
        """
        super().setup(task)
        config, length = self.config, task.length
        self.gram_weight_at = build_schedule(config.gram_weight, length)
        self.local_weight_at = build_schedule(config.local_weight, length)
        self.gram_start = steps_in(config.gram_start, length)
        self.gram_teacher, self.copy_steps = None, set[int]()
        if self.gram_start >= length.total_steps:
            return
        first, every = (steps_in(t, length) for t in (config.gram_copy, config.gram_renew_every))
        backbone: nn.Module = task.base_model.backbone  # type: ignore[assignment]
        self.gram_teacher = Teacher(FeatureExtractor(backbone), drop_path=False)
        self.copy_steps = {self.gram_start + n * every for n in range(1, config.gram_renewals + 1)}
        if config.gram_teacher is not None:
            self._load_gram_teacher(self.gram_teacher, task)
        elif first > self.gram_start:
            raise UserError(
                f"method.gram_copy={config.gram_copy}: the Gram teacher is copied at step {first}, "
                f"after step {self.gram_start} of method.gram_start={config.gram_start}"
            )
        else:
            self.copy_steps.add(first)

    def _load_gram_teacher(self, teacher: Teacher, task: Task) -> None:
        backbone: nn.Module = teacher.network.backbone  # type: ignore[assignment]
        if is_on_meta(backbone):
            return
        try:
            weights = self.open_frozen("gram_teacher", task).network.state_dict()
            backbone.load_state_dict(adapted_state(backbone, weights))
        except RuntimeError as error:  # names of tensors and their shapes
            raise UserError(
                "method.gram_teacher: it must be of the same architecture and image size as the "
                f"backbone, since it is renewed: {str(error).splitlines()[-1].strip()}"
            ) from error

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state; if it has no Gram teacher, keep the configured one or copy the teacher."""
        ours = f"{prefix}gram_teacher."
        if self.gram_teacher is not None and not any(key.startswith(ours) for key in state):
            for name, value in self.gram_teacher.state_dict().items():
                teachers = state.get(f"{prefix}teacher.{name}", value)
                state[ours + name] = value if self.config.gram_teacher else teachers
        super()._load_from_state_dict(state, prefix, *args)

    def student_views(self, batch: Batch) -> list[Tensor]:
        """Return all views, with the size of global views divided by ``gram_scale``."""
        views, scale = batch.all_views, self.config.gram_scale
        if scale == 1:
            return views
        reduced = [
            F.interpolate(
                view,
                size=(round(view.shape[2] / scale), round(view.shape[3] / scale)),
                mode="bicubic",
                antialias=True,
            )
            for view in views[:NUM_GLOBAL]
        ]
        return [*reduced, *views[NUM_GLOBAL:]]

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Masks:
        """Draw masks for the global views of the student."""
        scale = self.config.gram_scale
        return super().draw(
            seed, key, [(round(rows / scale), round(columns / scale)) for rows, columns in sizes]
        )

    @torch.no_grad()
    def on_forward(self, task: Task) -> None:
        """Compute the targets of DINOv2, and ``batch["gram_patches"]``.

        These are the Gram teacher's patches (2 * B, N, E), or None before ``gram_start``. Also set
        ``batch["gram_weight"]`` and ``batch["local_weight"]``, the weights of this step.
        """
        super().on_forward(task)
        batch = task.last_batch
        batch["gram_weight"] = self.gram_weight_at(task.where)
        batch["local_weight"] = self.local_weight_at(task.where)
        batch["gram_patches"] = None
        if self.gram_teacher is not None and task.steps_done >= self.gram_start:
            views = torch.cat(batch.all_views[:NUM_GLOBAL])  # (2 * B, C, H, W)
            grid = self.grid_of(*batch.input.global_views[0].shape[-2:])
            patches = self.gram_teacher(views).tokens.map  # (2 * B, E, scale * h, scale * w)
            if patches.shape[-2:] != grid:
                patches = F.interpolate(patches, size=grid, mode="bicubic")
            batch["gram_patches"] = patches.flatten(2).transpose(1, 2)  # (2 * B, N, E)

    def forward(self, output: PatchOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the terms of DINOv2, with ``dino_local`` times ``local_weight``, and of Gram.

        The Gram term is weighted, and 0 before ``gram_start``. ``output`` is the same as for
        ``DINOv2``.
        """
        patches, targets = output.features.patches, batch["gram_patches"]
        if targets is None:
            gram = patches.new_zeros(())
        else:
            gram = gram_loss(patches, targets, negatives=self.config.gram_negatives)
        terms = super().forward(output, batch)
        terms["dino_local"] = batch["local_weight"] * terms["dino_local"]
        return {**terms, "gram": batch["gram_weight"] * gram}

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Update teacher and centers; at ``copy_steps``, copy the teacher to the Gram teacher."""
        super().on_update(task)
        if self.gram_teacher is not None and task.steps_done + 1 in self.copy_steps:
            backbone: nn.Module = self.teacher.network.backbone  # type: ignore[assignment]
            self.gram_teacher.update(backbone, momentum=0.0)


@in_full_precision
def gram_loss(patches: Tensor, targets: Tensor, *, negatives: Negatives) -> Tensor:
    """Return the mean squared difference of the cosines of all pairs of patches in an image.

    Eq. 2 of DINOv3, as a mean over pairs and images.

    Args:
        patches: Patches of the student, (n, N, E).
        targets: Patches of the Gram teacher, (n, N, E'); E' may differ from E.
        negatives: Whether negative cosines of both networks are kept (``keep``) or set to 0
            (``drop``).
    """
    cosines, wanted = (
        unit @ unit.mT for unit in (F.normalize(patches, dim=2), F.normalize(targets, dim=2))
    )  # (n, N, N) each
    if negatives == "drop":
        cosines, wanted = cosines.relu(), wanted.relu()
    return F.mse_loss(cosines, wanted)
