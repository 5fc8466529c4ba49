# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend gives the CPU's bits. Needs an NVIDIA GPU; MOJOLEARN_REQUIRE_CUDA=1 makes its absence a failure."""

import os

import numpy as np
import pytest

from mojolearn import LanguageModelConfig, LanguageModelTrainer, _native
from mojolearn._errors import BackendError
from vendor_parity import SCHEDULE, differences, parameters, random_shape, run

RUNS = int(os.environ.get("MOJOLEARN_CUDA_RUNS", "24"))  # random shapes


def missing_device() -> str:
    try:
        _native.describe_device(_native.VENDORS.index("cuda"), 0)
    except BackendError as error:
        return str(error)
    return ""


MISSING = missing_device()
needs_cuda = pytest.mark.skipif(
    bool(MISSING) and not os.environ.get("MOJOLEARN_REQUIRE_CUDA"), reason=f"no CUDA device: {MISSING}"
)


@pytest.mark.skipif(not MISSING, reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_that_says_what_was_looked_for():
    shape = LanguageModelConfig()
    trainer = LanguageModelTrainer(
        np.zeros(shape.n_total, np.float32), data_schedule=SCHEDULE, shape=shape, vendor="cuda"
    )
    with pytest.raises(BackendError, match="looked for"):
        trainer.evaluate(np.zeros((shape.batch, shape.length + 1), np.int32))


@needs_cuda
def test_an_index_beyond_the_last_device_is_an_error_that_says_how_many_there_are():
    with pytest.raises(BackendError, match=r"device 99 of cuda: the driver .* shows \d+ device"):
        _native.describe_device(_native.VENDORS.index("cuda"), 99)


def assert_parity(shape, seed, planted, steps):
    ours, right = (run(shape, vendor, seed, planted, steps) for vendor in ("cuda", "cpu"))
    assert list(differences(ours, right)) == [], f"seed {seed}, planted {planted}, {shape}"


@needs_cuda
@pytest.mark.parametrize("seed", range(RUNS))
def test_random_shapes(seed):
    assert_parity(random_shape(np.random.default_rng(seed), scale=1 + seed % 3), seed, seed % 2 == 1, steps=2)


@needs_cuda
@pytest.mark.parametrize("seed", range(1000, 1000 + max(1, RUNS // 50)))
def test_long_runs_with_planted_subnormals(seed):
    assert_parity(random_shape(np.random.default_rng(seed)), seed, True, steps=200)


@needs_cuda
@pytest.mark.parametrize("chunked", [False, True])
def test_dimensions_of_large_tiles(chunked):
    """Every product goes through the certified kernels, and some tensors are not aligned to 16 bytes."""
    for vocab_size, head_dim in ((515, 64), (512, 160)):
        shape = LanguageModelConfig(
            batch=2,
            length=300,
            d_model=2 * head_dim,
            n_heads=2,
            n_kv=1,
            head_dim=head_dim,
            intermediate=333,
            n_layers=1,
            vocab_size=vocab_size,
            chunked_lm_head_v2=chunked,
        )
        for planted in (False, True):
            assert_parity(shape, vocab_size + planted, planted, steps=1)


@needs_cuda
@pytest.mark.parametrize(("batch", "planted"), [(1, True), (3, False)])
def test_attention_in_chunks(batch, planted):
    """Too many scores for one chunk of the backward pass: the heads of a group apart, and queries apart as well."""
    shape = LanguageModelConfig(
        batch=batch,
        length=2048,
        d_model=96,
        n_heads=12,
        n_kv=4,
        head_dim=8,
        intermediate=8,
        n_layers=1,
        vocab_size=50,
    )
    assert_parity(shape, batch, planted, steps=1)


@needs_cuda
@pytest.mark.parametrize("size", [32, 128, 512])
def test_products_just_below_the_smallest_normal_number_round_up_to_it(size):
    """A flushing processor finds 0: the certificate must refuse the stage, and the careful path give 2^-126."""
    shape = LanguageModelConfig(
        batch=4,
        length=size // 4,
        d_model=size,
        n_heads=1,
        n_kv=1,
        head_dim=size,
        intermediate=8,
        n_layers=1,
        vocab_size=size,
    )
    flat = np.zeros(shape.n_total, np.float32)  # attention and MLP give zeros: the head sees the embedding
    embed = flat[: size * size].reshape(size, size)
    head = flat[-size * size :].reshape(size, size)
    embed[:, size // 2] = np.uint32(0x1D7FFFFF).view(np.float32)
    head[:, size // 2] = np.uint32(0x22800000).view(np.float32)
    ids = np.zeros((shape.batch, shape.length), np.int32)
    seen = {}
    for vendor in ("cuda", "cpu"):
        trainer = LanguageModelTrainer(flat, data_schedule=SCHEDULE, shape=shape, vendor=vendor)
        seen[vendor] = np.asarray(trainer.logits(ids)).view(np.uint32)
        trainer.close()
    assert (seen["cuda"] == 0x00800000).all()
    assert (seen["cpu"] == seen["cuda"]).all()


@needs_cuda
def test_a_refused_step_changes_nothing():
    shape = LanguageModelConfig()
    start = parameters(shape, np.random.default_rng(0), False)
    start[-1] = 3e38
    start[: shape.vocab_size * shape.d_model] = 3e38
    trainer = LanguageModelTrainer(start, data_schedule=SCHEDULE, shape=shape, vendor="cuda")
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        trainer.train_step(np.zeros((shape.batch, shape.length + 1), np.int32))
    assert trainer.export_state()["parameters"].tobytes() == start.tobytes()
    trainer.close()
