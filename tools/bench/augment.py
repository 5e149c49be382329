"""CPU time of an image's views: selftask and other libraries, interleaved in one process.

    python tools/bench/augment.py [simclr|dino|cifar ...] [--rounds 10] [--images 40]

``simclr`` makes two views of 224 from JPEGs of 500x375 in memory, ``dino`` 2x224 + 8x96, ``cifar``
two views of 32 from 32x32 arrays; all with crop, flip, color jitter (p .8, strengths .8 .8 .8 .2),
gray (.2) and blur (.5, sigma .1-2; not in ``cifar``), normalized float32 (3, H, W) at the end. One
thread is used. In a round each entry processes the same images once; the first entry changes with
the round. Figures are process CPU time per image: the median and the minimum over rounds.

``selftask`` includes the conversion of batches to floats, as in training on a CPU. ``selftask
bytes`` ends with the output of a worker. ``by opencv`` does not use the compiled kernel. Libraries
that are not installed are skipped and named. The operations differ in some ways. albumentations
does not antialias when it reduces sizes. kornia draws the order of the jitter per batch and blurs
with a kernel of 23, as does torchvision v2 on tensors. lightly and solo-learn use their own
defaults (solo-learn's pipeline is rebuilt from torchvision: bicubic crops, Pillow's blur).
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it accesses the network at import
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

import numpy as np
import torch
from PIL import Image, ImageFilter

from selftask.config.schema import Component, ViewConfig
from selftask.data.reading.image import decode_image
from selftask.data.views import Views

Work = Callable[[Sequence[Any]], None]  # makes all views of all images
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER = (0.8, 0.8, 0.8, 0.2)


def jpegs(count: int) -> list[bytes]:
    """Return crops of scikit-learn's two photos with sensor noise, quality 90, about 64 KB each."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    files = []
    for number in range(count):
        photo = Image.fromarray(load_sample_images().images[number % 2])
        left, top = rng.integers(0, 120, 2).tolist()
        crop = photo.crop((left, top, left + 480, top + 300)).resize((500, 375))
        noisy = np.asarray(crop) + rng.normal(0, 4, (375, 500, 3))
        buffer = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def arrays(count: int) -> list[np.ndarray]:
    """Return 32x32 crops of the same photos."""
    rng = np.random.default_rng(0)
    photos = [np.asarray(Image.open(io.BytesIO(data)).resize((250, 188))) for data in jpegs(4)]
    corners = [rng.integers(0, 150, 2) for _ in range(count)]
    return [
        np.ascontiguousarray(photos[n % 4][y : y + 32, x : x + 32])
        for n, (y, x) in enumerate(corners)
    ]


class Contest:
    """Sizes and numbers of the views, from which entries build their pipelines."""

    def __init__(
        self, views: list[tuple[int, int, tuple[float, float]]], *, blur: bool, encoded: bool
    ) -> None:
        self.views = views  # (count, size, scale of the crops' areas)
        self.blur = blur
        self.encoded = encoded

    def images(self, count: int) -> list[Any]:
        return jpegs(count) if self.encoded else arrays(count)

    def pillow(self, image: Any) -> Image.Image:
        if self.encoded:
            return Image.open(io.BytesIO(image)).convert("RGB")
        return Image.fromarray(image)

    def pixels(self, image: Any) -> np.ndarray:
        return decode_image(image, "jpeg") if self.encoded else image

    def each(self, build: Callable[[int, tuple[float, float]], Any]) -> list[Any]:
        """Return a pipeline for each single view."""
        return [build(size, scale) for count, size, scale in self.views for _ in range(count)]


CONTESTS = {
    "simclr": Contest([(2, 224, (0.08, 1.0))], blur=True, encoded=True),
    "dino": Contest([(2, 224, (0.4, 1.0)), (8, 96, (0.05, 0.4))], blur=True, encoded=True),
    "cifar": Contest([(2, 32, (0.08, 1.0))], blur=False, encoded=False),
}


