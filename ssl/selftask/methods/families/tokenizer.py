"""Methods that predict the tokens that a frozen tokenizer assigns to patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selftask.config.fields import setting
from selftask.config.schema import FrozenModule
from selftask.methods.base import Method
from selftask.models.distillation.patch_targets import PatchTokenizer, TokenTargets

if TYPE_CHECKING:
    from selftask.task import Task


def trained_tokenizer() -> Any:
    """Return a required config field ``tokenizer``, with a hint for users who omit it."""
    return setting(
        missing="give a run of vqkd or package.module:Class",
        tiny=FrozenModule(model="timm:test_vit", weights="none"),
    )


def open_tokenizer(method: Method, task: Task) -> TokenTargets:
    """Return ``method.tokenizer``: the user's own class, or the scores of a trained network.

    Raises:
        UserError: If the tokenizer does not exist, or gives no tokens.
    """
    if FrozenModule.of(method.config.tokenizer).is_code:
        return TokenTargets(method.open_frozen("tokenizer", task).network, "method.tokenizer")
    trained = method.open_trained("tokenizer", task, scores=True)
    assert trained.scores is not None
    backbone = trained.network.backbone
    scores = trained.scores.patches or trained.scores
    tokenizer = PatchTokenizer(backbone, scores.head, scores.width(backbone))
    return TokenTargets(tokenizer, "method.tokenizer")
