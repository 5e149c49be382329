"""Methods that predict clusters of images, from a memory bank with the features of all images.

N: images of the data set, V: views that are remembered, B: images per rank, D: width of the head.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.methods.base import Method, Task
from selftask.models.memory_bank import MemoryBank
from selftask.models.precision import to_float32

log = get_logger(__name__)

NO_CLUSTER = -100  # of images that were not read; cross_entropy ignores it


class ClusteredImages(Method):
    """Method with ``self.memory``, features (N, V, D) of unit length of all images."""

    requires: ClassVar[tuple[str, ...]] = ("index",)  # the memory has a slot for each image
    num_remembered: ClassVar[int] = 1
    """Number of views in the memory, V."""

    def build_memory(self, task: Task, key: str, num_clusters: int) -> int:
        """Allocate an entry for each image, and return the number of images, N.

        Args:
            task: The task.
            key: Key of the method's config with the number of clusters, for messages.
            num_clusters: Largest number of clusters.

        Raises:
            UserError: If there are fewer images than clusters.
        """
        num_images = task.data_module.num_images
        if num_clusters > num_images:
            raise UserError(
                f"method.{key}={getattr(self.config, key)}: {num_images} images cannot make "
                f"{num_clusters} clusters; a tenth of the images is plenty"
            )
        self.memory = MemoryBank(num_images, self.num_remembered, self.config.out_dim)
        return num_images

    @torch.no_grad()
    def fill_memory(self, task: Task) -> None:
        """Fill the memory in one pass over the data with the initial weights.

        The network is in eval mode during the pass, so that the last batch may have one image, and
        in train mode afterwards. Rows of images that cannot be read are 0. Every rank must call
        this method.
        """
        log.info("filling the memory, one pass over %d images", len(self.memory))
        task.base_model.eval()
        rows = self.memory.rows.zero_()  # (N, V, D)
        for batch in task.data_module.iterate_all():
            with task.autocast():
                output = task.base_model(batch.all_views[: self.num_remembered])  # (V, B, D)
            features = F.normalize(to_float32(output), dim=2)
            rows[batch.index] = features.transpose(0, 1)
        rows.copy_(all_reduce_sum(rows))  # each row is zero on all ranks but one
        task.base_model.train()

    def on_forward(self, task: Task) -> None:
        """In training, append indices (B,) and outputs (B, V, D) of the batch to ``pending``.

        ``on_update`` of a subclass updates the memory with them.
        """
        if task.train:
            batch = task.last_batch
            remembered = batch.output[: self.num_remembered].detach()  # (V, B, D)
            self.pending.append((batch.index, remembered.transpose(0, 1)))