def view_configs(contest: Contest) -> dict[str, ViewConfig]:
    """Return the ``views:`` of a recipe."""

    def view(count: int, size: int, scale: tuple[float, float]) -> ViewConfig:
        jitter = dict(zip(("brightness", "contrast", "saturation", "hue"), JITTER, strict=True))
        transforms = [
            Component(name="random_resized_crop", args={"size": size, "scale": scale}),
            Component(name="horizontal_flip"),
            Component(name="color_jitter", args={"p": 0.8, **jitter}),
            Component(name="grayscale", args={"p": 0.2}),
            *([Component(name="gaussian_blur", args={"p": 0.5})] if contest.blur else []),
            Component(name="normalize"),
        ]
        return ViewConfig(count=count, transforms=transforms)

    return {f"of {size}": view(count, size, scale) for count, size, scale in contest.views}


def selftask(contest: Contest, *, floats: bool = True, compiled: bool = True) -> Work:
    views = Views(view_configs(contest))
    for view in views.made:
        view.pipeline.compiled = view.pipeline.compiled and compiled

    epochs = itertools.count()  # new draws in each turn, as in the other entries

    def work(images: Sequence[Any]) -> None:
        epoch = next(epochs)
        made = [views(contest.pixels(image), 0, epoch, n) for n, image in enumerate(images)]
        batches = [torch.from_numpy(np.stack(same)) for same in zip(*made, strict=True)]
        if floats:
            for to_float, batch in zip(views.to_float, batches, strict=True):
                to_float(batch)

    return work


def torchvision_v1(contest: Contest, interpolation: str = "bilinear") -> Work:
    from torchvision import transforms as tv

    def build(size: int, scale: tuple[float, float]) -> Any:
        mode = tv.InterpolationMode(interpolation)
        blur = tv.RandomApply([tv.Lambda(_pillow_blur)], 0.5)
        return tv.Compose(
            [
                tv.RandomResizedCrop(size, scale=scale, interpolation=mode),
                tv.RandomHorizontalFlip(),
                tv.RandomApply([tv.ColorJitter(*JITTER)], 0.8),
                tv.RandomGrayscale(0.2),
                *([blur] if contest.blur else []),
                tv.ToTensor(),
                tv.Normalize(MEAN, STD),
            ]
        )

    return _one_by_one(contest.pillow, contest.each(build))


def torchvision_v2(contest: Contest, *, tensors: bool = False) -> Work:
    from torchvision.transforms import v2

    def build(size: int, scale: tuple[float, float]) -> Any:
        kernel = max(3, size // 10 | 1)
        blur = v2.GaussianBlur(kernel, (0.1, 2.0)) if tensors else v2.Lambda(_pillow_blur)
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=scale, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(*JITTER)], 0.8),
                v2.RandomGrayscale(0.2),
                *([v2.RandomApply([blur], 0.5)] if contest.blur else []),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def tensor(image: Any) -> torch.Tensor:
        return torch.from_numpy(contest.pixels(image)).permute(2, 0, 1)

    return _one_by_one(tensor if tensors else contest.pillow, contest.each(build))


def lightly(contest: Contest) -> Work:
    from lightly.transforms import DINOTransform, SimCLRTransform

    if len(contest.views) == 2:
        transform: Any = DINOTransform()
    else:
        size = contest.views[0][1]
        transform = SimCLRTransform(input_size=size, gaussian_blur=0.5 * contest.blur)
    return _one_by_one(contest.pillow, [transform])


def albumentations(contest: Contest) -> Work:
    import albumentations as A
    import cv2

    cv2.setNumThreads(1)

    def build(size: int, scale: tuple[float, float]) -> Any:
        brightness, contrast, saturation, hue = JITTER
        pipeline = A.Compose(
            [
                A.RandomResizedCrop((size, size), scale=scale),
                A.HorizontalFlip(p=0.5),
                A.ColorJitter(
                    (1 - brightness, 1 + brightness),
                    (1 - contrast, 1 + contrast),
                    (1 - saturation, 1 + saturation),
                    (-hue, hue),
                    p=0.8,
                ),
                A.ToGray(p=0.2),
                *([A.GaussianBlur(0, (0.1, 2.0), p=0.5)] if contest.blur else []),
                A.Normalize(MEAN, STD),
                A.ToTensorV2(),
            ]
        )
        return lambda pixels: pipeline(image=pixels)

    return _one_by_one(contest.pixels, contest.each(build))


