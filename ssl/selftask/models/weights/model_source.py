"""Models by address: a run folder, an exported file, ``timm:NAME`` or ``torchvision:NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from selftask.checkpoint import store
from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.manifest import DamagedCheckpoint
from selftask.checkpoint.mirror import local_run
from selftask.config.checks.grid import resized_backbone, resized_pipeline, undivided
from selftask.config.checks.locations import goes_on
from selftask.config.library_names import split_address
from selftask.config.schema import Component, Config
from selftask.config.trust import code_in, refuse_code
from selftask.errors import UserError, explained
from selftask.files.addresses import fetch
from selftask.files.paths import exists, expand_user, is_folder
from selftask.logs import get_logger
from selftask.models.build import build_backbone, build_on_meta, embed_dim
from selftask.models.weights.address import NONE, PRETRAINED, check_model
from selftask.models.weights.layouts import State
from selftask.models.weights.load import is_on_meta, load_weights, renamed, with_prefix
from selftask.models.weights.places import Exported, Saved, find_weights
from selftask.models.weights.read import backbone_state, of_networks, read_state, weights_at

log = get_logger(__name__)

_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def open_model(
    address: str,
    *,
    weights: str = PRETRAINED,
    trust: bool = False,
    image_size: int | None = None,
    prefix: str | None = None,
    option: str = "prefix",
    name: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the backbone at an address, in eval mode on the CPU, and its metadata.

    Args:
        address: A run folder (its export, or else its newest checkpoint), ``RUN@best``,
            ``RUN@STEP``, the folder of a sharded checkpoint, an exported ``backbone.pt`` next to
            its ``backbone.json`` or their folder, ``timm:NAME`` or ``torchvision:NAME``.
        weights: For a library's model: ``pretrained`` for the library's weights, ``none`` for
            random weights, or a file.
        trust: Allow an architecture in the user's own code.
        image_size: Image size in pixels to which the model and its transforms are adapted;
            positions of a vision transformer are interpolated. None: the model's own.
        prefix: Prefix of the tensors to take from a file with several networks. None: the network
            that fits the backbone.
        option: Name of the option that sets ``prefix``, for messages; empty if there is none.
        name: Name of the weights of a run or file in messages; None for their path.

    Returns:
        The backbone, and the metadata of ``backbone.json``: architecture, channels, embed_dim,
        normalization, input_size, transforms (of its input images), and for runs method and step.
        Under ``torch.device("meta")`` no weights are loaded.

    Raises:
        UserError: If something is missing or does not match.
    """
    facts, location = _describe(address, weights, trust, image_size)
    library, model = split_address(address)
    origin = location.origin if location else address
    with explained(f"{origin}: architecture: cannot be built", TypeError):
        backbone = build_backbone(Component(**facts["architecture"]), facts.get("channels", 3))
    if is_on_meta(backbone):
        log.debug("%s: on the meta device, its weights are not read", address)
        state, what = None, address
    elif location is not None:
        state, what = location.read(), name or str(location.weights)
    elif weights == PRETRAINED:
        state, what = download(library, model), address
    else:
        state, what = None if weights == NONE else read_state(weights), weights
    if state is not None:
        state = state if prefix is None else with_prefix(state, prefix, f"{what}: {option}")
        load_weights(backbone, state, what=what, option=option)
    return backbone.eval(), {**facts, "embed_dim": embed_dim(backbone)}


def describe_model(
    address: str, *, weights: str = PRETRAINED, trust: bool = False, image_size: int | None = None
) -> dict[str, Any]:
    """Return the metadata of ``open_model`` except embed_dim, without building the model.

    Args:
        address: As in ``open_model``.
        weights: As in ``open_model``.
        trust: Allow an architecture in the user's own code.
        image_size: Image size in pixels to which the transforms are adapted; None: unchanged.

    Raises:
        UserError: If the model or its metadata is missing, or ``image_size`` does not fit it.
    """
    return _describe(address, weights, trust, image_size)[0]


