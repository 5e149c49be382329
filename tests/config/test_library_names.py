"""Names of the models of timm and torchvision, read from their source."""

from __future__ import annotations

import re

import pytest

from selftask.config import library_names
from selftask.config.library_names import check_name
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_names_in_the_source_are_those_of_the_library(library: str) -> None:
    assert library_names._read_names(library) == library_names._imported_names(library)


def test_names_of_timm_are_read_as_timm_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the name of weights, deprecated names, and names that a user registers."""
    monkeypatch.setattr(library_names, "_imported_names", lambda library: {"registered_by_user"})
    check_name("timm", "registered_by_user")
    monkeypatch.delitem(library_names.sys.modules, "timm.models", raising=False)
    for name in ("resnet18", "resnet18.a1_in1k", "vit_huge_patch14_224_in21k"):
        check_name("timm", name)
    with pytest.raises(UserError, match=r"no model named 'resnet81'; did you mean 'resnet18'\?"):
        check_name("timm", "resnet81")


@pytest.mark.parametrize(
    ("short", "keys"),
    [
        ("timm:resnet18", "backbone.name=timm backbone.model=resnet18"),
        ("my_net.py:Net", "backbone.name=custom backbone.model=my_net.py:Net"),
    ],
)
def test_short_form_is_no_name_of_a_backbone(short: str, keys: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"write it as two keys: {keys}")):
        load_config("simclr/digits", [f"backbone={{name: '{short}', image_channels: 1}}"])
