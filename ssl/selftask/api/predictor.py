"""A trained model as a function of images: features, neighbors, class.

E is the number of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.api.model import Model
from selftask.api.objects import overrides
from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.checkpoint.rotation import checkpoints
from selftask.config.compose import recipes
from selftask.config.load import load_config
from selftask.config.schema import FrozenModule
from selftask.data.loading.open_data import open_data
from selftask.errors import BadImage, UserError
from selftask.evaluate.nearest import Bank
from selftask.files.paths import exists, expand_user
from selftask.files.yaml_file import read_yaml
from selftask.logs import get_logger
from selftask.models.build import embed_dim
from selftask.models.weights.model_source import open_checkpoint
from selftask.models.weights.trained import TrainedNetwork, open_features, open_scores
from selftask.registry import METHODS

log = get_logger(__name__)

_RECIPE = "base/evaluate.yaml"  # of the images to search
_BATCH_SIZE = 64  # affects memory only


class Neighbor(NamedTuple):
    """A similar image."""

    path: str
    """Its path, or its name in the data set."""
    cosine: float
    """Cosine similarity of its features to those of the image, in [-1, 1]."""


@dataclass(frozen=True)
class Prediction:
    """Output of a ``Predictor`` for one image."""

    features: np.ndarray
    """Features of the image, (E,) float32."""
    neighbors: list[Neighbor] = field(default_factory=list)
    """The most similar images, most similar first; empty without images to search."""
    label: str | int | None = None
    """Class with the highest score: its name, or its number if classes have no names; None without
    a classifier."""
    score: float | None = None
    """Softmax of this class, in [0, 1]; None without a classifier."""


class Predictor:
    """A trained model as a function: ``Predictor("runs/a")("cat.jpg").features``.

    Images are transformed as in the evaluations of the run, or as in the model's metadata.

    Args:
        model: A run, ``RUN@best``, ``RUN@STEP``, an exported ``backbone.pt``, ``timm:NAME`` or
            ``torchvision:NAME``; or a ``Model``. A run of a method with a classifier predicts
            classes, too.
        neighbors: Images to search: a value of ``data=``, such as a folder, or a map-style data
            set. Their features are computed here, in this process; unreadable images are skipped.
            None: predictions have no neighbors.
        k: Number of neighbors to return, or of all images if there are fewer.
        device: Device to compute on; a ``Model`` is moved to it.
        weights: For a library's model: ``pretrained``, ``none`` (random), or a file.
        trust: Allow an architecture in the user's own code, which is then imported.

    Raises:
        UserError: If the model or the images cannot be opened, no image of ``neighbors`` can be
            read, or ``weights`` or ``trust`` is given for a ``Model``.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        neighbors: Any = None,
        k: int = 5,
        device: torch.device | str = "cpu",
        weights: str | None = None,
        trust: bool = False,
    ) -> None:
        self.head: nn.Module | None = None
        self.classes: Sequence[str] | None = None
        if isinstance(model, Model):
            if weights is not None or trust:
                raise UserError("Predictor: weights and trust are for a model by its name")
        else:
            model = self._open(FrozenModule(model=str(model), weights=weights, trust=trust))
        self.model = model.to(device)
        self.device = torch.device(device)
        if self.head is not None:
            self.head.to(self.device)
        self.k = k
        self._paths: list[str] = []
        if neighbors is not None:
            self._search_in(neighbors)

    def __call__(self, image: Any) -> Prediction:
        """Return features, neighbors and class of a file, Pillow image, array or tensor.

        Raises:
            UserError: If a file is missing or cannot be read.
            ValueError: If an array or tensor is not an image, or has another number of channels.
        """
        return self.predict([image])[0]

    @torch.no_grad()
    def predict(self, images: Sequence[Any]) -> list[Prediction]:
        """Return the predictions of several images, which are computed together.

        Args:
            images: Files, Pillow images, arrays or tensors, as for ``Model.transform``; or a tensor
                (B, C, H, W) of images that are already transformed.

        Raises:
            UserError: If a file is missing or cannot be read.
            ValueError: If an array or tensor is not an image, or has another number of channels.
        """
        try:
            features = self.model.features(images)  # (B, E)
        except BadImage as error:
            raise UserError(str(error)) from error
        neighbors = self._neighbors(features)
        labels, scores = self._classify(features)
        columns = zip(features.numpy(), neighbors, labels, scores, strict=True)
        return [Prediction(*row) for row in columns]

    def _open(self, module: FrozenModule) -> Model:
        """Return the backbone as a ``Model``.

        If the model has a classifier, that becomes ``head``, and the names of its classes, if it
        has any, ``classes``. Raises UserError if there is no such model.
        """
        checkpoint = _classifier_checkpoint(module)
        if checkpoint is None:
            return _as_model(open_features(module))
        network = open_scores(module)
        assert network.scores is not None
        self.head = network.scores.head.eval()
        self.classes = checkpoint["data"].get("classes")
        return _as_model(network)

    def _search_in(self, images: Any) -> None:
        """Compute the features of the images to search; skip unreadable ones, with a warning.

        Raises UserError if no image can be read.
        """
        config = load_config(str(recipes.folder() / _RECIPE), overrides({"data": images}))
        source, parts = open_data(config.data).train, []
        for first in range(0, len(source), _BATCH_SIZE):
            batch = []
            for index in range(first, min(first + _BATCH_SIZE, len(source))):
                try:
                    batch.append(self.model.transform(source[index][0]))
                except BadImage as error:
                    log.warning("neighbors: %s", error)
                    continue
                self._paths.append(source.path(index))
            parts += [self.model.features(torch.stack(batch))] if batch else []
        if not parts:
            raise UserError("neighbors: no image can be read")
        self._bank = Bank(torch.cat(parts))

    def _neighbors(self, features: Tensor) -> list[list[Neighbor]]:
        if not self._paths:
            return [[] for _ in features]
        no_exclusion = torch.full((len(features),), -1)
        cosine, row = self._bank.nearest(F.normalize(features, dim=1), self.k, no_exclusion)
        return [
            [Neighbor(self._paths[index], value) for index, value in zip(*pair, strict=True)]
            for pair in zip(row.tolist(), cosine.tolist(), strict=True)
        ]

    def _classify(self, features: Tensor) -> tuple[list[Any], list[Any]]:
        """Return the class with the highest score of each image, and the softmax of this score.

        Without a head both are lists of None. ``features`` is (B, E).
        """
        if self.head is None:
            return [None] * len(features), [None] * len(features)
        score, number = self.head(features.to(self.device)).softmax(dim=1).max(dim=1)
        names = self.classes
        labels = [index if names is None else names[index] for index in number.tolist()]
        return labels, score.tolist()


def _classifier_checkpoint(module: FrozenModule) -> dict[str, Any] | None:
    """Return the checkpoint of a run whose method has a classifier of labels, or None."""
    if module.library or module.is_code:
        return None
    address = local_run(module.model, num_checkpoints=1)
    checkpoint = named_checkpoint(module.model)
    folder = expand_user(address) if checkpoint is None else checkpoint.parent.parent
    if not exists(folder / "config.yaml"):
        return None
    if checkpoint is None and not checkpoints(folder / "checkpoints"):
        return None  # the run has only its export
    method = read_yaml(folder / "config.yaml")["method"]
    name = method if isinstance(method, str) else method["name"]
    requires_labels = "labels" in METHODS.declared(name, "requires", ())
    if not requires_labels or not METHODS.declared(name, "outputs_logits", False):
        return None
    return open_checkpoint(module.model)


def _as_model(network: TrainedNetwork) -> Model:
    backbone = network.network.backbone
    facts = {"channels": network.channels, "transforms": network.transforms}
    return Model(backbone, {**facts, "embed_dim": embed_dim(backbone)})
