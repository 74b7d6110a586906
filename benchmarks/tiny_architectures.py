"""Small models of every decoder architecture of Transformers, built from their configurations.

What a configuration calls its sizes differs, so each size has many names here; whatever a class
does not know is left out, and `OVERRIDES` says what single architectures need beside that.
"""

import inspect
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY: Final = 64

_SIZES: Final[dict[int, str]] = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size",
    32: "hidden_size d_model n_embd embedding_size embedding_dim emb_dim dim word_embed_proj_dim "
    "input_embedding_size output_embedding_size attention_hidden_size lru_width ple_embed_dim "
    "mamba_d_ssm prompt_mid_dim pronunciation_embed_dim shape_embed_dim",
    48: "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim dff "
    "shared_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_hidden_size d_inner dim_ff "
    "intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size feed_forward_size "
    "moe_shared_expert_intermediate_size n_inner",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads encoder_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts swa_num_attention_heads "
    "sliding_window sliding_window_size attention_window_size window_size local_attention "
    "attention_chunk_size mamba_n_heads mamba_num_heads linear_num_value_heads "
    "mamba_d_state ssm_state_size state_size index_topk linear_num_heads mamba_chunk_size "
    "chunk_size qk_rope_head_dim v_head_dim rotary_dim mamba_dt_rank time_step_rank n_mamba_heads",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_k "
    "moe_topk num_experts_per_token linear_num_key_heads encoder_layers "
    "num_encoder_layers attn_layer_period sliding_window_pattern _sliding_window_pattern "
    "global_attn_every_n_layers max_window_layers num_query_groups hidden_size_per_layer_input "
    "laurel_rank mamba_n_groups n_groups o_groups heads_per_ngram no_rope_layer_interval",
    1: "attn_layer_offset first_k_dense_replace n_group topk_group num_dense_layers "
    "num_nextn_predict_layers zero_expert_num mamba_ngroups num_mem_blocks n_shared_experts "
    "num_kv_shared_layers num_layers_per_stack",
    8: "head_dim linear_key_head_dim linear_value_head_dim index_head_dim kv_lora_rank q_lora_rank "
    "qk_nope_head_dim dim_head d_head kv_channels attention_head_dim mamba_d_head o_lora_rank "
    "mamba_head_dim swa_head_dim linear_head_dim query_pre_attn_scalar attention_head_size "
    "gated_norm_rank adapter_rank router_hidden_size block_size d_rel prompt_length",
    128: "max_position_embeddings n_positions n_ctx max_seq_len context_length "
    "max_target_positions model_max_length rel_extent keep_window_size",
    12: "qk_head_dim",
    16: "num_codebooks mamba_headdim index_n_heads",
    0: "pad_token_id",
}
_SMALL: Final = {name: size for size, names in _SIZES.items() for name in names.split()}
_NO_TOKEN: Final = dict.fromkeys(
    ("eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")
)

# Multi-head latent attention has as many key heads as query heads.
_LATENT: Final = {"num_key_value_heads": 4}
_TOKENS: Final = {"decoder_start_token_id": 2}
_MAMBA_HEADS: Final = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2}

OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "youtu"),
        _LATENT,
    ),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3"), _LATENT),
    **dict.fromkeys(("bigbird_pegasus", "blenderbot", "marian", "trocr", "xglm"), _TOKENS),
    "whisper": _TOKENS | {"eos_token_id": 3, "bos_token_id": 3},
    "bamba": _MAMBA_HEADS | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA_HEADS | {"layer_types": ["mamba", "attention"] * 2},
    "cohere_compass_text": _MIXED,
    "cwm": {"bos_token_id": 1} | _MIXED,
    "gemma4_text": _MIXED,
    "gemma4_unified_text": _MIXED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "rope_parameters": _ROPE,
    },
    "longcat_flash": _LATENT | {"head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "modernbert-decoder": {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2}
    | {"sep_token_id": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "xlstm": {"chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def architectures() -> list[str]:
    """The `model_type` of every architecture, one for each class."""
    of_class: dict[Any, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in of_class or model_type.endswith("_text"):  # it has no other modalities
            of_class[name] = model_type
    return list(of_class.values())


def class_name(model_type: str) -> str:
    """The class of the causal language model."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    """What a configuration can be given."""
    annotated = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    signature = set(inspect.signature(cls.__init__).parameters)
    return annotated | signature | set(getattr(cls, "attribute_map", {}))


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of a few thousand parameters."""
    cls = CONFIG_MAPPING[model_type]
    known = _fields(cls)
    values: dict[str, Any] = {k: size for k, size in _SMALL.items() if k in known}
    values |= {name: token for name, token in _NO_TOKEN.items() if name in known}
    if "is_decoder" in known:
        values["is_decoder"] = True
    values |= OVERRIDES.get(model_type, {})
    return cls(**values)


def build(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A small model in evaluation mode, its parameters away from where they are initialised."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()
