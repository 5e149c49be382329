"""Configs of other frameworks as recipes: one line with the page that translates them."""

from __future__ import annotations

from pathlib import Path

import pytest

from selftask.config.load import load_config
from selftask.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]

FILES = {
    "VISSL.yaml": """
# @package _global_
config:
  VERBOSE: False
  SEED_VALUE: 0
  DATA: {NUM_DATALOADER_WORKERS: 5, TRAIN: {DATA_SOURCES: [disk_folder]}}
  MODEL: {TRUNK: {NAME: resnet}}
  LOSS: {name: simclr_info_nce_loss}
""",
    "DINOv2.yaml": """
dino: {head_n_prototypes: 131072}
ibot: {separate_head: true}
train: {batch_size_per_gpu: 64}
student: {arch: vit_large}
crops: {local_crops_size: 98}
""",
    "solo-learn.yaml": """
defaults:
  - _self_
  - augmentations: simclr.yaml
  - override hydra/hydra_logging: disabled
name: "simclr-cifar10"
method: "simclr"
backbone: {name: resnet18}
method_kwargs: {proj_hidden_dim: 2048}
data: {dataset: cifar10}
optimizer: {name: lars}
max_epochs: 1000
devices: [0]
sync_batchnorm: True
""",
    "lightly-train.yaml": """
out: out/my_experiment
data: my_data
model: torchvision/resnet18
method: dino
epochs: 100
batch_size: 128
""",
    "lightly.yaml": """
input_dir: ''
loader: {batch_size: 16}
trainer: {max_epochs: 100}
criterion: {temperature: 0.5}
""",
    "mmselfsup.yaml": """
default_scope: mmselfsup
model: {type: SimCLR}
train_dataloader: {batch_size: 32}
optim_wrapper: {optimizer: {type: LARS}}
""",
    "mmselfsup.py": "_base_ = ['../_base_/models/simclr.py']\noptimizer = dict(type='LARS')\n",
}


@pytest.mark.parametrize("name", FILES)
def test_config_of_another_framework_is_one_line_with_its_page(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    with pytest.raises(ConfigError, match=f"a config of {path.stem}, ") as error:
        load_config(str(path), [])
    (problem,) = error.value.problems
    page = problem.partition("see ")[2].partition(",")[0]
    assert (ROOT / page).is_file()


def test_misspelled_recipe_is_not_taken_for_another_framework(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [/simclr/digits]\nepochs: 3\nbatch_size: 8\nprecision: float32\n")
    with pytest.raises(ConfigError, match=r"did you mean 'train\.epochs'"):
        load_config(str(path), [])
