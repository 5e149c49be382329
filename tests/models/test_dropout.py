"""Dropout that draws per sample: what ranks, batches, passes and recomputation must not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from timm.layers import DropPath
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from imagined_streams import is_view
from selftask.models.dropout import draw_per_sample
from selftask.models.features.tokens import Features, from_map
from selftask.models.network import Network
from selftask.models.teacher import Teacher
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks
from selftask.random.keyed import LAYER_DRAWS, keep_mask
from selftask.random.splitmix import splitmix64

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_layers_afterwards() -> Iterator[None]:
    yield
    LAYER_DRAWS.reset(0)


def keys(index: Tensor, epoch: int = 2) -> Tensor:
    return torch.stack([torch.full_like(index, epoch), index], dim=1)


INDEX = torch.arange(100, 112)
LAYERS = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout1d": lambda: nn.Dropout1d(0.3),
    "drop_path": lambda: DropPath(0.3),
    "drop_path_unscaled": lambda: DropPath(0.3, scale_by_keep=False),
    "stochastic_depth": lambda: torchvision.ops.StochasticDepth(0.3, "row"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_rank_draws_its_part_of_the_whole_batch(name: str) -> None:
    """Two views, one after the other, on one rank and on three; torch's generator stays."""
    layer = LAYERS[name]()
    assert draw_per_sample([layer], seed=7) == []
    x = torch.ones(2, 12, 5, 4)

    def run(index: Tensor, part: Tensor) -> Tensor:
        LAYER_DRAWS.start(keys(index), CPU)
        LAYER_DRAWS.enter((0, 1))
        y: Tensor = layer(part.flatten(0, 1))
        return y.view_as(part)

    before = torch.get_rng_state()
    whole = run(INDEX, x)
    parts = [run(INDEX[n : n + 4], x[:, n : n + 4]) for n in (0, 4, 8)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(whole[0], whole[1]), "views draw for themselves"
    kept = 1.0 if name == "drop_path_unscaled" else 1 / 0.7
    assert sorted(set(whole.flatten().tolist())) == pytest.approx([0.0, kept])


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_dropped_together_is_that_of_the_library(name: str) -> None:
    library, layer = LAYERS[name](), LAYERS[name]()
    draw_per_sample([layer], seed=0)
    x = torch.ones(400, 6, 5)
    LAYER_DRAWS.start(keys(torch.arange(400)), CPU)
    for drops in (library(x) == 0, layer(x) == 0):
        share = drops.float().mean().item()
        assert share == pytest.approx(0.3, abs=0.1)
        same_in_row = bool((drops == drops[:, :, :1]).all())
        same_in_sample = bool((drops == drops[:, :1, :1]).all())
        assert same_in_row == (name != "dropout")
        assert same_in_sample == (name not in ("dropout", "dropout1d"))


def test_layers_seeds_epochs_and_copies_draw_for_themselves() -> None:
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    teacher = copy.deepcopy(second)
    x = torch.ones(12, 50)
    seen = []
    for seed, epoch in ((0, 0), (1, 0), (0, 1)):
        draw_per_sample([nn.ModuleList([copy.deepcopy(first)])], seed=seed)
        layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
        draw_per_sample([layers, teacher], seed=seed)
        LAYER_DRAWS.start(keys(INDEX, epoch), CPU)
        seen += [layer(x) for layer in (*layers, teacher)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    again = layers[0](x)
    assert torch.equal(again, seen[6]), "a second pass, as in SAM, draws the same"


def test_words_that_are_read_are_random() -> None:
    """Against binomials: the share of each place and of each row, and pairs of places."""
    words = splitmix64(torch.arange(4000), torch.tensor(0))
    for keep in (0.1, 0.5, 0.9):
        mask = keep_mask(words, 37, keep).double()
        assert mask.shape == (4000, 37)
        sigma = (keep * (1 - keep) / mask.numel()) ** 0.5
        assert abs(mask.mean().item() - keep) < 4 * sigma
        place = (mask.mean(dim=0) - keep).abs().max().item()
        assert place < 5 * (keep * (1 - keep) / 4000) ** 0.5
        correlation = torch.corrcoef(mask.T) - torch.eye(37)
        assert correlation.abs().max().item() < 5 / 4000**0.5
    assert keep_mask(words, 8, 0.0).sum() == 0


def test_nothing_is_drawn_in_evaluation_outside_of_training_or_at_rate_0() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    kinds = [type(layer) for layer in network]
    draw_per_sample([network], seed=0)
    same = [type(layer) is kind for layer, kind in zip(network, kinds, strict=True)]
    assert same == [False, True]
    x = torch.ones(12, 8)
    LAYER_DRAWS.start(keys(INDEX), CPU)
    assert torch.equal(network.eval()(x), x)
    LAYER_DRAWS.stop()
    torch.manual_seed(0)
    got = network.train()(x)
    torch.manual_seed(0)
    assert torch.equal(got, nn.Dropout(0.5)(x)), "as ever: the library's own"


def test_nothing_is_drawn_for_a_teacher_without_dropout() -> None:
    """And the draws of the network are kept; a teacher with dropout draws."""
    network = nn.Sequential(DropPath(0.5), nn.Dropout2d(0.5))
    teachers = [Teacher(network, drop_path=drop_path) for drop_path in (False, True)]
    draw_per_sample([network, *teachers], seed=1)
    LAYER_DRAWS.start(keys(torch.arange(4)), torch.device("cpu"))
    words, images = LAYER_DRAWS.words, torch.ones(4, 2, 3, 3)
    calm, drawing = teachers
    as_network_of_two_views = lambda *_: LAYER_DRAWS.enter((0, 1))  # noqa: E731
    calm.network.register_forward_pre_hook(as_network_of_two_views)
    with Launches() as launches:
        assert torch.equal(calm(images), images)
    assert launches.number == 1, "of torch.equal"
    assert torch.equal(LAYER_DRAWS.words, words)
    assert not torch.equal(drawing(images), images)


def test_passes_of_a_batch_select_words_that_were_drawn_ahead() -> None:
    """Without an operation on the device; and those of views that no one expected are drawn."""
    draw_per_sample([nn.ModuleList([DropPath(0.5), DropPath(0.2)])], seed=3)
    key, views = keys(INDEX), [[0, 1], [2, 3, 4], [0, 3], [4, 5, 6]]
    drawn, expected = LAYER_DRAWS.draw(key, 5), LAYER_DRAWS.draw(key, 7)
    LAYER_DRAWS.start(key, CPU, drawn)
    counted = []
    for of_pass in views:
        with Launches() as launches:
            LAYER_DRAWS.enter(of_pass)
        counted.append(launches.number)
        assert torch.equal(LAYER_DRAWS.words, expected[:, of_pass].flatten(1))
    assert counted[:3] == [0, 0, 1], "a copy if other views lie between"
    seeds = [stream_of(3, *row) for row in key.tolist()]
    for view, layer in ((0, 0), (4, 1)):
        of_view = [next_word(next_word(start, view), layer) for start in seeds]
        assert drawn[layer, view].tolist() == of_view


def stream_of(seed: int, epoch: int, index: int) -> int:
    """Start of a sample's stream: ``layers`` in ASCII separates it from other draws."""
    start = seed ^ int.from_bytes(b"layers", "big")
    return next_word(next_word(start, epoch), index)


def next_word(start: int, position: int) -> int:
    """Vigna's splitmix64.c, as signed number: the output after ``position + 1`` steps."""
    z = (start + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layers_that_drop_whole_rows_share_one_draw(dtype: torch.dtype) -> None:
    """With the values that each would draw from its own words; a rate may be changed later."""
    rates = (0.1, 0.37, 0.5, 1.0, 0.2)
    network = nn.Sequential(*(DropPath(rate) for rate in rates)).append(nn.Dropout1d(0.3))
    draw_per_sample([network], seed=1)
    network[4].drop_prob = rates[4] / 2
    LAYER_DRAWS.start(keys(torch.arange(4000)), CPU)
    words, x = LAYER_DRAWS.words, torch.randn(4000, 1, 2).to(dtype)
    assert words is not None
    counted = []
    for layer, rate, of_layer in zip(network, (*rates[:4], 0.1, 0.3), words, strict=True):
        with Launches() as launches:
            y = layer(x)
        counted.append(launches.number)
        scale = 1 / (1 - rate) if rate < 1 else 1.0
        expected = x * (keep_mask(of_layer, 1, 1 - rate).to(dtype) * scale)[:, :, None]
        assert torch.equal(y, expected)
    assert counted[1:4] == [1] * 3, "their own product"
    with LAYER_DRAWS.again(words.flip(1)):
        dropped = network[1](torch.ones_like(x)) == 0
    assert torch.equal(dropped.flip(0), network[1](torch.ones_like(x)) == 0), "of these words"


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not is_view(func)
        return func(*args, **(kwargs or {}))


def test_rows_of_other_lengths(caplog: pytest.LogCaptureFixture) -> None:
    """Windows of an image follow its draws; rows that are no samples fall back on the library."""
    layer = nn.Dropout(0.5)
    draw_per_sample([layer], seed=0)
    LAYER_DRAWS.start(keys(INDEX), CPU)
    windows = layer(torch.ones(12 * 4, 9))
    LAYER_DRAWS.start(keys(INDEX[3:6]), CPU)
    assert torch.equal(layer(torch.ones(3 * 4, 9)), windows[12:24])
    for _ in range(2):
        assert layer(torch.ones(7, 9)).shape == (7, 9)
    assert caplog.text.count("Dropout got 7 rows for 3 images") == 1


class Residual(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.drop_path = nn.Linear(5, 5), DropPath(0.4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop_path(self.dropout(self.linear(x).tanh()))
        return y


class PooledBlocks(nn.Module):
    """Images (B, 5, H, W) -> (B, 5)."""

    embed_dim = 5
    offers = ("dense",)

    def __init__(self, own_checkpointing: bool = False, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(dropout) for _ in range(3)))
        self.own_checkpointing = own_checkpointing

    def extract(self, images: Tensor) -> Features:
        pooled = self(images)
        return Features(pooled, from_map(pooled[..., None, None]), {})

    def forward(self, images: Tensor) -> Any:
        x = images.mean(dim=(2, 3))
        if self.own_checkpointing:
            return checkpoint(self.blocks, x, use_reentrant=False)
        return self.blocks(x)


def multi_crop(
    own_checkpointing: bool = False, dropout: float = 0.3
) -> tuple[Network, list[Tensor]]:
    torch.manual_seed(0)
    backbone = PooledBlocks(own_checkpointing, dropout)
    network = Network(backbone, nn.Sequential(nn.Dropout(0.2 if dropout else 0.0))).double()
    draw_per_sample([network], seed=3)
    sizes = (4, 4, 2, 2, 2)
    return network, [torch.randn(12, 5, size, size).double() for size in sizes]


def outputs(network: Any, views: list[Tensor], part: slice = slice(None)) -> Tensor:
    """Output for some samples of a batch, as on a rank that has only these."""
    LAYER_DRAWS.start(keys(INDEX[part]), CPU)
    output: Tensor = network([view[part] for view in views])
    return output


def gradients(network: Any, views: list[Tensor]) -> list[Tensor]:
    output = outputs(network, views)
    weights = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), [*network.parameters()]))


def test_recomputation_draws_what_the_first_pass_drew() -> None:
    """Multi-crop: when the first pass is computed again, the draws of the second are in place."""
    network, views = multi_crop()
    plain = gradients(network, views)
    checkpoint_blocks(find_blocks(network))
    for a, b in zip(plain, gradients(network, views), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dropout", [0.3, 0.0])
def test_a_backbones_own_recomputation_is_refused_where_it_would_be_wrong(dropout: float) -> None:
    """Also with stochastic depth alone."""
    network, views = multi_crop(own_checkpointing=True, dropout=dropout)
    with pytest.raises(RuntimeError, match="activation_checkpointing=blocks"):
        gradients(network, views)


class ByExtract(Network):
    """A user's network that extracts two views, then two more; it knows nothing of draws."""

    def forward(self, views: list[Tensor]) -> Tensor:
        first, second = self.extract(views[:2]), self.extract(torch.cat(views[2:]))
        return torch.cat([first.pooled, second.pooled]).unflatten(0, (4, -1))


class ByBackbone(nn.Module):
    """Another one, which calls the backbone itself."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, views: list[Tensor]) -> Tensor:
        pooled: Tensor = self.backbone(torch.cat(views))
        return pooled.unflatten(0, (4, -1))


@pytest.mark.parametrize("build", [lambda b: ByExtract(b, nn.Identity()), ByBackbone])
def test_a_network_that_never_thought_of_draws_is_cut_among_ranks(build: Any) -> None:
    """Stochastic depth of a sample and view, on one rank and on two."""
    torch.manual_seed(0)
    network = build(PooledBlocks(dropout=0.0)).double()
    draw_per_sample([network], seed=3)
    views = [torch.ones(12, 5, 2, 2).double() for _ in range(4)]
    whole = outputs(network, views)
    parts = [outputs(network, views, part) for part in (slice(0, 6), slice(6, 12))]
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-14)
    assert len({tuple(view.flatten().tolist()) for view in whole}) == 4, "views have own draws"
    assert torch.equal(outputs(network, views), whole), "a call starts with the first view"


def test_views_of_two_sizes_are_cut_among_ranks() -> None:
    network, views = multi_crop()
    parts = [outputs(network, views, part) for part in (slice(0, 6), slice(6, 12))]
    assert torch.allclose(torch.cat(parts, dim=1), outputs(network, views), atol=1e-14)


def test_one_view_at_a_time_draws_what_all_together_draw() -> None:
    network, views = multi_crop()
    together = outputs(network, views)
    network.per_view = True
    assert torch.allclose(outputs(network, views), together, atol=1e-14)


def test_timms_attention_drops_through_its_layer() -> None:
    attention = Attention(16, num_heads=2, attn_drop=0.5)
    without = Attention(16, num_heads=2)
    draw_per_sample([attention, without], seed=0)
    assert not attention.fused_attn
    assert without.fused_attn == Attention(16).fused_attn
    x = torch.randn(4, 6, 16)
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        LAYER_DRAWS.start(keys(INDEX[:4]), CPU)
        results.append(attention(x))
    assert torch.equal(*results)


def test_layers_that_draw_by_themselves_are_named() -> None:
    network = nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.1), nn.AlphaDropout(0.2))
    batch = torchvision.ops.StochasticDepth(0.3, "batch")
    assert draw_per_sample([network, batch], seed=0) == [
        "0 (MultiheadAttention)",
        "1 (AlphaDropout)",
        " (StochasticDepth)",
    ]
    assert draw_per_sample([nn.MultiheadAttention(8, 2)], seed=0) == []


def test_compiled_is_as_it_is() -> None:
    """One graph, which is used again for the next batch."""
    network, views = multi_crop()
    views = [view.float() for view in views[:2]]
    network.float()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(network, backend=counter, fullgraph=True)
    for epoch in range(3):
        results = []
        for called in (network, compiled):
            LAYER_DRAWS.start(keys(INDEX, epoch), CPU)
            results.append(called(views))
        assert torch.allclose(*results, atol=1e-6)
    assert counter.frame_count == 1
