"""``selftask eval zeroshot``: towers of runs, with prompts, by loops over images and classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score
from torch import nn

import tiny
from selftask.cli.main import main
from selftask.evaluate.zeroshot import mean_per_class, read_names
from selftask.models.weights.formats.image_text_folder import open_image_text

DRAWS = np.random.default_rng(0)
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ["a photo of the number {}", "{}, written by hand"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods, digits to test on, names of the classes, and prompts."""
    folder = tmp_path_factory.mktemp("zeroshot")
    for method in ("clip", "siglip", "simclr"):
        words = tiny.overrides(method, folder, method, "train.max_steps=3", "optimizer.lr=0.01")
        assert main(["train", f"{method}/digits", *words]) == 0
    tiny.digits_file(folder, "test.npz", 80, 200)
    rows = [f"{digit},{name}" for digit, name in enumerate(NAMES)]
    (folder / "classes.csv").write_text("\n".join(["class,name", "8,a pair of loops", *rows]))
    (folder / "templates.txt").write_text("\n".join([*TEMPLATES, ""]))
    return folder


def tokens(text: str, length: int) -> torch.Tensor:
    """Bytes plus 1 between 257 and 258, and 0 after them."""
    content = [257, *(byte + 1 for byte in text.encode()[: length - 2]), 258]
    return torch.tensor([content + [0] * (length - len(content))])


