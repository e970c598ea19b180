"""Mistakes that new users make: each is refused, or taken as it was meant, and the message says what to write."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer.cli import main
from eformer.errors import AlreadyQuantizedError, CheckpointError

ALL = [str(kind) for kind in ef.QuantizationType]


@pytest.fixture
def w(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (128, 64))


# -- quantizing what is quantized --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_an_array_quantized_already_is_not_rounded_again(w, kind):
    q = ef.quantize(w, dtype=kind)
    assert ef.quantize(q, dtype=kind) is q
    assert ef.implicit(lambda q: ef.quantize(q, dtype=kind))(q).format == q.format
    np.testing.assert_array_equal(ef.straight_through(q, dtype=kind), q.materialize())
    other = "int8" if kind != "int8" else "nf4"
    with pytest.raises(AlreadyQuantizedError, match=rf"with dtype={kind}.*dtype={other}(.|\n)*dequantize\(q\)"):
        ef.quantize(q, dtype=other)


def test_other_options_count_as_another_way(w, key):
    q = ef.quantize(w, dtype="nf4", block_size=32)
    with pytest.raises(AlreadyQuantizedError, match=r"with block_size=32, but block_size=64 was requested"):
        ef.quantize(q, dtype="nf4")
    with pytest.raises(AlreadyQuantizedError, match=r"axis=-2.*axis=-1"):
        ef.quantize(q, dtype="nf4", block_size=32, axis=-1)
    assert ef.quantize(q, dtype="nf4", block_size=32, axis=0) is q
    with pytest.raises(AlreadyQuantizedError, match=r"with dtype=int8, but activations=int8 was requested") as caught:
        ef.quantize(ef.quantize(w, dtype="int8"), dtype="int8", activations="int8")
    assert "eformer.ActivationArray(q, activations='int8')" in str(caught.value)
    with pytest.raises(AlreadyQuantizedError, match=r"dequantize\(q\)"):
        ef.quantize(q, dtype="nf4", activations="int8")  # blocks differ, too
    with pytest.raises(AlreadyQuantizedError, match="already quantized"):
        ef.implicit(lambda q: ef.quantize(q, dtype="int8"))(q)
    with pytest.raises(AlreadyQuantizedError, match="LoraArray"):
        ef.quantize(ef.add_lora({"w": q}, "*", 4, key)["w"], dtype="nf4")


def test_dequantize(w):
    q = ef.quantize(w, dtype="int8")
    np.testing.assert_array_equal(ef.dequantize(q), q.materialize())
    assert ef.dequantize(q, jnp.bfloat16).dtype == jnp.bfloat16
    assert ef.dequantize(w) is w
    with pytest.raises(TypeError, match="dequantize_tree"):
        ef.dequantize({"w": q})


# -- blocks longer than the axis ---------------------------------------------------------------------------------------


def test_models_with_short_axes_can_be_quantized_again(key):
    params = {"kernel": jax.random.normal(key, (100, 256))}
    long = ef.quantize(params["kernel"], dtype="nf4", block_size=512)
    once = ef.quantize_tree(params, {"*": {"dtype": "nf4", "block_size": 512}})
    assert once["kernel"].block_size == 128
    assert long.block_size == 512
    np.testing.assert_array_equal(once["kernel"].materialize(), long.materialize())
    again = ef.quantize_tree(once, {"*": None}, default=None)
    assert again["kernel"] is once["kernel"]
    assert once["kernel"].bits_per_weight < 6
    with pytest.warns(ef.errors.UnusedRuleWarning, match="quantized already"):
        ef.quantize_tree(once, {"*": {"dtype": "nf4", "block_size": 512}})


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_the_gradient_through_quantize_is_zero_in_every_format(w, kind):
    """It is a step function. `straight_through` trains, and so does what people write by hand."""
    x = jnp.ones((2, 128))

    def loss(w):
        return jnp.sum(x @ ef.quantize(w, dtype=kind))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), jnp.zeros_like(w))
    trained = jax.grad(lambda w: jnp.sum(x @ ef.straight_through(w, dtype=kind)))(w)
    np.testing.assert_array_equal(trained, jnp.full_like(w, 2))
    by_hand = jax.grad(lambda w: jnp.sum(x @ (w + jax.lax.stop_gradient(ef.quantize(w, dtype=kind).materialize() - w))))
    np.testing.assert_array_equal(by_hand(w), jnp.full_like(w, 2))


def test_what_is_not_differentiated_may_be_quantized_inside(w):
    def loss(x, w):
        return jnp.sum((x @ ef.quantize(w, dtype="nf4")) ** 2)

    x = jnp.ones((2, 128))
    dense = ef.quantize(w, dtype="nf4").materialize()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, w), jax.grad(lambda x: jnp.sum((x @ dense) ** 2))(x), 1e-4)


# -- pieces of a packed axis -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_a_slice_inside_of_a_block_decodes_only_the_blocks_it_touches(key, kind):
    q = ef.quantize(jax.random.normal(key, (512, 48)), dtype=kind, axis=-2)
    dense = np.asarray(q.materialize())
    with ef.materialization_policy("error"):
        found = ef.explain(lambda q: (q[3], q[-1], q[300, 5:9]))(q)
    for got, want in zip(found.result, (dense[3], dense[-1], dense[300, 5:9]), strict=True):
        np.testing.assert_array_equal(np.asarray(ef.materialize(got)), want)
    with ef.materialization_policy("allow"):
        found = ef.explain(ef.implicit(lambda q: (q[:10], q[70:91:3, 1::2], q[1:511])))(q)
    for got, want in zip(found.result, (dense[:10], dense[70:91:3, 1::2], dense[1:511]), strict=True):
        np.testing.assert_array_equal(np.asarray(ef.materialize(got)), want)
    bounds = [10 * 48 * 4, 21 * 24 * 4, 512 * 48 * 4]
    for event, bound in zip(found.materializations, bounds, strict=False):
        assert event.dense_bytes <= max(bound, 64 * 48 * 4 * 2)
    if q.blocked is not None:
        assert found.materializations


def test_a_matrix_cut_out_of_blocks_is_still_under_the_policy(key):
    q = ef.quantize(jax.random.normal(key, (512, 48)), dtype="nf4")
    with ef.materialization_policy("error"), pytest.raises(ef.errors.MaterializationError, match=r"\[64,48\].*slice"):
        q[:10]


# -- arguments that make no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INT8", "int8"),
        ("nf-4", "nf4"),
        ("ternery", "ternary"),
        ("float8_e4m3fn", "fp8"),
        ("4bit", "nf4"),
        ("fp8_e4m3", "fp8"),
        ("w4a16", "int4"),
        (jnp.int8, "int8"),
        (np.dtype("int8"), "int8"),
        (jnp.int4, "int4"),
        (jnp.float8_e5m2, "fp8_e5m2"),
    ],
)
def test_did_you_mean(w, name, meant):
    with pytest.raises(ValueError, match=rf"Did you mean '{meant}'\?"):
        ef.quantize(w, dtype=name)
    with pytest.raises((ValueError, TypeError), match=rf"Did you mean '{meant}'\?"):
        ef.quantize_tree({"kernel": w}, {"*": name}, donate=False)


@pytest.mark.parametrize("name", ["int7", "float32", 8, None])
def test_nothing_is_guessed_without_a_reason(name):
    with pytest.raises(ValueError, match="Unsupported quantization type") as caught:
        ef.QuantizationConfig(name)  # pyright: ignore[reportArgumentType]
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("params", ["model.safetensors", Path("model.safetensors"), None])
@pytest.mark.parametrize("function", [ef.quantize_tree, ef.dequantize_tree, ef.report, ef.plan_tree, ef.size])
def test_a_file_or_nothing_is_no_model(function, params):
    with pytest.raises(TypeError, match=r"quantize_file\(source, target\)"):
        function(params)


def test_implicit_of_something_else(w):
    for wrong in (3, w, ef.quantize(w)):
        with pytest.raises(TypeError, match=r"implicit wraps a function(.|\n)*implicit\(f\)\(x, q\)"):
            ef.implicit(wrong)  # pyright: ignore[reportArgumentType]


def test_save_with_its_arguments_the_other_way_round(w, tmp_path):
    with pytest.raises(TypeError, match=r"the other way round: save\('here.safetensors', tree\)"):
        ef.save({"w": w}, "here.safetensors")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes the file first, got a dict"):
        ef.save({"w": w}, {"w": w})  # pyright: ignore[reportArgumentType]


def test_a_rank_larger_than_the_matrix(key):
    params = {"small": {"kernel": jnp.ones((64, 8))}, "large": {"kernel": jnp.ones((64, 64))}}
    with pytest.raises(ValueError, match=r"rank=16 is more than 'small/kernel' of shape \(64, 8\) can have, 8"):
        ef.add_lora(params, "*", 16, key)
    made = ef.add_lora(params, {"small/kernel": 4, "*": 16}, key=key)
    assert (made["small"]["kernel"].rank, made["large"]["kernel"].rank) == (4, 16)


def test_a_report_against_another_tree(w):
    q = ef.quantize_tree({"up": {"kernel": w}}, donate=False)
    with pytest.raises(ValueError, match="no path in common: 'up/kernel' here, 'params/up/kernel' there"):
        ef.report(q, {"params": {"up": {"kernel": w}}})
    assert ef.report(q, {"up": {"kernel": w}}).leaves[0].relative_error is not None


# -- calibration, budgets, judging -------------------------------------------------------------------------------------


def forward(params, x):
    return x @ params["w"]


@pytest.fixture
def stats(w) -> ef.Statistics:
    return ef.calibrate(forward, {"w": w}, [jnp.ones((4, 128))])


def test_one_batch_is_no_list_of_batches(w):
    q = {"w": ef.quantize(w)}
    for run in (ef.calibrate, lambda f, p, x: ef.distill(f, p, q, x, steps=1)):
        with pytest.raises(TypeError, match=r"an array of shape \(4, 128\), which looks like one batch.*\[batch\]"):
            run(forward, {"w": w}, jnp.ones((4, 128)))


def test_what_is_no_statistics(w, stats):
    for budget in ("4.7 bits", 4.7):
        with pytest.raises(TypeError, match=r"is the statistics; .*plan_bits\(params, budget='4.7 bits'\)"):
            ef.plan_bits({"w": w}, budget)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"stats='s.safetensors'.*Statistics.load"):
        ef.plan_bits({"w": w}, "s.safetensors", "4.7 bits")  # pyright: ignore[reportArgumentType]
    for wrong in ([jnp.ones((4, 128))], "stats", {"w": w}):
        with pytest.raises(TypeError, match=r"calibration.* is of type.*eformer.calibrate\(.*Statistics.load\(path\)"):
            ef.quantize_tree({"w": w}, calibration=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Give those of the whole model"):
        ef.quantize_tree({"w": w}, calibration=stats["w"])  # pyright: ignore[reportArgumentType]
    how = {"dtype": "int8", "activations": "int8", "static": True}
    with pytest.raises(TypeError, match=r"those of this array alone, stats\[path\].*paths look like 'w'"):
        ef.quantize(w, **how, statistics=stats)  # pyright: ignore[reportArgumentType]
    assert not w.is_deleted()


def test_statistics_of_a_leaf_are_shown_in_one_line(stats):
    assert repr(stats["w"]) == "LeafStatistics(shape (128, 64), axes (0,), whole moment, 4 tokens)"


def test_a_plan_of_bits_is_taken_for_its_rules(w):
    params = {"w": w, "v": w[:64]}
    plan = ef.plan_bits(params, budget="6 bits", formats=("nf4", "int8"))
    made = (ef.quantize_tree(params, rules, donate=False) for rules in (plan, plan.rules))
    one, other = ({name: q.format for name, q in tree.items()} for tree in made)
    assert one == other
    assert "int8" in one.values()


def test_texts_of_different_lengths():
    with pytest.raises(ValueError, match=r"different lengths, from 2 to 3\..*one length"):
        ef.evaluate(lambda p, t: p[t], jnp.zeros((4, 4)), [[1, 2, 3], [1, 2]])


def test_freed_arrays_are_named(w):
    params = {"w": w}
    q = ef.quantize_tree(params)
    x = jnp.ones((4, 128))
    for run in (
        lambda: ef.distill(forward, params, q, [x], steps=1),
        lambda: ef.calibrate(forward, params, [x]),
        lambda: ef.evaluate(lambda p, t: jax.nn.one_hot(t, 128) @ p["w"], q, [1, 2, 3], against=params),
    ):
        with pytest.raises(ValueError, match=r"\['w'\].* was freed before.*donate=False"):
            run()


# -- arrays around arrays ----------------------------------------------------------------------------------------------


def test_activations_of_a_dense_array(w):
    for wrong in (w, np.asarray(w)):
        with pytest.raises(TypeError, match=r"w is a dense .*\(128, 64\).*quantize\(w, dtype=.*activations='int8'\)"):
            ef.ActivationArray(wrong, activations="int8")
    q = ef.quantize(w, dtype="int8")
    assert ef.implicit(lambda q: ef.ActivationArray(q, activations="int8"))(q).format == "int8 x int8"


def test_a_number_is_no_shape_of_a_cache():
    with pytest.raises(TypeError, match=r"shape=5 is not a shape; give a tuple of sizes"):
        ef.QuantizedCache.zeros(5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("arguments", [((2, 64),), ((2, 64), jnp.bfloat16), (2, 64), ()])
def test_an_empty_cache_is_made_by_zeros(arguments):
    with pytest.raises(TypeError, match=r"QuantizedCache.zeros\(shape, dtype\)"):
        ef.QuantizedCache(*arguments)


def test_options_of_formats_belong_to_rules(w, tmp_path):
    for function in (ef.quantize_tree, ef.plan_tree, ef.fake_quantize_tree):
        with pytest.raises(TypeError, match=r"dtype= is not an argument here.*default='int8'"):
            function({"w": w}, dtype="int8")
    with pytest.raises(TypeError, match=r"block_size=.*default=\{'dtype': 'nf4', 'block_size': 32\}"):
        ef.quantize_file(tmp_path, tmp_path, block_size=32)
    assert ef.quantize_tree({"w": w}, default={"dtype": "nf4", "block_size": 32})["w"].block_size == 32


@pytest.mark.parametrize("options", [{"dtype": "int4"}, {"dtype": "int4", "block_size": 32}, {"bits": 4}])
def test_options_are_no_rules(w, options):
    with pytest.raises(ValueError, match=r"are options of a format, (.|\n)* \{\"\*\": \{'(dtype|bits)': "):
        ef.quantize_tree({"w": w}, options)
    named = {"axis": None, "method": "int8"}  # leaves may be called so
    made = ef.quantize_tree({"axis": w, "method": w + 1, "w": w + 2}, named, donate=False)
    assert [leaf.format for leaf in ef.report(made).leaves] == ["float32", "int8", "nf4"]


def test_dropout_is_for_one_step(w, key, tmp_path):
    params = ef.add_lora({"w": w}, "*", 4, key, dropout=0.5)
    with pytest.raises(TypeError, match=r"key is of type dict.*lora_dropout\(params, key\)"):
        ef.lora_dropout(key, params)  # pyright: ignore[reportArgumentType]
    for step in (ef.lora_dropout(params, key), ef.lora_dropout(params, jax.random.PRNGKey(0))):
        with pytest.raises(CheckpointError, match="Save the model that lora_dropout was given"):
            ef.save(tmp_path / "model.safetensors", step)


def test_dir_lists_what_is_for_users():
    shown = [name for name in dir(ef) if not name.startswith("__")]
    assert set(shown) == set(ef._HOMES)  # pyright: ignore[reportPrivateUsage]
    assert "__version__" in dir(ef)


# -- files and the command line ----------------------------------------------------------------------------------------


def test_json_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path / "config.json")]) == 1
    assert "of JSON files only an index" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="holds no tensors"):
        ef.load(tmp_path / "config.json")


def test_folders_that_are_not_whole(w, tmp_path, capsys):
    target = str(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert main(["quantize", str(tmp_path / "empty"), target]) == 1
    assert "is a folder without a checkpoint. Name the folder that has the .safetensors" in capsys.readouterr().err
    folder = tmp_path / "wrong"
    folder.mkdir()
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        ef.save(folder / name, {f"layer{i}": {"kernel": w}})
    crossed = {"layer0.kernel": names[1], "layer1.kernel": names[0]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": crossed}))
    assert main(["quantize", str(folder), target]) == 1
    assert "is not in the file. If an index says it is, index and files are of different" in capsys.readouterr().err


def test_the_command_line_speaks_its_own_language(w, tmp_path, capsys):
    file = ef.save(tmp_path / "q.safetensors", {"a": {"kernel": ef.quantize(w, dtype="int8")}})
    assert main(["quantize", str(file), str(tmp_path / "r.safetensors"), "--format", "int4"]) == 2
    said = capsys.readouterr().err
    assert "with dtype=int8" in said
    assert "--rule 'a/kernel=none'" in said
    assert "dequantize_tree" not in said


def test_an_error_inside_jax_is_one_line(w, tmp_path, capsys):
    file = ef.save(tmp_path / "q.safetensors", {"a": {"kernel": ef.quantize(w, dtype="nf4")}})
    assert main(["export", str(file), str(tmp_path / "folder"), "--to", "gptq"]) == 1
    said = capsys.readouterr().err
    assert said.rstrip().endswith("or materialize it.")
    assert "JAX" not in said


def test_windows_and_activations_on_the_command_line(w, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a text")
    evaluate = ["evaluate", "no_such_model", "--text", str(text)]
    assert main([*evaluate, "--window", "64", "--stride", "100"]) == 2
    assert "--stride 100 must be from 1 to 64" in capsys.readouterr().err
    assert main([*evaluate, "--window", "0"]) == 2
    assert "--window 0" in capsys.readouterr().err
    file = ef.save(tmp_path / "q.safetensors", {"w": w})
    with pytest.raises(SystemExit, match="2"):
        main(["quantize", str(file), str(tmp_path / "r.safetensors"), "--activations", "int4"])
    said = capsys.readouterr().err
    assert "int8" in said
    assert "None" not in said
