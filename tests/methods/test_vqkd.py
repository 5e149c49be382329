"""VQ-KD against the figures of its authors' code over two steps, and its codes over a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from figures import draw
from selftask.errors import UserError
from selftask.methods.vqkd import vqkd_terms
from selftask.models.clustering import cluster_sums
from selftask.models.distillation.vector_quantizer import VectorQuantizer

# microsoft/unilm beit2 for seeds 0 and 500, two steps each: commitment loss, gradient of the
# vectors, sum of the codes, norms of the change of the codebook and of the cluster sizes
QUANTIZER = [
    [
        (0.11151228335470977, 6.673644462187741, 186, 0.02274775524147778, 0.1000000000000001),
        (0.10086472136769355, 5.738897292169527, 203, 0.03381673852816942, 0.19857744081340173),
    ],
    [
        (0.10841541486213296, 5.631812009400148, 163, 0.01970343675159151, 0.11489125293076068),
        (0.10800784007026165, 6.151070967846565, 152, 0.03079280277984265, 0.20772895801981986),
    ],
]
# its reconstruction loss and the gradient of the reconstruction
RECONSTRUCTION = [
    (0.9857142239997371, 0.08637790546012869),
    (1.0189839691538072, 0.0876485660854991),
]


@pytest.mark.parametrize("case", [0, 1])
def test_two_steps_of_the_codebook_are_those_of_the_authors_code(case: int) -> None:
    seed = 500 * case
    quantizer = VectorQuantizer(12, 8).double()
    start = F.normalize(draw(seed + 1, 12, 8), dim=1)
    quantizer.codebook.copy_(start)
    for step, figures in enumerate(QUANTIZER[case]):
        maps = draw(seed + 10 + step, 2, 8, 4, 4).requires_grad_()
        units = F.normalize(maps.permute(0, 2, 3, 1), dim=-1)
        codes = quantizer(units)
        nearest = quantizer.codebook[codes]
        passed = units + (nearest - units).detach()
        _, commitment = vqkd_terms(units, units, units, nearest)
        weighted = (passed.permute(0, 3, 1, 2) * draw(seed + 20, 2, 8, 4, 4)).sum()
        (gradient,) = torch.autograd.grad(commitment + weighted, maps)
        sums, counts = cluster_sums(units.detach().flatten(0, 2), codes.flatten(), 12)
        quantizer.update(sums, counts, momentum=0.99)
        moved = (quantizer.codebook - start).norm().item()
        computed = (
            *(commitment.item(), gradient.norm().item(), codes.sum().item()),
            *(moved, quantizer.usage.norm().item()),
        )
        assert computed == pytest.approx(figures, rel=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_reconstruction_is_that_of_the_authors_code(case: int) -> None:
    seed = 500 * case
    rebuilt, target = draw(seed + 30, 2, 9, 8).requires_grad_(), draw(seed + 31, 2, 9, 8)
    loss, _ = vqkd_terms(rebuilt, target, target, target)
    (gradient,) = torch.autograd.grad(loss, rebuilt)
    computed = (loss.item(), gradient.norm().item())
    assert computed == pytest.approx(RECONSTRUCTION[case], rel=1e-9)


def test_codes_follow_their_vectors_and_unused_ones_stay() -> None:
    """As a loop over codes."""
    quantizer = VectorQuantizer(6, 3).double()
    before = quantizer.codebook.clone()
    units = F.normalize(draw(1, 9, 3), dim=1)
    codes = torch.tensor([0, 0, 2, 2, 2, 5, 0, 5, 5])
    quantizer.update(*cluster_sums(units, codes, 6), momentum=0.75)
    for code in range(6):
        members = [units[row] for row in range(9) if codes[row] == code]
        expected = before[code]
        if members:
            mean = sum(members) / len(members)
            expected = 0.75 * before[code] + 0.25 * mean / mean.norm()
        assert torch.allclose(quantizer.codebook[code], expected / expected.norm(), rtol=1e-12)


def test_the_first_codes_are_clusters_of_the_first_patches(tmp_path: Path) -> None:
    """Closer to these patches than random codes; from then on they move with the momentum."""
    task = tiny.task("vqkd", tmp_path, "run", "method.codebook_momentum=0.9")
    task.prepare()
    task.on_start(), task.on_phase_start()
    quantizer = task.base_model.head.quantizer
    random = quantizer.codebook.clone()
    task.step()
    units = task.last_batch.output.prediction.units.detach().flatten(0, 1)
    first = quantizer.codebook.clone()
    closest = [(units @ codes.T).amax(dim=1).mean().item() for codes in (random, first)]
    assert closest[1] > closest[0] + 0.1
    assert torch.allclose(first.norm(dim=1), torch.ones(len(first)))
    task.step()
    coded = task.last_batch.output.prediction
    used = coded.codes.unique()
    assert torch.equal(coded.nearest, first[coded.codes])
    assert 0 < (quantizer.codebook - first).norm(dim=1).max() < 0.2
    for code in used.tolist():
        mean = coded.units.detach()[coded.codes == code].mean(dim=0)
        moved = F.normalize(0.9 * first[code] + 0.1 * mean / mean.norm(), dim=0)
        torch.testing.assert_close(quantizer.codebook[code], moved, rtol=0, atol=1e-5)
    unused = torch.ones(len(first), dtype=torch.bool)
    unused[used] = False
    assert torch.allclose(quantizer.codebook[unused], first[unused], atol=1e-6)
    task.close()


def test_more_codes_than_patches_are_refused(tmp_path: Path) -> None:
    task = tiny.task("vqkd", tmp_path, "run", "method.num_codes=5000")
    with pytest.raises(UserError, match=r"method\.num_codes=5000: .*of one step, which are 1024"):
        task.prepare()