@pytest.mark.parametrize("method", ["clip", "siglip"])
@torch.no_grad()
def test_a_class_is_the_mean_of_its_unit_prompts(
    home: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "zeroshot", f"{home}/{method}", f"data.val={home}/test.npz"]
    words += [f"classes={home}/classes.csv", f"templates={home}/templates.txt"]
    words += ["eval.transforms=[{name: normalize, stats: half}]"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "120 test images; 10 classes; prompts such as 'a photo of the number zero'" in (
        printed.out + printed.err
    )
    row = json.loads(printed.out.splitlines()[-1])

    state = tiny.last_state(home / method)["model"]
    task = tiny.task(method, home, "other")
    task.prepare()
    network: nn.Module = task.model
    network.load_state_dict(state)
    network.double().eval()
    length = len(network.text.pos_embed)
    classes = []
    for digit, name in enumerate(NAMES):
        names = [name, "a pair of loops"] if digit == 8 else [name]
        texts = [t.replace("{}", n) for n in names for t in TEMPLATES]
        parts = [network.text_head(network.text(tokens(t, length)))[0].numpy() for t in texts]
        classes.append(np.mean([part / np.linalg.norm(part) for part in parts], axis=0))
    with np.load(home / "test.npz") as digits:
        pixels, labels = digits["images"] / 255, digits["labels"]
    right: list[bool] = []
    among: list[bool] = []
    for image, label in zip(pixels, labels, strict=True):
        x = torch.from_numpy((image - 0.5) / 0.5)[None, None].expand(1, 3, 32, 32)
        z = network.head(network.backbone(x))[0].numpy()
        cosines = [z @ c / np.linalg.norm(c) for c in classes]
        rank = sorted(range(10), key=lambda c: -cosines[c]).index(label)
        right.append(rank == 0)
        among.append(rank < 5)
    assert 0 < row["zeroshot_top1"] == pytest.approx(np.mean(right), abs=1e-8)
    assert row["zeroshot_top5"] == pytest.approx(np.mean(among), abs=1e-8)
    means = [np.mean(np.array(right)[labels == digit]) for digit in range(10)]
    assert row["zeroshot_mean_per_class"] == pytest.approx(np.mean(means), abs=1e-8)
    assert row["zeroshot_top1_low"] < row["zeroshot_top1"] < row["zeroshot_top1_high"]
    assert (row["test_images"], row["classes"], row["chance"]) == (120, 10, 0.1)
    kept = json.loads((home / method / "evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["image_scores"]["zeroshot_top1"]["images"] == 120 and kept["step"] == 3


def test_the_mean_over_classes_and_its_spread() -> None:
    targets = torch.from_numpy(DRAWS.choice([0, 1, 3], size=400, p=[0.7, 0.2, 0.1]))
    predicted = torch.where(torch.from_numpy(DRAWS.random(400)) < 0.6, targets, targets.roll(1))
    is_right = (predicted == targets).double()
    figure = mean_per_class(is_right, targets)
    assert figure == pytest.approx(balanced_accuracy_score(targets, predicted))
    shares = [
        (is_right[targets == c].mean().item(), (targets == c).sum().item()) for c in (0, 1, 3)
    ]
    variance = sum(p * (1 - p) / n for p, n in shares) / 3**2
    assert figure.scores is not None
    assert figure.scores.var() / 400 == pytest.approx(variance)
    assert mean_per_class(torch.ones(400).double(), targets).scores == pytest.approx(np.ones(400))


def test_names_are_those_of_the_folders() -> None:
    names = {"golden_retriever": ["golden retriever"], "n02": ["n02"]}
    assert read_names(None, list(names)) == names


def test_classes_without_test_images_may_be_left_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(home / "test.npz") as digits:
        few = {key: digits[key][digits["labels"] % 2 == 1] for key in ("images", "labels")}
    np.savez(home / "odd.npz", **few)
    words = ["eval", "zeroshot", f"{home}/clip@3", f"data.val={home}/odd.npz"]
    words += [f"classes={home}/classes.csv"]
    assert main(words) == 0
    out = capsys.readouterr()
    text = "warning: no test images of 5 of 10 classes (0, 2, 4, 6, 8); only_test_classes=true"
    assert text in out.out + out.err
    every = json.loads(out.out.splitlines()[-1])
    assert main([*words, "only_test_classes=true"]) == 0
    odd = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (odd["classes"], odd["chance"]) == (5, 0.2) and "zeroshot_top5" not in odd
    assert odd["zeroshot_top1"] >= every["zeroshot_top1"]


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("simclr", "", "simclr has no text tower; runs of clip, siglip have"),
        ("nothing", "", "nothing: has no checkpoint with a text tower; expected a run of clip"),
        (
            "clip",
            "",
            "classes is missing: the classes of the data are numbers, 0, 1, 2, 3, 4 and 5",
        ),
        ("clip", "classes=unknown.csv", "unknown.csv:3: the data have no class '11'"),
        ("clip", "classes=few.csv", "few.csv: no row for 2, 3, 4, 5, 6 and 3 more"),
        ("clip", "classes=empty.csv", "empty.csv:2: class '0' has an empty name"),
        ("clip", "classes=twice.csv", "classes: the texts of '0' and '1' are the same"),
        ("clip", "classes=classes.csv templates=bad.txt", "bad.txt:2: 'a cat' lacks {}"),
        ("clip", "classes=classes.csv templates=none.txt", "none.txt: cannot be read: "),
        ("clip", "classes=classes.csv eval.layers=[1]", "eval.layers: zeroshot compares"),
        ("clip", "weights=ema", "weights=: both towers are read from the checkpoint"),
        ("clip", "data.tokenizer.length=20", "data.tokenizer: bytes, lower case, 20 tokens; "),
    ],
)
def test_mistakes_are_one_line(
    home: Path,
    run: str,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    rows = "\n".join(f"{n},{n}" for n in range(2, 10))
    Path("unknown.csv").write_text("class,name\n0,zero\n11,eleven")
    Path("few.csv").write_text("class,name\n0,zero\n1,one")
    Path("empty.csv").write_text("class,name\n0,\n")
    Path("twice.csv").write_text(f"class,name\n0,zero\n1,Zero\n{rows}")
    Path("bad.txt").write_text("a {}\na cat\n")
    assert main(["eval", "zeroshot", run, "data.val=test.npz", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_folder_of_transformers_gives_its_own_logits(
    home: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted({*" ".join([*TEMPLATES, *NAMES, "a pair of loops"]).replace(",", " ,").split()})
    ids = {word: n for n, word in enumerate(["<pad>", "<unk>", *words, "<end>"])}
    library = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", ids["<end>"])]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "projection_dim": 16}
    text = {"vocab_size": len(ids), "max_position_embeddings": 12, "eos_token_id": ids["<end>"]}
    vision = {"image_size": 32, "patch_size": 16}
    configs = {"text_config": small | text, "vision_config": small | vision}
    of_kind = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{of_kind}Config")(**configs, projection_dim=16)
    model = getattr(transformers, f"{of_kind}Model")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
    processor = getattr(transformers, f"{of_kind}ImageProcessor")(
        size={"height": 32, "width": 32} if kind == "siglip" else {"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
    )
    for part in (model, tokenizer, processor):
        part.save_pretrained(tmp_path)

    one = home / "one.csv"
    one.write_text("\n".join(["class,name", *(f"{n},{name}" for n, name in enumerate(NAMES))]))
    prompt = home / "one.txt"
    prompt.write_text(TEMPLATES[0])
    command = ["eval", "zeroshot", str(tmp_path), f"data={home}/test.npz"]
    assert main([*command, f"classes={one}", f"templates={prompt}", "data.num_workers=0"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    with np.load(home / "test.npz") as digits:
        images, labels = [np.stack([i] * 3, axis=2) for i in digits["images"]], digits["labels"]
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    texts = [TEMPLATES[0].replace("{}", name) for name in NAMES]
    tokens = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(pixel_values=pixels, input_ids=tokens).logits_per_image
    expected = (logits.argmax(dim=1).numpy() == labels).mean()
    assert row["zeroshot_top1"] == pytest.approx(expected, abs=1e-8)
    assert len(logits.argmax(dim=1).unique()) > 1, "not a constant prediction"
    loaded, facts = open_image_text(tmp_path)
    with torch.no_grad():
        x, y = loaded(pixels), loaded.embed_texts(texts)
    cosines = F.normalize(x, dim=1) @ F.normalize(y, dim=1).T
    bias = model.logit_bias.detach() if kind == "siglip" else 0.0
    torch.testing.assert_close(cosines * model.logit_scale.detach().exp() + bias, logits)
    assert facts["transforms"][-1]["mean"] == list(processor.image_mean)
    assert not (tmp_path / "evaluations.jsonl").exists()
    assert main([*command, f"classes={one}", "image_size=64"]) == 2
    assert "image_size: " in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert main([*command, f"classes={one}"]) == 2
    assert "transformers cannot load it: " in capsys.readouterr().err