def _describe(
    address: str, weights: str, trust: bool, image_size: int | None
) -> tuple[dict[str, Any], Exported | Saved | None]:
    """Return the metadata, and the location of the weights unless it is a library's model."""
    check_model(address, weights)
    library, name = split_address(address)
    if library:
        return _for_size(_describe_library(library, name, weights), image_size), None
    location = find_weights(address)
    facts = _for_size(location.facts(), image_size)
    if not trust:
        architecture = Component(**facts["architecture"])
        named = {**architecture.args, "name": architecture.name}
        code = code_in({"architecture": named, "transforms": facts.get("transforms")})
        refuse_code(code, str(location.origin))
    return facts, location


def read_init(config: Config) -> State | None:
    """Return the weights of ``init.backbone``.

    The result is None if it is not set, or if all weights come from a checkpoint of this run.

    Raises:
        UserError: If they cannot be read, or ``init.rename`` or ``init.prefix`` do not apply.
    """
    init = config.init
    if init.backbone is None or goes_on(config):
        return None
    try:
        if init.head:  # both of the same step
            weights = backbone_state(open_checkpoint(init.backbone))
        else:
            weights = read_weights(init.backbone)
    except UserError as error:
        raise UserError(f"init.backbone={error}") from error
    weights = renamed(weights, init.rename, "init.rename")
    return weights if init.prefix is None else with_prefix(weights, init.prefix, "init.prefix")


def open_init(config: Config, channels: int) -> State | None:
    """Return the result of ``read_init``, after checking that it fits the backbone.

    A backbone from the user's own code is not checked, since building it twice may have side
    effects, nor is one that cannot be built on the meta device.

    Args:
        config: The config of the run.
        channels: Number of channels of the images.

    Raises:
        UserError: If the weights cannot be read or do not fit.
    """
    weights = read_init(config)
    if weights is not None and config.backbone.name != "custom":
        backbone = build_on_meta(config.backbone, channels)
        if backbone is not None:
            _fit_init(backbone, config, weights)
    return weights


def load_init(backbone: nn.Module, config: Config, weights: State | None = None) -> None:
    """Load ``init.backbone`` if it is set, unless all weights come from a checkpoint.

    Nothing is read for a backbone on the meta device.

    Args:
        backbone: The backbone.
        config: The config of the run.
        weights: Result of ``read_init``; None to call it here.

    Raises:
        UserError: If the weights cannot be read or do not fit.
    """
    if is_on_meta(backbone):
        return
    weights = read_init(config) if weights is None else weights
    if weights is not None:
        _fit_init(backbone, config, weights)


def _fit_init(backbone: nn.Module, config: Config, weights: State) -> None:
    """Load the result of ``read_init``, or raise UserError; on the meta device, only compare."""
    init = config.init
    load_weights(
        backbone,
        weights,
        min_matched=init.min_matched,
        skip=init.skip,
        what="init.backbone",
        option="init.prefix",
    )


def read_weights(address: str) -> dict[str, Tensor]:
    """Return the weights at an address, to initialize a network (``init.backbone``).

    The address is one of ``open_model``, any file of weights, ``RUN@best`` or ``RUN@STEP``. Its
    architecture may be unknown: ``load_weights`` checks whether the weights match. Raises UserError
    if there are none.
    """
    library, name = split_address(address)
    if library:
        return download(library, name)
    path = local_run(address)
    is_run = is_folder(expand_user(path)) or named_checkpoint(address) is not None
    return find_weights(address).read() if is_run else read_state(path)


def load_head(network: nn.Module, config: Config) -> None:
    """Load the head of the run ``init.backbone`` if ``init.head`` is set; see ``load_init``.

    Raises UserError if there is no checkpoint, or its head does not match.
    """
    address = config.init.backbone
    wanted = config.init.head and not goes_on(config) and not is_on_meta(network)
    if wanted and address is not None:
        weights = weights_at(open_checkpoint(address), "model.head")
        head: nn.Module = network.head  # type: ignore[assignment]
        try:
            head.load_state_dict(weights)
        except RuntimeError as error:
            reasons = " ".join(line.strip() for line in str(error).splitlines()[1:])
            raise UserError(
                f"init.head: the head of {address} is not that of this run: {reasons[:400]}"
            ) from error


