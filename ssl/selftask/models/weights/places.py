"""Location of a run's backbone: its export, or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from selftask.checkpoint import store
from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.checkpoint.rotation import MANIFEST, checkpoints, step_of
from selftask.config.schema import Component
from selftask.errors import UserError, shorten
from selftask.files import addresses
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import expand_user, is_file, is_folder
from selftask.files.received import read_json
from selftask.files.yaml_file import parse_yaml
from selftask.logs import get_logger
from selftask.models.weights.address import no_model
from selftask.models.weights.export import META, WEIGHTS, metadata
from selftask.models.weights.read import backbone_state, of_backbone, read_backbone, read_state

log = get_logger(__name__)


_UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@contextmanager
def written_by_selftask(origin: str | Path) -> Iterator[None]:
    """Context that converts errors caused by unexpected content to a UserError of one line.

    Args:
        origin: The file or run with the content, for the message.
    """
    try:
        yield
    except _UNEXPECTED as error:
        reason = shorten(repr(error), 300)
        raise UserError(f"{origin}: is not what selftask writes ({reason})") from error


def config_of(checkpoint: Mapping[str, Any], origin: str | Path) -> dict[str, Any]:
    """Return the config in a checkpoint as plain values; raise UnreadableFile if it is invalid."""
    return parse_yaml(checkpoint["config"].encode(errors="surrogatepass"), origin)


@dataclass(frozen=True)
class Exported:
    """A file of weights and its metadata file."""

    weights: Path
    meta: Path

    @property
    def origin(self) -> Path:
        """The file that defines the architecture."""
        return self.meta

    def read(self) -> dict[str, Tensor]:
        """Return the weights; see ``read_state`` for errors."""
        return read_state(self.weights)

    def facts(self) -> dict[str, Any]:
        """Return the metadata; raise UserError if a file is missing or has another format."""
        if not is_file(self.weights):
            raise no_model(self.weights)
        if not is_file(self.meta):
            raise UserError(
                f"{self.weights}: nothing says which architecture it is for, {self.meta} is "
                f"missing; use timm:NAME or torchvision:NAME with weights={self.weights}"
            )
        with written_by_selftask(self.meta):
            facts = read_json(self.meta)
            if facts.keys() >= {"step", "bytes"}:  # the manifest of a checkpoint
                raise UserError(
                    f"{self.weights}: is a checkpoint; give the folder of its run, whose backbone "
                    "`selftask export` takes out of the newest one"
                )
            {**Component(**facts["architecture"]).args}  # raises TypeError if it is not a mapping
        return facts


@dataclass(frozen=True)
class Saved:
    """The backbone in a checkpoint of a run; other tensors are not read."""

    weights: Path  # the checkpoint
    state: Mapping[str, Any]

    @property
    def origin(self) -> Path:
        """The file that defines the architecture."""
        return self.weights

    def read(self) -> dict[str, Tensor]:
        """Return the backbone's weights, with adapters merged."""
        return backbone_state(self.state)

    def facts(self) -> dict[str, Any]:
        """Return the metadata that an export of this checkpoint would have."""
        with written_by_selftask(self.weights):
            config = config_of(self.state, self.weights)
            return metadata(
                component(config["backbone"]),
                [component(transform) for transform in config["eval"]["transforms"]],
                channels=self.state["channels"],
                method=config["method"]["name"],
                step=int(self.state["clock"]["steps_done"]),
                recipe=config["recipe"],
            )


def find_weights(address: str) -> Exported | Saved:
    """Return the location of the backbone at an address.

    Args:
        address: A run (its export, or else its newest checkpoint), ``RUN@best``, ``RUN@STEP``, the
            folder of an export or of a sharded checkpoint, or an exported file.

    Raises:
        UserError: If a folder has no weights, or its checkpoints are damaged.
    """
    if is_remote(address) and not addresses.is_folder(address):
        meta = f"{address.rpartition('.')[0]}.json"
        there = addresses.is_file(meta)
        return Exported(fetch(address), fetch(meta) if there else Path(meta))
    if (named := named_checkpoint(address)) is not None:
        return Saved(named, read_backbone(named))
    path = expand_user(local_run(address))
    if not is_folder(path):
        return Exported(path, path.with_suffix(".json"))
    if is_file(path / MANIFEST):
        return Saved(path, read_backbone(path))
    for folder in (path / "export", path):
        if is_file(folder / WEIGHTS):
            export = Exported(folder / WEIGHTS, folder / META)
            _warn_of_newer(path, export)
            return export
    newest = store.load_newest(
        expand_user(local_run(address, num_checkpoints=1)) / "checkpoints",
        partial(
            store.load_with,
            {"backbone": str, "config": str, "clock": dict},
            read=partial(store.load, wanted=of_backbone),
        ),
    )
    if newest is None:
        raise UserError(
            f"{path}: holds no {WEIGHTS}, nor does {path / 'export'}, and there is no checkpoint: "
            "is it a run?"
        )
    state, checkpoint = newest
    log.info("%s: has no export; taking its newest checkpoint, %s", address, checkpoint.name)
    return Saved(checkpoint, state)


def component(section: Mapping[str, Any]) -> Component:
    """Return a section of a resolved config as a component, without ``lora`` of a backbone."""
    return Component(
        name=section["name"], args={k: v for k, v in section.items() if k not in ("name", "lora")}
    )


def _warn_of_newer(run: Path, export: Exported) -> None:
    """Warn if the export is not of the same step as the newest checkpoint."""
    newest = next(iter(checkpoints(run / "checkpoints")), None)
    if newest is None or not is_file(export.meta):
        return
    there, exported = step_of(newest), export.facts().get("step")
    if exported is not None and exported != there:
        log.warning(
            "%s is of step %d, and the newest checkpoint of step %d; `selftask export %s` writes "
            "that of the newest",
            *(export.weights, exported, there, run),
        )
