"""``selftask eval zeroshot``: classify images by the names of their classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.checkpoint.rotation import checkpoints
from selftask.cli.model.checkpoint_model import open_checkpoint
from selftask.cli.model.evaluations.measured import print_measured
from selftask.cli.model.load_model import Frozen, open_frozen
from selftask.cli.options import take
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.trust import TRUST
from selftask.errors import UserError
from selftask.files.paths import expand_user
from selftask.logs.lines import info_on_stderr

if TYPE_CHECKING:
    from torch import Tensor

    from selftask.data.tokenizers.base import Tokenizer

USAGE = f"""\
usage: selftask eval zeroshot RUN_OR_FOLDER [classes=FILE.csv] [templates=FILE] [key=value ...]

Classifies images by the texts of their classes, and prints top-1, top-5 and the mean of the top-1
of each class, with 95 % intervals over the test images, as one JSON line last.
RUN           a run of clip or siglip: its newest checkpoint; RUN@STEP or RUN@best
FOLDER        CLIP or SigLIP as transformers saves it (save_pretrained), with its tokenizer and
              image processor; needs data=DIR
data.val=DIR  the labeled images to classify; default: those of the run, or else data
classes=FILE  columns class,name: the name of a folder (or the number of a class) and its name in
              prompts, in one or more rows; default: names of folders, with spaces for _
templates=FILE  a prompt a line, in which {{}} stands for the name; default: "a photo of a {{}}.",
              "a photo of a big {{}}." and "a photo of a small {{}}."
only_test_classes=true  predicts only classes that have test images
eval.transforms=[...]   how images are shown; default: as in the run
{TRUST}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Classify images, print the accuracies, and append those of a run to ``evaluations.jsonl``."""
    from selftask.evaluate.zeroshot import ZeroshotOptions, measure_zeroshot

    return print_measured("zeroshot", argv, USAGE, ZeroshotOptions, measure_zeroshot, _open)


def _open(address: str, words: list[str]) -> tuple[Frozen, str]:
    """Return image and text tower as one model with its images, and its run.

    Both towers of a run are of the same checkpoint. For a folder, the returned path is not a run.
    """
    if take("weights", words)[0] is not None:
        raise UserError(
            "eval zeroshot: weights=: both towers are read from the checkpoint; leave it out"
        )
    from selftask.models.weights.formats.image_text_folder import (
        is_image_text_folder,
        open_image_text,
    )

    if is_image_text_folder(folder := expand_user(address)):
        if take("image_size", words)[0] is not None:
            raise UserError(f"image_size: {address} takes images of one size; leave it out")
        with info_on_stderr():
            loaded = open_image_text(folder)
        return open_frozen(address, words, loaded=loaded), str(folder / "config.json")  # no run
    checkpoint, run = named_checkpoint(address), address
    if checkpoint is None:
        folder = expand_user(local_run(address, num_checkpoints=1)) / "checkpoints"
        checkpoint = next(iter(checkpoints(folder)), None)
    else:
        run = str(checkpoint.parent.parent)
    if checkpoint is None:
        raise UserError(
            f"{address}: has no checkpoint with a text tower; expected a run of clip or siglip, "
            "or the folder of such a model of transformers"
        )
    frozen = open_checkpoint(checkpoint, words)
    from selftask.data.tokenizers.base import build_tokenizer
    from selftask.models.text import ImageTextModel
    from selftask.models.weights.trained import open_text

    tokenizer = build_tokenizer(frozen.config.data.tokenizer)
    head, text = open_text(str(checkpoint), frozen.facts["embed_dim"], tokenizer)
    model = ImageTextModel(frozen.backbone, head, text, partial(_tokens, tokenizer))
    return replace(frozen, backbone=model), run


def _tokens(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the token ids (T, L) of T texts; L is the length that the tokenizer gives them."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([tokenizer(text) for text in texts]))
