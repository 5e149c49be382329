"""VISSL's list of transforms as the views of a recipe."""

from __future__ import annotations

from typing import Any

from vissl_keys import Unconvertible

# VISSL uses torchvision's defaults: bilinear interpolation and this scale
CROP_SCALE = [0.08, 1.0]
DROPPED = ("ToTensor",)


def to_views(transforms: list[dict[str, Any]]) -> dict[str, Any]:
    """Return groups of views: one, or one for each crop size.

    Raises Unconvertible for the first transform without a counterpart.
    """
    first, *rest = [dict(transform) for transform in transforms]
    name = first.pop("name")
    if name == "ImgReplicatePil":
        chain = [part for transform in rest for part in _convert(transform)]
        return {"main": {"count": first["num_times"], "transforms": chain}}
    if name == "ImgPilToMultiCrop":
        chain = [part for transform in rest for part in _convert(transform)]
        sizes = zip(first["num_crops"], first["size_crops"], first["crop_scales"], strict=True)
        groups = {}
        for place, (count, size, scale) in enumerate(sizes):
            crop = {"name": "random_resized_crop", "size": size, "scale": [*map(float, scale)]}
            group = {"count": count, "transforms": [crop, *chain]}
            groups[("global", "local")[place] if place < 2 else f"local_{place}"] = group
        return groups
    raise Unconvertible(f"views begin with {name}, not ImgReplicatePil or ImgPilToMultiCrop")


def _convert(transform: dict[str, Any]) -> list[dict[str, Any]]:
    arguments = dict(transform)
    name = arguments.pop("name")
    made: list[dict[str, Any]]
    if name in DROPPED:
        return []
    if name == "RandomResizedCrop":
        crop = {"name": "random_resized_crop", "size": arguments.pop("size")}
        made = [crop | {"scale": arguments.pop("scale", CROP_SCALE)}]
        if "ratio" in arguments:
            made[0]["ratio"] = arguments.pop("ratio")
        if arguments.get("interpolation") in (2, 3):  # PIL's constants
            made[0]["interpolation"] = {2: "bilinear", 3: "bicubic"}[arguments.pop("interpolation")]
    elif name == "RandomHorizontalFlip":
        made = [{"name": "horizontal_flip", "p": arguments.pop("p", 0.5)}]
    elif name == "ImgPilColorDistortion":
        s = arguments.pop("strength", 1.0)
        strengths = {key: round(0.8 * s, 6) for key in ("brightness", "contrast", "saturation")}
        jitter = {"name": "color_jitter", **strengths, "hue": round(0.2 * s, 6), "p": 0.8}
        made = [jitter, {"name": "grayscale", "p": 0.2}]
    elif name == "ImgPilGaussianBlur":
        sigma = [arguments.pop("radius_min", 0.1), arguments.pop("radius_max", 2.0)]
        made = [{"name": "gaussian_blur", "p": arguments.pop("p", 0.5), "sigma": sigma}]
    elif name == "ImgPilRandomSolarize":
        made = [{"name": "solarize", "p": arguments.pop("prob", 0.5)}]
    elif name == "RandomGrayscale":
        made = [{"name": "grayscale", "p": arguments.pop("p", 0.1)}]
    elif name == "Normalize":
        made = [{"name": "normalize", "mean": arguments.pop("mean"), "std": arguments.pop("std")}]
    else:
        raise Unconvertible(f"the transform {name}: see `selftask list transforms`")
    if arguments:
        raise Unconvertible(f"{name}: {', '.join(arguments)}")
    return made
