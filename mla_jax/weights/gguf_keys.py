"""The metadata keys of llama.cpp's architecture `deepseek2`: one table, by which files are read and written.

Keys stand behind the architecture's name and a dot."""

ARCHITECTURE = "deepseek2"

# field of Config -> key, of every model
ARCHITECTURE_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "vocab_size": "vocab_size",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# the same, of models with routed experts
EXPERT_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
# field of RopeScaling -> key
ROPE_NAMES = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
YARN_KEYS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}

BLOCKS = "block_count"  # with the MTP layers, which are the last ones
MTP_LAYERS = "nextn_predict_layers"
KV_HEADS = "attention.head_count_kv"  # 1 where the latent is cached, else the number of heads
# Widths of a cached row: of the latent where it is cached, and then those of a head have the suffix
KEY_LENGTH, VALUE_LENGTH, OF_A_HEAD = "attention.key_length", "attention.value_length", "_mla"

GATE = "expert_gating_func"
GATES = {1: "softmax", 2: "sigmoid"}

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# What the multiplier is of mscale_all_dim (llama.cpp, pull request 17945). mscale is not in files; every release has both equal.
LOG_FACTOR = 0.1