def open_checkpoint(address: str) -> dict[str, Any]:
    """Load the checkpoint at an address: a run (newest), ``RUN@best``, ``RUN@STEP`` or a path.

    From a sharded checkpoint only tensors of network and method are read. Raises UserError if there
    is no checkpoint.
    """
    path = named_checkpoint(address) or fetch(local_run(address, num_checkpoints=1))
    read, folder = partial(store.load, wanted=of_networks), path / "checkpoints"
    if is_folder(folder):
        newest = store.load_newest(folder, read)
        if newest is None:
            raise UserError(f"{address}: the run has no checkpoint yet")
        return newest[0]
    if not exists(path):
        raise UserError(f"{address}: there is no such run or checkpoint")
    with explained(f"{address}: is no checkpoint of a run", DamagedCheckpoint, OSError):
        return store.load_with({"model": dict, "method": dict, "config": str}, path, read)


def _for_size(facts: dict[str, Any], size: int | None) -> dict[str, Any]:
    """Return the metadata for images of ``size`` pixels; unchanged if None."""
    if size is None:
        return facts
    backbone = resized_backbone(Component(**facts["architecture"]), size)
    if text := undivided(backbone, size):
        raise UserError(text)
    shown = [dict(transform) for transform in facts.get("transforms") or ()]
    transforms = resized_pipeline([Component(name=t.pop("name"), args=t) for t in shown], size)
    return {
        **facts,
        "architecture": {"name": backbone.name, "args": backbone.args},
        "input_size": size,
        "transforms": [transform.to_dict() for transform in transforms],
    }


def _describe_library(library: str, name: str, weights: str) -> dict[str, Any]:
    if weights == PRETRAINED:
        transforms = _transforms_of(library, name)
    else:
        size = _input_size(library, name)
        transforms = _transforms(size, int(size / 0.875), _IMAGENET["mean"], _IMAGENET["std"])
    *_, crop, normalize = transforms
    return {
        "architecture": {"name": library, "args": {"model": name, "args": {}}},
        "channels": 3,
        "normalization": {key: normalize[key] for key in ("mean", "std")},
        "input_size": crop["size"],
        "transforms": transforms,
        "method": library,
        "weights": weights,
    }


def _input_size(library: str, name: str) -> int:
    """Return the image size in pixels of a timm model's configuration; 224 if it is unknown."""
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(name)
        if config is not None:
            return int(config.input_size[-1])
    return 224


def _transforms_of(library: str, name: str) -> list[dict[str, Any]]:
    """Return the transforms that the library uses with its pretrained weights."""
    if library == "timm":
        import timm
        from timm.data import resolve_data_config

        shown = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
        size, interpolation = shown["input_size"][-1], shown["interpolation"]
        smooth = interpolation if interpolation in ("bilinear", "nearest") else "bicubic"
        resized = int(size / shown["crop_pct"])
        return _transforms(size, resized, shown["mean"], shown["std"], smooth)
    import torchvision

    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    resized, smooth = preset.resize_size[0], preset.interpolation.value
    return _transforms(preset.crop_size[0], resized, preset.mean, preset.std, smooth)


def _transforms(
    size: int,
    resized: int,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str = "bilinear",
) -> list[dict[str, Any]]:
    """Return transforms: resize the short side to ``resized``, crop to ``size``, normalize."""
    return [
        {"name": "resize", "size": resized, "interpolation": interpolation},
        {"name": "center_crop", "size": size},
        {"name": "normalize", "mean": list(mean), "std": list(std)},
    ]


def download(library: str, name: str) -> dict[str, Tensor]:
    """Return the library's pretrained weights, from its cache or the network.

    Raises:
        UserError: If they cannot be fetched.
    """
    try:
        if library == "timm":
            import timm

            return dict(timm.create_model(name, pretrained=True).state_dict())
        import torchvision

        weights = torchvision.models.get_model_weights(name).DEFAULT
        return dict(weights.get_state_dict(progress=False))
    except Exception as error:  # libraries and their clients raise various errors
        raise UserError(
            f"{library}:{name}: cannot fetch its trained weights "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); start from a "
            f"file, init.backbone=FILE; eval takes weights=FILE, or weights=none for random ones"
        ) from error
