"""All sections of a run's report that show images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from selftask.checkpoint.rotation import checkpoints
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.config.trust import refuse_addresses
from selftask.data.fingerprint import differences, fingerprint
from selftask.data.loading.open_data import Sources, open_received
from selftask.distributed.device import pick_device
from selftask.distributed.world import World
from selftask.errors import BadImage, UserError
from selftask.files.received import read_bytes
from selftask.files.yaml_file import read_yaml
from selftask.models.weights.model_source import open_model
from selftask.report.images.cache import SectionCache, digest
from selftask.report.images.class_table import class_section
from selftask.report.images.embedding_map import MOST_POINTS, Projection, map_section
from selftask.report.images.gather import Gathered, Pass, gather
from selftask.report.images.neighbors import neighbors_section
from selftask.report.images.patch_maps import has_patches, patch_section, patch_tokens
from selftask.report.images.projections import pca, tsne
from selftask.report.images.reconstructions import reconstructions_of, visualizes
from selftask.report.images.sprite import image_section
from selftask.report.images.views import views_of
from selftask.report.images.weights import Weights, find_weights, trained_on
from selftask.report.page import Section, render

DEFAULT_IMAGES = 1000
_FEWEST_FOR_TSNE = 15  # images


@dataclass(kw_only=True)
class ImageSections:
    """Builder of the report sections that show images of one run.

    Args:
        run: The run folder, on this machine.
        images: Number of images for which features are computed; 0 for no sections.
        trust: Allow code that the run names.
        tell: Called with progress messages.
    """

    run: Path
    images: int = DEFAULT_IMAGES
    trust: bool = False
    tell: Callable[[str], None]

    def __post_init__(self) -> None:
        self._cache = SectionCache(self.run)
        self._opened: tuple[Config, Sources] | None = None

    def make(self) -> list[Section]:
        """Return the sections; a section that cannot be shown contains the reason.

        There are none if ``images`` is 0 or the run has no ``config.yaml``.
        """
        if not self.images or not (self.run / "config.yaml").is_file():
            return []
        settings = digest(read_bytes(self.run / "config.yaml"))
        sections = self._group("Views that the network saw", "views", settings, self._views)
        weights = find_weights(self.run)
        if weights is None:
            return sections
        key = digest(settings, weights.digest, self.images)
        made = self._group(
            "Images by their features", "features", key, lambda: self._features(weights)
        )
        newest = next(iter(checkpoints(self.run / "checkpoints")), None)
        if newest is not None and visualizes(self._method):
            key = digest(settings, newest.name)
            made += self._group(
                "Masks and reconstructions",
                "reconstructions",
                key,
                lambda: self._reconstructions(newest),
            )
        return sections + made

    def _group(
        self, title: str, name: str, key: str, make: Callable[[], list[Section]]
    ) -> list[Section]:
        """Return the sections of a group, cached if possible, or a section with the error."""
        sections = self._cache.get(name, key)
        if sections is not None:
            return sections
        try:
            sections = make()
        except (UserError, BadImage, OSError, RuntimeError) as error:
            note = render("images.note", f"Not shown: {error}")
            return [image_section(title, note, name)]
        self._cache.put(name, key, sections)
        return sections

    @property
    def _method(self) -> str:
        """Name of the method, without loading code that the run names."""
        method = read_yaml(self.run / "config.yaml").get("method")
        return str(method.get("name")) if isinstance(method, dict) else str(method)

    def _open(self) -> tuple[Config, Sources]:
        """Return config and data; raise UserError if the training images have changed."""
        if self._opened is None:
            config = load_config(str(self.run / "config.yaml"), [], trust=self.trust)
            if config.train.threads != "auto":
                torch.set_num_threads(config.train.threads)
            if not self.trust:
                refuse_addresses(config, "method")
            sources = open_received(config, trust=self.trust)
            before = trained_on(self.run)
            if before is not None:
                changed = differences(before, fingerprint(sources.train))
                if changed:
                    raise UserError(f"the training images have changed: {'; '.join(changed)}")
            self._opened = config, sources
        return self._opened

    def _views(self) -> list[Section]:
        self.tell("views of training images")
        return [views_of(*self._open())]

    def _features(self, weights: Weights) -> list[Section]:
        """Return all sections that need features, from one pass over the images."""
        config, sources = self._open()
        source, what = (sources.train, "training images")
        if sources.val is not None:
            source, what = (sources.val, "validation images")
        self.tell(f"features of {min(self.images, len(source)):,} {what}, by {weights.path}")
        backbone, _ = open_model(weights.address, trust=self.trust)
        gathered = gather(
            backbone,
            config,
            source,
            what=what,
            count=self.images,
            device=pick_device(config.train.device, World()),
            tell=self.tell,
        )
        sections = [
            neighbors_section(gathered.images, gathered.shown),
            class_section(gathered.images),
        ]
        if len(gathered.images) > 2:
            sections.insert(1, self._map(gathered.images.draw(MOST_POINTS)))
        if has_patches(backbone):
            sections.append(_patches(backbone, gathered))
        return sections

    def _map(self, images: Gathered) -> Section:
        vectors = F.normalize(torch.from_numpy(images.features), dim=1).numpy()
        scores, shares = pca(vectors, 2)
        axes = [
            f"{arrow} component {number} ({share:.0%} of the variance)"
            for arrow, number, share in zip("→↑", (1, 2), shares, strict=True)
        ]
        projections = {"pca": Projection("PCA", scores, (axes[0], axes[1]))}
        if len(images) >= _FEWEST_FOR_TSNE:
            self.tell(f"t-SNE of {len(images):,} images")
            projections["tsne"] = Projection("t-SNE", tsne(vectors))
        return map_section(images, projections)

    def _reconstructions(self, checkpoint: Path) -> list[Section]:
        config, sources = self._open()
        self.tell(f"what {config.method.name} makes of training images")
        return [reconstructions_of(config, sources, checkpoint)]


def _patches(backbone: Any, gathered: Pass) -> Section:
    device = next(backbone.parameters()).device
    names: Sequence[str] = [gathered.images.names[row] for row in gathered.shown]
    return patch_section(
        list(gathered.pixels), names, patch_tokens(backbone, gathered.inputs.to(device))
    )
