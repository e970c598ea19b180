"""What is quantized by default, by the tensor names and shapes of real checkpoints.

Every table holds one layer of a model as its checkpoint stores it: `+` must be quantized, `-` must stay.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import serialization as files
from eformer._quantize.leaves import named_leaf
from eformer._quantize.plan import plan
from eformer.cli import main

MODELS = {
    "LLaMA 3": """
        + model.embed_tokens.weight 128256 4096
        + model.layers.0.self_attn.q_proj.weight 4096 4096
        + model.layers.0.self_attn.k_proj.weight 1024 4096
        + model.layers.0.self_attn.o_proj.weight 4096 4096
        - model.layers.0.self_attn.rotary_emb.inv_freq 64
        - model.layers.0.self_attn.rotary_emb.cos_cached 1 1 8192 128
        - model.layers.0.self_attn.rotary_emb.sin_cached 8192 128
        + model.layers.0.mlp.gate_proj.weight 14336 4096
        + model.layers.0.mlp.down_proj.weight 4096 14336
        - model.layers.0.input_layernorm.weight 4096
        - model.norm.weight 4096
        + lm_head.weight 128256 4096""",
    "LLaMA, GGUF": """
        + token_embd.weight 128256 4096
        - rope_freqs.weight 64 128
        + blk.0.attn_q.weight 4096 4096
        + blk.0.ffn_gate.weight 14336 4096
        + blk.0.ffn_gate_exps.weight 8 14336 4096
        - blk.0.ffn_gate_inp.weight 8 4096
        - blk.0.attn_norm.weight 4096
        - blk.0.ssm_a 16 5120
        - blk.0.ssm_conv1d.weight 5120 4
        - position_embd.weight 1024 768
        + output.weight 128256 4096""",
    "Qwen 2, Qwen 3 with experts": """
        + model.layers.0.self_attn.q_proj.weight 4096 2048
        - model.layers.0.self_attn.q_proj.bias 4096
        - model.layers.0.self_attn.q_norm.weight 128
        - model.layers.0.mlp.gate.weight 128 2048
        + model.layers.0.mlp.experts.0.gate_proj.weight 768 2048
        + model.layers.0.mlp.experts.0.down_proj.weight 2048 768
        + model.layers.1.mlp.experts.gate_up_proj 128 1536 2048
        + model.layers.1.mlp.experts.down_proj 128 2048 768
        - model.layers.1.mlp.gate.weight 128 2048
        + model.layers.0.mlp.shared_expert.up_proj.weight 5632 2048
        - model.layers.0.mlp.shared_expert_gate.weight 1 8192
        - model.layers.2.linear_attn.conv1d.weight 8192 1 4
        - model.layers.2.linear_attn.dt_bias 32
        - model.layers.2.linear_attn.A_log 32
        + model.layers.2.linear_attn.in_proj_qkvz.weight 12288 2048""",
    "Gemma": """
        + model.embed_tokens.weight 256000 2304
        + model.layers.0.mlp.gate_proj.weight 9216 2304
        - model.layers.0.pre_feedforward_layernorm.weight 2304
        - model.layers.0.post_attention_layernorm.weight 2304
        - model.layers.0.self_attn.k_norm.weight 256
        + transformer.embedder.input_embedding 256128 2048
        + transformer.layer_0.attn.attn_vec_einsum.w 8 256 2048
        + transformer.layer_0.attn.kv_einsum.w 2 1 2048 256
        + transformer.layer_0.mlp.gating_einsum 2 2048 16384
        + transformer.layer_0.mlp.linear 16384 2048
        - transformer.layer_0.pre_attention_norm.scale 2048""",
    "Mixtral": """
        - model.layers.0.block_sparse_moe.gate.weight 8 4096
        + model.layers.0.block_sparse_moe.experts.0.w1.weight 14336 4096
        + model.layers.0.block_sparse_moe.experts.0.w2.weight 4096 14336
        + decoder.layers.moe.wi_0 8 4096 14336
        + decoder.layers.moe.wo 8 14336 4096
        - decoder.layers.moe.gate.kernel 4096 8""",
    "DeepSeek V3": """
        + model.layers.3.self_attn.q_a_proj.weight 1536 7168
        - model.layers.3.self_attn.q_a_proj.weight_scale_inv 12 56
        - model.layers.3.self_attn.q_b_proj.weight_scale_inv 192 112
        - model.layers.3.self_attn.q_a_layernorm.weight 1536
        + model.layers.3.self_attn.kv_a_proj_with_mqa.weight 576 7168
        + model.layers.3.self_attn.kv_b_proj.weight 32768 512
        - model.layers.3.mlp.gate.weight 256 7168
        - model.layers.3.mlp.gate.e_score_correction_bias 256
        + model.layers.3.mlp.experts.0.up_proj.weight 2048 7168
        + model.layers.3.mlp.shared_experts.down_proj.weight 7168 2048
        + model.layers.61.eh_proj.weight 7168 14336
        - model.layers.61.enorm.weight 7168
        + model.layers.61.shared_head.head.weight 129280 7168""",
    "GPT-2": """
        + wte.weight 50257 768
        - wpe.weight 1024 768
        - h.0.attn.bias 1 1 1024 1024
        + h.0.attn.c_attn.weight 768 2304
        - h.0.attn.c_attn.bias 2304
        + h.0.attn.c_proj.weight 768 768
        + h.0.mlp.c_fc.weight 768 3072
        - h.0.ln_1.weight 768
        - ln_f.weight 768""",
    "GPT-NeoX": """
        + gpt_neox.embed_in.weight 50432 6144
        + gpt_neox.layers.0.attention.query_key_value.weight 18432 6144
        + gpt_neox.layers.0.attention.dense.weight 6144 6144
        - gpt_neox.layers.0.attention.bias 1 1 2048 2048
        - gpt_neox.layers.0.attention.rotary_emb.inv_freq 12
        + gpt_neox.layers.0.mlp.dense_h_to_4h.weight 24576 6144
        - gpt_neox.layers.0.input_layernorm.weight 6144
        - gpt_neox.final_layer_norm.weight 6144
        + embed_out.weight 50432 6144""",
    "T5": """
        + shared.weight 32128 1024
        + encoder.block.0.layer.0.SelfAttention.q.weight 16384 1024
        + encoder.block.0.layer.0.SelfAttention.o.weight 1024 16384
        - encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 128
        - encoder.block.0.layer.0.layer_norm.weight 1024
        + encoder.block.0.layer.1.DenseReluDense.wi_0.weight 65536 1024
        + decoder.block.0.layer.2.DenseReluDense.wo.weight 1024 65536
        - target.decoder.relpos_bias.rel_embedding 64 128
        - model.encoder.relative_attention_bias.embedding 32 128""",
    "BERT": """
        + bert.embeddings.word_embeddings.weight 30522 1024
        - bert.embeddings.position_embeddings.weight 512 1024
        - bert.embeddings.token_type_embeddings.weight 4 1024
        - bert.embeddings.LayerNorm.weight 1024
        + bert.encoder.layer.0.attention.self.query.weight 1024 1024
        + bert.encoder.layer.0.attention.output.dense.weight 1024 1024
        - bert.encoder.layer.0.attention.output.LayerNorm.gamma 1024
        + bert.encoder.layer.0.intermediate.dense.weight 4096 1024
        + bert.pooler.dense.weight 1024 1024
        - cls.predictions.bias 30522
        + cls.predictions.decoder.weight 30522 1024
        - deberta.encoder.rel_embeddings.weight 512 1024""",
    "ViT": """
        - vit.embeddings.cls_token 1 1 6144
        - vit.embeddings.register_tokens 1 4 1536
        - vit.embeddings.mask_token 1 8192
        - vit.embeddings.position_embeddings 1 197 768
        + vit.embeddings.patch_embeddings.projection.weight 768 3 16 16
        + vit.encoder.layer.0.attention.attention.query.weight 768 768
        - vit.encoder.layer.0.layernorm_before.weight 768
        - blocks.0.ls1.gamma 768
        - blocks.0.attn.relative_position_bias_table 732 12
        - blocks.0.attn.rel_pos_h 127 64
        - pos_embed 1 197 768
        + blocks.0.attn.qkv.weight 2304 768
        + head.weight 1000 768""",
    "CLIP": """
        + text_model.embeddings.token_embedding.weight 49408 768
        - text_model.embeddings.position_embedding.weight 77 768
        - vision_model.embeddings.class_embedding 1024
        + vision_model.embeddings.patch_embedding.weight 1024 3 14 14
        - vision_model.embeddings.position_embedding.weight 257 1024
        + vision_model.encoder.layers.0.mlp.fc1.weight 4096 1024
        - vision_model.pre_layrnorm.weight 1024
        + visual_projection.weight 768 1024
        - logit_scale 1
        - positional_embedding 77 512
        + transformer.resblocks.0.attn.in_proj_weight 1536 512
        + text_projection 512 512
        + visual.proj 768 512""",
    "Whisper": """
        + model.encoder.conv1.weight 1280 128 3
        - model.encoder.conv1.bias 1280
        + model.encoder.conv2.weight 1280 1280 3
        - model.encoder.embed_positions.weight 1500 1280
        - model.decoder.embed_positions.weight 448 1280
        + model.decoder.embed_tokens.weight 51866 1280
        + model.decoder.layers.0.encoder_attn.q_proj.weight 1280 1280
        - model.decoder.layers.0.encoder_attn_layer_norm.weight 1280
        + model.decoder.layers.0.fc1.weight 5120 1280
        + proj_out.weight 51866 1280""",
    "Mamba": """
        + backbone.embeddings.weight 50280 2560
        - backbone.layers.0.mixer.A_log 5120 16
        - backbone.layers.0.mixer.D 5120
        - backbone.layers.1.mixer.A_log 80
        - backbone.layers.1.mixer.D 80 64
        - backbone.layers.0.mixer.conv1d.weight 5120 1 4
        - backbone.layers.0.mixer.conv1d.bias 5120
        - backbone.layers.0.mixer.dt_proj.bias 5120
        + backbone.layers.0.mixer.in_proj.weight 10240 2560
        + backbone.layers.0.mixer.x_proj.weight 192 5120
        + backbone.layers.0.mixer.dt_proj.weight 5120 160
        + backbone.layers.0.mixer.out_proj.weight 2560 5120
        - backbone.layers.0.norm.weight 2560
        - backbone.norm_f.weight 2560""",
    "RWKV": """
        + emb.weight 65536 4096
        - blocks.0.att.time_decay 64 64
        - blocks.0.att.time_faaaa 64 64
        - blocks.0.att.time_first 4096
        - blocks.0.att.time_mix_k 1 1 4096
        - blocks.0.att.time_maa_x 1 1 4096
        - blocks.0.att.r_k 64 64
        - blocks.0.att.x_r 1 1 4096
        + blocks.0.att.receptance.weight 4096 4096
        + blocks.0.att.gate.weight 4096 4096
        + blocks.0.att.output.weight 4096 4096
        - blocks.0.att.ln_x.weight 4096
        + blocks.0.ffn.key.weight 14336 4096
        - blocks.0.ln0.weight 4096
        + head.weight 65536 4096""",
    "UNet of Stable Diffusion": """
        + conv_in.weight 320 4 3 3
        + time_embedding.linear_1.weight 1280 320
        + down_blocks.0.resnets.0.conv1.weight 320 320 3 3
        - down_blocks.0.resnets.0.norm1.weight 320
        + down_blocks.0.resnets.0.time_emb_proj.weight 320 1280
        + down_blocks.1.resnets.0.conv_shortcut.weight 640 320 1 1
        + down_blocks.0.attentions.0.proj_in.weight 320 320 1 1
        + down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight 320 768
        + down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0.weight 320 320
        + down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj.weight 2560 320
        - down_blocks.0.attentions.0.transformer_blocks.0.norm3.weight 320
        - conv_norm_out.weight 320
        + conv_out.weight 4 320 3 3
        - features.3.depthwise.weight 960 1 5 5""",
    "DiT": """
        - pos_embed 1 256 1152
        + x_embedder.proj.weight 1152 4 2 2
        + t_embedder.mlp.0.weight 1152 256
        + y_embedder.embedding_table.weight 1001 1152
        + blocks.0.attn.qkv.weight 3456 1152
        + blocks.0.mlp.fc2.weight 1152 4608
        + blocks.0.adaLN_modulation.1.weight 6912 1152
        + final_layer.linear.weight 32 1152
        - scale_shift_table 6 1152
        - transformer_blocks.0.scale_shift_table 6 1152
        + transformer_blocks.0.norm1.linear.weight 9216 1536
        + context_embedder.weight 1536 4096""",
    "quantized elsewhere": """
        - layers.0.q_proj.scales 4096 64
        - layers.0.q_proj.biases 4096 64
        - layers.0.q_proj.weight_scale 4096 1
        - layers.0.k_proj.weight_scale 4096 32
        - layers.0.k_proj.weight_zero_point 4096 32
        - layers.0.q_proj.weight.absmax 4096 64""",
}


def rows(text: str) -> dict[str, tuple[bool, tuple[int, ...]]]:
    lines = [line.split() for line in text.strip().splitlines()]
    return {name: (sign == "+", tuple(map(int, shape))) for sign, name, *shape in lines}


@pytest.mark.parametrize("model", MODELS)
def test_defaults(model):
    wanted = rows(MODELS[model])
    leaves = [named_leaf(name, jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for name, (_, shape) in wanted.items()]
    planned = plan(leaves)
    decided = {".".join(d.leaf.names): d.config is not None for d in planned.decisions}
    assert decided == {name: yes for name, (yes, _) in wanted.items()}
    assert all(d.reason.startswith("role: ") == (d.config is not None) for d in planned.decisions)
    bits = [b for d in planned.decisions if d.config is not None and (b := _bits(d)) > 6.5]
    assert not bits
    flat = ef.plan_tree({name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, (_, shape) in wanted.items()})
    configs = {".".join(d.leaf.names): d.config for d in planned.decisions}
    assert {d.leaf.path: d.config for d in flat.decisions} == configs


def _bits(decision) -> float:
    """Bits per weight of a leaf once it is quantized: NF4 with blocks of 64 has 4.5 to 5."""
    value = decision.leaf.value
    made = jax.eval_shape(lambda w: ef.quantize(w, decision.config), value)
    return 8 * sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(made)) / math.prod(value.shape)


@pytest.mark.parametrize(
    ("tree", "kept"),
    [
        ({"a": (64, 64), "b": (64, 64)}, set()),
        ({"w": (64, 96), "b": (96,)}, {"b"}),
        ({"w": (5, 64, 96), "b": (5, 96)}, {"b"}),
        ({"w": (64, 96), "b": (96, 64)}, set()),
        ({"kernel": (64, 8, 16), "bias": (8, 16)}, {"bias"}),
    ],
)
def test_what_is_called_b_is_a_bias_beside_its_matrix_only(tree, kept):
    dense = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tree.items()}
    planned = ef.plan_tree(dense, min_size=0)
    assert {d.leaf.path for d in planned.decisions if d.config is None} == kept


def test_what_is_unsure_is_listed_everywhere(tmp_path, capsys):
    tree = {"cls": jnp.ones((1, 1, 4096)), "odd": jnp.ones((3, 4096)), "up": {"kernel": jnp.ones((64, 64))}}
    planned = ef.plan_tree(tree)
    assert planned.unsure == ["cls", "odd"]
    assert "cls        dense   it is unclear whether a product uses it: it is a vector" in str(planned)
    assert "up/kernel  nf4     role: kernel" in str(planned)
    source = files.save(tmp_path / "in.safetensors", tree)
    assert main(["quantize", str(source), str(tmp_path / "out.safetensors"), "--quiet"]) == 0
    assert "left dense, as it is unclear whether a product uses them: cls, odd\n" in capsys.readouterr().out
    made = ef.quantize_tree(tree, donate=False)
    assert isinstance(made["odd"], jax.Array)
    asked = ef.quantize_tree(tree, donate=False, skip=())  # whoever knows better says so
    assert isinstance(asked["odd"], ef.ArrayNF4)
    with pytest.warns(UserWarning, match=r"rule 'odd' quantizes nothing.*unclear"):
        ef.quantize_tree(tree, {"odd": "int8"}, donate=False)


def test_another_format_than_the_one_it_has_is_refused():
    made = ef.quantize_tree({"up": {"kernel": jnp.ones((64, 64))}}, "int8")
    again = ef.quantize_tree(made)  # nothing in particular was asked for
    assert again["up"]["kernel"] is made["up"]["kernel"]
    assert ef.quantize_tree(made, "int8")["up"]["kernel"] is made["up"]["kernel"]
    fix = r"dequantize_tree first, or keep it with a rule, \{'up/kernel': None\}"
    for rules, options in ("nf4", {}), ({"up*": "nf4"}, {}), (None, {"default": "ternary"}):
        with pytest.raises(ValueError, match=rf"'up/kernel' is already quantized, with dtype=int8, but .*{fix}"):
            ef.quantize_tree(made, rules, **options)
    nf4 = ef.quantize_tree({"up": {"kernel": jnp.ones((64, 64))}})
    with pytest.raises(ValueError, match="with block_size=64, but block_size=32 was requested"):
        ef.quantize_tree(nf4, {"up*": {"dtype": "nf4", "block_size": 32}})
    kept = ef.quantize_tree(nf4, {"up*": None}, default="int8")
    np.testing.assert_array_equal(kept["up"]["kernel"].materialize(), nf4["up"]["kernel"].materialize())