def kornia_pipelines(contest: Contest) -> list[Any]:
    """Return kornia's pipeline for each view, for float32 (B, 3, H, W) in [0, 1]."""
    import kornia.augmentation as K

    def build(size: int, scale: tuple[float, float]) -> Any:
        kernel = max(3, size // 10 | 1)
        return torch.nn.Sequential(
            K.RandomResizedCrop((size, size), scale=scale),
            K.RandomHorizontalFlip(),
            K.ColorJitter(*JITTER, p=0.8),
            K.RandomGrayscale(p=0.2),
            *([K.RandomGaussianBlur((kernel, kernel), (0.1, 2.0))] if contest.blur else []),
            K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )

    return contest.each(build)


def kornia(contest: Contest) -> Work:
    pipelines = kornia_pipelines(contest)

    def work(images: Sequence[Any]) -> None:
        pixels = torch.from_numpy(np.stack([contest.pixels(image) for image in images]))
        batch = pixels.permute(0, 3, 1, 2).float() / 255
        for pipeline in pipelines:
            pipeline(batch)

    return work


def decoding(contest: Contest) -> Work:
    return _one_by_one(contest.pixels, [])


ENTRIES: dict[str, tuple[Callable[[Contest], Work], str]] = {
    "decoding alone": (decoding, "simplejpeg"),
    "selftask": (selftask, "selftask"),
    "selftask bytes": (partial(selftask, floats=False), "selftask"),
    "selftask by opencv": (partial(selftask, compiled=False), "selftask"),
    "albumentations": (albumentations, "albumentations"),
    "torchvision v1": (torchvision_v1, "torchvision"),
    "torchvision v2": (torchvision_v2, "torchvision"),
    "torchvision v2 tensors": (partial(torchvision_v2, tensors=True), "torchvision"),
    "solo-learn's": (partial(torchvision_v1, interpolation="bicubic"), "torchvision"),
    "lightly": (lightly, "lightly"),
    "kornia": (kornia, "kornia"),
}


def _one_by_one(load: Callable[[Any], Any], pipelines: Sequence[Any]) -> Work:
    def work(images: Sequence[Any]) -> None:
        for image in images:
            loaded = load(image)
            for pipeline in pipelines:
                pipeline(loaded)

    return work


def _pillow_blur(image: Image.Image) -> Image.Image:
    sigma = 0.1 + 1.9 * float(torch.rand(()))
    return image.filter(ImageFilter.GaussianBlur(sigma))


def entries_of(contest: Contest) -> Iterator[tuple[str, Work]]:
    """Yield the entries whose package is installed."""
    for name, (build, package) in ENTRIES.items():
        if name == "decoding alone" and not contest.encoded:
            continue
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        yield name, build(contest)


def measure(contest: Contest, rounds: int, count: int) -> dict[str, list[float]]:
    """Return milliseconds of CPU time per image, one figure per round."""
    images = contest.images(count)
    works = dict(entries_of(contest))
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work(images[:8])
    names = list(works)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.process_time()
            works[name](images)
            times[name].append(1e3 * (time.process_time() - start) / count)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contests", nargs="*", default=list(CONTESTS), help=", ".join(CONTESTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--images", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.contests:
        contest = CONTESTS[name]
        count = args.images if contest.encoded else 10 * args.images
        times = measure(contest, args.rounds, count)
        ours = statistics.median(times["selftask"])
        print(f"\n{name}: {args.rounds} rounds of {count} images, load {os.getloadavg()[0]:.1f}")
        print(f"{'':24}{'ms/image':>10}{'least':>10}{'images/s':>10}{'x selftask':>12}")
        for entry, all_ms in times.items():
            middle, least = statistics.median(all_ms), min(all_ms)
            print(f"{entry:24}{middle:10.3f}{least:10.3f}{1e3 / middle:10.0f}{middle / ours:12.2f}")


if __name__ == "__main__":
    main()
