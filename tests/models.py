# SPDX-License-Identifier: Apache-2.0
"""Small models, their inputs, and comparisons by bits."""

import numpy as np
from hypothesis import strategies as st

from mojolearn import LanguageModelConfig, LanguageModelTrainer

SMALL = LanguageModelConfig(
    batch=2, length=6, d_model=16, n_heads=2, n_kv=1, head_dim=8, intermediate=24, n_layers=2, vocab_size=33
)
SCHEDULE = {"corpus": "made up"}


@st.composite
def shapes(draw):
    """Any valid shape, as long as it is small."""
    n_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim, vocab_size = 2 * draw(st.integers(1, 5)), draw(st.integers(1, 40))
    return LanguageModelConfig(
        batch=draw(st.integers(1, 4)),
        length=draw(st.integers(1, 20)),
        d_model=n_kv * group * head_dim,
        n_heads=n_kv * group,
        n_kv=n_kv,
        head_dim=head_dim,
        intermediate=draw(st.integers(1, 40)),
        n_layers=draw(st.integers(1, 3)),
        vocab_size=vocab_size,
        chunked_lm_head_v2=vocab_size > 1 and draw(st.booleans()),
    )


def weights(shape=SMALL, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape.n_total) * 0.1).astype(np.float32)


def batches(count, shape=SMALL, seed=1):
    size = (count, shape.batch, shape.length + 1)
    return np.random.default_rng(seed).integers(0, shape.vocab_size, size).astype(np.int32)


def trainer(shape=SMALL, parameters=None, **options):
    options.setdefault("data_schedule", SCHEDULE)
    return LanguageModelTrainer(weights(shape) if parameters is None else parameters, shape=shape, **options)


def bits(value):
    """Something that is equal only if every bit is: for numbers, arrays, and dicts and lists of them."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [bits(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value.hex() if isinstance(value, float) else value
