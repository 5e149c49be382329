"""Packaging. ``ssl/`` is a source root, not a package: Python's own ``ssl`` stays itself."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "ssl/selftask/__init__.py").read_text())
assert VERSION is not None

KERNEL = Path("ssl/selftask/data/kernel")
AUGMENT = Extension(
    "selftask.data.kernel._augment",
    sources=sorted(str(path) for path in KERNEL.glob("*.c")),
    depends=sorted(str(path) for path in KERNEL.glob("*.h")),
    extra_compile_args=[] if os.name == "nt" else ["-O3", "-std=c11", "-g0"],
    # Without a compiler the package installs all the same, and is slower; wheels always have it.
    optional=os.environ.get("SELFTASK_REQUIRE_KERNEL") != "1",
)


class BuildWithRecipes(build_py):
    """Copy ``configs/`` into the package.

    Recipes are no package of ``package_dir``: with a second folder there, an editable install is
    an import hook instead of a line in a .pth file, and a folder ``selftask`` beside a script
    would hide it. In a checkout, selftask finds the recipes by itself.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            recipes = Path(self.build_lib) / "selftask" / "configs"
            shutil.copytree(HERE / "configs", recipes, dirs_exist_ok=True)


setup(
    name="selftask",
    version=VERSION[1],
    description="Self-supervised learning in vision that stops anywhere and resumes bit for bit",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    cmdclass={"build_py": BuildWithRecipes},
    package_dir={"": "ssl"},
    packages=find_packages(where="ssl"),
    package_data={
        "selftask": [
            "py.typed",
            "**/*.pyi",
            "report/static/**",
            "report/templates/*.html",
            "cli/scaffold/templates/*.txt",
        ],
    },
    ext_modules=[AUGMENT],
    install_requires=[
        "torch>=2.10",  # before, weights_only=True can corrupt memory: CVE-2026-24747
        "torchvision>=0.25",  # of torch 2.10
        "classy-vision>=0.7.0",
        "fvcore>=0.1.5.post20221221",
        "iopath>=0.1.9",
        "submitit>=1.5",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "timm>=1.0.31",  # before, a Swin has no dynamic_img_size
        "scikit-learn>=1.5",
        "scipy>=1.13",
        "safetensors>=0.5",
        "rich>=13.7",
        "jinja2>=3.1.2",
        "numpy>=2.1",
        "pillow>=11.3",  # before, its wheels read no AVIF
        "opencv-python-headless>=4.10.0.84",
        "simplejpeg>=1.8",
        "pyyaml>=6.0.1",
        "xxhash>=3.1",
    ],
    extras_require={
        "data": [
            "pyarrow>=17",
            "h5py>=3.12.1",  # 3.12.0 is yanked
            "lmdb>=1.5.1",
            "fsspec[http]>=2024.6",
            "tifffile>=2024.8.10",
        ],
        "datasets": ["datasets>=3"],  # Hugging Face's
        "text": ["tokenizers>=0.22.2"],  # data.tokenizer=file; before, it excludes transformers 5
        "test": [
            *(
                "pytest>=8",
                "pytest-xdist>=3",
                "pytest-rerunfailures>=14",
                "lightly>=1.5",
                "lightning>=2.2",
                "tensorboard>=2.18",
                "wandb>=0.19",
                "mlflow-skinny>=2.16",
            ),
            *(
                "pyarrow>=17",
                "h5py>=3.12.1",  # 3.12.0 is yanked
                "lmdb>=1.5.1",
                "fsspec[http]>=2024.6",
                "tifffile>=2024.8.10",
            ),
            *(
                "transformers>=5",
                "accelerate>=1",
                "nbclient>=0.8",
                "ipykernel>=6",
                "matplotlib>=3.7",
            ),
            *("sphinx>=8", "myst-nb>=1.2", "furo>=2024.8.6"),
            "selenium>=4.11",  # the pages of reports in Chromium
            *("onnx>=1.17", "onnxscript>=0.2", "onnxruntime>=1.20"),
        ],
        "docs": ["sphinx>=8", "myst-nb>=1.2", "furo>=2024.8.6"],  # make docs
        "tensorboard": ["tensorboard>=2.18"],  # hooks.tensorboard, and so on
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow-skinny>=2.16"],
        "dev": ["ruff>=0.12", "mypy>=1.14", "types-PyYAML"],
        "release": ["cyclonedx-bom>=5", "pip-licenses>=5", "build>=1"],  # make release
        "onnx": ["onnx>=1.17", "onnxscript>=0.2"],
    },
    entry_points={"console_scripts": ["selftask = selftask.__main__:run"]},
)
