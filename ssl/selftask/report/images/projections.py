"""Projections of features to two dimensions: PCA and t-SNE. N images, E features."""

from __future__ import annotations

import numpy as np

_SEED = 0  # of t-SNE, so that equal features give equal maps


def pca(values: np.ndarray, components: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first principal components and their shares of the variance.

    They are computed in float64. The sign of a component is chosen so that its largest loading is
    positive.

    Args:
        values: (N, E).
        components: Number K of components; those beyond N or E are zero.

    Returns:
        Scores (N, K) and shares (K,).
    """
    centered = np.asarray(values, dtype=np.float64) - values.mean(axis=0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centered.T @ centered)  # ascending
    axes, variances = axes[:, ::-1][:, :components], variances[::-1].clip(min=0)
    signs = np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    scores = np.zeros((len(centered), components))
    scores[:, : axes.shape[1]] = centered @ (axes * signs)
    shares = np.zeros(components)
    shares[: axes.shape[1]] = variances[:components] / max(variances.sum(), 1e-300)
    return scores, shares


def tsne(features: np.ndarray) -> np.ndarray:
    """Return t-SNE positions (N, 2) of L2-normalized features (N, E).

    PCA reduces the features to at most 50 dimensions and initializes the positions.
    """
    from sklearn.manifold import TSNE

    reduced, _ = pca(features, min(50, *features.shape))
    perplexity = min(30.0, (len(features) - 1) / 3)
    model = TSNE(perplexity=perplexity, init="pca", random_state=_SEED)
    return model.fit_transform(reduced.astype(np.float32))
