"""Batched random_apply, random_choice and random_order: each image has its own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selftask.data.device.compose import Chain
from selftask.data.device.operation import (
    Images,
    Operation,
    Tensors,
    find_batched_transform,
    fitted,
    per_image,
)
from selftask.data.device.packing import Steps, Tree, spread, take
from selftask.data.transforms.nested import RandomApply, RandomChoice, RandomOrder
from selftask.data.views import Compose
from selftask.registry import register_batched_transform

if TYPE_CHECKING:
    from selftask.random.views import Streams

NONE = -1  # in place of the number of a chain: the image is unchanged
Chosen = tuple[int, list[Any]]  # number of a chain, and the parameters of its operations


class Branches(Operation):
    """Several chains of operations; each image goes through one of them or none."""

    ragged = True  # each chain checks sizes itself

    def __init__(self, transform: Any, chains: Iterable[Chain]) -> None:
        super().__init__(transform)
        self.chains = list(chains)
        self.vectorised = all(chain.vectorised for chain in self.chains)

    def draw_for(self, rng: np.random.Generator, height: int, width: int) -> Chosen:
        return self.draw_chosen(int(self.choose(np.array(rng.random()))), rng, height, width)

    def draw_chosen(self, number: int, rng: np.random.Generator, height: int, width: int) -> Chosen:
        """Draw the parameters of the chain ``number``."""
        return number, [] if number == NONE else self.chains[number].draw_for(rng, height, width)

    def transforms(self) -> Iterator[Any]:
        for chain in self.chains:
            yield from chain.transforms()

    def applied(
        self, params: Chosen, height: int, width: int
    ) -> Iterator[tuple[Any, Any, int, int]]:
        number, inner = params
        if number != NONE:
            yield from self.chains[number].applied(inner, height, width)

    def choose(self, draws: np.ndarray) -> np.ndarray:
        """Return the number of a chain, or ``NONE``, for each uniform random number."""
        raise NotImplementedError(f"{type(self).__name__} does not choose")

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        number, inner = params
        if number == NONE:
            return height, width
        return self.chains[number].size_after(height, width, inner)

    def sizes_after(self, sizes: np.ndarray, packed: Any) -> np.ndarray:
        after: np.ndarray = packed["after"]
        return after

    def pack(self, params: Sequence[Chosen], sizes: np.ndarray) -> Tree:
        return self._pack(
            np.array([number for number, _ in params]),
            lambda chain, rows: chain.pack([params[row][1] for row in rows.tolist()], sizes[rows]),
            sizes,
        )

    def draw(self, streams: Streams, sizes: np.ndarray) -> Tree:
        return self.draw_all(self.choose(streams.random(1)[:, 0]), streams, sizes)

    def draw_all(self, numbers: np.ndarray, streams: Streams, sizes: np.ndarray) -> Tree:
        """Do ``draw`` with given numbers of chains, (B,)."""
        return self._pack(
            numbers, lambda chain, rows: chain.draw(streams.at(rows), sizes[rows]), sizes
        )

    def _pack(
        self,
        numbers: np.ndarray,
        lay_out: Callable[[Chain, np.ndarray], tuple[Steps, np.ndarray]],
        sizes: np.ndarray,
    ) -> Tree:
        """Call ``lay_out(chain, rows)`` for each chain that an image goes through."""
        after, chains = sizes.copy(), {}
        for number, chain in enumerate(self.chains):
            (rows,) = np.nonzero(numbers == number)
            if len(rows):
                steps, after[rows] = lay_out(chain, rows)
                chains[str(number)] = spread(steps, rows, len(sizes))
        return {"number": numbers, "after": after, "chains": chains}

    def apply(self, images: Images, packed: Any, canvas: tuple[int, int]) -> Images:
        number, made = packed["number"], fitted(images.values, canvas)
        for name, steps in packed["chains"].items():
            chain, chosen = self.chains[int(name)], number == int(name)
            if images.dense:
                changed = chain.apply(images, steps).values
                made = torch.where(per_image(chosen), fitted(changed, canvas), made)
                continue
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                sizes = None if images.sizes is None else images.sizes[rows]
                some = Images(images.values[rows], sizes, dense=False)
                made[rows] = fitted(chain.apply(some, take(steps, rows)).values, canvas)
        return images.with_values(made, packed["after"])


@register_batched_transform("random_apply")
class BatchedRandomApply(Branches):
    """One chain with probability p, otherwise none."""

    transform: RandomApply

    def __init__(self, transform: RandomApply) -> None:
        super().__init__(transform, [_chain(transform.transforms, transform.pipeline)])

    def choose(self, draws: np.ndarray) -> np.ndarray:
        return np.where(draws < self.transform.p, 0, NONE)


@register_batched_transform("random_choice")
class BatchedRandomChoice(Branches):
    """One of several chains for each image."""

    transform: RandomChoice

    def __init__(self, transform: RandomChoice) -> None:
        built = zip(transform.choices, transform.pipelines, strict=True)
        super().__init__(transform, [_chain(choice, pipeline) for choice, pipeline in built])

    def choose(self, draws: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.transform.shares, draws, side="right")


@register_batched_transform("random_order")
class BatchedRandomOrder(Operation):
    """All operations, in the order drawn for each image."""

    ragged = True
    in_place = False
    transform: RandomOrder

    def __init__(self, transform: RandomOrder) -> None:
        super().__init__(transform)
        pipeline = Compose(transform.built, transform.channels)
        operations = _chain(transform.transforms, pipeline).operations
        self._one = Branches(transform, [Chain([operation]) for operation in operations])
        self._chain = Chain([self._one] * len(operations))
        self.vectorised = self._one.vectorised

    def draw_for(self, rng: np.random.Generator, height: int, width: int) -> list[Chosen]:
        size, params = (height, width), []
        for number in np.argsort(rng.random(len(self._chain.operations))).tolist():
            params.append(self._one.draw_chosen(number, rng, *size))
            size = self._one.size_after(*size, params[-1])
        return params

    def transforms(self) -> Iterator[Any]:
        return self._one.transforms()

    def applied(
        self, params: list[Chosen], height: int, width: int
    ) -> Iterator[tuple[Any, Any, int, int]]:
        return self._chain.applied(params, height, width)

    def size_after(self, height: int, width: int, params: Any = None) -> tuple[int, int]:
        return self._chain.size_after(height, width, params)

    def sizes_after(self, sizes: np.ndarray, packed: Any) -> np.ndarray:
        after: np.ndarray = packed["after"]
        return after

    def pack(self, params: Sequence[list[Chosen]], sizes: np.ndarray) -> Tree:
        steps, after = self._chain.pack(params, sizes)
        return {"steps": steps, "after": after}

    def draw(self, streams: Streams, sizes: np.ndarray) -> Tree:
        order = np.argsort(streams.random(len(self._chain.operations)), axis=1)
        steps, after = self._chain.lay_out(
            lambda at, _, now: self._one.draw_all(order[:, at], streams, now), sizes
        )
        return {"steps": steps, "after": after}

    def apply(self, images: Images, packed: Tensors, canvas: tuple[int, int]) -> Images:
        steps: Any = packed["steps"]
        made = self._chain.apply(images, steps)
        return made.with_values(made.values, packed["after"])


def _chain(transforms: Sequence[dict[str, Any]], pipeline: Compose) -> Chain:
    """Return the batched versions of a nested list of transforms."""
    named = zip(transforms, pipeline.transforms, strict=True)
    return Chain([find_batched_transform(transform["name"], built) for transform, built in named])
