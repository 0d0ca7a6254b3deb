"""Products of few rows: any shape gives the direct result, and nothing changes where results must be the same bits."""

import subprocess
import sys

import mlx.core as mx
import pytest
from mlx import nn

from app.engine.few_rows import FewRowsEmbedding, FewRowsLinear, Product, direct, padded, transposed, use_fast_products

WITH_OPENBLAS = """
from app.engine.platform import openblas_is_loaded, prepare
if prepare(environment={}).openblas:
    assert openblas_is_loaded()
    import mlx.core as mx
    from mlx import nn
    from app.engine.few_rows import FewRowsLinear, SMALLEST_WEIGHTS, fastest_products, use_fast_products
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8, bias=False))
    inputs = {rows: mx.random.normal((1, rows, 1024)) for rows in range(1, 18)}
    wanted = {rows: model(x) for rows, x in inputs.items()}
    mx.eval(wanted)
    use_fast_products(model)
    assert type(model.layers[0]) is FewRowsLinear and model.layers[0].weight.size >= SMALLEST_WEIGHTS
    for rows, x in inputs.items():
        assert mx.allclose(model(x), wanted[rows], rtol=1e-4, atol=1e-4), rows
    assert set(fastest_products()) <= set(range(2, 16))
print("ok")
"""


@pytest.mark.parametrize("product", [transposed, padded(16)])
@pytest.mark.parametrize("rows", [1, 2, 5, 15])
def test_every_shape_gives_the_plain_product(product: Product, rows: int) -> None:
    x, weight = mx.random.normal((rows, 24)), mx.random.normal((40, 24))
    assert mx.allclose(product(x, weight), direct(x, weight), rtol=1e-5, atol=1e-5)


def test_without_openblas_a_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    use_fast_products(model)
    assert [type(layer) for layer in model.layers] == [nn.Embedding, nn.Linear]


def test_projections_keep_their_bias_and_their_leading_dimensions() -> None:
    linear, embedding = nn.Linear(4, 6), nn.Embedding(9, 4)
    x = mx.random.normal((2, 3, 4))
    wanted = linear(x), embedding.as_linear(x)
    linear.__class__, embedding.__class__ = FewRowsLinear, FewRowsEmbedding
    for got, want in zip((linear(x), embedding.as_linear(x)), wanted, strict=True):
        assert got.shape == want.shape
        assert mx.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_with_openblas_the_fastest_shapes_give_the_same_result() -> None:
    run = subprocess.run([sys.executable, "-c", WITH_OPENBLAS], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout.strip(), run.returncode) == ("ok", 0), run.stderr
