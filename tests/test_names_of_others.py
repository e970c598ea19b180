"""Arguments and calls as other libraries have them: the message says what it is called here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import eformer as ef

CALLS = {
    "group_size": (lambda w: ef.quantize(w, dtype="int4", group_size=32), "block_size=32"),
    "bits": (lambda w: ef.quantize(w, bits=4), 'dtype="int4"'),
    "format": (lambda w: ef.quantize(w, format="nf4"), "dtype='nf4'"),
    "mode": (lambda w: ef.quantize(w, mode="affine"), "biased=True"),
    "zero_point": (lambda w: ef.quantize(w, dtype="int4", zero_point=True), "symmetric=False"),
    "groups of a tree": (lambda w: ef.quantize_tree({"kernel": w}, group_size=32), '"block_size": 32'),
    "bits of a tree": (lambda w: ef.quantize_tree({"kernel": w}, bits=4), '{"*": "int4"}'),
    "exclude": (lambda w: ef.quantize_tree({"kernel": w}, exclude=["lm_head"]), '{"*lm_head*": None}'),
    "r": (lambda w: ef.add_lora({"kernel": w}, r=4, key=jax.random.key(0)), "rank=4"),
    "lora_alpha": (lambda w: ef.add_lora({"kernel": w}, lora_alpha=16, key=jax.random.key(0)), "alpha=16"),
    "target_modules": (lambda w: ef.add_lora({"kernel": w}, target_modules=["q_proj"]), "rules="),
    "explain": (lambda w: ef.explain(lambda x: x, w), r"explain(f)(x, q)"),
    "explain an array": (lambda w: ef.explain(w), r"explain(f)(x, q)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_it_is_called_here(case):
    call, said = CALLS[case]
    with pytest.raises(TypeError) as caught:
        call(jnp.ones((128, 64)))
    assert said in str(caught.value)


def test_arguments_that_nobody_has_are_pythons():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ef.quantize(jnp.ones((128, 64)), colour=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("name", "warned"), [("q.qweight", True), ("q.weight_packed", True), ("q.weight", False)])
def test_a_packed_checkpoint_read_as_plain_tensors(name, warned, tmp_path, recwarn):
    save_file({name: np.arange(6, dtype=np.int32)}, tmp_path / "model.safetensors")
    assert np.array_equal(ef.load(tmp_path)[name], np.arange(6))
    said = [str(w.message) for w in recwarn if issubclass(w.category, ef.errors.PackedTensorsWarning)]
    assert len(said) == warned
    assert all("eformer.load_checkpoint" in s for s in said)


def test_warnings_name_the_line_of_the_caller(recwarn):
    ef.add_lora({"kernel": jnp.ones((128, 64))}, ["*kernel*", "*nothing*"], key=jax.random.key(0))
    assert [w.filename for w in recwarn] == [__file__]
