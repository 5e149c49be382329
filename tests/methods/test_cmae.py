"""CMAE against the figures of its authors' code, and what its two networks see."""

from __future__ import annotations

import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from figures import draw
from minitask import MiniTask, predicted
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.methods.cmae import CMAE, FeatureDecoder, Predictions, contrast_loss
from selftask.methods.mae import normalize, patchify
from selftask.models.features.tokens import gather_tokens

# ZhichengHuang/CMAE for seeds 0 and 500: both terms, gradients of pixels and prediction
PUBLISHED = {
    0: (1.8958498619346513, 0.22268081959693145, 0.07026456443652675, 0.2250976459118289),
    500: (2.052247554767153, 0.8515419592237206, 0.07310536692933559, 0.4926408710068726),
}


def _vit() -> VisionTransformer:
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 12, "depth": 1, "num_heads": 3}
    return VisionTransformer(num_classes=0, **sizes)


@pytest.mark.parametrize("seed", PUBLISHED)
def test_loss_is_that_of_the_authors_code(seed: int) -> None:
    patches = normalize(patchify(draw(seed, 4, 3, 16, 16), 4))
    predict = draw(seed + 2, 4, 16).argsort(dim=1)[:, :8]
    pixels = gather_tokens(draw(seed + 1, 4, 16, 48), predict)[:, None].requires_grad_()
    image = draw(seed + 3, 4, 12).requires_grad_()
    batch = Batch(views={}, labels=predict[:, 0], index=predict[:, 0], key=predict[:, :2])
    batch["pixels"], batch["target"] = gather_tokens(patches, predict), draw(seed + 4, 4, 12)
    terms = CMAE(CMAE.Config())(predicted(Predictions(pixels, image)), batch)
    gradients = torch.autograd.grad(sum(terms.values()), (pixels, image))
    actual = [terms["masked_pixels"].item(), terms["image_contrast"].item()]
    actual += [gradient.norm().item() for gradient in gradients]
    assert actual == pytest.approx(PUBLISHED[seed], rel=1e-9)


def test_the_feature_is_that_of_all_patches_and_no_prefix_token() -> None:
    """As the mean over patches of what the decoder makes of the whole sequence."""
    torch.manual_seed(0)
    decoder = FeatureDecoder(6, (2, 2), dim=8, depth=1, num_heads=2, num_out=5).double()
    keep, predict = torch.tensor([[2], [0]]), torch.tensor([[[3, 0, 1]], [[1, 2, 3]]])
    encoded = draw(1, 2, 2, 6)  # a class token and one patch
    tokens = torch.stack([decoder.embed(encoded)[:, 1] + decoder.positions[keep[:, 0]]], 1)
    queries = decoder.mask_token + decoder.positions[predict[:, 0]]
    x = torch.cat([decoder.embed(encoded[:, :1]), tokens, queries], dim=1)
    expected = decoder.project(decoder.norm(decoder.blocks[0](x)))[:, 1:].mean(dim=1)
    torch.testing.assert_close(decoder(encoded, keep, predict), expected)


def test_the_target_is_the_mean_of_the_teachers_patches_of_the_second_view() -> None:
    """Through its projector; the network's feature goes through projector and predictor."""
    small = {"decoder_dim": 8, "decoder_depth": 1, "decoder_heads": 2, "feature_depth": 1}
    sizes = {"hidden_dim": 7, "out_dim": 5, "momentum": 0.9}
    task = MiniTask("cmae", {**small, **sizes}, backbone=_vit, sizes=(8, 8), lr=0.1).run(2)
    batch = task.forward(torch.arange(8))
    teacher, network, mask = task.loss.teacher.network, task.base_model, batch["mask"]
    tokens = teacher.backbone.forward_features(batch.all_views[1])
    torch.testing.assert_close(batch["target"], teacher.head(tokens[:, 1:].mean(dim=1)).detach())
    encoded = batch.output.features.tokens.sequence
    feature = network.feature_decoder(encoded, mask.keep, mask.predict, grid=(4, 4))
    head = network.contrast_head
    expected = head.predictor(head.projector(feature))
    torch.testing.assert_close(batch.output.prediction.image, expected)


def test_contrast_loss_of_perfect_and_of_equal_predictions() -> None:
    """Predictions at orthogonal targets reach the floor; the same for all images: 2 tau ln B."""
    eye = torch.eye(4, dtype=torch.float64)
    floor = 0.14 * (math.log(math.exp(1 / 0.07) + 3) - 1 / 0.07)
    assert contrast_loss(eye, eye, temperature=0.07).item() == pytest.approx(floor, abs=1e-12)
    same = contrast_loss(eye[:1].expand(4, 4), eye[:1].expand(4, 4), temperature=0.07)
    assert same.item() == pytest.approx(0.14 * math.log(4), rel=1e-12)


def test_one_view_is_refused() -> None:
    with pytest.raises(ConfigError, match="cmae needs 2 views"):
        load_config("cmae", ["views.crops.count=1"])
