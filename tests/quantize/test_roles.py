"""Which leaves of real models are quantized, and along which axis: all of it decided from shapes alone."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from eformer._quantize.leaves import open_tree, roles_of
from eformer.jaximus import ImplicitArray
from eformer.ops.quantization import quantize_tree

F32 = jnp.float32


def axes(params: Any, rules: Any = None, **options: Any) -> dict[str, Any]:
    """Path -> the axis of every leaf that is quantized."""
    options = {"min_size": 0, **options}
    made = quantize_tree(params, rules, abstract=True, **options)
    return {leaf.path: leaf.value.axis for leaf in open_tree(made).leaves if isinstance(leaf.value, ImplicitArray)}


def shapes(**leaves: tuple[int, ...]) -> dict[str, Any]:
    """A dict model from `a__b=(shape)`."""
    tree: dict[str, Any] = {}
    for path, shape in leaves.items():
        *parents, name = path.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jax.ShapeDtypeStruct(shape, F32)
    return tree


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(40, 24)(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.LayerNorm()(x))
        x = nn.DenseGeneral((3, 7))(x)
        x = nn.DenseGeneral(24, axis=(-2, -1))(x)
        x = nn.Conv(24, (3,))(x)
        return nn.Dense(40, name="lm_head")(x)


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: Any) -> Any:
                x = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(nn.LayerNorm()(x))
                return nn.Dense(24, name="query")(x), None

        return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=5)()(x, None)[0]


def test_linen():
    params = jax.eval_shape(LinenModel().init, jax.random.key(0), jnp.zeros((2, 6), int))["params"]
    attention = {f"MultiHeadDotProductAttention_0/{name}/kernel": -3 for name in ("query", "key", "value")}
    expected = {
        "Embed_0/embedding": -1,
        **attention,
        "MultiHeadDotProductAttention_0/out/kernel": -1,  # heads and head size are contracted: blocks along the rest
        "DenseGeneral_0/kernel": -3,
        "DenseGeneral_1/kernel": -2,
        "Conv_0/kernel": -2,
        "lm_head/kernel": -2,
    }
    assert axes(params) == expected
    int8 = axes(params, "int8")
    assert int8["MultiHeadDotProductAttention_0/out/kernel"] == (-3, -2)
    assert int8["MultiHeadDotProductAttention_0/query/kernel"] == (-3,)
    assert int8["Embed_0/embedding"] == (-1,)
    assert "lm_head/kernel" not in axes(params, skip=("norms", "biases", "heads"))
    assert {"Embed_0/embedding", "Conv_0/kernel"}.isdisjoint(axes(params, skip=("embeddings", "convolutions")))


def test_linen_stack():
    """Every matrix has a leading axis of layers; so have norms and biases, which stay."""
    params = jax.eval_shape(LinenStack().init, jax.random.key(0), jnp.zeros((6, 24)))["params"]
    (block,) = params
    assert axes(params) == {
        **{f"{block}/attention/{name}/kernel": -3 for name in ("query", "key", "value")},
        f"{block}/attention/out/kernel": -1,
        f"{block}/query/kernel": -2,
    }
    leaves = open_tree(params).leaves
    kernels = [role for leaf, role in zip(leaves, roles_of(leaves), strict=True) if leaf.path.endswith("kernel")]
    assert [role.batch for role in kernels] == [1] * 5


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(40, 24, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 24, decode=False, rngs=rngs)
        self.general = nnx.LinearGeneral((4, 6), (2, 3), axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(24, 8, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(24, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_nnx_module_and_state():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))
    expected = {
        "embed/embedding": -1,
        **{f"attention/{name}/kernel": -3 for name in ("query", "key", "value")},
        "attention/out/kernel": -1,
        "general/kernel": -1,
        "conv/kernel": -2,
        "layers/0/kernel": -2,
    }
    assert axes(model) == expected
    assert axes(model, "int8")["general/kernel"] == (-4, -3)
    # The state alone does not say that `general` contracts two axes.
    assert axes(nnx.state(model)) == {**expected, "general/kernel": -2}


class EqxModel(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    conv: eqx.nn.Conv2d
    mlp: eqx.nn.MLP
    ln: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array):
        self.embed = eqx.nn.Embedding(40, 24, key=key)
        self.attention = eqx.nn.MultiheadAttention(4, 24, key=key)
        self.conv = eqx.nn.Conv2d(8, 16, 3, key=key)
        self.mlp = eqx.nn.MLP(24, 24, 32, 1, key=key)
        self.ln = eqx.nn.LayerNorm((24, 24))


def test_equinox():
    names = ("query", "key", "value", "output")
    expected = {
        "embed/weight": -1,
        **{f"attention/{name}_proj/weight": -1 for name in names},
        "conv/weight": -3,
        "mlp/layers/0/weight": -1,
        "mlp/layers/1/weight": -1,
    }
    assert axes(eqx.filter_eval_shape(EqxModel, jax.random.key(0))) == expected
    stacked = eqx.filter_eval_shape(eqx.filter_vmap(EqxModel), jax.random.split(jax.random.key(0), 5))
    assert axes(stacked) == expected


def test_haiku():
    def model(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(40, 24)(tokens)
        x = x + hk.MultiHeadAttention(4, 6, w_init=jnp.zeros, model_size=24)(x, x, x)
        x = hk.LayerNorm(-1, True, True)(hk.Conv1D(24, 3)(x))
        return hk.Linear(8)(x)

    params = jax.eval_shape(hk.transform(model).init, jax.random.key(0), jnp.zeros((2, 6), int))
    found = axes(params)
    assert found.pop("embed/embeddings") == -1
    assert set(found) == {f"multi_head_attention/{n}/w" for n in ("query", "key", "value", "linear")} | {
        "conv1_d/w",
        "linear/w",
    }
    assert set(found.values()) == {-2}


def test_plain_dicts():
    """Names of checkpoints in the wild. `gate` is a router only beside experts."""
    model = shapes(
        embed_tokens__weight=(64, 32),
        wpe=(16, 32),
        h__self_attn__q_proj__weight=(32, 32),
        h__mlp__gate=(32, 48),
        h__mlp__up=(32, 48),
        h__moe__gate__kernel=(32, 4),
        h__moe__experts__w=(4, 32, 48),
        h__ln_1__weight=(3, 32),
        h__attn__wq=(32, 4, 8),
        h__attn__wo=(4, 8, 32),
        tall__wq=(5, 32, 16),  # a stack of matrices, not heads
        tall__wo=(5, 16, 32),
        square__wq=(8, 8, 8),  # could be either: taken for a stack, which can be scanned over
        square__wo=(8, 8, 8),
        patch_embed__kernel=(32, 32),
        lm_head__weight=(64, 32),
        unembed=(32, 64),
    )
    assert axes(model) == {
        "embed_tokens/weight": -1,
        "h/self_attn/q_proj/weight": -1,
        "h/mlp/gate": -2,
        "h/mlp/up": -2,
        "h/moe/experts/w": -2,
        "h/attn/wq": -3,
        "h/attn/wo": -1,
        "tall/wq": -2,
        "tall/wo": -2,
        "square/wq": -2,
        "square/wo": -2,
        "patch_embed/kernel": -2,
        "lm_head/weight": -1,
        "unembed": -2,
    }
    everything = axes(model, skip=())
    assert set(everything) - set(axes(model)) == {"wpe", "h/moe/gate/kernel", "h/ln_1/weight"}
    assert set(axes(model)) - set(axes(model, skip=("heads",))) == {"lm_head/weight", "unembed"}


def test_norms_and_positions_are_told_by_whole_words():
    kept = (
        *("norm", "norm1", "norm_2", "norm_f", "norms", "input_layernorm", "layer_norm", "LayerNorm_0", "BatchNorm_3"),
        *("RMSNorm", "attn_norm", "q_norm", "LayerNormalization_0", "batch_normalization", "final_layer_norm2", "ln"),
        *("ln_f", "ln1", "post_ln", "decoder/~/layer_norm", "enorm", "pos", "pos_embed", "pos_emb", "posembed"),
        *("abs_pos_embedding", "position_embedding", "position_embeddings", "embed_positions", "PositionEmbedding_0"),
        *("positional_encoding", "position", "relative_position_bias_table", "wpe"),
    )
    matrices = (
        *("position_wise_ffn", "positionwise_feed_forward", "pos_ffn", "norm_proj", "denormalize", "decomposition"),
        *("composition", "normal_net", "norm_linear", "enormous", "pose_head", "compositional_ffn", "position_proj"),
    )
    found = axes({name: {"weight": jax.ShapeDtypeStruct((8, 32), F32)} for name in (*kept, *matrices)})
    assert set(found) == {f"{name}/weight" for name in matrices}


def test_axis_of_a_rule_wins():
    model = shapes(a__kernel=(8, 4), b__kernel=(8, 4))
    assert axes(model, {"a*": {"dtype": "nf4", "axis": -1}}) == {"a/kernel": -1, "b/kernel": -2}


def test_unknown_group():
    with pytest.raises(ValueError, match=r"skip=.*'heats'.*norms, biases"):
        axes(shapes(a=(2, 2)), skip=("heats",))


@pytest.mark.parametrize(("bias", "kind"), [((4, 16), "bias"), ((4, 8), "bias"), ((4, 12), "kernel"), ((16,), "bias")])
def test_a_leaf_called_b_is_a_bias_where_a_matrix_beside_it_has_its_axes(bias, kind):
    leaves = open_tree(shapes(layer__w=(4, 8, 16), layer__b=bias)).leaves
    assert {leaf.path: role.kind for leaf, role in zip(leaves, roles_of(leaves), strict=True)}["layer/b"] == kind
