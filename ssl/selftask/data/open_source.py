"""Opening of one source by its config."""

from __future__ import annotations

from selftask.config.extensions.user_code import source_of
from selftask.config.schema import Component
from selftask.data.labels import check_labels
from selftask.data.source import Source
from selftask.data.subset import subset_of
from selftask.errors import UserError
from selftask.registry import SOURCES


def open_source(component: Component) -> Source:
    """Open a registered source, or the part of it that its argument ``subset`` selects.

    Raises:
        UserError: If the arguments or the data are invalid.
    """
    registered = SOURCES[component.name]
    config = getattr(registered, "Config", None)
    args = {name: value for name, value in component.args.items() if name != "subset"}
    source: Source = registered(config(**args)) if config else registered(**args)
    if not isinstance(source, Source):
        raise UserError(
            f"{source_of(registered)}: the source {component.name!r} must extend "
            "selftask.data.source.Source; a data set with __len__ and __getitem__ alone needs no "
            "registration: data=package.module:Class"
        )
    check_labels(source)
    return subset_of(source, component.args.get("subset"))
